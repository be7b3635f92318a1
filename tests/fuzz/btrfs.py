"""What becket reads of a btrfs by mkfs.btrfs, from its superblock on and without what lies between.

The nodes and the data that the top-level subvolume needs move next to each other, and one chunk has them all.
Needs a file system of one device whose checksums becket does not verify (xxhash), in nodes of 4 KiB.
"""
import struct
import sys

BLOCK = 4096
HEAD, ITEM, POINTER, KEY = 101, 25, 33, 17
PLACE = 64 << 10
CHUNK, ROOT, EXTENT = 228, 132, 108

image = open(sys.argv[1], "rb").read()
superblock = bytearray(image[PLACE:][:BLOCK])
u64 = lambda bytes, at: struct.unpack_from("<Q", bytes, at)[0]
put = lambda bytes, at, value: struct.pack_into("<Q", bytes, at, value)

chunks = []  # Logical address, length, place.
out = []  # Blocks behind the superblock.
moved = {}


def key_at(bytes, at):
    return struct.unpack_from("<QBQ", bytes, at)


def block(logical):
    for start, length, place in chunks:
        if start <= logical < start + length:
            return bytearray(image[place + logical - start:][:BLOCK])
    raise SystemExit(f"no chunk has {logical}")


def reserve():
    out.append(None)
    return PLACE + BLOCK * len(out)


def items(node):
    count, level = struct.unpack_from("<IB", node, 96)
    for index in range(count):
        at = HEAD + index * (POINTER if level else ITEM)
        if level:
            yield key_at(node, at), at + KEY
        else:
            yield key_at(node, at), HEAD + struct.unpack_from("<I", node, at + KEY)[0]


def move(logical, wanted):
    """Moves a tree; `wanted` says which items of the tree of trees are followed."""
    if logical in moved:
        return moved[logical]
    address = moved[logical] = reserve()
    number, node = len(out) - 1, block(logical)
    put(node, 48, address)
    for (owner, kind, _), at in items(node):
        if node[100]:
            put(node, at, move(u64(node, at), wanted))
        elif kind == ROOT and wanted(owner):
            put(node, at + 176, move(u64(node, at + 176), wanted))
        elif kind == EXTENT and node[at + 20] and u64(node, at + 21):
            first, blocks = u64(node, at + 21), u64(node, at + 29) // BLOCK
            data = [reserve() for _ in range(blocks)]
            for index, place in enumerate(data):
                out[(place - PLACE) // BLOCK - 1] = block(first + index * BLOCK)
            put(node, at + 21, data[0])
    out[number] = node
    return address


def learn(logical):
    node = block(logical)
    for key, at in items(node):
        if node[100]:
            learn(u64(node, at))
        elif key[1] == CHUNK and (key[2], u64(node, at), u64(node, at + 56)) not in chunks:
            chunks.append((key[2], u64(node, at), u64(node, at + 56)))


first = superblock[811:][:struct.unpack_from("<I", superblock, 160)[0]]
at = 0
while at < len(first):
    stripes = struct.unpack_from("<H", first, at + KEY + 44)[0]
    chunks.append((key_at(first, at)[2], u64(first, at + KEY), u64(first, at + KEY + 56)))
    at += KEY + 48 + 32 * stripes
learn(u64(superblock, 88))

put(superblock, 80, move(u64(superblock, 80), lambda tree: tree == 5))
# One chunk, which is where it says: in the superblock, and as the only item of the tree of chunks.
tree = u64(superblock, 88)
put(superblock, 88, reserve())
node = block(tree)
chunk = bytearray(first[:KEY + 80])
put(chunk, 9, PLACE)
put(chunk, KEY, (1 + len(out)) * BLOCK)
struct.pack_into("<H", chunk, KEY + 44, 1)
put(chunk, KEY + 56, PLACE)
put(node, 48, u64(superblock, 88))
struct.pack_into("<IB", node, 96, 1, 0)
struct.pack_into("<17sII", node, HEAD, bytes(chunk[:KEY]), BLOCK - HEAD - 80, 80)
node[BLOCK - 80:] = chunk[KEY:]
out[-1] = node
superblock[199] = 0
struct.pack_into("<I", superblock, 160, len(chunk))
superblock[811:811 + len(chunk)] = chunk
sys.stdout.buffer.write(bytes(superblock) + b"".join(map(bytes, out)))

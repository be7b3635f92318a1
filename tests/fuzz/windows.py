"""The smallest images of NTFS and exFAT, which their tools make 1 MiB long at least.

Called by seeds.sh: windows.py ntfs|exfat >IMAGE.
"""
import struct
import sys

CLUSTER = 512
RECORD = 1024


def utf16(text):
    return text.encode('utf-16-le')


def sectors(magic, body, size):
    """A record or block whose sectors end with a mark: their own last bytes are at 0x30."""
    bytes = bytearray(body.ljust(size, b'\0'))
    count = size // 512
    bytes[0:8] = magic + struct.pack('<HH', 0x30, count + 1)
    saved = struct.pack('<H', 1)
    for end in range(510, size, 512):
        saved += bytes[end:end + 2]
        bytes[end:end + 2] = struct.pack('<H', 1)
    bytes[0x30:0x30 + len(saved)] = saved
    return bytes


def attribute(kind, value, name='', flags=0, runs=None, unit=0, size=0):
    name = utf16(name)
    head = 24 if runs is None else 64
    start = head + (len(name) + 7) // 8 * 8
    if runs is None:
        rest = struct.pack('<IHH', len(value), start, 0)
    else:
        value = runs
        clusters = 16
        rest = struct.pack('<QQHBxxxxxQQQ', 0, clusters - 1, start, unit, clusters * CLUSTER, size, size)
    body = (rest.ljust(head - 16, b'\0') + name).ljust(start - 16, b'\0') + value
    len_ = (16 + len(body) + 7) // 8 * 8
    common = struct.pack('<IIBBHHH', kind, len_, runs is not None, len(name) // 2, head, flags, 0)
    return (common + body).ljust(len_, b'\0')


def record(number, attributes, directory=False):
    attributes = b''.join(attributes) + struct.pack('<II', 0xffffffff, 0)
    head = struct.pack('<8xQHHHHIIQHxxI', 0, 1, 1, 0x40, 1 | directory << 1, 0x40 + len(attributes), RECORD, 0, 9, number)
    return sectors(b'FILE', head.ljust(0x40, b'\0') + attributes, RECORD)


def standard(flags=0x20):
    return attribute(0x10, struct.pack('<4QI', *[132223104000000000] * 4, flags) + bytes(12))


def entry(number, name, flags=0):
    key = struct.pack('<Q4QQQIIBB', 5 | 1 << 48, *[0] * 4, 0, 0, 0, 0, len(name), 1) + utf16(name)
    len_ = (16 + len(key) + 7) // 8 * 8
    return (struct.pack('<QHHI', number | 1 << 48, len_, len(key), flags) + key).ljust(len_, b'\0')


def name(name):
    return attribute(0x30, entry(0, name)[16:])


LAST = struct.pack('<QHHI', 0, 16, 0, 2)


def index(entries, head=16):
    entries = b''.join(entries) + LAST
    return struct.pack('<IIII', head, head + len(entries), head + len(entries), 0) + bytes(head - 16) + entries


def ntfs():
    # Clusters: 0 boot, 1 to 10 the records that are there, 11 and 12 a block, 13 to 15 what is compressed.
    there = [0, 3, 5, 16, 17]
    runs, cluster, last = b'', 1, 0
    for place, number in enumerate(there):
        before = number - (there[place - 1] + 1 if place else 0)
        if before:
            runs += bytes([0x01, 2 * before])
        runs += bytes([0x11, 2, cluster - last])
        cluster, last = cluster + 2, cluster
    text = b'some text, ' * 400
    # A chunk: eleven letters, and a copy of the rest that goes on in itself.
    chunk = b'\0' + text[:8] + b'\x08' + text[8:11]
    wide = 4
    chunk += struct.pack('<H', (11 - 1) << (16 - wide) | 4096 - 11 - 3)
    packed = struct.pack('<H', 0x8000 | 0x3000 | len(chunk) - 1) + chunk
    block = struct.pack('<24x') + index([entry(16, 'a'), entry(17, 'packed')], 40)
    records = [
        record(0, [standard(), attribute(0x80, b'', runs=runs + b'\0', size=18 * RECORD)]),
        record(3, [standard(), attribute(0x60, utf16('small')), attribute(0x70, struct.pack('<8xBBH', 3, 1, 0))]),
        record(5, [
            standard(), attribute(0x90, struct.pack('<IIII', 0x30, 1, RECORD, 2) + index([]), '$I30'),
            attribute(0xa0, b'', '$I30', runs=bytes([0x11, 2, 11, 0]), size=RECORD),
            attribute(0xb0, b'\1' + bytes(7), '$I30'),
        ], True),
        record(16, [standard(), name('a'), attribute(0x80, b'x' * 500), attribute(0x80, b'more', 'stream')]),
        record(17, [
            standard(), name('packed'), attribute(0x80, b'', flags=1, runs=bytes([0x11, 3, 13, 0x01, 13, 0]), unit=4, size=4100),
        ]),
    ]
    boot = struct.pack('<3s8sHB', b'\xeb\x52\x90', b'NTFS    ', 512, 1).ljust(40, b'\0')
    boot += struct.pack('<QQQbxxxbxxxQ', 16, 1, 1, -10, -10, 0x1234567890abcdef)
    image = boot.ljust(510, b'\0') + b'\x55\xaa' + b''.join(records)
    image += sectors(b'INDX', block, RECORD) + packed
    return image.ljust(17 * CLUSTER, b'\0')


def exfat():
    # Sectors of 512 bytes: 0 boot, 1 the table, from 2 on clusters: the root, a directory, two files.
    boot = b'\xeb\x76\x90EXFAT   '.ljust(64, b'\0')
    boot += struct.pack('<QQIIIIIIHHBBB', 0, 16, 1, 1, 2, 10, 2, 0x1234abcd, 0x100, 0, 9, 0, 1)
    table = struct.pack('<8I', 0xfffffff8, ~0 & 0xffffffff, ~0 & 0xffffffff, ~0 & 0xffffffff, 6, 0, ~0 & 0xffffffff, 0)

    def entries(name, cluster, size, flags, attributes=0x20):
        name = utf16(name)
        parts = [name[at:at + 30].ljust(30, b'\0') for at in range(0, len(name), 30)]
        time = (40 << 9 | 1 << 5 | 1) << 16
        file = struct.pack('<BBHHHIIIBBBBB', 0x85, 1 + len(parts), 0, attributes, 0, time, time, time, 0, 0, 0, 0, 0)
        stream = struct.pack('<BBxBHxxQIIQ', 0xc0, flags, len(name) // 2, 0, size, 0, cluster, size)
        return file.ljust(32, b'\0') + stream + b''.join(b'\xc1\0' + part for part in parts)

    root = struct.pack('<BB', 0x83, 5) + utf16('small').ljust(30, b'\0')
    root += entries('dir', 3, 512, 3, 0x10) + entries('chain with a long name', 4, 700, 1)
    below = entries('run', 7, 900, 3)
    clusters = [root, below, b'a' * 512, b'', b'b' * 512, b'c' * 512, b'd' * 512]
    image = boot.ljust(510, b'\0') + b'\x55\xaa' + table.ljust(512, b'\0')
    return (image + b''.join(cluster.ljust(512, b'\0') for cluster in clusters)).ljust(16 * 512, b'\0')


sys.stdout.buffer.write({'ntfs': ntfs, 'exfat': exfat}[sys.argv[1]]())

#!/usr/bin/env bash
# Makes the corpora anew: the smallest images that the real tools make, and a few lines of each text.
# Touches only the folder `corpus` beside it. Findings of fuzzers (`found-*`) are not made here.
set -euo pipefail
cd "$(dirname "$0")"
export SOURCE_DATE_EPOCH=0 PATH="$PATH:/usr/sbin"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
mkdir -p "$tree/dir/deeper"
printf 'some text\n' >"$tree/dir/a"
head -c 5000 /dev/zero | tr '\0' x >"$tree/dir/deeper/a file with a long name"
truncate -s 20000 "$tree/hole"
ln -s dir/a "$tree/link"
place() { mkdir -p "corpus/$1"; echo "corpus/$1/$2"; }

# Partition tables, in the first and last sectors.
for label in dos gpt; do
    image=$(place partitions $label)
    truncate -s 48K "$image"
    printf 'label: %s\nstart=40,size=8\nstart=56,size=6\n' $label | sfdisk -q "$image"
done

# File systems. SquashFS with its metadata as they are, so that a changed byte is a changed field.
genisoimage -quiet -R -J -no-pad -o "$(place iso9660 rock)" "$tree"
genisoimage -quiet -l -no-pad -o "$(place iso9660 plain)" "$tree" 2>/dev/null
mksquashfs "$tree" "$(place squashfs stored)" -noappend -quiet -no-progress -noI -noD -noF -noX -b 4096 -nopad
mksquashfs "$tree" "$(place squashfs xz)" -noappend -quiet -no-progress -comp xz -noI -b 4096 -nopad
mksquashfs "$tree" "$(place squashfs zstd)" -noappend -quiet -no-progress -comp zstd -nopad
for kind in ext2 ext4; do
    image=$(place ext $kind)
    rm -f "$image"
    truncate -s 128K "$image"
    mke2fs -q -F -t $kind -b 1024 -N 32 -O ^metadata_csum,^has_journal,^resize_inode -d "$tree" "$image"
done
for bits in 12 16 32; do
    image=$work/fat$bits
    truncate -s $((bits == 12 ? 128 : bits == 16 ? 2200 : 34000))K "$image"
    mkfs.vfat -f 1 -s 1 -F $bits "$image" >/dev/null
    mcopy -s -Q -i "$image" "$tree/dir" ::/
    # What is behind the first files holds nothing, and a fuzzer likes short inputs.
    head -c $((bits == 12 ? 40 : 320))K "$image" >"$(place fat fat$bits)"
done
# XFS in the first blocks of its first group: directories of two forms. What is so small is made for tests only.
cp "$tree/dir/deeper/a file with a long name" "$work/long"
for entries in 0 20; do
    image=$work/xfs$entries
    truncate -s 40M "$image"
    {
        printf '/\n0 0\nd--755 0 0\na ---644 0 0 %s\nlong ---644 0 0 %s\nlink l--777 0 0 a\n' \
            "$tree/dir/a" "$work/long"
        for number in $(seq $entries); do echo "an-entry-$number ---644 0 0 $tree/dir/a"; done
        echo '$'
    } >"$work/proto"
    TEST_DIR=x TEST_DEV=x QA_CHECK_FS=x mkfs.xfs -q -f -m crc=0 -d agcount=2 -b size=1024 -l size=2m,su=4k \
        -p "$work/proto" "$image" 2>/dev/null
    head -c $((entries ? 64 : 24))K "$image" >"$(place xfs "entries-$entries")"
done
# btrfs without what its files do not need, in one leaf and in several.
for entries in 0 60; do
    image=$work/btrfs$entries
    cp -r "$tree" "$image.tree"
    for number in $(seq $entries); do echo "$number" >"$image.tree/an entry of the directory, number $number"; done
    python3 -c "import os; os.setxattr('$image.tree/dir', 'user.x', b'y' * 20)"
    truncate -s 110M "$image"
    mkfs.btrfs -q --rootdir "$image.tree" -n 4096 --csum xxhash -m single -d single "$image" >/dev/null
    python3 btrfs.py "$image" >"$(place btrfs "entries-$entries")"
done
for kind in exfat ntfs; do python3 windows.py $kind >"$(place $kind small)"; done
rm -f corpus/erofs/{plain,chunks,packed}
mkfs.erofs "$(place erofs plain)" "$tree" >/dev/null 2>&1
mkfs.erofs --chunksize 4096 "$(place erofs chunks)" "$tree" >/dev/null 2>&1
# What erofs-utils of Debian 13 (1.8) makes and those of Debian 12 do not. A test of the reader knows the texts.
if mkfs.erofs --help 2>&1 | grep -q -- -Eall-fragments; then
    python3 - "$work" <<'END'
import os, sys
text = lambda first, end: ''.join(f'line {n * n} of some text\n' for n in range(first, end))
os.mkdir(f'{sys.argv[1]}/texts')
for name, is_ in [('one', text(0, 2000)), ('two', 'another start\n' + text(300, 1500)), ('three', text(1, 3))]:
    open(f'{sys.argv[1]}/texts/{name}', 'w').write(is_)
END
    new() {
        rm -f "corpus/erofs/new-$1"
        mkfs.erofs --quiet --all-root -T0 -U12345678-1234-1234-1234-123456789abc -b512 "${@:2}" \
            "$(place erofs "new-$1")" "$work/texts"
    }
    new lzma -zlzma -C8192 -Efragments,dedupe
    new zstd -zzstd -C8192 -Ededupe
    new deflate -zdeflate -C4096 -Eztailpacking
    new lz4 -zlz4hc -C4096 -Eall-fragments
fi

# A physical volume of LVM, smaller than its tools make one: label, area, text, two extents. Its checksums are
# left out, for the reader's door corrects them.
python3 - >"$(place lvm2 two)" <<'END'
import struct, sys
pv = 'aaaaaabbbbccccddddeeeeffffgggggg'
text = b"""vg {
id = "hhhhhh-iiii-jjjj-kkkk-llll-mmmm-nnnnnn"
seqno = 3
status = ["RESIZEABLE", "READ", "WRITE"]
extent_size = 8
physical_volumes {
pv0 {
id = "aaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg"
pe_start = 8
pe_count = 3
}
}
logical_volumes {
one {
status = ["READ", "WRITE", "VISIBLE"]
creation_time = 1795616715
segment1 {
start_extent = 0
extent_count = 1
type = "striped"
stripes = [
"pv0", 0
]
}
}
two {
status = ["READ", "VISIBLE"]
segment1 {
start_extent = 0
extent_count = 2
type = "striped"
stripe_size = 4
stripes = ["pv0", 1, "pv0", 2]
}
}
}
}
# Generated by hand
\0"""
label = b'LABELONE' + struct.pack('<QII', 1, 0, 32) + b'LVM2 001' + pv.encode()
label += struct.pack('<Q8Q', 16384, 4096, 0, 0, 0, 1024, 3072, 0, 0)
area = bytes(4) + b' LVM2 x[5A%r0N*>' + struct.pack('<IQQQQII', 1, 1024, 3072, 512, len(text), 0, 0)
sectors = [b'', label, area, text]
image = b''.join(bytes.ljust(512, b'\0') for bytes in sectors)
sys.stdout.buffer.write(image.ljust(16384, b'\0'))
END

# Compressed images.
head -c 20000 "$(place ext ext4)" >"$work/small"
xz -c --block-size=4KiB "$work/small" >"$(place packed xz)"
xz -c --check=none --x86 --lzma2 "$work/small" >"$(place packed xz-x86)"
bgzip -c "$work/small" >"$(place packed bgzf)"
split -b 4096 "$work/small" "$work/part."
zstd -q --no-progress "$work"/part.*
cat "$work"/part.*.zst >"$(place packed zstd)"
{ # Its seekable format: one frame, and a table of one entry.
    frame=$work/part.aa.zst
    le32() { printf '%b' "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' $(($1 & 255)) $(($1 >> 8 & 255)) $(($1 >> 16 & 255)) $(($1 >> 24 & 255)))"; }
    cat "$frame"
    le32 $((0x184d2a5e)); le32 17; le32 "$(stat -c %s "$frame")"; le32 4096; le32 1; printf '\0'; le32 $((0x8f92eab1))
} >"$(place packed zstd-seekable)"

# Disks in QEMU's and VMware's form.
for version in 0.10 1.1; do
    qemu-img convert -f raw -O qcow2 -o cluster_size=512,compat=$version "$work/small" "$(place qcow2 $version)"
done
qemu-img convert -c -f raw -O qcow2 -o cluster_size=4096 "$work/small" "$(place qcow2 compressed)"

# The same for the writer: with a bitmap, and with a table on other metadata, which is not written.
for image in 0.10 1.1 compressed; do cp "$(place qcow2 $image)" "$(place qcow2-written $image)"; done
qemu-img convert -f raw -O qcow2 -o cluster_size=512 "$work/small" "$(place qcow2-written bitmap)"
qemu-img bitmap --add "$(place qcow2-written bitmap)" b0
python3 - "$(place qcow2 1.1)" "$(dirname "$(place qcow2-written x)")" <<'END'
import struct, sys
sound = open(sys.argv[1], 'rb').read()
number = lambda at: struct.unpack('>Q', sound[at:at + 8])[0] & (1 << 63) - 1
counts, l1 = number(48), number(40)
l2, block = number(l1), number(counts)
copied = 1 << 63
for name, at, value in [
    ('l1', l2, l1 | copied), ('l2', l2, l2 | copied), ('counts', l2, counts | copied), ('block', l2, block | copied),
    ('twice', l2, number(l2 + 8) | copied), ('l2-on-counts', l1, counts | copied), ('block-on-l1', counts, l1),
    ('zeroes-on-l1', l2, l1 | copied | 1), ('zeroes-behind', l2, len(sound) + 4096 | copied | 1),
    ('packed-on-l1', l2, 1 << 62 | l1), ('unaligned', counts, block + 8), ('table-on-l1', 48, l1),
]:
    patched = bytearray(sound)
    patched[at:at + 8] = struct.pack('>Q', value)
    open(f'{sys.argv[2]}/sketch-{name}', 'wb').write(patched)
END
qemu-img convert -f raw -O vmdk -o subformat=monolithicSparse "$work/small" "$work/vmdk"
head -c 140K "$work/vmdk" >"$(place disks vmdk)"
qemu-img convert -f raw -O vmdk -o subformat=streamOptimized "$work/small" "$work/vmdk"
head -c 140K "$work/vmdk" >"$(place disks vmdk-stream)"
qemu-img convert -f raw -O vdi "$work/small" "$work/vdi"
head -c 24K "$work/vdi" >"$(place disks vdi)"
qemu-img convert -f raw -O vpc -o subformat=fixed,force_size=on "$work/small" "$(place disks vhd-fixed)"
qemu-img convert -f raw -O vpc -o subformat=dynamic,force_size=on "$work/small" "$work/vhd"
head -c 24K "$work/vhd" >"$(place disks vhd-dynamic)"
# A VHDX has 3 MiB at least: the tables come nearer to the headers, and the data end early.
qemu-img convert -f raw -O vhdx -o block_size=1M "$work/small" "$work/vhdx"
python3 - "$work/vhdx" "$(place disks vhdx)" <<'END'
import struct, sys
sound = open(sys.argv[1], 'rb').read()
regions = 192 << 10
made = bytearray(sound[:320 << 10])
for entry in (regions + 16, regions + 48):
    start, length = struct.unpack('<QL', sound[entry + 16:entry + 28])
    # The metadata have a table of 64 KiB and their items behind it.
    kept = sound[start:start + (66 << 10)] if sound[start:start + 8] == b'metadata' else sound[start:start + 512]
    made[entry + 16:entry + 28] = struct.pack('<QL', len(made), length)
    made += kept + bytes(-len(kept) % 512)
# The fuzz door corrects the checksums; the first block lies nowhere.
made[320 << 10:320 << 10 | 8] = bytes(8)
open(sys.argv[2], 'wb').write(made)
END
printf '# Disk DescriptorFile\nversion=1\nparentCID=ffffffff\nRW 8 FLAT "a b.vmdk" 0\nRDONLY 2 ZERO\n' >"$(place vmdk flat)"

# Containers that becket only recognises: their first and last bytes are enough.
foreign() { { head -c 1024 "$2"; tail -c 512 "$2"; } >"$(place foreign "$1")"; }
for kind in vdi vhdx qed parallels qcow vmdk; do
    qemu-img convert -f raw -O $kind "$work/small" "$work/foreign"
    foreign $kind "$work/foreign"
done
qemu-img convert -f raw -O vpc -o subformat=fixed,force_size=on "$work/small" "$work/foreign"
foreign vhd "$work/foreign"
(cd "$work" && tar -cf a.tar small && zip -q a.zip small && 7z a -bso0 -bsp0 a.7z small && ar -qc a.ar small &&
    echo small | cpio --quiet -o -H newc >a.cpio)
bzip2 -c "$work/small" >"$work/a.bz2"
lz4 -q -c "$work/small" >"$work/a.lz4"
lzip -c "$work/small" >"$work/a.lz"
xz --format=lzma -c "$work/small" >"$work/a.lzma"
for kind in tar zip 7z ar cpio bz2 lz4 lz lzma; do foreign $kind "$work/a.$kind"; done
{ head -c 1024 /dev/zero; printf 'koly\0\0\0\4\0\0\2\0'; head -c 500 /dev/zero; } >"$(place foreign dmg)"

# What is in a disk, and one block of each codec: a number, the length it yields, and its bytes.
cp corpus/squashfs/zstd "$(place inspect squashfs)"
cp corpus/erofs/plain "$(place inspect erofs)"
block() { printf "%b\x00\x10" "$1"; cat; }
printf 'becket %.0s' {1..100} >"$work/text"
python3 -c 'import sys,zlib; sys.stdout.buffer.write(zlib.compress(sys.stdin.buffer.read()))' <"$work/text" | block '\x00' >"$(place codecs zlib)"
xz -c <"$work/text" | block '\x01' >"$(place codecs xz)"
printf '\xf0\x0bplain literals of lz4 here' | block '\x02' >"$(place codecs lz4)"
zstd -q -c <"$work/text" | block '\x03' >"$(place codecs zstd)"
gzip -n -c <"$work/text" | block '\x04' >"$(place codecs gzip)"
printf '\0\0\xf0\x0bplain literals of lz4 here' | block '\x09' >"$(place codecs padded-lz4)"
python3 -c 'import sys,lzma; data = lzma.compress(sys.stdin.buffer.read(), format=lzma.FORMAT_ALONE)
sys.stdout.buffer.write(bytes([255 - data[0]]) + data[14:])' <"$work/text" | block '\x0a' >"$(place codecs padded-lzma)"
printf '\x05\xb0\x08abc\x11\x20' | block '\x08' >"$(place codecs lznt1)"
xz -c --check=crc32 <"$work/text" | tail -c +13 | head -c -28 | block '\x05' >"$(place codecs xz-block)"

# Texts. Of the protocols' longest words only sketches: those change, and a fuzzer finds the rest.
text() { printf '%s' "$3" >"$(place "$1" "$2")"; }
map='[{"start":0,"len":8192,"place":{"data":{"file":0,"offset":0}}},{"start":8192,"len":4096,"place":"zero"},{"start":12288,"len":4096,"place":{"encoded":{"layer":0,"offset":0}}}]'
facts='{"kind":"regular","size":16384,"writable":true,"direct":{"memory":4,"offset":512},"direct_reason":"r","physical_block_size":512,"io_min":512,"io_opt":0,"rotational":false,"discard":true,"discard_granularity":4096,"write_zeroes":true}'
text control sketch-attach '{"method":"org.becket.Becket1.Attach","parameters":{"name":"a","image":"/a","offset":0,"size_limit":null,"map":'"$map"',"files":[{"facts":'"$facts"',"direct":true}],"below":null,"encoded":{"cache_size":1},"read_only":true,"block_size":512,"add_partitions":true,"partitions":[{"number":1,"start":0,"len":512,"label":"l","uuid":null}],"queues":1,"depth":64,"mode":"copy","merge":false,"direct_io":true,"autoclear":false,"lease":false,"isolate":false,"cgroup":false,"transport":"ublk","reason":"","warnings":[]}}'
text control set '{"method":"org.becket.Becket1.Set","parameters":{"name":"a","direct_io":"on","read_only":true,"size_limit":4096,"shortest":0,"image":null}}'
text control status '{"method":"org.becket.Becket1.Status"}'
text control service '{"method":"org.varlink.service.GetInterfaceDescription","parameters":{"interface":"org.becket.Becket1"}}'
calls='{"method":"org.becket.Becket1.List"}\0{"method":"org.becket.Becket1.Stat","parameters":{"name":"a"}}\0'
printf "\x1e$calls" >"$(place frames two)"
text worker sketch-serve '{"serve":{"kind":"ublk","id":1,"queues":1,"depth":64,"flags":0,"geometry":{"size":16384,"logical_block":512,"physical_block":4096,"io_min":512,"io_opt":0,"dma_align":4,"read_only":true,"rotational":false,"discard":true,"discard_granularity":4096,"write_zeroes":true},"map":'"$map"',"files":[{"facts":'"$facts"',"direct":true}],"below":null,"encoded":{"cache_size":null},"direct_io":true,"merge":false,"mark":7,"isolated":false,"lease":false,"cgroup":false}}'
text worker change '{"change":{"id":1,"map":'"$map"',"read_only":true,"direct_io":false,"files":null}}'
text worker await '"await"'
text worker full '{"full":{"id":1,"why":"w","room":3}}'
text worker succession '{"version":2}'
text blocks one '[{"codec":"lz4","below":[{"start":0,"len":4096,"place":{"data":{"file":0,"offset":0}}}],"blocks":[{"start":0,"len":8192,"input":0,"input_len":100,"skip":0,"yields":8192}]}]'
text record short '{"version":1,"boot_id":"b","name":"a","entry":{"record":"claim","image":"/a","claimant":{"pid":1,"start":2}}}'
text losetup show $'--find\n--show\n-P\n-o\n1MiB\n--sizelimit=4K\ndisk.img'
text losetup list $'-l\n-O\nNAME,BACK-FILE\n-J\n/dev/loop0'
text losetup many $'-vf\n--direct=on\n-b\n4096\n--show\n--\n-x'
text beckettab lines $'# disks\nroot /srv/root.img ro\n\'data\' "/srv/my data.img" nofail,offset=1MiB,via=loop # x\nnet /nfs/a.img _netdev,noauto\n'
text from lines $'a.img\n\'b c.img\' --name b -r --offset 1MiB # data\n"d\\"e" --block-size=4096\n'
text mounts lines $'36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/root rw\n37 36 7:1 / /a\\040b ro shared:2 master:3 - squashfs /dev/loop1 ro\n'

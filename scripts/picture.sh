#!/usr/bin/env bash
# Draws docs/session.svg and the pictures of the guide: real sessions, with the output of each command as it is.
# It attaches images that it makes, so it must run as root.
#   scripts/picture.sh [BECKET]
set -euo pipefail
becket=$(realpath "${1:-target/release/becket}")
docs=$(cd "$(dirname "$0")/.." && pwd)/docs
work=$(mktemp -d /var/tmp/becket-picture-XXXXXX)
export BECKET_RUNTIME_DIR=$work/state BECKET_LINK_DIR=$work/links NO_COLOR=1 PATH=$work/bin:$PATH:/usr/sbin:/sbin
trap 'becket detach --all >/dev/null 2>&1; umount "$work/windows" 2>/dev/null; rm -rf "$work"' EXIT
mkdir -p "$work"/{bin,srv,windows,tree/usr/bin,squash/LiveOS,iso/LiveOS} "$docs/guide/src/pictures"
ln -s "$becket" "$work/bin/becket"
cd "$work/srv"
{
    cp /usr/bin/{tar,ls} "$work/tree/usr/bin/"
    mke2fs -q -t ext4 -O ^has_journal -L live-root -U 6f1c2f6e-3f0b-4c56-9b57-0d6f3f3a1d10 -d "$work/tree" \
        "$work/squash/LiveOS/rootfs.img" 16M
    mksquashfs "$work/squash" "$work/iso/LiveOS/squashfs.img" -comp zstd -all-root -quiet -no-progress
    genisoimage -quiet -R -V LIVE-2026 -o live.iso "$work/iso"
    truncate -s 64M disk.img
    printf 'label: gpt\nstart=2048, size=48M, name=root\n' | sfdisk -q disk.img
    mke2fs -q -t ext4 -E offset=1048576 disk.img 48M
    # A disk of Windows in the format of its virtual machines.
    truncate -s 64M windows.raw
    printf 'label: gpt\nstart=2048, size=16M, type=U, name=EFI\nstart=34816, size=40M, name=Windows, type=%s\n' \
        EBD0A0A2-B9E5-4433-87C0-68B6B72699C7 | sfdisk -q windows.raw
    truncate -s 40M ntfs.raw
    mkntfs -q -F -L Windows ntfs.raw
    ntfs-3g ntfs.raw "$work/windows"
    mkdir -p "$work/windows/Users/ann" "$work/windows/Windows/System32"
    printf 'Meet Bob at ten.\r\n' >"$work/windows/Users/ann/notes.txt"
    head -c 300000 /dev/zero >"$work/windows/Users/ann/photo.jpg"
    touch -d 2026-10-02T08:15:00Z "$work/windows/Users/ann"/*
    umount "$work/windows"
    for _ in {1..50}; do pgrep -f "ntfs-3g ntfs.raw $work" || break; sleep 0.1; done
    dd if=ntfs.raw of=windows.raw bs=1M seek=17 conv=notrunc status=none
    mkfs.vfat -n EFI --offset 2048 windows.raw 16384
    qemu-img convert -f raw -O vhdx windows.raw windows.vhdx
    rm ntfs.raw windows.raw
} >"$work/making" 2>&1 || { cat "$work/making"; exit 1; }

# Runs what is typed, as it is shown, and draws it: draw FILE TITLE COMMAND...
draw() {
    local file=$1 title=$2 line
    for line in "${@:3}"; do
        printf '$ %s\n' "$line"
        bash -c "$line" 2>&1 | sed "s|$work||g; s|~[^ /]*/srv|/srv|; /^e2fsck /d"
    done >"$work/session"
    awk -v title="$title" '
        function escaped(text) { gsub(/&/, "\\&amp;", text); gsub(/</, "\\&lt;", text); gsub(/>/, "\\&gt;", text); return text }
        { line[NR] = $0; if (length($0) > wide) wide = length($0) }
        END {
            width = wide * 7.9 + 32; height = NR * 18 + 56
            printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\">\n", width, height
            print "<title>" title "</title>"
            print "<style>text{font:13px ui-monospace,monospace;fill:#d4d4d4;white-space:pre}.p{fill:#7ec699;font-weight:bold}</style>"
            printf "<rect width=\"%d\" height=\"%d\" rx=\"8\" fill=\"#1e1e1e\"/>\n", width, height
            split("#ff5f56 #ffbd2e #27c93f", colour, " ")
            for (i = 1; i <= 3; i++) printf "<circle cx=\"%d\" cy=\"18\" r=\"6\" fill=\"%s\"/>\n", i * 20, colour[i]
            for (i = 1; i <= NR; i++)
                printf "<text x=\"16\" y=\"%d\"%s xml:space=\"preserve\">%s</text>\n", 34 + i * 18,
                    line[i] ~ /^\$ / ? " class=\"p\"" : "", escaped(line[i])
            print "</svg>"
        }' "$work/session" >"$file"
    cat "$work/session"
}
draw "$docs/session.svg" "A session with becket" \
    'becket inspect live.iso' 'becket ls live.iso/LiveOS/squashfs.img/LiveOS/rootfs.img/usr/bin' \
    'becket map live.iso/LiveOS/squashfs.img' 'becket attach disk.img' 'becket list' \
    'becket run -r live.iso/LiveOS/squashfs.img/LiveOS/rootfs.img -- e2fsck -fn {} | tail -n 1' \
    'becket detach disk.img' 'becket list'
draw "$docs/guide/src/pictures/inside.svg" "Looking into a disk of Windows" \
    'becket inspect windows.vhdx' 'becket ls -l windows.vhdx/p2/Users/ann' \
    'becket cat windows.vhdx/p2/Users/ann/notes.txt' 'becket cp -r windows.vhdx/p2/Users users' \
    'ls -l users/ann | tail -n +2'
becket map --svg "$docs/guide/src/pictures/map.svg" live.iso/LiveOS/squashfs.img/LiveOS/rootfs.img
becket attach --via fuse --name disk disk.img >/dev/null
becket attach --via fuse --name live live.iso/LiveOS/squashfs.img/LiveOS/rootfs.img >/dev/null
# Something to see.
(
    end=$((SECONDS + 6))
    while ((SECONDS < end)); do
        dd if="$work/links/live" of=/dev/null bs=64k iflag=direct status=none
        dd if="$work/links/disk" of="$work/links/disk" bs=16k count=400 seek=1000 iflag=direct oflag=direct \
            conv=notrunc status=none
    done
) &
draw "$docs/guide/src/pictures/top.svg" "becket top" 'becket top --once --interval 2s'
wait

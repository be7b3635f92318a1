#!/usr/bin/env bash
# Draws docs/session.svg: a real session, with the output of each command as it is. It attaches images that it
# makes, so it must run as root.
#   scripts/picture.sh [BECKET]
set -euo pipefail
becket=$(realpath "${1:-target/release/becket}")
picture=$(cd "$(dirname "$0")/.." && pwd)/docs/session.svg
work=$(mktemp -d /var/tmp/becket-picture-XXXXXX)
export BECKET_RUNTIME_DIR=$work/state BECKET_LINK_DIR=$work/links NO_COLOR=1 PATH=$work/bin:$PATH:/usr/sbin:/sbin
trap 'becket detach --all >/dev/null 2>&1; rm -rf "$work"' EXIT
mkdir -p "$work"/{bin,srv,tree/usr/bin,squash/LiveOS,iso/LiveOS}
ln -s "$becket" "$work/bin/becket"
cd "$work/srv"
{
    cp /usr/bin/{tar,ls} "$work/tree/usr/bin/"
    mke2fs -q -t ext4 -O ^has_journal -L live-root -U 6f1c2f6e-3f0b-4c56-9b57-0d6f3f3a1d10 -d "$work/tree" \
        "$work/squash/LiveOS/rootfs.img" 16M
    mksquashfs "$work/squash" "$work/iso/LiveOS/squashfs.img" -comp zstd -all-root -quiet -no-progress
    genisoimage -quiet -R -V LIVE-2026 -o live.iso "$work/iso"
    truncate -s 64M disk.img
    printf 'label: gpt\nsize=48M, name=root\n' | sfdisk -q disk.img
    mke2fs -q -t ext4 -E offset=1048576 disk.img 48M
} >"$work/making" 2>&1 || { cat "$work/making"; exit 1; }
# What is typed, as it is shown and as it is run.
session=(
    'becket inspect live.iso' 'becket ls live.iso/LiveOS/squashfs.img/LiveOS/rootfs.img/usr/bin'
    'becket map live.iso/LiveOS/squashfs.img' 'becket attach disk.img' 'becket list'
    'becket run -r live.iso/LiveOS/squashfs.img/LiveOS/rootfs.img -- e2fsck -fn {} | tail -n 1'
    'becket detach disk.img' 'becket list'
)
for line in "${session[@]}"; do
    printf '$ %s\n' "$line"
    bash -c "$line" 2>&1 | sed "s|$work||g; /^e2fsck /d"
done >"$work/session"
awk '
    function escaped(text) { gsub(/&/, "\\&amp;", text); gsub(/</, "\\&lt;", text); gsub(/>/, "\\&gt;", text); return text }
    { line[NR] = $0; if (length($0) > wide) wide = length($0) }
    END {
        width = wide * 7.9 + 32; height = NR * 18 + 56
        printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\">\n", width, height
        print "<title>A session with becket</title>"
        print "<style>text{font:13px ui-monospace,monospace;fill:#d4d4d4;white-space:pre}.p{fill:#7ec699;font-weight:bold}</style>"
        printf "<rect width=\"%d\" height=\"%d\" rx=\"8\" fill=\"#1e1e1e\"/>\n", width, height
        split("#ff5f56 #ffbd2e #27c93f", colour, " ")
        for (i = 1; i <= 3; i++) printf "<circle cx=\"%d\" cy=\"18\" r=\"6\" fill=\"%s\"/>\n", i * 20, colour[i]
        for (i = 1; i <= NR; i++)
            printf "<text x=\"16\" y=\"%d\"%s xml:space=\"preserve\">%s</text>\n", 34 + i * 18,
                line[i] ~ /^\$ / ? " class=\"p\"" : "", escaped(line[i])
        print "</svg>"
    }' "$work/session" >"$picture"
cat "$work/session"

# Takes a whole tree out of images, and reads one file that is nested in them, without a device. Expects
# ENTRANTS, ROUNDS, MIB (of the tree), CALLS (of each `cat` in a round), and IMAGES (a folder, made once).
for program in unsquashfs debugfs 7z bsdtar; do
    command -v "$program" >"$SAID" || fail "no $program (Debian: squashfs-tools e2fsprogs p7zip-full libarchive-tools)"
done
make_images() {
    local codec
    rm -rf "$IMAGES" && mkdir -p "$IMAGES/tree" "$IMAGES/live"
    # Files and links of this machine's /usr, drawn at random, until there are so many MiB of them.
    (cd /usr && find . -xdev \( -type f -o -type l \) -size -65536 -printf '%s %p\n' | LC_ALL=C sort -k 2) |
        shuf --random-source=<(yes) |
        awk -v most=$((MIB << 20)) '(sum += $1) <= most { sub("[0-9]* ", ""); print }' >"$IMAGES/drawn"
    (cd /usr && xargs -d '\n' cp -d --preserve=mode,timestamps --parents -t "$IMAGES/tree" <"$IMAGES/drawn") &&
        for codec in xz zstd; do
            mksquashfs "$IMAGES/tree" "$IMAGES/squashfs-$codec" -comp $codec -all-root -quiet -no-progress || return
        done &&
        mke2fs -q -F -t ext4 -d "$IMAGES/tree" "$IMAGES/ext4" $((MIB * 5 / 4 + 64))M &&
        genisoimage -quiet -R -D -o "$IMAGES/iso" "$IMAGES/tree" &&
        # One file of a live CD: in ext4, in SquashFS, in an ISO image.
        mke2fs -q -F -t ext4 -d /usr/share/doc "$IMAGES/live/rootfs.img" 512M &&
        mksquashfs "$IMAGES/live" "$IMAGES/squash.img" -comp zstd -quiet -no-progress &&
        rm -rf "$IMAGES/live" && mkdir "$IMAGES/live" && mv "$IMAGES/squash.img" "$IMAGES/live/" &&
        genisoimage -quiet -R -o "$IMAGES/live.iso" "$IMAGES/live" && rm -rf "$IMAGES/live" &&
        touch "$IMAGES/made"
}
if [[ ! -e $IMAGES/made ]]; then
    say "the images are made: once"
    make_images >"$SAID" 2>&1 || fail "the images cannot be made: $(tail -n 1 "$SAID")"
fi
# Nothing of this measures a disk: what is read is in the page cache, what is written is in memory.
OUT=$WORK/out
mkdir -p "$OUT"
mount -t tmpfs -o size=$((MIB * 3 / 2 + 256))M tmpfs "$OUT" || fail "no file system in memory"
undo_at_the_end 'umount "$OUT"'

# out TOOL IMAGE: the whole tree, owners, modes and times as the tool keeps them by default as root.
out() {
    case $1 in
    becket) "$BECKET" cp -r "$2/." "$OUT/tree" ;;
    unsquashfs) unsquashfs -quiet -no-progress -dest "$OUT/tree" "$2" ;;
    debugfs) mkdir "$OUT/tree" && debugfs -R "rdump / $OUT/tree" "$2" ;;
    # Its newer versions take out a link with `..` only if asked to; older ones do not know the option.
    7z) 7z x -y -bd -snld20 "-o$OUT/tree" "$2" ;;
    bsdtar) mkdir "$OUT/tree" && bsdtar -x -p -f "$2" -C "$OUT/tree" ;;
    esac
}
# Whether KIND is one that TOOL reads.
reads() {
    case $1:$2 in
    becket:* | unsquashfs:squashfs-* | debugfs:ext4 | 7z:* | bsdtar:iso) ;;
    *) return 1 ;;
    esac
}
cats() {
    local call
    for ((call = 0; call < CALLS; call++)); do
        "$BECKET" cat "$IMAGES/live.iso/squash.img/rootfs.img/bash/copyright" || return
    done
}
# Ticks that the programs started here have worked.
user_and_system() { awk '{ print $16 + $17 }' "/proc/$$/stat"; }
turn() {
    local kind work
    for kind in squashfs-xz squashfs-zstd ext4 iso; do
        reads "$1" $kind || continue
        cat "$IMAGES/$kind" >/dev/null
        work=$(user_and_system)
        CALLS=1 took "$kind-ms" "$1" out "$1" "$IMAGES/$kind"
        figure "$kind-cpu-ms" "$1" $((($(user_and_system) - work) * 10))
        if ((round == 0)); then
            # 7z writes some links as files: what it took out is compared where it has them.
            LC_ALL=C diff -r --no-dereference "$IMAGES/tree" "$OUT/tree" >"$SAID" 2>&1
            say "$1, $kind: $(grep -vc 'Only in .*: lost+found$' "$SAID") differences"
            [[ $1 != becket ]] || ! grep -qv 'Only in .*: lost+found$' "$SAID" || fail "$kind: $(head -n 3 "$SAID")"
        fi
        rm -rf "$OUT/tree"
    done
    [[ $1 != becket ]] || took cat-ms becket cats
}
turns 0 turn

# Makes the images of nested.sh, once: ISO images that hold SquashFS that holds an ext4 image with FILES files
# of this machine's /usr. Expects IMAGES (a folder), CODECS, FILES.
make_iso() {
    local tree=$IMAGES/iso-$1
    mkdir -p "$tree/LiveOS"
    mksquashfs "$IMAGES/squash" "$tree/LiveOS/squashfs.img" -comp "$1" -all-root -quiet -no-progress &&
        genisoimage -quiet -R -o "$IMAGES/$1.part" "$tree" && mv "$IMAGES/$1.part" "$IMAGES/$1.iso"
    rm -rf "$tree"
    [[ -e $IMAGES/$1.iso ]] || fail "there is no image with $1"
}
if [[ ! -e $IMAGES/order ]]; then
    say "the files are gathered: once"
    rm -rf "$IMAGES" && mkdir -p "$IMAGES/tree" "$IMAGES/squash/LiveOS"
    # Of 16 KiB to 2 MiB, drawn at random, and the same ones again on the same machine.
    (cd /usr && find . -xdev -type f -size +31 -size -4096 | LC_ALL=C sort) |
        shuf --random-source=<(yes) -n "$FILES" >"$IMAGES/drawn"
    (cd /usr && xargs -d '\n' cp --parents -t "$IMAGES/tree" <"$IMAGES/drawn") || fail "the files cannot be copied"
    mke2fs -q -F -t ext4 -O ^has_journal -m 0 -d "$IMAGES/tree" "$IMAGES/squash/LiveOS/ext3fs.img" 1G ||
        fail "there is no file system"
    rm -rf "$IMAGES/tree"
    shuf --random-source=<(yes 1) "$IMAGES/drawn" >"$IMAGES/order"
fi
for codec in "${CODECS[@]}"; do
    [[ -e $IMAGES/$codec.iso ]] || { say "an image with $codec is made: once" && make_iso "$codec"; }
done
# What the guest gets.
mkdir -p "$IMAGES/given" && ln -f "$IMAGES/order" "$IMAGES"/*.iso "$IMAGES/given/"

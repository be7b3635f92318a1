# Puts the images where reading costs little: on ext4 on a null_blk in memory. Expects them in IMAGES.
modprobe isofs && modprobe squashfs || fail "this kernel lacks isofs or squashfs"
null_blk $((256 + $(du -cm "$IMAGES"/*.iso | tail -n 1 | cut -f 1)))
mkfs.ext4 -q -F -O ^has_journal /dev/nullb0 || fail "there is no file system"
mkdir -p /mnt/nested
mount /dev/nullb0 /mnt/nested && cp "$IMAGES"/* /mnt/nested/ || fail "the images do not fit"
IMAGES=/mnt/nested

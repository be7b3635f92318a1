# Puts the images where reading costs little: on ext4 on a null_blk in memory. Expects GIVEN (a folder), MIB;
# leaves IMAGES.
modprobe loop && modprobe ublk_drv && modprobe isofs && modprobe squashfs || fail "this kernel lacks loop, ublk, isofs or squashfs"
modprobe configfs 2>"$SAID"
modprobe null_blk nr_devices=0 || fail "this kernel has no null_blk"
mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
null=/sys/kernel/config/nullb/nullb0
mkdir $null || fail "null_blk makes no device"
for setting in "size=$MIB" memory_backed=1 queue_mode=2 irqmode=0 blocksize=512; do
    echo "${setting#*=}" >"$null/${setting%%=*}" || fail "null_blk does not take $setting"
done
echo 1 >$null/power
mkfs.ext4 -q -F -O ^has_journal /dev/nullb0 || fail "there is no file system"
mkdir -p /mnt/nested
mount /dev/nullb0 /mnt/nested || fail "the file system cannot be mounted"
cp "$GIVEN"/*.iso "$GIVEN/order" /mnt/nested/ || fail "the images do not fit"
IMAGES=/mnt/nested

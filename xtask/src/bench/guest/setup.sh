# What every benchmark in the guest needs: drivers, and IMAGE on an ext4 that lives in memory.
# Expects CPUS and REPORT; leaves IMAGE, and the functions say, fail and fresh.
set -u
IMAGE=/mnt/bench/image

say() { printf '%s\n' "$*"; }
section() { printf '@@ %s\n' "$*" >>"$REPORT"; }
fail() {
    say "bench: $*"
    exit 1
}
# The page cache as after a boot, and nothing left to write.
fresh() {
    sync
    echo 3 >/proc/sys/vm/drop_caches
}

modprobe loop && modprobe ublk_drv || fail "this kernel lacks loop or ublk"
modprobe configfs 2>/dev/null
modprobe null_blk nr_devices=0 || fail "this kernel has no null_blk"
mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
null=/sys/kernel/config/nullb/nullb0
mkdir $null || fail "null_blk makes no device"
for setting in size=400 memory_backed=1 queue_mode=2 irqmode=0 blocksize=512; do
    echo "${setting#*=}" >"$null/${setting%%=*}" || fail "null_blk does not take $setting"
done
echo 1 >$null/power
mkfs.ext4 -q -F /dev/nullb0 || fail "there is no file system"
mkdir -p /mnt/bench
mount /dev/nullb0 /mnt/bench || fail "the file system cannot be mounted"
# Written once with direct I/O: every block is allocated and nothing of it is in the page cache.
dd if=/dev/zero of=$IMAGE bs=1M count=256 oflag=direct status=none || fail "the image cannot be written"
fresh

section kernel "$(uname -r)"
section fio "$(fio --version)"

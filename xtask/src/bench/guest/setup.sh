# IMAGE, on an ext4 that lives in memory, and the functions fresh and load.
IMAGE=/mnt/bench/image

# Nothing left to write, and nothing of the image in the page cache. Not drop_caches: programs would then be
# read again from the guest's disks, and while a guest waits for its disk, a clock that counts instructions
# leaps from timer to timer. A run would seem to take seconds more than it did, or not to end.
fresh() {
    sync
    dd if=$IMAGE iflag=nocache count=0 status=none
}

# What all tasks wait for, when fio does not end in time.
stuck() {
    local task
    echo "fio did not end in 30 s"
    for task in /proc/[0-9]*/task/*; do
        [[ $(<"$task/comm") =~ fio|becket|ublk|iou- ]] || continue
        echo "-- $(<"$task/comm") $(grep State "$task/status")"
        cat "$task/stack"
    done
    grep -r . /sys/kernel/debug/block/ublkb*/hctx*/{busy,tags,state} /sys/kernel/debug/block/nullb0/hctx*/busy
} 2>&1

# load DEVICE ARGUMENTS...: runs fio; its answer is in $WORK/fio.json, or its words in $SAID.
load() {
    local job watch code
    rm -f "$WORK/stuck"
    fio --filename="$1" "${@:2}" --output-format=json --output="$WORK/fio.json" >"$SAID" 2>&1 &
    job=$!
    (sleep 30 && stuck >"$WORK/stuck" && kill $job) &
    watch=$!
    wait $job
    code=$?
    kill $watch 2>"$WORK/killed"
    wait $watch 2>"$WORK/killed"
    [[ ! -s $WORK/stuck ]] || { mv "$WORK/stuck" "$SAID" && code=124; }
    return $code
}

null_blk 400
mkfs.ext4 -q -F /dev/nullb0 || fail "there is no file system"
mkdir -p /mnt/bench
mount /dev/nullb0 /mnt/bench || fail "the file system cannot be mounted"
# Written once with direct I/O: every block is allocated and nothing of it is in the page cache.
dd if=/dev/zero of=$IMAGE bs=1M count=256 oflag=direct status=none || fail "the image cannot be written"
fresh
# Programs are in memory before anything is measured.
for program in /usr/local/bin/* $(command -v fio bash sleep sync dd losetup); do
    cat "$program" $(ldd "$program" 2>/dev/null | grep -o '/[^ ]*')
done >/dev/null 2>&1
load /dev/nullb0 --name=warm --ioengine=libaio --direct=1 --rw=randread --bs=4k --iodepth=64 --time_based \
    --runtime=100ms || fail "fio does not run here: $(cat "$SAID")"
section note "load: $(fio --version), libaio, direct I/O; image: 256 MiB on ext4 on a null_blk in memory"

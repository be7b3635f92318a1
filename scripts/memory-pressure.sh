#!/bin/bash
# Swap and write-back on becket's devices while memory is short, with their server in the same machine. For a
# guest:
#   cargo xtask vm --memory 512 --timeout 2200 --file target/release/becket:/usr/bin/becket \
#       --file scripts/memory-pressure.sh:/usr/bin/memory-pressure -- \
#       'SECONDS_OF_PRESSURE=600 memory-pressure'
# (two minutes without SECONDS_OF_PRESSURE). Prints the amounts that moved, and the page faults of the worker
# meanwhile: its memory is locked, so it may have no fault that waits for a disk.
set -u
seconds=${SECONDS_OF_PRESSURE:-120}
modprobe ublk_drv || exit
# Written, not fallocated: converting unwritten blocks allocates memory in the layer below (see
# docs/reliability.md).
attach() { dd if=/dev/zero of="/scratch/$1.img" bs=1M count="$2" conv=fsync status=none && becket attach --via ublk --name "$1" "/scratch/$1.img"; }
swap=$(attach swap 512) && mkswap "$swap" >/dev/null && swapon "$swap" || exit
disk=$(attach files 320) && mkfs.ext4 -q "$disk" && mkdir /run/files && mount "$disk" /run/files || exit
worker=$(becket list --json | grep -m1 -o '"worker_pid": [0-9]*' | tr -dc 0-9)
faults() { cat /proc/"$worker"/task/*/stat 2>/dev/null | sed 's/.*) //' | awk '{ minor += $8; major += $10 } END { print minor, major }'; }
moved() { awk '/^(pswpin|pswpout|oom_kill) / { printf "%s %s  ", $1, $2 }' /proc/vmstat; }
# Half as much again as there is memory, touched all over.
perl -e '$size = shift() << 20; $x = "\0" x $size; for (;;) { substr($x, int(rand($size)), 1) = "b" for 1 .. 1000 }' 600 &
hog=$!
( while :; do dd if=/dev/zero of=/run/files/f bs=1M count=200 conv=fsync 2>/dev/null && echo >>/run/written; done ) &
writer=$!
sleep 10
before=$(faults)
echo "begin: minor and major faults $before; $(moved)"
sleep "$seconds"
after=$(faults)
echo "end after $seconds s: minor and major faults $after; $(moved)"
echo "write-back: $(wc -l </run/written) files of 200 MiB"
grep -E 'VmLck|VmSwap|VmRSS' /proc/"$worker"/status
kill -0 $hog && echo "the hog lives"
becket list
kill $hog $writer
wait 2>/dev/null
# The writer's last dd goes on for a while.
for ((tries = 0; tries < 60; tries++)); do umount /run/files 2>/dev/null && break; sleep 1; done
swapoff "$swap" && becket detach --all || exit
read -r _ major_before <<<"$before"
read -r _ major_after <<<"$after"
[[ $major_before == "$major_after" && $(awk '/^oom_kill /{print $2}' /proc/vmstat) == 0 ]] && echo "no major fault, no OOM kill"

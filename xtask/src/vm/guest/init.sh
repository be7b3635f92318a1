#!/bin/bash
# Process 1 of the guest: makes a running system of the stacked root, runs the script, reports, powers off.
# Talks to the host over two ports: `output` is the script's own, `status` carries our few lines.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8
# shellcheck source=/dev/null
. /becket-vm/settings # UDEV, OUTS

mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /dev/pts /dev/shm /run/lock
mount -t devpts devpts /dev/pts
# udev's links, which bash's <(...) and programs given /dev/stdin want.
ln -s /proc/self/fd /dev/fd
for stream in stdin:0 stdout:1 stderr:2; do ln -s "/proc/self/fd/${stream#*:}" "/dev/${stream%:*}"; done
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
chmod 1777 /tmp
# e4defrag looks for its file system there.
ln -s /proc/self/mounts /etc/mtab
hostname becket-vm
ip link set lo up
ulimit -c 0

port() { # NAME: its device
    local node
    for node in /sys/class/virtio-ports/*; do
        [[ $(<"$node/name") == "$1" ]] && echo "/dev/${node##*/}" && return
    done
}
exec 3>"$(port status)"

if [[ $UDEV == yes ]]; then
    /lib/systemd/systemd-udevd --daemon
    udevadm trigger --action=add
    udevadm settle
fi

echo ready >&3
cd /root || cd /
/bin/bash /becket-vm/script </dev/null >"$(port output)" 2>&1 3>&-
code=$?

for index in "${!OUTS[@]}"; do
    file=${OUTS[$index]}
    if [[ -f $file ]]; then
        # Through a copy, so that the size is true even when something still writes to the file.
        cp -- "$file" /run/out
        echo "file $index $(stat -c %s /run/out)" >&3
        cat /run/out >&3
    else
        echo "missing $index" >&3
    fi
done
echo "exit $code" >&3
exec 3>&-
# No clean unmount: every disk is read-only or thrown away.
echo o >/proc/sysrq-trigger
# A builtin: when the power goes the disks go first, and a program on them could not even start.
while :; do :; done

#!/bin/bash
# Process 1 of the guest, or a service of systemd: makes a running system of the stacked root, runs the
# script, reports, powers off. Talks to the host over two ports: `output` is the script's own, `status`
# carries our few lines.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8
# shellcheck source=/dev/null
. /becket-vm/settings # UDEV, SYSTEMD, ORDERLY, OUTS

become_systemd() { # it makes the system, and a service starts this program again
    local units=/etc/systemd/system unit
    # Without one it would take this for the machine's very first start.
    echo 00000000000000000000000000000001 >/etc/machine-id
    printf '%s\n' '[Unit]' 'DefaultDependencies=no' 'After=multi-user.target' '[Service]' 'ExecStart=/becket-vm/init' \
        >$units/becket-vm.service
    # The script also reports a failed start, and at once.
    for unit in multi-user emergency; do
        mkdir -p $units/$unit.target.wants
        ln -sf ../becket-vm.service $units/$unit.target.wants/becket-vm.service
    done
    ln -sf /lib/systemd/system/multi-user.target $units/default.target
    # Nobody logs in here, and time is short.
    for unit in getty.target systemd-logind.service systemd-update-utmp-runlevel.service timers.target; do
        ln -sf /dev/null $units/$unit
    done
    exec /lib/systemd/systemd
}

become_a_system() {
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
}

if (($$ == 1)); then
    [[ $SYSTEMD == yes ]] && become_systemd
    become_a_system
fi

port() { # NAME: its device
    local node
    for node in /sys/class/virtio-ports/*; do
        [[ $(<"$node/name") == "$1" ]] && echo "/dev/${node##*/}" && return
    done
}
exec 3>"$(port status)"

if [[ $UDEV == yes && $SYSTEMD == no ]]; then
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
[[ $ORDERLY == yes ]] && exec systemctl --no-block poweroff
# No clean unmount: every disk is read-only or thrown away.
echo o >/proc/sysrq-trigger
# A builtin: when the power goes the disks go first, and a program on them could not even start.
while :; do :; done

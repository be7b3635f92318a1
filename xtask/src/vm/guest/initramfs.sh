#!/bin/sh
# The guest's first program: loads what the root needs, stacks it, and hands over to becket-vm/init.
# lowest: the read-only userland; above it this run's files; on top a tmpfs that forgets.
bb=/bin/busybox
die() { echo "becket-vm: $*" >/dev/console; echo o >/proc/sysrq-trigger; $bb sleep 10; }

$bb mount -t proc proc /proc
$bb mount -t sysfs sysfs /sys
$bb mount -t devtmpfs dev /dev
while read -r module; do
    $bb insmod "/modules/$module" || die "cannot load $module"
done </modules/order

# The devices have found their places in memory: the other CPUs may join (qemu.rs says why only now).
for cpu in /sys/devices/system/cpu/cpu[1-9]*; do
    [ -e "$cpu/online" ] && echo 1 >"$cpu/online"
done

disk() { # SERIAL: the disk's node
    for node in /sys/block/vd*; do
        [ "$($bb cat "$node/serial")" = "$1" ] && echo "/dev/${node##*/}" && return
    done
    die "there is no disk $1"
}

cd /disks || die "no /disks"
$bb mkdir root run top
$bb mount -t ext4 -o ro "$(disk root)" root || die "cannot mount the root"
$bb mount -t ext4 -o ro "$(disk run)" run || die "cannot mount the run's files"
$bb mount -t tmpfs -o size=75% tmpfs top || die "cannot mount a tmpfs"
$bb mkdir top/upper top/work
$bb mount -t overlay -o lowerdir=run:root,upperdir=top/upper,workdir=top/work overlay /new || die "no overlay"
modules=/new/usr/lib/modules/$($bb uname -r)
$bb mkdir -p "$modules"
$bb mount -t ext4 -o ro "$(disk modules)" "$modules" || die "cannot mount the modules"
$bb mount -t ext4 "$(disk scratch)" /new/scratch || die "cannot mount the scratch disk"
for dir in proc sys dev; do $bb mount --move /$dir /new/$dir; done
exec $bb switch_root /new /becket-vm/init

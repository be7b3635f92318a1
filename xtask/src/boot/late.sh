# The last part of the boot's checks, after those of users.
# A mount that systemd leaves alone until the end, and a program on it that only systemd's last signals end:
# boot/late.rs checks the disk after the machine has powered off.
late() {
    local units=/run/systemd/system
    truncate -s 64M /scratch/late.img && becket attach --via ublk --name late /scratch/late.img && mkfs.ext4 -q /dev/becket/late || return
    printf '%s\n' '[Unit]' 'DefaultDependencies=no' '[Mount]' 'What=/dev/becket/late' 'Where=/late' >$units/late.mount
    printf '%s\n' '[Unit]' 'DefaultDependencies=no' 'After=late.mount' '[Service]' 'KillMode=none' \
        "ExecStart=/bin/bash -c 'for ((i = 1; ; i++)); do echo \$\$i >>/late/numbers; done'" >$units/late-writer.service
    systemctl daemon-reload && systemctl start late.mount late-writer.service && within 20 test -s /late/numbers
}
check a_late_mount_is_there late
ended=yes

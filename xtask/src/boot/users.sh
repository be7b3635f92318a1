# Devices of a user without privileges, on a machine with udev: it gives the nodes, and nobody else gets in.
as_nobody() { # COMMANDS: what an ordinary user does in a directory of their own, with devices that go to nobody else
    setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        BECKET_RUNTIME_DIR=/scratch/nobody/run bash -euc "cd /scratch/nobody; $1"
}
install -d -o 65534 -g 65534 /scratch/nobody
nobody_sees_what_is_missing() {
    as_nobody 'truncate -s 1M a.img; ! becket attach --via ublk a.img 2>said'
    cat /scratch/nobody/said
    grep "only root may open /dev/ublk-control" /scratch/nobody/said && grep 91-becket-users.rules /scratch/nobody/said
}
rules_for_users() {
    install -m 644 /usr/share/becket/91-becket-users.rules /etc/udev/rules.d/ || return
    local try
    # Udev has missed it once, beside another busy guest: what it says then is shown, also when it works later.
    for try in 1 2 3; do
        udevadm control --reload && udevadm trigger --settle /dev/ublk-control &&
            [[ $(stat -c %a /dev/ublk-control) == 666 ]] && return
        {
            echo "try $try"
            ls -l --full-time /dev/ublk-control /etc/udev/rules.d
            udevadm test /sys/class/misc/ublk-control 2>&1 | tail -n 30
            ps -eo pid,stat,wchan:20,etime,args | grep -v '\]$'
        } >&3
        sleep 5
    done
    return 1
}
nobody_has_a_device() {
    as_nobody '
        truncate -s 32M disk.img
        printf "label: gpt\nsize=8M\n" | sfdisk -q disk.img
        device=$(becket attach --via ublk disk.img 2>warned)
        echo "$device"; cat warned
        grep "partitions are not devices" warned
        [[ -b $device && ! -e ${device}p1 ]]
        [[ $(stat -c %u:%g "$device" "/dev/ublkc${device#/dev/ublkb}" | sort -u) == 65534:65534 ]]
        becket list
        head -c 4M /dev/urandom >bytes
        dd if=bytes of="$device" bs=1M seek=16 conv=notrunc,fsync status=none
        cmp -n 4194304 -i 0:16777216 bytes disk.img
        dd if="$device" bs=64k iflag=direct,skip_bytes skip=16M count=64 status=none | cmp - bytes
        ! becket attach --via ublk --partitions on disk.img
        echo "$device" >device
    '
}
strangers_stay_out() {
    local device
    device=$(</scratch/nobody/device)
    chmod 666 "$device" "/dev/ublkc${device#/dev/ublkb}"
    local stranger="setpriv --reuid 65533 --regid 65533 --clear-groups" code=0
    $stranger head -c 512 "$device" && code=1
    $stranger becket ublk-give "${device#/dev/ublkb}" && code=1
    chmod 600 "$device" "/dev/ublkc${device#/dev/ublkb}"
    head -c 512 "$device" >/dev/null && return $code
}
roots_devices_stay_roots() {
    local device
    truncate -s 32M /scratch/root.img && device=$(becket attach --via ublk /scratch/root.img) &&
        becket ublk-give "${device#/dev/ublkb}" && udevadm settle &&
        [[ $(stat -c %u "$device" "/dev/ublkc${device#/dev/ublkb}" | sort -u) == 0 ]] && becket detach "$device"
}
nobody_lets_go() {
    as_nobody '
        read -r device <device
        becket detach "$device"
        [[ ! -e $device ]]
        # For reading only, and one partition by its path.
        device=$(becket attach -r --via ublk disk.img/p1)
        [[ $(cat "/sys/block/${device#/dev/}/ro") == 1 ]]
        cmp -n 8388608 -i 0:1048576 "$device" disk.img
        becket detach "$device"
        [[ $(becket list 2>&1) == *"nothing is attached"* ]]
    ' && ! ls /dev/ublkc* | grep -v "$(basename -a /dev/ublkb* | sed 's/ublkb/ublkc/')"
}
nobodys_server_dies() { # without recovery its device is lost, and goes
    as_nobody '
        device=$(becket attach --via ublk disk.img)
        kill -KILL $(becket list --json | grep -m1 worker_pid | tr -dc 0-9)
        for try in $(seq 100); do becket list --json | grep "\"state\": \"lost\"" && break; sleep 0.1; done
        becket detach "$device"
        [[ ! -e $device && $(becket list 2>&1) == *"nothing is attached"* ]]
    '
}
check a_user_without_ublk_sees_what_is_missing nobody_sees_what_is_missing
exec 3>&1
check rules_give_users_ublk rules_for_users
check a_user_has_a_device nobody_has_a_device
check other_users_cannot_open_it strangers_stay_out
check the_devices_of_root_are_not_given_away roots_devices_stay_roots
check a_user_s_device_goes nobody_lets_go
check a_user_s_device_is_lost_with_its_worker nobodys_server_dies


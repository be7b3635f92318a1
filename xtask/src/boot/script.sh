# Runs in the guest when systemd has reached multi-user.target. IMAGES is set in front of this.
# Never passes when it ends early; each `test` line is a case for CI.
ended=
the_end() {
    journalctl -b -o short-monotonic --no-pager >/root/boot.log
    # A run that ends before the last line has not passed the checks after that point.
    [[ $ended ]] || exit 1
    exit $code
}
trap the_end EXIT
name() { (($1 % 2)) && echo "snap$1" || echo "snap-$1"; }

up() {
    within 20 eval '[[ $(systemctl is-system-running) != starting ]]'
    systemctl --failed --no-legend --no-pager
    systemctl is-active local-fs.target multi-user.target && [[ -z $(systemctl --failed --no-legend) ]]
}
all_mounted() {
    local number
    for ((number = 0; number < IMAGES; number++)); do
        [[ $(</srv/mnt/$number/id) == "$number" ]] || { echo "image $number"; return 1; }
        [[ $(findmnt -no SOURCE /srv/mnt/$number) == $(realpath "/dev/becket/$(name $number)") ]] || return
    done
}
# One of them is an export, of image 0.
all_listed() { [[ $(becket list --json | grep -c '"state": "live"') == $((IMAGES + 1)) ]]; }
exported() {
    becket copy "nbd+unix:///exported?socket=/run/exported.sock" /root/copy.img &&
        cmp /root/copy.img /srv/images/0.squashfs && becket list | grep '^exported .* nbd '
}
wrong_line_reported() {
    dmesg | grep "becket-generator.*line .* is left out: .*--flat" && ! systemctl list-units --all | grep 'becket-attach@wrong'
}
one_server() { [[ $(systemctl show -P MainPID becket) == "$(becket list --json | grep -m1 server_pid | tr -dc 0-9)" ]]; }
waits() { # the kernel's word for the device, and the link
    [[ $(systemctl is-active "$(systemd-escape -p --suffix=device "/dev/becket/$(name 0)")") == active ]]
}

check the_target_is_reached up
check all_images_are_mounted all_mounted
check all_devices_are_live all_listed
check the_wrong_line_is_reported wrong_line_reported
check a_line_of_the_table_exports exported
check devices_are_units waits
check the_server_is_systemds one_server
systemd-analyze --no-pager time
attached=$(journalctl -b -o short-monotonic -u 'becket-attach@*' | grep Finished | tail -1 | grep -o '[0-9.]*' | head -1)
echo "becket: $IMAGES images mounted; the last was attached $attached s after the kernel began"

udisks_shows_it() { # the name, and what is on it
    local info
    truncate -s 8M /scratch/labelled.img && mkfs.ext4 -q -L "some label" /scratch/labelled.img &&
        becket attach --via ublk --name labelled /scratch/labelled.img || return
    udevadm settle
    info=$(udisksctl info -b "$(realpath /dev/becket/labelled)")
    echo "$info"
    becket detach labelled
    grep -q '^ *IdLabel: *some label$' <<<"$info" && grep -q '^ *IdType: *ext4$' <<<"$info" && grep -q '^ *HintName: *labelled$' <<<"$info"
}
check udisks_shows_names_and_labels udisks_shows_it

# A load that notices each lost or wrong byte, on a device that only its unit attaches.
truncate -s 32M /scratch/load.img
check a_device_is_attached_by_its_name systemctl start becket-attach@load
events_are_entries() { # of the journal, by their fields
    local entry
    entry=$(journalctl -b -o json BECKET_EVENT=attached BECKET_DEVICE=load)
    [[ $entry == *'"SYSLOG_IDENTIFIER":"becket"'* && $entry == *'"PRIORITY":"6"'* && $entry == *'"MESSAGE":"supervisor: load'* ]] ||
        { journalctl -b -o json SYSLOG_IDENTIFIER=becket | tail -3; return 1; }
}
check events_are_entries_of_the_journal within 10 events_are_entries
worker() { becket list --json | grep -m1 worker_pid | tr -dc 0-9; }
server() { systemctl show -P MainPID becket; }
loaded() {
    until [[ -e /root/enough ]]; do
        fio --name=load --filename=/dev/becket/load --size=32M --rw=randwrite --bs=4k --iodepth=16 --ioengine=libaio --direct=1 \
            --verify=crc32c --time_based --runtime=4 --verify_backlog=256 || return
    done
}
loaded >/root/fio 2>&1 &
load=$!
sleep 1
restarts_are_not_noticed() {
    local before after worker
    worker=$(worker)
    for _ in 1 2 3; do
        before=$(server)
        systemctl restart becket || return
        after=$(server)
        echo "server $before, then $after; worker $worker, then $(worker)"
        [[ $after != "$before" && $after != 0 && $(worker) == "$worker" ]] || return
    done
}
a_killed_server_is_followed() {
    local before
    before=$(server)
    kill -KILL "$before"
    within 20 eval "[[ \$(server) != 0 && \$(server) != $before ]]" && becket list
}
check a_restart_is_not_noticed_by_devices restarts_are_not_noticed
check a_killed_server_is_followed_by_systemds a_killed_server_is_followed
check the_load_has_seen_it_all kill -0 $load
touch /root/enough
if wait $load; then echo "test boot::the_load_saw_no_error ... ok"; else
    cat /root/fio; echo "test boot::the_load_saw_no_error ... FAILED"; code=1
fi

# Its unit cannot end a device in use, and names the user.
busy_stays() {
    local pid
    sleep 60 </dev/becket/load &
    pid=$!
    systemctl stop becket-attach@load
    becket list | grep -w load && journalctl -b -u becket-attach@load | grep "is in use: .*sleep"
    local status=$?
    kill $pid
    return $status
}
by_hand() { becket detach load && systemctl reset-failed becket-attach@load && systemctl start becket-attach@load; }
stopped() { systemctl stop becket-attach@load && [[ ! -e /dev/becket/load ]] && ! becket list | grep -w load; }
unmounts_first() {
    systemctl stop "becket-attach@$(name 1)" && ! findmnt /srv/mnt/1 && [[ ! -e /dev/becket/$(name 1) ]]
}
mount_pulls_it_in() { # a device that went comes again with what needs it
    local unit
    unit="becket-attach@$(name 1)"
    systemctl start srv-mnt-1.mount && [[ $(</srv/mnt/1/id) == 1 && $(systemctl is-active "$unit") == active ]]
}
check a_device_in_use_stays busy_stays
check a_device_detached_by_hand_can_be_started_again by_hand
check a_stopped_unit_detaches stopped
check a_stopped_unit_unmounts_first unmounts_first
check a_mount_pulls_its_device_in mount_pulls_it_in


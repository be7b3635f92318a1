# Many devices at once, and what they cost. Expects COUNTS, VIA, ONE (attaches of one device), NODES (empty if
# the driver makes nodes as they are needed: then a round before makes them). With NEW, becket's records are on a
# new ext4 of this disk each time: there ext4 need not look at each inode that was deleted a moment ago.
LIST=$WORK/list DEVICES=$WORK/devices NEW=${NEW-} RECORDS=
undo() { "$BECKET" detach --all; detach_ours; old; }
old() { # the records' file system goes
    [[ -z $RECORDS ]] || { umount "$WORK/records" && losetup -d "$RECORDS" && RECORDS=; }
}
new() { # and a new one comes
    [[ $NEW ]] || return 0
    old && mkdir -p "$WORK/records" && rm -f "$WORK/ext4" && truncate -s 300M "$WORK/ext4" &&
        mkfs.ext4 -q -F "$WORK/ext4" && RECORDS=$(losetup --find --show --direct-io=on "$WORK/ext4") &&
        mount "$RECORDS" "$WORK/records" && sync || fail "there is no ext4 for records"
    export BECKET_RUNTIME_DIR=$WORK/records/run BECKET_LINK_DIR=$WORK/records/links
}
undo_at_the_end undo
mkdir -p "$WORK/images"
# list FIRST LAST: the images to attach from now on.
list() {
    local number
    for ((number = $1; number <= $2; number++)); do echo "$WORK/images/$number"; done >"$LIST"
    xargs truncate -s 1M <"$LIST"
}
put_up() { # ENTRANT: DEVICES has a line for each image
    case $1 in
    losetup) while read -r image; do losetup --find --show --direct-io=on "$image" || return; done <"$LIST" ;;
    losetup-8) xargs -P 8 -n 1 losetup --find --show --direct-io=on <"$LIST" ;;
    *) "$BECKET" attach --via "$VIA" --from "$LIST" ;;
    esac >"$DEVICES" && [[ $(wc -l <"$DEVICES") == $(wc -l <"$LIST") ]]
}
take_down() {
    case $1 in
    becket*) xargs "$BECKET" detach <"$DEVICES" ;;
    *) xargs losetup -d <"$DEVICES" ;;
    esac >"$SAID" 2>&1 || fail "cannot detach: $(cat "$SAID")"
    : >"$DEVICES"
}
turn() { # WHAT ENTRANT
    new
    took "$1" "$2" put_up "$2"
    take_down "$2"
}
# One device stays, and with it the server where there is one: it starts once in the life of a machine.
truncate -s 1M "$WORK/images/kept"
new
"$BECKET" attach --via "$VIA" "$WORK/images/kept" >"$SAID" 2>&1 || fail "$(cat "$SAID")"
[[ $NEW ]] && "$BECKET" detach --all >"$SAID" 2>&1 # it would stay on the first ext4
for count in "${COUNTS[@]}"; do
    list 1 "$count"
    first=0
    ENTRANTS=("becket-$VIA" losetup-8 losetup)
    [[ $NODES && $count -gt 69 ]] && first=1 && backwards
    turns $first turn "attach-$count-ms"
done
# One device by one command.
one() { # ENTRANT
    case $1 in
    losetup) took one-attach-ms losetup losetup --find --show --direct-io=on "$WORK/images/1" ;;
    *) took one-attach-ms "$1" "$BECKET" attach --via "$VIA" "$WORK/images/1" ;;
    esac || fail "one device cannot be attached"
    grep ^/dev/ "$SAID" >"$DEVICES"
    take_down "$1"
}
ENTRANTS=(losetup "becket-$VIA")
ROUNDS=$ONE turns 0 one >"$WORK/rounds"
"$BECKET" detach --all >"$SAID" 2>&1 || fail "$(cat "$SAID")"

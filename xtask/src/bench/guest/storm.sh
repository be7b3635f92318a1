# Many devices at once, and what they cost. Expects COUNTS, ROUNDS, BECKET, VIA, WORK (a folder), ONE
# (attaches of one device), NODES (how many nodes of loop devices there are from the beginning, if there are
# as many as are needed). Detaches what it attaches, however it ends.
LIST=$WORK/list DEVICES=$WORK/devices
restore() {
    "$BECKET" detach --all
    detach_ours
} >"$WORK/restored" 2>&1
mkdir -p "$WORK/images"
trap restore EXIT
trap 'exit 1' INT TERM HUP

now() { echo "${EPOCHREALTIME/./}"; }

# list FIRST LAST: the images to attach from now on.
list() {
    local number
    for ((number = $1; number <= $2; number++)); do echo "$WORK/images/$number"; done >"$LIST"
    xargs truncate -s 1M <"$LIST"
}
losetup_one() { while read -r image; do losetup --find --show --direct-io=on "$image" || return; done <"$LIST"; }
losetup_eight() { xargs -P 8 -n 1 losetup --find --show --direct-io=on <"$LIST"; }
becket_all() { "$BECKET" attach --via "$VIA" --from "$LIST"; }
take_away() {
    case $1 in
    becket*) xargs "$BECKET" detach <"$DEVICES" ;;
    *) xargs losetup -d <"$DEVICES" ;;
    esac >"$SAID" 2>&1 || fail "cannot detach: $(cat "$SAID")"
    : >"$DEVICES"
}

section kernel "$(uname -r)"
# One device stays, and with it the server where there is one: it starts once in the life of a machine.
truncate -s 1M "$WORK/images/kept"
"$BECKET" attach --via "$VIA" "$WORK/images/kept" >"$SAID" 2>&1 || fail "$(cat "$SAID")"
for count in "${COUNTS[@]}"; do
    list 1 "$count"
    # losetup is the first of the first round that counts: the others are compared with it.
    ENTRANTS=("becket-$VIA" losetup-8 losetup)
    # A warm-up round makes the devices' nodes and loads programs; if the driver has made all nodes, one is
    # enough.
    first=0
    if [[ $NODES && $count -gt 69 ]]; then
        first=1
        backwards
    fi
    for ((round = first; round <= ROUNDS; round++)); do
        for entrant in "${ENTRANTS[@]}"; do
            begin=$(now)
            case $entrant in
            losetup) losetup_one ;;
            losetup-8) losetup_eight ;;
            *) becket_all ;;
            esac >"$DEVICES" 2>"$SAID" || absent "$entrant" "attach-$count-ms"
            end=$(now)
            ((round == 0)) || figure "attach-$count-ms" "$entrant" "$(thousandth $((end - begin)))"
            [[ $(wc -l <"$DEVICES") == "$count" ]] || absent "$entrant" "attach-$count-ms"
            take_away "$entrant"
        done
        ((round == 0)) || say "$count devices, round $round of $ROUNDS"
        backwards
    done
done

# One device at a time, each by a command of its own, both started by the shell in the same way.
list 1 1
image=$WORK/images/1
for ((round = 0; round <= ONE; round++)); do
    begin=$(now)
    losetup --find --show --direct-io=on "$image" >"$DEVICES"
    middle=$(now)
    take_away losetup
    next=$(now)
    "$BECKET" attach --via "$VIA" "$image" >"$DEVICES" || fail "one device cannot be attached"
    end=$(now)
    take_away "becket-$VIA"
    ((round == 0)) && continue
    figure one-attach-ms losetup "$(thousandth $((middle - begin)))"
    figure one-attach-ms "becket-$VIA" "$(thousandth $((end - next)))"
done
"$BECKET" detach --all >"$SAID" 2>&1 || fail "$(cat "$SAID")"

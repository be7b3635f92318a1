# Calls of losetup, one process each. Expects COUNT (devices that are listed) and CALLS (of each kind in a
# round).
undo_at_the_end detach_ours
call() {
    case $1 in
    losetup) losetup "${@:2}" ;;
    *) "$BECKET" losetup "${@:2}" ;;
    esac
}
repeated() {
    local number
    for ((number = 0; number < CALLS; number++)); do call "$@" || return; done
}
attached() { repeated "$1" -f --show "$WORK/one" >"$WORK/taken"; }
detached() {
    local device
    while read -r device; do call "$1" -d "$device" || return; done <"$WORK/taken"
}
turn() {
    took attach-ms "$1" attached "$1"
    took detach-ms "$1" detached "$1"
    took "list-$COUNT-ms" "$1" repeated "$1" -l
    took "plain-$COUNT-ms" "$1" repeated "$1" -a
    took "json-$COUNT-ms" "$1" repeated "$1" -lJ
    took "file-of-$COUNT-ms" "$1" repeated "$1" -j "$WORK/0"
    took version-ms "$1" repeated "$1" -V
}
truncate -s 1M "$WORK/one"
for ((device = 0; device < COUNT; device++)); do
    truncate -s 1M "$WORK/$device"
    losetup -f "$WORK/$device" 2>"$SAID" || fail "$(cat "$SAID")"
done
ENTRANTS=(losetup becket)
turns 0 turn

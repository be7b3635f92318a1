# Calls of losetup, one process each. Expects COUNT (devices that are listed), ROUNDS, CALLS (of each kind a
# round), BECKET, WORK (a folder). Detaches what it attaches, however it ends.
DEVICES=$WORK/devices
: >"$DEVICES"
restore() { detach_ours; }
trap restore EXIT
trap 'exit 1' INT TERM HUP

now() { echo "${EPOCHREALTIME/./}"; }
run() {
    case $1 in
    losetup) losetup "${@:2}" ;;
    *) "$BECKET" losetup "${@:2}" ;;
    esac
}
# measure ENTRANT WHAT WORDS...: CALLS times the same call.
measure() {
    local begin call
    begin=$(now)
    for ((call = 0; call < CALLS; call++)); do run "$1" "${@:3}" >/dev/null 2>"$SAID" || absent "$1" "$2-us"; done
    ((round == 0)) || section figure "$2-us" "$1" "$((($(now) - begin) / CALLS))"
}
# pairs ENTRANT: as many devices attached, then detached.
pairs() {
    local begin call taken=()
    begin=$(now)
    for ((call = 0; call < CALLS; call++)); do
        taken+=("$(run "$1" -f --show "$WORK/one" 2>"$SAID")") || absent "$1" attach-us
    done
    ((round == 0)) || section figure attach-us "$1" "$((($(now) - begin) / CALLS))"
    begin=$(now)
    for call in "${taken[@]}"; do run "$1" -d "$call" 2>"$SAID" || absent "$1" detach-us; done
    ((round == 0)) || section figure detach-us "$1" "$((($(now) - begin) / CALLS))"
}

section kernel "$(uname -r)"
truncate -s 1M "$WORK/one"
ENTRANTS=(losetup becket)
for ((device = 0; device < COUNT; device++)); do
    truncate -s 1M "$WORK/$device"
    losetup -f --show "$WORK/$device" >>"$DEVICES" 2>"$SAID" || fail "$(cat "$SAID")"
done
# The first round makes nodes and loads programs.
for ((round = 0; round <= ROUNDS; round++)); do
    for entrant in "${ENTRANTS[@]}"; do
        pairs "$entrant"
        measure "$entrant" "list-$COUNT" -l
        measure "$entrant" "plain-$COUNT" -a
        measure "$entrant" "json-$COUNT" -lJ
        measure "$entrant" "file-of-$COUNT" -j "$WORK/0"
        measure "$entrant" version -V
    done
    ENTRANTS=("${ENTRANTS[1]}" "${ENTRANTS[0]}")
done

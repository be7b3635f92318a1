# What every benchmark needs, in the guest and on the host. Expects REPORT; SAID is where programs' words go.
set -u
SAID=${SAID:-/root/said}

say() { printf '%s\n' "$*"; }
section() { printf '@@ %s\n' "$*" >>"$REPORT"; }
# figure WHAT NAME VALUE: a number of a series. thousandth NUMBER: a thousandth of it, with three digits.
figure() { section figure "$@"; }
thousandth() { echo "$(($1 / 1000)).$(printf %03d $(($1 % 1000)))"; }
fail() {
    say "bench: $*"
    exit 1
}
# absent NAME...: reports that a contestant has no number here, with its last output.
absent() {
    section absent "$@"
    cat "$SAID" >>"$REPORT"
    say "$*: not there: $(head -n 1 "$SAID")"
}
# attached NAME: a contestant's turn begins, with its device in DEVICE; otherwise it is reported to be absent.
attached() {
    DEVICE=
    attach "$1" >"$SAID" 2>&1 && [[ -e $DEVICE ]] && return
    absent "$1"
    return 1
}
# detached NAME: its turn ends.
detached() { detach "$1" >"$SAID" 2>&1 || fail "cannot detach $1: $(cat "$SAID")"; }
# Turns ENTRANTS around for the next round: a machine that grows slower or faster favours nobody.
backwards() {
    local entrant back=()
    for entrant in "${ENTRANTS[@]}"; do
        back=("$entrant" "${back[@]}")
    done
    ENTRANTS=("${back[@]}")
}
# detach_ours: the loop devices whose images lie in $WORK, whichever contestant attached them; a number may
# have been reused.
detach_ours() {
    local held device
    for held in /sys/block/loop*/loop/backing_file; do
        [[ -e $held && $(<"$held") == "$WORK"/* ]] || continue
        device=${held#/sys/block/}
        losetup -d "/dev/${device%%/*}"
    done
}

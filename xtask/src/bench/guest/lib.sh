# What every scenario has, in the guest and on the host. Expects REPORT, SAID (where the words of programs
# go), WORK (a folder), BECKET, and from the scenario ENTRANTS and ROUNDS. `attach NAME` sets DEVICE, and
# `detach NAME` removes it: they are made from the table of contestants.
set -u
mkdir -p "$WORK"
say() { printf '%s\n' "$*"; }
fail() {
    say "bench: $*"
    exit 1
}
section() { printf '@@ %s\n' "$*" >>"$REPORT"; }
# figure WHAT ENTRANT VALUE: one number. Round 0 loads programs into memory and does not count.
figure() { ((${round:-1} == 0)) || section figure "$@"; }
# absent ENTRANT WHAT: there is no number here; why is what the last program said.
absent() {
    section absent "$@"
    cat "$SAID" >>"$REPORT"
    say "$*: absent: $(head -n 1 "$SAID")"
}
thousandth() { echo "$(($1 / 1000)).$(printf %03d $(($1 % 1000)))"; }
# took WHAT ENTRANT COMMAND...: runs the command and reports its milliseconds; a command that does the same
# CALLS times reports those of one.
took() {
    local begin=${EPOCHREALTIME/./} end
    if ! "${@:3}" >"$SAID" 2>&1; then
        absent "$2" "$1"
        return 1
    fi
    end=${EPOCHREALTIME/./}
    TOOK=$(thousandth $(((end - begin) / ${CALLS:-1})))
    figure "$1" "$2" "$TOOK"
}
# turns FIRST COMMAND...: the rounds from FIRST to ROUNDS; in each the command for every entrant, in every
# other round backwards: a machine that becomes slower or faster favours none.
turns() {
    local entrant
    for ((round = $1; round <= ROUNDS; round++)); do
        for entrant in "${ENTRANTS[@]}"; do "${@:2}" "$entrant"; done
        say "round $round of $ROUNDS"
        backwards
    done
    unset round
}
backwards() {
    local entrant back=()
    for entrant in "${ENTRANTS[@]}"; do back=("$entrant" "${back[@]}"); done
    ENTRANTS=("${back[@]}")
}
# undo_at_the_end COMMAND: however the script ends.
undo_at_the_end() {
    # shellcheck disable=SC2064
    trap "$1 >'$WORK/undone' 2>&1" EXIT
    trap 'exit 1' INT TERM HUP
}
# in_memory: $SHARED, a folder in memory, and $SOCKET in it. At the end everything is detached, and the servers
# end that were started as $OTHER and $ORIGIN.
in_memory() {
    SHARED=$(mktemp -d /dev/shm/becket-bench.XXXXXX)
    SOCKET=$SHARED/socket
    undo_at_the_end out_of_memory
}
out_of_memory() {
    local server
    "$BECKET" detach --all
    for server in ${OTHER:-} ${ORIGIN:-}; do kill "$server"; done
    rm -rf "$SHARED"
}
# nbd_client: $CLIENT, which reads an export over NBD and batches.
nbd_client() {
    (cd "$KEPT/../.." && cargo build --release --quiet -p becket-transport --example nbd_load) ||
        fail "the client cannot be built"
    CLIENT=$KEPT/../release/examples/nbd_load
}
# The process of the only worker.
worker_pid() { "$BECKET" list --json | sed -n 's/.*"worker_pid": *\([0-9]*\).*/\1/p' | head -n 1; }
# Ticks of the processor that the process $PID has used, or all of several: a hundredth of a second each.
ticks() {
    local pid files=()
    for pid in $PID; do files+=("/proc/$pid/stat"); done
    awk '{ sub(/.*\) /, ""); all += $12 + $13 } END { print all }' "${files[@]}"
}
# The loop devices whose images lie in $WORK, whichever contestant attached them: a number may have been
# reused.
detach_ours() {
    local held device
    for held in /sys/block/loop*/loop/backing_file; do
        [[ -e $held && $(<"$held") == "$WORK"/* ]] || continue
        device=${held#/sys/block/}
        losetup -d "/dev/${device%%/*}"
    done
}
# null_blk MIB: a block device in memory, /dev/nullb0.
null_blk() {
    local null=/sys/kernel/config/nullb/nullb0 setting
    modprobe loop && modprobe ublk_drv || fail "this kernel lacks loop or ublk"
    modprobe configfs 2>"$SAID"
    modprobe null_blk nr_devices=0 || fail "this kernel has no null_blk"
    mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
    mkdir $null || fail "null_blk makes no device"
    for setting in "size=$1" memory_backed=1 queue_mode=2 irqmode=0 blocksize=512 discard=1 power=1; do
        echo "${setting#*=}" >"$null/${setting%%=*}" || fail "null_blk does not take $setting"
    done
}
section kernel "$(uname -r)"

# Every workload on every contestant, one contestant attached at a time. Expects WORKLOADS (as
# randread-4k-d64-j2: fio's rw, bs, iodepth, numjobs) and FIGURES (what is kept of fio's answer).
# fio's words for a workload. What a program waits for begins with the submission: lat, not clat, which leaves
# the system call out. Counted instructions repeat within a thousandth after a tenth of a second; time does
# not.
arguments() {
    local pattern block depth jobs times="--ramp_time=200ms --runtime=1"
    IFS=- read -r pattern block depth jobs <<<"$1"
    [[ $CLOCK == time ]] || times="--ramp_time=100ms --runtime=500ms"
    echo "--name=$1 --ioengine=libaio --direct=1 --rw=$pattern --bs=$block --iodepth=${depth#d} --size=256M" \
        "--time_based $times --norandommap --randrepeat=1 --clat_percentiles=0 --lat_percentiles=1" \
        "${jobs:+--numjobs=${jobs#j} --group_reporting}"
}
# The device of some contestants is read-only.
fits() { [[ ! -b $DEVICE || $(blockdev --getro "$DEVICE") == 0 || $1 != *write* ]]; }
lost() { # ENTRANT WORKLOAD...
    local workload figure
    for workload in "${@:2}"; do
        for figure in "${FIGURES[@]}"; do absent "$1" "$workload-$figure"; done
    done
}
# One run; one that does not end is repeated up to twice, and counted.
run() { # ENTRANT WORKLOAD
    local attempt
    for attempt in 1 2 3; do
        # shellcheck disable=SC2046
        if load "$DEVICE" $(arguments "$2"); then
            section fio "$@" "${FIGURES[@]}"
            cat "$WORK/fio.json" >>"$REPORT"
            say "round $round $*: $(sed -n 's/^ *"iops" : \([1-9][0-9]*\).*/\1/p' "$WORK/fio.json" | head -n 1)"
            return
        fi
        say "round $round $*: attempt $attempt of fio failed"
        figure failed-runs "$1" 1
    done
    lost "$@"
}
turn() {
    local workload
    fresh
    attach "$1" >"$SAID" 2>&1 || { lost "$1" "${WORKLOADS[@]}" && return; }
    for workload in "${WORKLOADS[@]}"; do fits "$workload" && run "$1" "$workload"; done
    detach "$1" >"$SAID" 2>&1 || fail "cannot detach $1: $(cat "$SAID")"
}
turns 1 turn

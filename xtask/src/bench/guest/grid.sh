# Runs every workload over every contestant, ROUNDS times, one contestant attached at a time.
# Expects ENTRANTS, WORKLOADS and COUNTED (each NAME|fio's arguments), and ROUNDS.

# A device that nobody may write is read only.
fits() {
    [[ ! -b $DEVICE || $(blockdev --getro "$DEVICE") == 0 || ${workload#*|} != *--rw=*write* ]]
}

# One run; one that does not end is reported, and made again up to twice.
measured() {
    local attempt code iops
    for attempt in 1 2 3; do
        load "$DEVICE" "${workload#*|}"
        code=$?
        section run "$entrant" "${workload%%|*}" "$round" "$code" "$DEVICE"
        if ((code == 0)); then
            cat /root/fio.json >>"$REPORT"
            iops=$(sed -n 's/^ *"iops" : \([1-9][0-9]*\).*/\1/p' /root/fio.json | head -n 1)
            say "round $round $entrant ${workload%%|*}: ${iops:-?}"
            return
        fi
        cat /root/said >>"$REPORT"
        say "round $round $entrant ${workload%%|*}: attempt $attempt of fio ended with $code"
    done
}

# Counts system calls by thread and number while fio runs.
counted() {
    local trigger=/sys/kernel/tracing/events/raw_syscalls/sys_enter
    mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
    # A thread that ends during the run would lose its name: the histogram keeps what it had at its last call.
    echo 'hist:keys=common_pid.execname,id:size=2048' >$trigger/trigger || fail "this kernel counts no system calls"
    load "$DEVICE" "${workload#*|}" || fail "a counted run over $entrant: $(cat /root/said)"
    section calls "$entrant" "${workload%%|*}" "$(server "$entrant")"
    cat $trigger/hist >>"$REPORT"
    echo '!hist:keys=common_pid.execname,id:size=2048' >$trigger/trigger
}

for ((round = 1; round <= ROUNDS; round++)); do
    for entrant in "${ENTRANTS[@]}"; do
        fresh
        attached "$entrant" || continue
        for workload in "${WORKLOADS[@]}"; do
            fits && measured
        done
        if ((round == 1)); then
            for workload in "${COUNTED[@]}"; do
                fits && counted
            done
        fi
        detached "$entrant"
    done
    backwards
done

# Runs every workload over every contestant, ROUNDS times, one contestant attached at a time.
# Expects ENTRANTS, WORKLOADS (each NAME|fio's arguments) and ROUNDS.

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

for ((round = 1; round <= ROUNDS; round++)); do
    for entrant in "${ENTRANTS[@]}"; do
        fresh
        attached "$entrant" || continue
        for workload in "${WORKLOADS[@]}"; do
            fits && measured
        done
        detached "$entrant"
    done
    backwards
done

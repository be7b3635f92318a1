# Runs every workload over every contestant, ROUNDS times, one contestant attached at a time.
# Expects ENTRANTS, WORKLOADS (NAME|fio's arguments) and ROUNDS.
# What everybody is waiting for, when fio does not end in time.
stuck() {
    local task
    echo "fio did not end in 30 s"
    for task in /proc/[0-9]*/task/*; do
        [[ $(<"$task/comm") =~ fio|becket|ublk|iou- ]] || continue
        echo "-- $(<"$task/comm") $(grep State "$task/status")"
        cat "$task/stack"
    done
    grep -r . /sys/kernel/debug/block/ublkb*/hctx*/{busy,tags,state} /sys/kernel/debug/block/nullb0/hctx*/busy
} 2>&1

for ((round = 1; round <= ROUNDS; round++)); do
    for entrant in "${ENTRANTS[@]}"; do
        fresh
        DEVICE=
        if ! attach "$entrant" >/root/said 2>&1 || [[ ! -e $DEVICE ]]; then
            section absent "$entrant"
            cat /root/said >>"$REPORT"
            say "round $round $entrant: not there: $(head -n 1 /root/said)"
            continue
        fi
        for workload in "${WORKLOADS[@]}"; do
            # shellcheck disable=SC2086
            fio --filename="$DEVICE" ${workload#*|} --output-format=json --output=/root/fio.json >/root/said 2>&1 &
            load=$!
            (sleep 30 && stuck >/root/stuck && kill $load) &
            watch=$!
            wait $load
            code=$?
            kill $watch 2>/root/killed
            wait $watch
            if [[ -s /root/stuck ]]; then
                mv /root/stuck /root/said
                code=124
            fi
            section run "$entrant" "${workload%%|*}" "$round" "$code" "$DEVICE"
            if ((code == 0)); then
                cat /root/fio.json >>"$REPORT"
                iops=$(sed -n 's/^ *"iops" : \([1-9][0-9]*\).*/\1/p' /root/fio.json | head -n 1)
                say "round $round $entrant ${workload%%|*}: ${iops:-?}"
            else
                cat /root/said >>"$REPORT"
                say "round $round $entrant ${workload%%|*}: fio ended with $code"
            fi
        done
        detach "$entrant" >/root/said 2>&1 || fail "cannot detach $entrant: $(cat /root/said)"
    done
done

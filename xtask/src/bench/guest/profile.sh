# Samples the whole machine while one workload runs over each contestant in turn.
# Expects ENTRANTS, WORKLOAD (fio's arguments); perf is unpacked below /opt/perf.
export LD_LIBRARY_PATH=/opt/perf/usr/lib/x86_64-linux-gnu:/opt/perf/lib/x86_64-linux-gnu
perf=/opt/perf/usr/bin/perf
echo 0 >/proc/sys/kernel/kptr_restrict
echo -1 >/proc/sys/kernel/perf_event_paranoid
echo 20000 >/proc/sys/kernel/perf_event_max_sample_rate
echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent
for entrant in "${ENTRANTS[@]}"; do
    fresh
    attached "$entrant" || continue
    # Once undisturbed, for the number of I/Os ...
    # shellcheck disable=SC2086
    fio --filename="$DEVICE" $WORKLOAD --output-format=json --output=/root/fio.json >/root/said 2>&1 ||
        fail "fio: $(cat /root/said)"
    section load "$entrant"
    cat /root/fio.json >>"$REPORT"
    # ... and once for as long as perf needs to start (seconds of an emulated CPU) and to sample. The later --runtime counts.
    # shellcheck disable=SC2086
    fio --filename="$DEVICE" $WORKLOAD --runtime=600 --output=/dev/null >/root/said 2>&1 &
    load=$!
    sleep 1
    $perf record -q -a -e cpu-clock -F 9000 -o /root/perf.data -- sleep 2 >/root/said 2>&1 ||
        fail "perf record: $(cat /root/said)"
    kill -INT $load
    wait $load
    section profile "$entrant"
    # perf and its sleep start and end within the sampling; they are no part of the path.
    $perf report -q -i /root/perf.data --stdio --no-children --sort comm,dso,symbol -n -t '|' \
        2>/root/said >>"$REPORT" || fail "perf report: $(cat /root/said)"
    say "$entrant is sampled"
    detached "$entrant"
done

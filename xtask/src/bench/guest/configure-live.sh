# A load of 4 KiB random reads while its device is changed a hundred times. Follows configure.sh; expects LIVE, and IMAGE
# of 256 MiB.
CHANGES=100
DEVICE=$("$BECKET" attach --via "$VIA" "$IMAGE") || fail "becket cannot attach"
undisturbed() { true; }
# As many commands that change nothing: what starting them costs the load is not the change's fault.
looking() {
    local times
    for ((times = 0; times < CHANGES; times++)); do "$BECKET" list >"$WORK/done" 2>&1 || return; done
}
changing() {
    local times to=off
    for ((times = 0; times < CHANGES; times++)); do
        "$BECKET" set "$DEVICE" --direct-io $to >"$WORK/done" 2>&1 || return
        [[ $to == off ]] && to=on || to=off
    done
}
for ((round = 0; round <= LIVE; round++)); do
    for what in undisturbed looking changing; do
        fio --filename="$DEVICE" --name=x --ioengine=libaio --direct=1 --readonly --rw=randread --bs=4k --iodepth=4 \
            --size=256M --norandommap --time_based --runtime=600 --clat_percentiles=0 --lat_percentiles=1 \
            --percentile_list=50:99:99.9 --output-format=json --output="$WORK/fio.json" >"$SAID" 2>&1 &
        load=$!
        sleep 2
        begin=$(now)
        $what || { cp "$WORK/done" "$SAID"; absent becket "live-p99.9-us-$what"; }
        end=$(now)
        [[ $what == undisturbed ]] && sleep 15
        kill -INT $load
        wait $load
        ((round == 0)) && continue
        # fio's own judge: an error of any read is in its answer.
        error=$(sed -n 's/^ *"error" : \([0-9]*\).*/\1/p' "$WORK/fio.json" | head -n 1)
        figure live-read-errors "$what" "${error:-1}"
        # What takes no time is not compared with.
        [[ $what == undisturbed ]] || figure live-changes-ms "$what" "$(thousandth $((end - begin)))"
        for point in 50 99 99.9; do
            ns=$(sed -n '/"read" : {/,/"write" : {/p' "$WORK/fio.json" | sed -n '/"lat_ns" : {/,/}/p' |
                sed -n "s/^ *\"$point[.0]*\" : \([0-9]*\).*/\1/p" | head -n 1)
            figure "live-p$point-us" "$what" "$((ns / 1000))"
        done
        say "round $round: $what"
    done
done
"$BECKET" detach "$DEVICE" >"$SAID" 2>&1 || fail "$(cat "$SAID")"

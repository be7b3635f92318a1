# A given number of devices, once by each transport: how long it takes, what each costs, and whether it is the
# right one. Expects MOST (how many), BECKET, WORK (a folder).
LIST=$WORK/list DEVICES=$WORK/devices
mkdir -p "$WORK/images"
now() { echo "${EPOCHREALTIME/./}"; }
worker() { pgrep -f -x '@becket worker' | head -n 1; }
rss() { awk '$1 == "VmRSS:" {print $2}' "/proc/$(worker)/status"; }

section kernel "$(uname -r)"
modprobe loop && modprobe ublk_drv || fail "this kernel lacks loop or ublk"
# Each begins with its number.
for ((number = 1; number <= MOST; number++)); do
    printf '%08d' "$number" >"$WORK/images/$number"
    echo "$WORK/images/$number"
done >"$LIST"
xargs truncate -s 1M <"$LIST"
for via in ublk loop; do
    begin=$(now)
    "$BECKET" attach --via "$via" --from "$LIST" >"$DEVICES" 2>"$SAID" || absent "becket-$via" "attach-$MOST-ms"
    end=$(now)
    figure "attach-$MOST-ms" "becket-$via" "$(((end - begin) / 1000))"
    attached=$(wc -l <"$DEVICES")
    figure devices "becket-$via" "$attached"
    say "$attached devices by $via"
    # shellcheck disable=SC2046
    cmp <(xargs head -q -c 8 <"$DEVICES") <(printf '%08d' $(seq "$MOST")) >"$SAID" 2>&1
    figure wrong "becket-$via" "$?"
    begin=$(now)
    "$BECKET" list --json >"$WORK/listed"
    end=$(now)
    figure list-ms "becket-$via" "$(((end - begin) / 1000))"
    if [[ $via == ublk ]]; then
        figure copied "becket-$via" "$(grep -o '"mode": *"[a-z-]*"' "$WORK/listed" | grep -vc zero)"
        figure each-kib worker "$(($(rss) / MOST))"
        figure threads worker "$(find "/proc/$(worker)/task" -mindepth 1 -maxdepth 1 | wc -l)"
    fi
    begin=$(now)
    "$BECKET" detach --all >"$SAID" 2>&1 || fail "$(cat "$SAID")"
    end=$(now)
    figure detach-ms "becket-$via" "$(((end - begin) / 1000))"
done

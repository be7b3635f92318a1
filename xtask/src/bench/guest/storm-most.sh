# MOST devices, once by each transport: how long it takes, what each costs, and whether it is the right one.
LIST=$WORK/list DEVICES=$WORK/devices
mkdir -p "$WORK/images"
worker() { pgrep -f -x '@becket worker' | head -n 1; }
put_up() { "$BECKET" attach --via "$1" --from "$LIST" >"$DEVICES"; }
modprobe loop && modprobe ublk_drv || fail "this kernel lacks loop or ublk"
# Each begins with its number.
for ((number = 1; number <= MOST; number++)); do
    printf '%08d' "$number" >"$WORK/images/$number"
    echo "$WORK/images/$number"
done >"$LIST"
xargs truncate -s 1M <"$LIST"
for via in ublk loop; do
    took "attach-$MOST-ms" "becket-$via" put_up "$via"
    figure devices "becket-$via" "$(wc -l <"$DEVICES")"
    # shellcheck disable=SC2046
    cmp <(xargs head -q -c 8 <"$DEVICES") <(printf '%08d' $(seq "$MOST")) >"$SAID" 2>&1
    figure wrong "becket-$via" "$?"
    took list-ms "becket-$via" "$BECKET" list --json
    if [[ $via == ublk ]]; then
        figure copied "becket-$via" "$(grep -o '"mode": *"[a-z-]*"' "$SAID" | grep -vc zero)"
        figure each-kib worker "$(($(awk '$1 == "VmRSS:" {print $2}' "/proc/$(worker)/status") / MOST))"
        figure threads worker "$(find "/proc/$(worker)/task" -mindepth 1 -maxdepth 1 | wc -l)"
    fi
    took detach-ms "becket-$via" "$BECKET" detach --all || fail "$(cat "$SAID")"
done

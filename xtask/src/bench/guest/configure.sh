# One device with everything about it said at once. Expects ROUNDS, BECKET, VIA, WORK (a folder). Leaves nothing attached.
DEVICE=
restore() {
    "$BECKET" detach --all
    detach_ours
} >"$WORK/restored" 2>&1
trap restore EXIT
trap 'exit 1' INT TERM HUP

now() { echo "${EPOCHREALTIME/./}"; }
figure() { section figure "$@"; }
thousandth() { echo "$(($1 / 1000)).$(printf %03d $(($1 % 1000)))"; }

section kernel "$(uname -r)"
truncate -s 64M "$WORK/image" "$WORK/kept"
# The same for both: where it begins and ends, its blocks, that nobody writes, and no page cache.
losetup_all() { losetup --find --show --offset 1048576 --sizelimit 33554432 --sector-size 4096 --direct-io=on --read-only "$WORK/image"; }
becket_all() { "$BECKET" attach --via "$VIA" --offset 1M --size-limit 32M --block-size 4096 --direct-io on --read-only "$WORK/image"; }
# Another device keeps the server.
"$BECKET" attach --via "$VIA" "$WORK/kept" >"$SAID" 2>&1 || fail "$(cat "$SAID")"
for ((round = 0; round <= ROUNDS; round++)); do
    begin=$(now)
    DEVICE=$(losetup_all 2>"$SAID") || fail "losetup: $(cat "$SAID")"
    middle=$(now)
    losetup -d "$DEVICE"
    next=$(now)
    DEVICE=$(becket_all 2>"$SAID") || fail "becket: $(cat "$SAID")"
    end=$(now)
    "$BECKET" detach "$DEVICE" >"$SAID" 2>&1 || fail "$(cat "$SAID")"
    DEVICE=
    ((round == 0)) && continue
    figure configured-attach-ms losetup "$(thousandth $((middle - begin)))"
    figure configured-attach-ms "becket-$VIA" "$(thousandth $((end - next)))"
done
"$BECKET" detach --all >"$SAID" 2>&1 || fail "$(cat "$SAID")"

# What one command costs with an image on a web server: the first byte, a path three levels deep, all of it,
# and reads of what the store has. Expects MIB, LATENCIES (seconds before each answer), SECONDS_EACH.
nbd_client
in_memory
head -c "${MIB}M" /dev/urandom >"$SHARED/image" || fail "no room for an image"
# An ISO that holds a SquashFS that holds an ext4.
mkdir -p "$SHARED/tree" "$SHARED/squash" "$SHARED/iso/LiveOS"
echo far away >"$SHARED/tree/file" && head -c 8M /dev/urandom >"$SHARED/tree/rest"
mke2fs -q -F -d "$SHARED/tree" "$SHARED/squash/root.img" 64M >"$SAID" 2>&1 &&
    head -c 8M /dev/urandom >"$SHARED/squash/rest" &&
    mksquashfs "$SHARED/squash" "$SHARED/iso/LiveOS/squashfs.img" -comp zstd -quiet -no-progress >"$SAID" 2>&1 &&
    genisoimage -quiet -R -o "$SHARED/live.iso" "$SHARED/iso" 2>"$SAID" || fail "no image: $(cat "$SAID")"
store() { "$BECKET" "$1" --store "$SHARED/store" "${@:2}" 2>"$SAID"; }
since() { awk "BEGIN { print ($EPOCHREALTIME - $1) * $2 }"; }
# first: from the beginning of `attach` to the first 4 KiB, with a server that runs. There is one
# while any device is attached.
first() {
    local begun device before
    truncate -s 1M "$SHARED/other" && "$BECKET" attach --via fuse "$SHARED/other" >"$SAID" 2>&1
    rm -rf "$SHARED/store"
    before=$(requests) begun=$EPOCHREALTIME
    if device=$(store attach --via fuse "$URL") && dd if="$device" of="$SHARED/first" bs=4k count=1 status=none; then
        figure first-ms "becket" "$(since "$begun" 1000)"
        figure first-requests "becket" "$(($(requests) - before))"
        head -c 4096 "$SHARED/image" | cmp -s "$SHARED/first" || fail "the first bytes are others"
    else
        absent becket first
    fi
    "$BECKET" detach --all >"$SAID" 2>&1
}
nested() {
    local begun before
    rm -rf "$SHARED/store"
    before=$(requests) begun=$EPOCHREALTIME
    if [[ $(store cat "$URL#LiveOS/squashfs.img/root.img/file") == "far away" ]]; then
        figure nested-ms becket "$(since "$begun" 1000)"
        figure nested-requests becket "$(($(requests) - before))"
    else
        absent becket nested
    fi
}
read_device() {
    local device
    device=$(store attach --via fuse "$URL") && dd if="$device" of=/dev/null bs=1M status=none
}
read_nbdkit() {
    nbdkit -f -U "$SOCKET" curl "url=$URL" &
    OTHER=$!
    for ((wait = 0; wait < 100; wait++)); do
        [[ ! -S $SOCKET ]] || break
        sleep 0.01
    done
    nbdcopy "nbd+unix:///?socket=$SOCKET" null:
}
# whole NAME ENTRANT: all bytes, to a file or to nowhere.
whole() {
    local begun
    rm -rf "$SHARED/store" "$SHARED/copy"
    begun=$EPOCHREALTIME
    case $2 in
    curl) curl -s -o "$SHARED/copy" "$URL" ;;
    copy) store copy "$URL" "$SHARED/copy" ;;
    copy-no-store) "$BECKET" copy --no-store "$URL" "$SHARED/copy" ;;
    device) read_device ;;
    nbdkit) read_nbdkit ;;
    esac >"$SAID" 2>&1 && figure "$1" "$2" "$(since "$begun" 1)" || absent "$2" "$1"
    case $2 in
    device) "$BECKET" detach --all >"$SAID" 2>&1 ;;
    nbdkit) kill "$OTHER" && wait "$OTHER" ;;
    *) cmp -s "$SHARED/copy" "$SHARED/image" || fail "the copy by $2 is another one" ;;
    esac 2>"$SAID"
    OTHER=
    rm -f "$SHARED/copy" "$SOCKET"
}
# warm ENTRANT IMAGE: reads of an export, and the worker's time for each.
warm() {
    local before ios
    store export --nbd "unix:$SOCKET" --name image --direct-io off "$2" >"$SAID" || { absent "$1" warm && return; }
    PID=$(worker_pid)
    # All is there then.
    "$CLIENT" "$SOCKET" image --depth 8 --len 262144 --sequential --seconds 2 >"$SAID" 2>&1
    before=$(ticks)
    if "$CLIENT" "$SOCKET" image --depth 64 --seconds "$SECONDS_EACH" >"$WORK/driven" 2>"$SAID"; then
        ios=$(sed 's/.*"ios":\([0-9]*\).*/\1/' "$WORK/driven")
        figure warm-cpu-us "$1" "$(awk "BEGIN { print ($(ticks) - $before) * 10000 / $ios }")"
        figure warm-iops "$1" "$(sed 's/.*"per_second":\([0-9]*\).*/\1/' "$WORK/driven")"
    else
        absent "$1" warm
    fi
    "$BECKET" detach --all >"$SAID" 2>&1
    rm -f "$SOCKET"
}
# An image of programs and texts, compressed as one piece.
mkdir "$SHARED/usr" && { tar -c -C / usr/lib usr/share 2>"$SAID" | head -c "${MIB}M" >"$SHARED/usr/all"; }
mke2fs -q -F -d "$SHARED/usr" "$SHARED/packed" "$((MIB + 64))M" >"$SAID" 2>&1 && gzip "$SHARED/packed" ||
    fail "no compressed image: $(cat "$SAID")"
rm -r "$SHARED/usr"
# stream: a .gz on this host: the first 64 KiB of its device, and all of it.
stream() {
    local begun device
    rm -rf "$SHARED/store" "$SHARED/copy"
    begun=$EPOCHREALTIME
    gzip -dc "$SHARED/packed.gz" >"$SHARED/copy" && figure stream-s gzip "$(since "$begun" 1)" || absent gzip stream
    truncate -s 1M "$SHARED/other" && "$BECKET" attach --via fuse "$SHARED/other" >"$SAID" 2>&1
    begun=$EPOCHREALTIME
    if device=$(store attach --via fuse "$SHARED/packed.gz") &&
        dd if="$device" of=/dev/null bs=64k count=1 status=none; then
        figure stream-first-ms device "$(since "$begun" 1000)"
        # Read from behind: it waits until all is decoded.
        dd if="$device" of=/dev/null bs=64k skip="$(((MIB + 64) * 16 - 1))" status=none &&
            figure stream-s device "$(since "$begun" 1)"
        cmp -s "$device" "$SHARED/copy" || fail "what was decoded is another image"
    else
        absent device stream
    fi
    "$BECKET" detach --all >"$SAID" 2>&1
    rm -f "$SHARED/copy"
}
for ((round = 0; round <= ROUNDS; round++)); do
    stream
    origin "$SHARED/image" 0.02
    first
    for latency in "${LATENCIES[@]}"; do
        origin "$SHARED/image" "$latency"
        for entrant in "${ENTRANTS[@]}"; do whole "whole-$latency-s" "$entrant"; done
    done
    origin "$SHARED/image" 0
    "$BECKET" store prefetch --store "$SHARED/store" "$URL" >"$SAID" 2>&1 || fail "cannot fetch: $(cat "$SAID")"
    warm stored "$URL"
    warm file "$SHARED/image"
    origin "$SHARED/live.iso" 0.02
    nested
    backwards
    say "round $round of $ROUNDS"
done

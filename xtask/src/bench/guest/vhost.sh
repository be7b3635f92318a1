# Random reads of a virtual machine's disk over vhost-user-blk, by a driver that is the same for all servers.
# Expects SECONDS_EACH, MIB, WAYS (cached: a file in memory; direct: past the page cache of this disk).
(cd "$KEPT/../.." && cargo build --release --quiet -p becket-virtio) || fail "the driver cannot be built"
CLIENT=$KEPT/../release/becket-virtio
in_memory
for way in "${WAYS[@]}"; do
    image=$SHARED/cached
    [[ $way == cached ]] || image=$WORK/direct
    head -c "${MIB}M" /dev/urandom >"$image" || fail "no room for $image"
done
sync
# serve ENTRANT WAY: sets PID.
serve() {
    local image=$SHARED/cached cache=off wish=off
    [[ $2 == cached ]] || image=$WORK/direct cache=on wish=on
    case $1 in
    becket)
        "$BECKET" export --vhost-user "unix:$SOCKET" --queues 1 --direct-io "$wish" "$image" >"$SAID" 2>&1 || return
        PID=$(worker_pid)
        ;;
    qsd*)
        local aio=threads
        [[ $1 == qsd-threads ]] || aio=io_uring
        qemu-storage-daemon --blockdev "driver=file,node-name=f,filename=$image,aio=$aio,cache.direct=$cache" \
            --blockdev driver=raw,node-name=r,file=f \
            --export "type=vhost-user-blk,id=e,node-name=r,addr.type=unix,addr.path=$SOCKET,writable=on" \
            >"$SAID" 2>&1 &
        OTHER=$! PID=$OTHER
        for ((wait = 0; wait < 100; wait++)); do
            [[ ! -S $SOCKET ]] || return 0
            sleep 0.05
        done
        return 1
        ;;
    esac
}
unserve() { # ENTRANT
    case $1 in
    becket) "$BECKET" detach --all >"$SAID" 2>&1 || fail "cannot detach: $(cat "$SAID")" ;;
    *)
        kill "$OTHER" && wait "$OTHER"
        OTHER=
        ;;
    esac 2>"$SAID"
    rm -f "$SOCKET"
}
# drive ARGUMENT...: IOS and RATE of one run.
drive() {
    "$CLIENT" "$SOCKET" --seconds "$SECONDS_EACH" "$@" >"$WORK/driven" 2>"$SAID" || return
    IOS=$(sed 's/.*"ios":\([0-9]*\).*/\1/' "$WORK/driven") RATE=$(sed 's/.*"per_second":\([0-9]*\).*/\1/' "$WORK/driven")
    [[ $(<"$WORK/driven") == *'"failed":0,'* ]]
}
turn() { # ENTRANT
    local way before
    for way in "${WAYS[@]}"; do
        if ! serve "$1" "$way"; then
            absent "$1" "$way"
            continue
        fi
        before=$(ticks)
        if drive; then
            figure "$way-d64-iops" "$1" "$RATE"
            figure "$way-d64-cpu-us" "$1" "$(awk "BEGIN { print ($(ticks) - $before) * 10000 / $IOS }")"
        else
            absent "$1" "$way"
        fi
        # The counter of system calls costs time: a run of its own.
        perf stat -x, -e raw_syscalls:sys_enter -p "$PID" -o "$WORK/calls" sleep "$SECONDS_EACH.9" &
        sleep 0.3
        if drive && wait $!; then
            figure "$way-d64-calls" "$1" "$(awk -F, "/raw_syscalls/ { print \$1 / $IOS }" "$WORK/calls")"
        else
            absent "$1" "$way"
        fi
        before=$(ticks)
        if drive --depth 1; then
            figure "$way-d1-us" "$1" "$(awk "BEGIN { print 1000000 / $RATE }")"
            figure "$way-d1-cpu-us" "$1" "$(awk "BEGIN { print ($(ticks) - $before) * 10000 / $IOS }")"
        fi
        unserve "$1"
    done
}
turns 0 turn

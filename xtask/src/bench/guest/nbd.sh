# Reads of an export over NBD and a unix socket, by a client that batches and is the same for all servers.
# Expects SECONDS_EACH, MIB, FIO, COPY, TLS, WAYS (memory: a file of tmpfs; cached: one of this disk, in the
# page cache).
nbd_client
in_memory
mkdir "$WORK/disk"
head -c "${MIB}M" /dev/urandom >"$SHARED/image" || fail "no room for an image in memory"
cp "$SHARED/image" "$WORK/disk/image" || fail "no room for an image"
# Data in every tenth of it.
truncate -s "$((MIB * 10))M" "$WORK/disk/sparse"
for ((part = 0; part < 10; part++)); do
    dd if="$SHARED/image" of="$WORK/disk/sparse" bs=1M conv=notrunc,nocreat status=none \
        count=$((MIB / 10)) skip=$((part * (MIB / 10))) seek=$((part * MIB)) ||
        fail "no room for a sparse image"
done
sync
if [[ $TLS == 1 ]]; then
    PKI=$WORK/pki
    mkdir "$PKI" && openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost \
        -addext subjectAltName=DNS:localhost -keyout "$PKI/server-key.pem" -out "$PKI/server-cert.pem" \
        2>"$SAID" && cp "$PKI/server-cert.pem" "$PKI/ca-cert.pem" || fail "no certificate: $(cat "$SAID")"
fi
# serve ENTRANT IMAGE [OPTION...]: sets PID. Every server calls its export "image".
serve() {
    local blockdev="driver=file,node-name=f,filename=$2"
    OTHER=
    case $1 in
    becket)
        "$BECKET" export --nbd "unix:$SOCKET" --name image --direct-io off "${@:3}" "$2" >"$SAID" 2>&1 || return
        PID=$(worker_pid)
        return
        ;;
    nbdkit) nbdkit -f -U "$SOCKET" "${@:3}" file "$2" >"$SAID" 2>&1 & ;;
    null) nbdkit -f -U "$SOCKET" null "size=${MIB}M" >"$SAID" 2>&1 & ;;
    qsd)
        qemu-storage-daemon --blockdev "$blockdev" --blockdev driver=raw,node-name=r,file=f \
            --nbd-server "addr.type=unix,addr.path=$SOCKET" \
            --export type=nbd,id=e,node-name=r,name=image,writable=on >"$SAID" 2>&1 &
        ;;
    qemu-nbd) qemu-nbd -t -f raw -x image -k "$SOCKET" "$2" >"$SAID" 2>&1 & ;;
    esac
    OTHER=$! PID=$!
    for ((wait = 0; wait < 100; wait++)); do
        [[ ! -S $SOCKET ]] || return 0
        sleep 0.05
    done
    return 1
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
    "$CLIENT" "$SOCKET" image --seconds "$SECONDS_EACH" "$@" >"$WORK/driven" 2>"$SAID" || return
    IOS=$(sed 's/.*"ios":\([0-9]*\).*/\1/' "$WORK/driven")
    RATE=$(sed 's/.*"per_second":\([0-9]*\).*/\1/' "$WORK/driven")
}
# measure NAME ENTRANT ARGUMENT...: rate and CPU time of each I/O.
measure() {
    local name=$1 entrant=$2 before
    shift 2
    before=$(ticks)
    if drive "$@"; then
        figure "$name-iops" "$entrant" "$RATE"
        figure "$name-cpu-us" "$entrant" "$(awk "BEGIN { print ($(ticks) - $before) * 10000 / $IOS }")"
    else
        absent "$entrant" "$name"
    fi
}
turn() { # ENTRANT
    local way image
    for way in "${WAYS[@]}"; do
        image=$SHARED/image
        [[ $way == memory ]] || image=$WORK/disk/image
        if ! serve "$1" "$image"; then
            absent "$1" "$way"
            continue
        fi
        # Into the page cache.
        drive --depth 8 --len 262144 --sequential || absent "$1" "$way"
        measure "$way-d64" "$1" --depth 64
        measure "$way-d1" "$1" --depth 1
        measure "$way-256k" "$1" --depth 8 --len 262144 --sequential
        # The counter of system calls costs time: a run of its own.
        perf stat -x, -e raw_syscalls:sys_enter -p "$PID" -o "$WORK/calls" sleep "$SECONDS_EACH.9" &
        local counter=$!
        sleep 0.3
        if drive --depth 64 && wait "$counter"; then
            figure "$way-d64-calls" "$1" "$(awk -F, "/raw_syscalls/ { print \$1 / $IOS }" "$WORK/calls")"
        else
            absent "$1" "$way"
        fi
        if [[ $FIO == 1 ]]; then
            fio --name=f --ioengine=nbd --uri="nbd+unix:///image?socket=$SOCKET" --rw=randread --bs=4k --iodepth=64 \
                --time_based --runtime="$SECONDS_EACH" --size="${MIB}M" --output-format=json >"$WORK/fio" 2>"$SAID" &&
                figure "$way-fio-iops" "$1" "$(awk -F'[:,]' '/"iops" *:/ { print $2 + 0; exit }' "$WORK/fio")"
        fi
        unserve "$1"
    done
    if [[ $COPY == 1 && $1 != null ]] && serve "$1" "$WORK/disk/sparse"; then
        local begun=$EPOCHREALTIME
        nbdcopy "nbd+unix:///image?socket=$SOCKET" "$SHARED/copy" 2>"$SAID" || absent "$1" copy
        figure copy-s "$1" "$(awk "BEGIN { print $EPOCHREALTIME - $begun }")"
        cmp -s "$SHARED/copy" "$WORK/disk/sparse" || fail "the copy by $1 is another one"
        rm -f "$SHARED/copy"
        unserve "$1"
    fi
    [[ $TLS != 1 ]] || secure "$1"
}
# secure ENTRANT: all bytes four times over TLS: the time, and that of the processes that serve, for a GiB.
secure() {
    local uri="nbds+unix:///image?socket=$SOCKET&tls-certificates=$PKI&tls-hostname=localhost" begun before copy
    case $1 in
    # The worker reads the image, and the doorman speaks TLS.
    becket) serve "$1" "$WORK/disk/image" --tls "$PKI" && PID=$(pgrep -P "$(ps -o ppid= -p "$PID" | tr -d ' ')") ;;
    nbdkit) serve "$1" "$WORK/disk/image" --tls=require "--tls-certificates=$PKI" ;;
    *) return ;;
    esac || { absent "$1" tls && return; }
    begun=$EPOCHREALTIME before=$(ticks)
    for copy in 1 2 3 4; do
        nbdcopy "$uri" null: 2>"$SAID" || { absent "$1" "tls $copy" && break; }
    done
    figure tls-s "$1" "$(awk "BEGIN { print ($EPOCHREALTIME - $begun) / $MIB * 256 }")"
    figure tls-cpu-s "$1" "$(awk "BEGIN { print ($(ticks) - $before) / 100 / $MIB * 256 }")"
    unserve "$1"
}
turns 0 turn

# A start from an image on a web server that is far away: the same reads for all, over NBD and a unix socket.
# Expects MIB, LATENCY (seconds before each answer), DEPTHS, READERS.
in_memory
head -c "${MIB}M" /dev/urandom >"$WORK/image" || fail "no room for an image"
cat >"$WORK/start.py" <<'END'
import boot, nbd, os, sys
socket, image, depth, name = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
reads = list(boot.reads(os.path.getsize(image) // 4096, 300, 4, 160))
connection = nbd.NBD()
connection.connect_uri(f"nbd+unix:///{name}?socket={socket}")
expected = open(image, "rb")
under_way = []
def finish():
    cookie, buffer, at, count = under_way.pop(0)
    while not connection.aio_command_completed(cookie):
        connection.poll(-1)
    expected.seek(at * 4096)
    if buffer.to_bytearray() != expected.read(count * 4096):
        sys.exit(f"wrong bytes at block {at}")
for at, count in reads:
    if under_way and depth == 1 or depth <= len(under_way):
        finish()
    buffer = nbd.Buffer(count * 4096)
    under_way.append((connection.aio_pread(buffer, at * 4096), buffer, at, count))
while under_way:
    finish()
print(boot.needed(reads))
END
origin "$WORK/image" "$LATENCY"
# serve ENTRANT [OPTION...]: with nothing in a cache.
serve() {
    OTHER=
    rm -rf "$SHARED/store"
    case $1 in
    becket*)
        "$BECKET" export --nbd "unix:$SOCKET" --name image --store "$SHARED/store" "${@:2}" "$URL" >"$SAID" 2>&1
        return
        ;;
    nbdkit-*)
        nbdkit -f -U "$SOCKET" --filter=cache curl "url=$URL" cache-on-read=true \
            "cache-min-block-size=${1#nbdkit-}" >"$SAID" 2>&1 &
        ;;
    local) nbdkit -f -U "$SOCKET" file "$WORK/image" >"$SAID" 2>&1 & ;;
    esac
    OTHER=$!
    for ((wait = 0; wait < 100; wait++)); do
        [[ ! -S $SOCKET ]] || return 0
        sleep 0.01
    done
    return 1
}
unserve() { # ENTRANT
    case $1 in
    becket*) "$BECKET" detach --all >"$SAID" 2>&1 || fail "cannot detach: $(cat "$SAID")" ;;
    *)
        kill "$OTHER" && wait "$OTHER"
        OTHER=
        ;;
    esac 2>"$SAID"
    rm -f "$SOCKET"
}
start() { NEEDED=$("$PYTHON" "$WORK/start.py" "$SOCKET" "$WORK/image" "$1" image 2>"$SAID"); }
serve becket --record && start 1 || fail "nothing can be recorded: $(cat "$SAID")"
unserve becket
"$BECKET" store trace --store "$SHARED/store" "$URL" >"$WORK/trace" 2>"$SAID" || fail "no trace: $(cat "$SAID")"
turn() { # ENTRANT
    local depth begun before options=()
    [[ $1 != becket-trace ]] || options=(--prefetch "$WORK/trace")
    for depth in "${DEPTHS[@]}"; do
        before=$(sent) begun=$EPOCHREALTIME
        if serve "$1" "${options[@]}" && start "$depth"; then
            figure "d$depth-s" "$1" "$(awk "BEGIN { print $EPOCHREALTIME - $begun }")"
            [[ $1 == local ]] || figure "d$depth-bytes" "$1" "$(awk "BEGIN { print ($(sent) - $before) / $NEEDED }")"
        else
            absent "$1" "d$depth"
        fi
        unserve "$1"
    done
}
turns 1 turn
# many COUNT: so many exports of the image, each with an overlay of its own, are started and read at the
# same moment, with nothing in the store. Sets BYTES, FIRST and LAST: when the first and the last were read.
many() {
    local number readers=() before begun sockets=$SHARED/many.
    rm -rf "$SHARED/store" "$SHARED"/*.qcow2
    before=$(sent) begun=$EPOCHREALTIME
    for ((number = 0; number < $1; number++)); do
        (
            "$BECKET" export --nbd "unix:$sockets$number" --name "image$number" --store "$SHARED/store" \
                --cow "$SHARED/$number.qcow2" "$URL" &&
                "$PYTHON" "$WORK/start.py" "$sockets$number" "$WORK/image" 1 "image$number" &&
                echo "$EPOCHREALTIME" >"$SHARED/read.$number"
        ) >"$SHARED/said.$number" 2>&1 &
        readers+=($!)
    done
    for ((number = 0; number < $1; number++)); do
        wait "${readers[number]}" || cp "$SHARED/said.$number" "$SAID"
    done
    "$BECKET" detach --all >>"$SAID" 2>&1
    BYTES=$(($(sent) - before))
    (($(cat "$SHARED"/read.* | wc -l) == $1)) || return 1
    FIRST=$(cat "$SHARED"/read.* | sort -n | head -n 1) LAST=$(cat "$SHARED"/read.* | sort -n | tail -n 1)
    FIRST=$(awk "BEGIN { print $FIRST - $begun }") LAST=$(awk "BEGIN { print $LAST - $begun }")
    rm -f "$SHARED"/read.*
}
if many 1; then
    ONE=$BYTES
    if many "$READERS"; then
        figure many-bytes becket "$(awk "BEGIN { print $BYTES / $ONE }")"
        figure many-last becket "$(awk "BEGIN { print $LAST / $FIRST }")"
        figure many-s becket "$LAST"
    else
        absent becket many
    fi
else
    absent becket many
fi

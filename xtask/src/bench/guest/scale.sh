# Many hosts that start one image at the same moment: each is a network namespace with a becket server, a store
# and an overlay of its own, and a link of HOST_MBIT to one switch. The origin's link has ORIGIN_MBIT. Expects
# HOSTS, MIB, HOST_MBIT, ORIGIN_MBIT.
[[ -n $(command -v nginx) && $UID == 0 ]] || fail "it needs nginx and root"
SHARED=$(mktemp -d /dev/shm/becket-bench.XXXXXX)
chmod 755 "$SHARED"
TAG=bkt$$
TURN=0 HOSTED=$SHARED/hosts-0
mkdir "$HOSTED"
within() { nsenter --net="/run/netns/$TAG-$1" -- "${@:2}"; }
# The becket of one host; ONE is the host that does it for all.
of_host() {
    local host=${ONE:-$1}
    mkdir -p "$HOSTED/$host"
    BECKET_RUNTIME_DIR=$HOSTED/$host/run BECKET_LINK_DIR=$HOSTED/$host/links \
        within "$host" "$BECKET" "${@:2}"
}
hosts_end() {
    local dir
    for dir in "$HOSTED"/*/run; do
        [[ -d $dir ]] || continue
        dir=${dir%/run}
        of_host "${dir##*/}" detach --all >"$SAID" 2>&1 || say "cannot detach: $(cat "$SAID")"
    done
    # Servers end soon after their last device, and until then their folders stay.
    rm -rf "$HOSTED"/*/{store,overlay.qcow2} "$HOSTED/store"
    HOSTED=$SHARED/hosts-$((++TURN))
    mkdir "$HOSTED"
}
undo() {
    local space
    # Hosts that are about to start, and the web servers.
    # shellcheck disable=SC2046
    kill $(jobs -p)
    wait
    hosts_end
    for ((wait = 0; wait < 100; wait++)); do
        [[ -n $(for space in /run/netns/"$TAG"-*; do ip netns pids "${space##*/}"; done) ]] || break
        sleep 0.1
    done
    for space in /run/netns/"$TAG"-*; do ip netns del "${space##*/}"; done
    rm -rf "$SHARED"
}
undo_at_the_end undo
# space NAME ADDRESS MBIT: a namespace at the switch; the switch sends no faster to it, nor it to the switch.
space() {
    ip netns add "$TAG-$1" &&
        ip -n "$TAG-$1" link set lo up &&
        ip -n "$TAG-$1" link add eth0 type veth peer name "p$1" netns "$TAG-switch" &&
        ip -n "$TAG-$1" addr add "$2/16" dev eth0 && ip -n "$TAG-$1" link set eth0 up &&
        ip -n "$TAG-switch" link set "p$1" master br0 up || fail "no network namespace"
    tc -n "$TAG-switch" qdisc add dev "p$1" root tbf rate "$3mbit" burst 256k latency 200ms &&
        tc -n "$TAG-$1" qdisc add dev eth0 root tbf rate "$3mbit" burst 256k latency 200ms ||
        fail "this kernel bounds no traffic (tbf)"
}
ip netns add "$TAG-switch" && ip -n "$TAG-switch" link add br0 type bridge &&
    ip -n "$TAG-switch" link set br0 up || fail "no network namespace"
space origin 10.99.0.1 "$ORIGIN_MBIT"
# As near to the hosts as they are to each other.
space zone 10.99.0.2 10000
for ((host = 1; host <= HOSTS; host++)); do space "$host" "10.99.1.$host" "$HOST_MBIT"; done
mkdir -p "$SHARED/www" "$SHARED/nginx"
head -c "${MIB}M" /dev/urandom >"$SHARED/www/image" || fail "no room for an image"
# web NAME ADDRESS: nginx in a namespace; what it serves comes from standard input.
web() {
    cat >"$SHARED/nginx/$1.conf" <<END
daemon off;
master_process off;
pid $SHARED/nginx/$1.pid;
error_log $SHARED/nginx/$1.error;
events { worker_connections 4096; }
http {
    log_format bytes '\$bytes_sent';
    access_log $SHARED/nginx/$1.log bytes;
    client_body_temp_path $SHARED/nginx/$1-body;
    proxy_temp_path $SHARED/nginx/$1-temp;
    fastcgi_temp_path $SHARED/nginx/$1-fastcgi;
    uwsgi_temp_path $SHARED/nginx/$1-uwsgi;
    scgi_temp_path $SHARED/nginx/$1-scgi;
    keepalive_requests 100000;
    $(cat)
}
END
    nsenter --net="/run/netns/$TAG-$1" -- nginx -c "$SHARED/nginx/$1.conf" >>"$SAID" 2>&1 &
    WEB=$!
    for ((wait = 0; wait < 100; wait++)); do
        within "$1" ss -Hltn 2>/dev/null | grep -q "$2:80" && return
        sleep 0.05
    done
    fail "nginx does not start: $(cat "$SAID")"
}
web origin 10.99.0.1 <<<"server { listen 10.99.0.1:80; root $SHARED/www; sendfile on; }"
ORIGIN=http://10.99.0.1/image
sent() { awk '{ sum += $1 } END { print sum + 0 }' "$SHARED/nginx/origin.log"; }
asked() { wc -l <"$SHARED/nginx/origin.log"; }
# What the first host has received.
received() { within 1 cat /proc/net/dev | awk '/eth0:/ { print $2 }'; }
cat >"$WORK/start.py" <<'END'
# Compares what a start reads, and writes one block.
import boot, os, sys
device, image = sys.argv[1], sys.argv[2]
reads = list(boot.reads(os.path.getsize(image) // 4096, 100, 16, 60))
disk, expected = os.open(device, os.O_RDWR), os.open(image, os.O_RDONLY)
for at, count in reads:
    if os.pread(disk, count * 4096, at * 4096) != os.pread(expected, count * 4096, at * 4096):
        sys.exit(f"wrong bytes at block {at}")
os.pwrite(disk, os.urandom(4096), 0)
os.fsync(disk)
print(boot.needed(reads))
END
# host NUMBER STORE SOURCE OPTION...: starts the image there; says how long that took.
host() {
    local begun=$EPOCHREALTIME device dir=$HOSTED/$1
    mkdir -p "$dir"
    device=$(of_host "$1" attach --via fuse --cow "$dir/overlay.qcow2" ${2:+--store "$2"} "${@:4}" "$3" 2>"$dir/said") &&
        "$PYTHON" "$WORK/start.py" "$device" "$SHARED/www/image" >"$dir/needed" 2>>"$dir/said" &&
        awk "BEGIN { print $EPOCHREALTIME - $begun }" >"$dir/took"
}
# all NAME COUNT STORE SOURCE OPTION...: that many hosts at the same moment; `own` is a store of each.
all() {
    local number store before asked received pids=() failed=0
    before=$(sent) asked=$(asked) received=$(received)
    for ((number = 1; number <= $2; number++)); do
        store=$3
        [[ $store != own ]] || store=$HOSTED/$number/store
        host "$number" "$store" "${@:4}" &
        pids+=($!)
    done
    for number in "${pids[@]}"; do wait "$number" || ((failed++)); done
    if ((failed == 0)); then
        figure slowest-s "$1" "$(cat "$HOSTED"/*/took | sort -g | tail -n 1)"
        figure median-s "$1" "$(cat "$HOSTED"/*/took | sort -g | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }')"
        figure origin-bytes "$1" "$(awk "BEGIN { print ($(sent) - $before) / $(<"$HOSTED/1/needed") }")"
        figure origin-requests "$1" "$(($(asked) - asked))"
        figure host-bytes "$1" "$(awk "BEGIN { print ($(received) - $received) / $(<"$HOSTED/1/needed") }")"
        figure needed-mb "$1" "$(awk "BEGIN { print $(<"$HOSTED/1/needed") / 1e6 }")"
    else
        cat "$HOSTED"/*/said >"$SAID"
        absent "$1" "all ($failed of $2 failed)"
    fi
    hosts_end
}
turn() { # ENTRANT
    case $1 in
    alone) all "$1" 1 own "$ORIGIN" ;;
    direct) all "$1" "$HOSTS" own "$ORIGIN" ;;
    one-host) ONE=1 all "$1" "$HOSTS" "$HOSTED/store" "$ORIGIN" ;;
    zone-nginx*)
        web zone 10.99.0.2 <<END
    proxy_cache_path $SHARED/nginx/cache keys_zone=cache:10m max_size=4g;
    server {
        listen 10.99.0.2:80;
        location / {
            slice 256k;
            proxy_pass http://10.99.0.1;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Range \$slice_range;
            proxy_cache cache;
            proxy_cache_key \$uri\$slice_range;
            proxy_cache_valid 200 206 1h;
            proxy_cache_lock on;
            proxy_cache_lock_timeout 60s;
        }
    }
END
        local web=$WEB
        local trace=()
        [[ $1 != *-trace ]] || trace=(--prefetch "$WORK/trace")
        all "$1" "$HOSTS" own http://10.99.0.2/image "${trace[@]}"
        kill "$web" && wait "$web" 2>>"$SAID"
        rm -rf "$SHARED/nginx/cache"
        ;;
    zone-export)
        if of_host zone export --nbd tcp:10.99.0.2:10809 --insecure --max-connections 4096 --name image \
            --read-only --store "$HOSTED/zone/store" "$ORIGIN" >"$SAID" 2>&1; then
            all "$1" "$HOSTS" "" nbd://10.99.0.2/image
        else
            absent "$1" all
            hosts_end
        fi
        ;;
    esac
}
# A trace is of the bytes of an image, at whatever address.
host 1 "$HOSTED/1/store" "$ORIGIN" --record || fail "nothing can be recorded: $(cat "$HOSTED/1/said")"
of_host 1 store trace --store "$HOSTED/1/store" "$ORIGIN" >"$WORK/trace" 2>"$SAID" || fail "no trace"
hosts_end
turns 1 turn

#!/usr/bin/env bash
# A Ceph cluster for tests: one monitor and one OSD on 127.0.0.1, of Debian's packages and without systemd.
# usage: scripts/ceph.sh DIR [memstore|bluestore]
#
# Prints "ready" when rbd works; DIR/ceph.conf is the configuration, and client.admin has all rights. Then it
# obeys words on its standard input, and answers each with "done": `kill-osd`, `start-osd`, `kill-mon`,
# `start-mon`, and `start-rgw`: a gateway for S3, whose port DIR/rgw names; its user has the keys `access` and
# `secret`. At the end of its input it ends the daemons that it has started, and removes DIR.
#
# memstore is there in two seconds and loses everything when the OSD dies; bluestore takes some more.
set -euo pipefail

dir=$1 store=${2:-memstore}
unset CEPH_ARGS
export CEPH_CONF=$dir/ceph.conf
mkdir -p "$dir"/{mon,osd,run,log,crash}
declare -A pids=()

# A range of ports that nobody uses now.
for _ in {1..50}; do
    port=$((20000 + RANDOM % 10000))
    ss -Hltn "sport >= $port and sport <= $((port + 21))" | grep -q . || break
done

cat >"$CEPH_CONF" <<EOF
[global]
fsid = $(</proc/sys/kernel/random/uuid)
mon host = [v2:127.0.0.1:$port]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
ms bind port min = $((port + 1))
ms bind port max = $((port + 20))
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = $dir/keyring
run dir = $dir/run
crash dir = $dir/crash
log file = $dir/log/\$name.log
pid file = $dir/run/\$name.pid
admin socket = $dir/run/\$name.asok
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
auth allow insecure global id reclaim = false
[mon]
mon data = $dir/mon
mon cluster log file = $dir/log/cluster.log
mon data avail warn = 3
mon data avail crit = 2
paxos propose interval = 0.05
paxos min wait = 0.01
mon memory autotune = false
[osd]
osd data = $dir/osd
osd objectstore = $store
bluestore block size = 4294967296
memstore device bytes = 2147483648
bluestore cache autotune = false
bluestore cache size = 67108864
bluestore fsck on mkfs = false
osd max pg log entries = 500
osd min pg log entries = 100
osd op num shards = 2
osd op num threads per shard = 2
osd heartbeat grace = 6
# How long a client that died still counts as one: so long is its lock waited for.
osd client watch timeout = 10
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$((port + 21))
rgw enable usage log = false
rgw enable gc threads = false
rgw enable lc threads = false
[client]
log file = /dev/null
pid file =
admin socket =
EOF
{
    ceph-authtool -C "$dir/keyring" -g -n mon. --cap mon 'allow *'
    ceph-authtool "$dir/keyring" -g -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
    ceph-authtool "$dir/keyring" -g -n client.rgw --cap mon 'allow *' --cap osd 'allow *'
    ceph-authtool "$dir/keyring" -g -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *'
    fsid=$(sed -n 's/^fsid = //p' "$CEPH_CONF")
    monmaptool --create --clobber --fsid "$fsid" --addv a "[v2:127.0.0.1:$port]" "$dir/monmap"
    ceph-mon --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
} >"$dir/log/made" 2>&1

start() { # name, command...
    local name=$1
    shift
    "$@" </dev/null >>"$dir/log/$name.out" 2>&1 &
    pids[$name]=$!
}
end() { # name, signal
    [[ -n ${pids[$1]:-} ]] || return 0
    kill -"$2" "${pids[$1]}" 2>/dev/null || true
    wait "${pids[$1]}" 2>/dev/null || true
    unset "pids[$1]"
}
finish() {
    end rgw KILL
    end osd KILL
    end mon KILL
    rm -rf "$dir"
}
trap finish EXIT
start_mon() { start mon ceph-mon -f -i a; }
start_osd() { start osd ceph-osd -f -i 0; }
start_rgw() {
    for pool in .rgw.root default.rgw.{log,control,meta,buckets.index,buckets.data}; do
        ceph osd pool create "$pool" 4 4 >/dev/null 2>&1
    done
    radosgw-admin user create --uid=u --display-name=u --access-key=access --secret-key=secret >>"$dir/log/made" 2>&1
    start rgw radosgw -f -n client.rgw
    for _ in {1..600}; do
        if (: </dev/tcp/127.0.0.1/$((port + 21))) 2>/dev/null; then
            echo "$((port + 21))" >"$dir/rgw"
            return
        fi
        sleep 0.1
    done
    echo "the gateway did not come up:" >&2
    tail -5 "$dir/log/rgw.out" "$dir/log/made" >&2
    exit 1
}
active() { # the OSD says it of itself: monitors believe in a dead one for a while
    for _ in {1..300}; do
        timeout 5 ceph daemon osd.0 status 2>/dev/null | grep -q '"state": "active"' && return
        kill -0 "${pids[osd]}" 2>/dev/null || start_osd
        sleep 0.1
    done
    echo "the OSD did not come up:" >&2
    tail -5 "$dir/log/osd.out" >&2
    exit 1
}

start_mon
timeout 60 ceph --connect-timeout 30 mon stat >/dev/null
osd=$(</proc/sys/kernel/random/uuid)
ceph osd new "$osd" 0 >/dev/null
ceph-osd --mkfs -i 0 --osd-uuid "$osd" >>"$dir/log/made" 2>&1
start_osd
active
ceph osd pool create rbd 8 8 >/dev/null 2>&1
rbd pool init rbd
echo ready

while read -r word; do
    case $word in
        kill-osd) end osd KILL ;;
        start-osd) start_osd; active ;;
        kill-mon) end mon KILL ;;
        start-mon) start_mon ;;
        start-rgw) start_rgw ;;
        *) echo "ceph.sh: $word?" >&2; exit 1 ;;
    esac
    echo "done"
done

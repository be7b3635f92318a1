# Random reads and writes of an image of a Ceph cluster that begins for this (one monitor, one OSD in memory,
# on this machine), by each way to it. Expects WORKLOADS (as randread-4k-d64), MIB and SECONDS_EACH.
[[ -n $(command -v ceph-osd) ]] || fail "the packages ceph-mon, ceph-osd and ceph-common are not installed"
SHARED=$(mktemp -d /dev/shm/becket-bench.XXXXXX)
SOCKET=$SHARED/socket
coproc CEPH { "$KEPT/../../scripts/ceph.sh" "$SHARED/ceph" memstore 2>"$SAID"; }
undo() {
    "$BECKET" detach --all
    [[ -z ${OTHER:-} ]] || kill "$OTHER"
    # The cluster ends with its input.
    exec {CEPH[1]}>&-
    wait "$CEPH_PID"
    rm -rf "$SHARED"
}
undo_at_the_end undo
read -r ready <&"${CEPH[0]}" && [[ $ready == ready ]] || fail "no cluster: $(tail -n 1 "$SAID")"
export CEPH_CONF=$SHARED/ceph/ceph.conf
# The cache of librbd is off for all, as it is for becket.
echo "rbd cache = false" >>"$CEPH_CONF"
head -c "${MIB}M" /dev/urandom | rbd import --no-progress - rbd/image || fail "no image"
# way ENTRANT: sets ENGINE, fio's words for where the image is.
way() {
    OTHER=
    local engine
    case $1 in
    librbd) ENGINE=(--ioengine=rbd --clientname=admin --pool=rbd --rbdname=image) ;;
    becket)
        DEVICE=$("$BECKET" attach ${VIA+--via "$VIA"} rbd:rbd/image 2>"$SAID") || return
        ENGINE=(--ioengine=libaio --direct=1 "--filename=$DEVICE")
        ;;
    becket-export)
        "$BECKET" export --nbd "unix:$SOCKET" --name image rbd:rbd/image >"$SAID" 2>&1 || return
        ENGINE=(--ioengine=nbd "--uri=nbd+unix:///image?socket=$SOCKET")
        ;;
    qemu-nbd)
        qemu-nbd -t --cache=none -f raw -x image -k "$SOCKET" "rbd:rbd/image:conf=$CEPH_CONF" >"$SAID" 2>&1 &
        OTHER=$!
        for ((wait = 0; wait < 40; wait++)); do sleep 0.05; done
        # It makes its socket before it finds that it cannot reach images of Ceph.
        kill -0 "$OTHER" 2>/dev/null || return
        ENGINE=(--ioengine=nbd "--uri=nbd+unix:///image?socket=$SOCKET")
        ;;
    esac
}
unway() { # ENTRANT
    case $1 in
    becket*) "$BECKET" detach --all >"$SAID" 2>&1 || fail "cannot detach: $(cat "$SAID")" ;;
    qemu-nbd) kill "$OTHER" && wait "$OTHER" ;;
    esac 2>"$SAID"
    OTHER=
    rm -f "$SOCKET"
}
turn() { # ENTRANT
    local workload pattern block depth kind
    if ! way "$1"; then
        absent "$1" image
        return
    fi
    for workload in "${WORKLOADS[@]}"; do
        IFS=- read -r pattern block depth <<<"$workload"
        kind=iops
        [[ $depth != d1 ]] || kind=p50-us
        if fio --name=f "${ENGINE[@]}" "--rw=$pattern" "--bs=$block" "--iodepth=${depth#d}" --time_based \
            --ramp_time=300ms "--runtime=$SECONDS_EACH" "--size=${MIB}M" --norandommap --randrepeat=1 \
            --clat_percentiles=0 --lat_percentiles=1 --output-format=json >"$WORK/fio.json" 2>"$SAID"; then
            if ((round > 0)); then
                section fio "$1" "$workload" "$kind"
                cat "$WORK/fio.json" >>"$REPORT"
            fi
        else
            absent "$1" "$workload-$kind"
        fi
    done
    unway "$1"
}
turns 0 turn

# Reads and writes of a file of this disk by the loop driver, and by a loop device over a file that a process
# serves over FUSE. Expects WORKLOADS (as randread-4k-d64-j2), MIB and SECONDS_EACH.
mkdir "$WORK/disk"
IMAGE=$WORK/disk/image
head -c "${MIB}M" /dev/urandom >"$IMAGE" || fail "no room for an image"
sync
undo() {
    "$BECKET" detach --all
    detach_ours
    [[ -z ${OTHER:-} ]] || kill "$OTHER"
}
undo_at_the_end undo
# way ENTRANT: sets DEVICE, and PID, the process that serves it, if there is one.
way() {
    OTHER='' PID=''
    local source="driver=file,node-name=f,filename=$IMAGE,cache.direct=on,aio=io_uring"
    case $1 in
    loop-direct) DEVICE=$(losetup --find --show --direct-io=on "$IMAGE" 2>"$SAID") || return ;;
    becket)
        DEVICE=$("$BECKET" attach --via fuse "$IMAGE" 2>"$SAID") || return
        PID=$(worker_pid)
        ;;
    qsd)
        : >"$WORK/served"
        qemu-storage-daemon --blockdev "$source" --blockdev driver=raw,node-name=r,file=f \
            --export "type=fuse,id=e,node-name=r,mountpoint=$WORK/served,writable=on" >"$SAID" 2>&1 &
        OTHER=$! PID=$OTHER
        for ((wait = 0; wait < 100; wait++)); do
            [[ ! -s $WORK/served ]] || break
            sleep 0.05
        done
        DEVICE=$(losetup --find --show --direct-io=on "$WORK/served" 2>>"$SAID")
        ;;
    esac
}
unway() { # ENTRANT
    case $1 in
    becket) "$BECKET" detach --all >"$SAID" 2>&1 ;;
    *) losetup -d "$DEVICE" 2>"$SAID" ;;
    esac || fail "cannot detach: $(cat "$SAID")"
    if [[ -n $OTHER ]]; then
        kill "$OTHER" && wait "$OTHER"
        OTHER=
    fi 2>"$SAID"
}
turn() { # ENTRANT
    local workload pattern block depth jobs before ios
    if ! way "$1"; then
        unway "$1"
        absent "$1" image
        return
    fi
    for workload in "${WORKLOADS[@]}"; do
        IFS=- read -r pattern block depth jobs <<<"$workload"
        [[ -z $PID ]] || before=$(ticks)
        if ! fio --name=f --ioengine=libaio --direct=1 "--filename=$DEVICE" "--rw=$pattern" "--bs=$block" \
            "--iodepth=${depth#d}" "--numjobs=${jobs#j}" --group_reporting --time_based \
            "--runtime=$SECONDS_EACH" --norandommap --randrepeat=1 --clat_percentiles=0 --lat_percentiles=1 \
            --output-format=json >"$WORK/fio.json" 2>"$SAID"; then
            absent "$1" "$workload-iops"
            continue
        fi
        ((round > 0)) || continue
        section fio "$1" "$workload" iops
        cat "$WORK/fio.json" >>"$REPORT"
        [[ -n $PID ]] || continue
        ios=$(awk -F: '/"total_ios"/ { all += $2 } END { print all }' "$WORK/fio.json")
        figure "$workload-cpu-us" "$1" "$(awk "BEGIN { print ($(ticks) - $before) * 10000 / $ios }")"
    done
    unway "$1"
}
turns 0 turn

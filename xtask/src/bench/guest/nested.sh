# Images inside images: a live CD's files read through becket's one map and through three stacked loop
# devices. Expects IMAGES (a folder with CODEC.iso, made once), CODECS, READERS and CPUS (numbers of them),
# and VIA. However it ends, its mounts and devices are gone and workqueues have their CPUs again.
MASKS=/sys/devices/virtual/workqueue/cpumask
MASK=$(<$MASKS)
INNER=LiveOS/squashfs.img/LiveOS/ext3fs.img
POINTS=("$WORK/iso" "$WORK/squash" "$WORK/files")
mkdir -p "${POINTS[@]}"
take_away() {
    local index
    umount "${POINTS[2]}"
    "$BECKET" detach --all
    for index in 2 1 0; do
        umount "${POINTS[index]}"
        [[ -n ${LOOPS[index]:-} ]] && losetup -d "${LOOPS[index]}"
    done
    LOOPS=()
} >"$WORK/gone" 2>&1
restore() {
    take_away
    echo "$MASK" >$MASKS
    [[ -n ${SLEEPER:-} ]] && kill "$SLEEPER"
}
undo_at_the_end restore
LOOPS=()

# Something to wait at that costs no process each time.
mkfifo "$WORK/never"
sleep infinity >"$WORK/never" &
SLEEPER=$!
exec 8<"$WORK/never"
rest() { read -rt "$1" -u 8; }

fresh() {
    sync
    echo 3 >/proc/sys/vm/drop_caches
}
# In BUSY the ticks that all CPUs have worked.
busy() {
    local user nice system idle wait irq softirq
    read -r _ user nice system idle wait irq softirq _ </proc/stat
    BUSY=$((user + nice + system + irq + softirq))
}
# CACHED is the machine's page cache in KiB, OWN the servers' own memory. Free memory is not used: other
# programs allocate and free more of it meanwhile than is measured here.
cached() {
    local name kib
    CACHED=0
    while read -r name kib _; do
        case $name in
        Buffers: | Cached:) ((CACHED += kib)) ;;
        esac
    done </proc/meminfo
}
own() {
    local pid name kib
    OWN=0
    for pid in $SERVERS; do
        while read -r name kib _; do
            case $name in
            RssAnon:) ((OWN += kib)) ;;
            esac
        done <"/proc/$pid/status"
    done
}
# on CPUS: from now on all of this runs on so many: readers, servers, and the kernel's workers.
on() {
    taskset -pc "0-$(($1 - 1))" $$ >"$SAID" 2>&1 || fail "$(cat "$SAID")"
    printf '%x' $(((1 << $1) - 1)) >$MASKS || fail "workqueues keep their CPUs"
}

# Three loop devices over each other; two where this kernel has no ISO 9660, the lower one with an offset.
show_loops() {
    local from=$1 index begin
    if ! grep -qw iso9660 /proc/filesystems && ! modprobe isofs; then
        begin=$(LC_ALL=C grep -abo -m 1 hsqs "$1" | head -n 1)
        LOOPS[1]=$(losetup --find --show --read-only --offset "${begin%%:*}" "$1") || return
        mount -o ro "${LOOPS[1]}" "${POINTS[1]}" || return
        LOOPS[2]=$(losetup --find --show --read-only "${POINTS[1]}/LiveOS/ext3fs.img") || return
        mount -o ro "${LOOPS[2]}" "${POINTS[2]}"
        return
    fi
    for index in 0 1 2; do
        LOOPS[index]=$(losetup --find --show --read-only "$from") || return
        mount -o ro "${LOOPS[index]}" "${POINTS[index]}" || return
        case $index in
        0) from=${POINTS[0]}/LiveOS/squashfs.img ;;
        1) from=${POINTS[1]}/LiveOS/ext3fs.img ;;
        esac
    done
}
show_becket() { show_ours "$@"; }
show_becket-768m() { show_ours "$@" --cache-size 768M; }
show_ours() {
    local device
    # A server of its own each time, which runs where we run.
    export BECKET_RUNTIME_DIR=$WORK/run-$((TURN++))
    device=$("$BECKET" attach --via "$VIA" --read-only "${@:2}" "$1/$INNER") && mount -o ro "$device" "${POINTS[2]}" || return
    SERVERS=$("$BECKET" list --json | sed -n 's/.*"\(worker\|server\)_pid": *\([0-9]*\).*/\2/p')
}
TURN=0

# How many threads serve the images: of becket's processes, or the kernel's workers for loop devices.
threads() {
    local all=() pid
    for pid in $SERVERS; do all+=(/proc/"$pid"/task/*); done
    THREADS=${#all[@]}
}
# read_all READERS: all files in random order, shared out among so many readers.
read_all() {
    local part
    for ((part = 0; part < $1; part++)); do
        (cd "${POINTS[2]}" && exec xargs -d '\n' cat <"$WORK/order.$1.$part" >/dev/null) &
        PIDS[part]=$!
    done
}
alive() {
    local pid
    for pid in "${PIDS[@]}"; do [[ -e /proc/$pid/stat ]] && kill -0 "$pid" 2>/dev/null && return; done
    return 1
}
# measure ENTRANT CODEC READERS CPUS
measure() {
    local what="$2-$3-readers-$4-cpus" begin end before work most=0 threads=0 pid
    SERVERS=
    fresh
    if ! "show_$1" "$IMAGES/$2.iso" >"$SAID" 2>&1; then
        absent "$1" "$what-s"
        take_away
        return
    fi
    fresh
    cached && before=$CACHED
    busy && work=$BUSY
    PIDS=()
    begin=${EPOCHREALTIME/./}
    read_all "$3"
    while alive; do
        cached && own && ((CACHED + OWN > most)) && most=$((CACHED + OWN))
        threads && ((THREADS > threads)) && threads=$THREADS
        rest 0.02
    done
    for pid in "${PIDS[@]}"; do wait "$pid" || absent "$1" "$what-s"; done
    end=${EPOCHREALTIME/./}
    busy
    figure "$what-s" "$1" "$(thousandth $(((end - begin) / 1000)))"
    figure "$what-cpu-s" "$1" "$(thousandth $(((BUSY - work) * 10)))"
    figure "$what-mib" "$1" "$(((most - before) / 1024))"
    [[ -z $SERVERS ]] || figure "$what-threads" "$1" "$threads"
    say "round $round: $what, $1: $(thousandth $(((end - begin) / 1000))) s"
    take_away
}

for readers in "${READERS[@]}"; do
    split -d -a 1 -n "l/$readers" "$IMAGES/order" "$WORK/order.$readers."
done
turn() {
    local cpus codec readers
    for cpus in "${CPUS[@]}"; do
        on "$cpus"
        for codec in "${CODECS[@]}"; do
            for readers in "${READERS[@]}"; do
                # One reader alone shows nothing on fewer CPUs than there are.
                ((readers > 1 || cpus == CPUS[-1])) && measure "$1" "$codec" "$readers" "$cpus"
            done
        done
    done
}
turns 1 turn

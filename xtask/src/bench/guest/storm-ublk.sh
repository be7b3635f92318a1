# What many idle ublk devices cost, and which waits for which when many programs open and close them. Follows
# storm.sh.
CRYPT=69 MANY=${COUNTS[-1]}
mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
events=/sys/kernel/tracing/events
worker() { pgrep -f -x '@becket worker' | head -n 1; }
field() { awk -v name="$2:" '$1 == name {print $2}' "$1"; }
rss() { field "/proc/$(worker)/status" VmRSS; }
# All memory that is neither free nor a program's nor a file's: tags have pages of their own that the kernel
# counts nowhere.
kernels() { awk '/^MemTotal:/ {all += $2} /^(MemFree|Cached|Buffers|AnonPages):/ {all -= $2} END {print all}' /proc/meminfo; }
quiet() { sync; echo 3 >/proc/sys/vm/drop_caches; sleep 1; }
attach_all() { put_up "becket-$VIA" 2>"$SAID" || fail "cannot attach: $(cat "$SAID")"; }

# counting EVENT KEYS, then counted EVENT KEYS NAME: a histogram of an event between the two.
counting() { echo "hist:keys=$2:size=4096" >"$events/$1/trigger" || fail "this kernel does not count $1"; }
counted() {
    cat "$events/$1/hist" >"$WORK/$3"
    echo "!hist:keys=$2:size=4096" >"$events/$1/trigger"
}
# Hits of a histogram's lines in which each of the words stands.
hits() {
    local file=$1 word
    shift
    cp "$file" "$WORK/lines"
    for word in "$@"; do
        grep -e "$word" "$WORK/lines" >"$WORK/fewer"
        mv "$WORK/fewer" "$WORK/lines"
    done
    sed -n 's/.*hitcount: *\([0-9]*\).*/\1/p' "$WORK/lines" | awk '{all += $1} END {print all + 0}'
}
contention() { # NAME: what the kernel's locks have been waited for, all and those that all devices share
    local name
    figure "$1-kernel-contended" all "$(hits "$WORK/locks" hitcount)"
    for name in ublk_ctl_mutex loop_validate_mutex loop_ctl_mutex; do
        figure "$1-kernel-contended" "$name" "$(hits "$WORK/locks" "$name")"
    done
}
# 202 is futex on x86-64.
futexes() { hits "$WORK/calls" becket 'id: *202'; }
LOCKS='lock/contention_begin lock_addr.sym' SYSCALLS='raw_syscalls/sys_enter common_pid.execname,id'

# Idle devices. Some come first, so that what the first one costs is not counted.
list 1 4
attach_all
quiet
free=$(field /proc/meminfo MemAvailable) kernel=$(kernels)
list 5 $((MANY + 4))
# shellcheck disable=SC2086
counting $LOCKS
attach_all
# shellcheck disable=SC2086
counted $LOCKS locks
contention attach
quiet
mode=$("$BECKET" list --json | grep -o '"mode": *"[a-z-]*"' | sort | uniq -c | sort -rn | head -n 1)
say "$MANY devices lie idle, $mode"
each() { awk -v all="$1" -v many="$MANY" 'BEGIN { printf "%.1f\n", all / many }'; }
# All that it has, including its own use before and that of earlier devices: memory that was used before would
# count as nothing.
figure idle-device-kib worker "$(each "$(rss)")"
figure idle-device-kib kernel "$(each $(($(kernels) - kernel)))"
figure idle-device-kib all "$(each $((free - $(field /proc/meminfo MemAvailable))))"
figure threads worker "$(find "/proc/$(worker)/task" -mindepth 1 -maxdepth 1 | wc -l)"
"$BECKET" detach --all >"$SAID" 2>&1 || fail "$(cat "$SAID")"

# Eight programs open, close and look at 64 devices.
list 1 64
attach_all
mapfile -t devices <"$DEVICES"
storm() {
    local times device
    for ((times = 0; times < 20; times++)); do
        for device in "${devices[@]}"; do
            [[ -b $device ]] && : <"$device"
        done
    done
}
# shellcheck disable=SC2086
counting $LOCKS
# shellcheck disable=SC2086
counting $SYSCALLS
eight() {
    local program
    for program in 1 2 3 4 5 6 7 8; do storm & done
    wait
}
took open-close-ms all eight
# shellcheck disable=SC2086
counted $SYSCALLS calls
# shellcheck disable=SC2086
counted $LOCKS locks
figure open-close-futexes becket "$(futexes)"
contention open-close
"$BECKET" detach --all >"$SAID" 2>&1 || fail "$(cat "$SAID")"

# Each image under dm-crypt.
modprobe dm-crypt 2>"$SAID"
list 1 "$CRYPT"
crypt() { # DEVICES: a table over each, and what is read through it
    local device number=0
    while read -r device; do
        dmsetup create "storm$((number++))" --table "0 2048 crypt aes-xts-plain64 $(printf '%064d' 7) 0 $device 0" || return
    done <"$DEVICES"
    for ((number--; number >= 0; number--)); do dmsetup remove "storm$number" || return; done
}
crypted() { put_up "$1" && crypt; }
crypted_turn() {
    took "crypt-$CRYPT-ms" "$1" crypted "$1"
    take_down "$1"
}
ENTRANTS=(losetup "becket-$VIA")
ROUNDS=1 turns 0 crypted_turn

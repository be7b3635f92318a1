# Fills a new file system on each contestant's device while dirty pages are scarce, and notes the
# microseconds. Expects ENTRANTS, SYSTEMS, ROUNDS, MIB, WORK (a folder), BECKET, the functions attach and
# detach, and backing, which sets BACKING to a block device of ROOM MiB, and unback. Runs on the host too: it
# puts everything back however it ends.
KNOBS=(dirty_ratio dirty_background_ratio dirty_bytes dirty_background_bytes)
declare -A BEFORE
BACKING= DEVICE= ATTACHED= FUSE=
ROOM=$((MIB * 3 / 2 + 384)) # xfs wants 300 at least
IMAGE=$WORK/lower/image

# Whatever a turn has left.
clear() {
    mountpoint -q "$WORK/upper" && umount "$WORK/upper"
    [[ -z $ATTACHED ]] || detach "$ATTACHED" && ATTACHED=
}
restore() {
    local knob
    clear
    mountpoint -q "$WORK/merged" && umount "$WORK/merged"
    [[ $FUSE ]] && kill "$FUSE" && wait "$FUSE"
    mountpoint -q "$WORK/lower" && umount "$WORK/lower"
    [[ $BACKING ]] && unback
    # Of each pair one is 0, and writing a 0 is refused or undoes the other.
    for knob in "${!BEFORE[@]}"; do
        [[ ${BEFORE[$knob]} == 0 ]] || echo "${BEFORE[$knob]}" >"/proc/sys/vm/$knob"
    done
} >"$WORK/restored" 2>&1
trap restore EXIT
trap 'exit 1' INT TERM HUP

for knob in "${KNOBS[@]}"; do
    BEFORE[$knob]=$(<"/proc/sys/vm/$knob")
done
echo $((64 << 20)) >/proc/sys/vm/dirty_bytes || fail "vm.dirty_bytes cannot be set"

# Nothing is discarded: the first to write would pay for the backing's blocks. Nothing is left to be
# initialised during a measurement.
make() { # SYSTEM DEVICE
    case $1 in
    xfs) mkfs.xfs -q -K -f "$2" ;;
    ext4) mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 "$2" ;;
    btrfs) mkfs.btrfs -q -K -f "$2" ;;
    esac
}

# What becket says of the image that it has attached.
show_mode() { # WHERE
    section mode "$1"
    "$BECKET" list --json >>"$REPORT"
}

# One contestant's turn; what went wrong is in $SAID.
turn() { # SYSTEM ENTRANT
    local begin end
    rm -f "$IMAGE" && truncate -s $((MIB * 5 / 4 + 128))M "$IMAGE" && sync || return
    attach "$2" && ATTACHED=$2 && make "$1" "$DEVICE" && mount "$DEVICE" "$WORK/upper" && sync || return
    begin=${EPOCHREALTIME/./}
    dd if=/dev/zero of="$WORK/upper/data" bs=1M count="$MIB" status=none && sync -f "$WORK/upper" || return
    end=${EPOCHREALTIME/./}
    took=$((end - begin))
    [[ $2 == becket ]] && ((round == 1)) && show_mode "$1"
    umount "$WORK/upper" && detach "$2" && ATTACHED=
} >"$SAID" 2>&1

mkdir -p "$WORK/lower" "$WORK/upper" "$WORK/merged"
section kernel "$(uname -r)"
backing || fail "there is no backing"
# Every block of it exists before anybody is measured.
dd if=/dev/zero of="$BACKING" bs=1M count="$ROOM" oflag=direct status=none || fail "the backing cannot be written"
for system in "${SYSTEMS[@]}"; do
    make "$system" "$BACKING" >"$SAID" 2>&1 && mount "$BACKING" "$WORK/lower" ||
        fail "there is no $system for the image: $(cat "$SAID")"
    for ((round = 1; round <= ROUNDS; round++)); do
        for entrant in "${ENTRANTS[@]}"; do
            if turn "$system" "$entrant"; then
                section took "$entrant" "$system" $took
                say "round $round $entrant on $system: $((took / 1000)) ms"
            else
                absent "$entrant" "$system"
                clear >"$SAID" 2>&1 || fail "it stays attached: $(cat "$SAID")"
            fi
        done
        backwards
    done
    umount "$WORK/lower"
done

# For file systems where direct I/O may be impossible: becket still attaches, takes a write, and says what it
# does and why.
odd() { # WHERE
    if attach becket && ATTACHED=becket && dd if=/dev/zero of="$DEVICE" bs=1M count=16 oflag=direct status=none; then
        show_mode "$1"
    else
        return 1
    fi
    detach becket && ATTACHED=
} >"$SAID" 2>&1
tried() { # WHERE
    odd "$1" && return
    section odd "$1"
    cat "$SAID" >>"$REPORT"
    clear >"$SAID" 2>&1 || fail "$1: it stays attached: $(cat "$SAID")"
}
make btrfs "$BACKING" >"$SAID" 2>&1 && mount -o compress-force=zstd "$BACKING" "$WORK/lower" ||
    fail "there is no btrfs: $(cat "$SAID")"
truncate -s 64M "$IMAGE"
tried compressed-btrfs
mkdir "$WORK/lower/up" "$WORK/lower/work" "$WORK/lower/down"
if mount -t overlay -o "lowerdir=$WORK/lower/down,upperdir=$WORK/lower/up,workdir=$WORK/lower/work" overlay "$WORK/merged"; then
    IMAGE=$WORK/merged/image
    truncate -s 64M "$IMAGE"
    tried overlay
    umount "$WORK/merged"
fi
umount "$WORK/lower"
# A journal of data leaves no way around the page cache.
make ext4 "$BACKING" >"$SAID" 2>&1 && mount -o data=journal "$BACKING" "$WORK/lower" ||
    fail "there is no ext4: $(cat "$SAID")"
IMAGE=$WORK/lower/image
truncate -s 64M "$IMAGE"
tried ext4-data-journal
if command -v qemu-storage-daemon >"$SAID" && [[ -e /dev/fuse ]]; then
    truncate -s 64M "$WORK/lower/below"
    IMAGE=$WORK/fuse
    : >"$IMAGE"
    qemu-storage-daemon --blockdev "file,node-name=f,filename=$WORK/lower/below" \
        --export "fuse,id=e,node-name=f,mountpoint=$IMAGE,writable=on" >"$SAID" 2>&1 &
    FUSE=$!
    for ((wait = 0; wait < 50; wait++)); do
        [[ -s $IMAGE ]] && break
        sleep 0.1
    done
    tried fuse
    kill $FUSE
    wait $FUSE
    FUSE=
else
    section odd fuse
    echo "there is no FUSE server here" >>"$REPORT"
fi

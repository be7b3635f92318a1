# Fills a new file system on each contestant's device while dirty pages are scarce: the seconds until it is
# filled and synced. Expects SYSTEMS, MIB, ON (null_blk, or loop for a file of this machine's disk). On the
# host, too: it puts everything back however it ends.
KNOBS=(dirty_ratio dirty_background_ratio dirty_bytes dirty_background_bytes)
declare -A BEFORE
BACKING= DEVICE= ATTACHED=
ROOM=$((MIB * 3 / 2 + 384)) # xfs wants 300 at least
IMAGE=$WORK/lower/image
clear() { # whatever a turn has left
    mountpoint -q "$WORK/upper" && umount "$WORK/upper"
    [[ -z $ATTACHED ]] || detach "$ATTACHED" && ATTACHED=
}
restore() {
    local knob
    clear
    mountpoint -q "$WORK/lower" && umount "$WORK/lower"
    [[ $BACKING == /dev/loop* ]] && losetup -d "$BACKING"
    # Of each pair one is 0, and writing a 0 is refused or undoes the other.
    for knob in "${!BEFORE[@]}"; do
        [[ ${BEFORE[$knob]} == 0 ]] || echo "${BEFORE[$knob]}" >"/proc/sys/vm/$knob"
    done
}
undo_at_the_end restore
for knob in "${KNOBS[@]}"; do BEFORE[$knob]=$(<"/proc/sys/vm/$knob"); done
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
prepared() {
    rm -f "$IMAGE" && truncate -s $((MIB * 5 / 4 + 128))M "$IMAGE" && sync &&
        attach "$1" && ATTACHED=$1 && make "$SYSTEM" "$DEVICE" && mount "$DEVICE" "$WORK/upper" && sync
}
filled() { dd if=/dev/zero of="$WORK/upper/data" bs=1M count="$MIB" status=none && sync -f "$WORK/upper"; }
turn() {
    if prepared "$1" >"$SAID" 2>&1; then took "$SYSTEM-ms" "$1" filled; else absent "$1" "$SYSTEM-ms"; fi
    clear >"$SAID" 2>&1 || fail "$1 stays attached: $(cat "$SAID")"
}
mkdir -p "$WORK/lower" "$WORK/upper"
if [[ $ON == loop ]]; then
    truncate -s ${ROOM}M "$WORK/backing" && BACKING=$(losetup --find --show --direct-io=on "$WORK/backing")
else
    for module in xfs btrfs; do modprobe $module 2>"$SAID"; done
    null_blk $ROOM && BACKING=/dev/nullb0
fi || fail "there is no backing"
# Every block of it exists before anything is measured.
dd if=/dev/zero of="$BACKING" bs=1M count="$ROOM" oflag=direct status=none || fail "the backing cannot be written"
for SYSTEM in "${SYSTEMS[@]}"; do
    make "$SYSTEM" "$BACKING" >"$SAID" 2>&1 && mount "$BACKING" "$WORK/lower" ||
        fail "there is no $SYSTEM for the image: $(cat "$SAID")"
    turns 1 turn
    umount "$WORK/lower"
done

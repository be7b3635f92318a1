# Without encoded bytes: a file on ext4 in a partition of an image on an ISO, beside the same bytes of the ISO
# file itself; and how long it takes to find a path through a large ISO. Expects the variables and functions
# of nested.sh, and KEPT (a folder for images that are made once).
RAW=$KEPT/pieces.iso
if [[ ! -e $RAW ]]; then
    say "an image without compression is made: once"
    rm -rf "$WORK/raw" && mkdir -p "$WORK/raw/one" "$WORK/raw/many" "$WORK/raw/tree" &&
        head -c 96M /dev/urandom >"$WORK/raw/one/nested.img" && head -c 400M /dev/urandom >"$WORK/raw/many/nested.img" &&
        mke2fs -q -F -t ext4 -b 4096 -O ^has_journal -E packed_meta_blocks=1 -m 0 -d "$WORK/raw/one" "$WORK/raw/p1" 120M &&
        mke2fs -q -F -t ext4 -b 4096 -O ^has_journal -m 0 -d "$WORK/raw/many" "$WORK/raw/p2" 480M &&
        truncate -s 602M "$WORK/raw/tree/disk.img" &&
        printf 'start=%d, size=%d\n' 2048 245760 247808 983040 | sfdisk -q --label gpt "$WORK/raw/tree/disk.img" &&
        dd if="$WORK/raw/p1" of="$WORK/raw/tree/disk.img" bs=1M seek=1 conv=notrunc,sparse status=none &&
        dd if="$WORK/raw/p2" of="$WORK/raw/tree/disk.img" bs=1M seek=121 conv=notrunc,sparse status=none &&
        genisoimage -quiet -R -o "$RAW.part" "$WORK/raw/tree" && mv "$RAW.part" "$RAW"
    rm -rf "$WORK/raw"
    [[ -e $RAW ]] || fail "there is no image without compression"
fi
BIG=$KEPT/big.iso
if [[ ! -e $BIG ]]; then
    say "an ISO image of 4 GiB is made: once"
    # Half of each block is noise: the SquashFS image has twice as many blocks as it would have with noise
    # alone.
    rm -rf "$WORK/big" && mkdir -p "$WORK/big/squash/LiveOS" "$WORK/big/tree/LiveOS" &&
        head -c 64K /dev/urandom >"$WORK/big/block" && truncate -s 128K "$WORK/big/block" &&
        mke2fs -q -F -t ext4 -O ^has_journal -m 0 "$WORK/big/squash/LiveOS/ext3fs.img" 64M &&
        for ((count = 0; count < 65000; count++)); do echo "$WORK/big/block"; done |
            xargs cat >>"$WORK/big/squash/LiveOS/ext3fs.img" &&
        mksquashfs "$WORK/big/squash" "$WORK/big/tree/LiveOS/squashfs.img" -comp zstd -Xcompression-level 1 -all-root \
            -quiet -no-progress &&
        rm -rf "$WORK/big/squash" && genisoimage -quiet -R -allow-limited-size -o "$BIG.part" "$WORK/big/tree" && mv "$BIG.part" "$BIG"
    rm -rf "$WORK/big"
    [[ -e $BIG ]] || fail "there is no ISO image of 4 GiB"
fi

# raw ENTRANT FILE OFFSET: reads LENGTH of it both ways.
raw() {
    local workload
    for workload in "read-1m-d4 --rw=read --bs=1M --iodepth=4" "randread-4k-d64 --rw=randread --bs=4k --iodepth=64"; do
        # shellcheck disable=SC2086
        if fio --name=raw --filename="$2" --offset="$3" --size="$LENGTH" --direct=1 --ioengine=libaio --readonly ${workload#* } \
            --time_based --runtime=3 --output-format=json --output="$WORK/fio.json" >"$SAID" 2>&1; then
            section fio "$1" "$PIECES-${workload%% *}" iops
            cat "$WORK/fio.json" >>"$REPORT"
        else
            absent "$1" "$PIECES-${workload%% *}-iops"
        fi
    done
}
raw_turn() {
    if [[ $1 == file ]]; then
        raw file "$RAW" "$IN"
        return
    fi
    DEVICE=$("$BECKET" attach --read-only "$NESTED" 2>"$SAID") || fail "$(cat "$SAID")"
    raw becket "$DEVICE" "$AT"
    "$BECKET" detach "$DEVICE" >"$SAID" 2>&1 || fail "$(cat "$SAID")"
}
ENTRANTS=(file becket)
for PIECES in one-piece pieces; do
    case $PIECES in
    one-piece) NESTED=$RAW/disk.img/p1/nested.img ;;
    pieces) NESTED=$RAW/disk.img/p2/nested.img ;;
    esac
    # The longest piece that lies in one place: where in the device, where in the ISO, how long.
    read -r AT IN LENGTH < <("$BECKET" map --json "$NESTED" |
        awk -F '[:,]' '/"kind": "data"/ { data = 1 } /"len"/ { len = $2 } /"offset"/ { offset = $2 }
            /"start"/ { if (data && len > most) { most = len; at = $2; in_iso = offset } data = 0 }
            END { printf "%.0f %.0f %.0f\n", at, in_iso, most }')
    # What is for the kernel's loop driver alone must not come to FUSE unnoticed.
    [[ $PIECES == pieces || $("$BECKET" map --json "$NESTED" | grep -c '"kind"') == 1 ]] || fail "the nested image is not in one piece"
    ((LENGTH >= 64 << 20)) || fail "the nested image lies in small pieces: the longest has ${LENGTH:-no} bytes"
    ROUNDS=$RAW_ROUNDS turns 1 raw_turn
done
# Cold: neither the images nor becket itself are in memory.
for ((times = 1; times <= 11; times++)); do
    fresh
    took resolve-ms becket "$BECKET" ls "$BIG/LiveOS/squashfs.img/LiveOS/ext3fs.img/" || fail "$(cat "$SAID")"
done

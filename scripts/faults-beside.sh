#!/bin/bash
# The same faults below becket and below others: what the program on top gets. Prints a line for each.
#   sudo scripts/faults-beside.sh [BECKET]
# Needs qemu-utils, nbdkit and loop devices; becket serves over ublk if the kernel has it, else over FUSE.
# NBD's servers are reached through the kernel's client if there is one (modprobe nbd; and nbd-client), else
# by qemu-io.
# The faulty backing is a device of becket's own (--fault), so all use the same one. Takes about a minute, and
# leaves nothing behind.
# WHO="nbdkit becket" runs only those, ONLY=killed runs only the last fault.
set -u
becket=$(realpath "${1:-target/debug/becket}")
via=fuse
[[ -e /dev/ublk-control ]] && via=ublk
dir=$(mktemp -d /var/tmp/faults-beside.XXXXXX)
export BECKET_RUNTIME_DIR=$dir/run BECKET_LINK_DIR=$dir/links NO_COLOR=1
cd "$dir" || exit
server= loop= mounted= top=
down() { # whatever stands
    case $top in
        /dev/nbd0) qemu-nbd -d "$top" >/dev/null ;;
        /dev/nbd1) nbd-client -d "$top" >/dev/null ;;
    esac
    [[ $server ]] && { kill -KILL "$server"; wait "$server"; } 2>/dev/null
    [[ $loop ]] && losetup -d "$loop"
    [[ -e links/top ]] && "$becket" detach top >/dev/null
    server= loop= top=
    rm -f socket
}
the_end() {
    down
    "$becket" detach --all >/dev/null 2>&1
    [[ $mounted ]] && umount "$mounted"
    cd / && rm -rf "$dir"
}
trap the_end EXIT

up() { # WHO FILE-OR-DEVICE: it is served; TOP is where
    down
    case $1 in
        loop) loop=$(losetup -f --show --direct-io=on "$2" 2>/dev/null || losetup -f --show "$2"); top=$loop ;;
        becket) top=$("$becket" attach --via $via --name top "$2") ;;
        qemu-nbd)
            if [[ -e /dev/nbd0 ]]; then
                qemu-nbd -v -f raw -c /dev/nbd0 --cache=none --persistent "$2" >/dev/null 2>&1 & server=$!
                top=/dev/nbd0
            else
                qemu-nbd -f raw -k "$dir/socket" --cache=none --persistent --shared=8 "$2" 2>/dev/null & server=$!
                top="nbd+unix:///?socket=$dir/socket"
            fi
            ;;
        nbdkit)
            nbdkit -f -U "$dir/socket" file "$2" 2>/dev/null & server=$!
            top="nbd+unix:///?socket=$dir/socket"
            ;;
    esac
    [[ $top == nbd* ]] && within 10 test -S socket
    if [[ $1 == nbdkit && -e /dev/nbd1 ]]; then
        nbd-client -unix "$dir/socket" /dev/nbd1 >/dev/null 2>&1
        top=/dev/nbd1
    fi
    [[ $top != /dev/nbd* ]] || within 10 connected || echo "$1 is not connected"
}
within() { # SECONDS COMMAND...: until it succeeds
    local until=$((SECONDS + $1))
    shift
    until "$@"; do ((SECONDS < until)) || return; sleep 0.1; done
}
connected() { (($(blockdev --getsize64 "$top") > 0)); }
# A word for what came of it: the error's text, or `ok` and the first byte read.
on_top() { # read|write|flush OFFSET LENGTH
    local said
    if [[ $top == nbd* ]]; then
        case $1 in
            read) said=$(timeout 20 qemu-io -f raw -c "read -v $2 512" "$top" 2>&1) ;;
            write) said=$(timeout 20 qemu-io -f raw -c "write -P 0x77 $2 $3" -c flush "$top" 2>&1) ;;
            flush) said=$(timeout 20 qemu-io -f raw -c "write -P 0x77 0 4096" -c flush "$top" 2>&1) ;;
        esac
        case $said in
            *failed:* | *rror*) sed -n 's/.*\(failed\|rror\): *//p' <<<"$said" | head -1 ;;
            *0000*:*) echo "ok, bytes $(grep -m1 -o ':  [0-9a-f][0-9a-f]' <<<"$said" | tr -d ': ')" ;;
            *) echo ok ;;
        esac
        return
    fi
    case $1 in
        read) said=$(dd if="$top" iflag=direct bs=4096 skip=$(($2 / 4096)) count=1 2>&1 >byte) && said="ok, bytes $(head -c1 byte | od -An -tx1 | tr -d ' ')" ;;
        write) said=$(dd if=payload of="$top" oflag=direct conv=notrunc,fsync bs=4096 seek=$(($2 / 4096)) count=$(($3 / 4096)) 2>&1) && said=ok ;;
        flush) said=$(dd if=payload of="$top" oflag=direct conv=notrunc,fsync bs=4096 count=1 2>&1) && said=ok ;;
    esac
    sed -n 's/^dd: .*: //p; /^ok/p' <<<"$said" | head -1
}
tell() { printf '%s | %s | %s\n' "$@"; }
head -c 16M /dev/zero | tr '\0' '\167' >payload

mib=$((1 << 20))
for who in ${WHO:-loop qemu-nbd nbdkit becket}; do
    if [[ ${ONLY:-} != killed ]]; then
        head -c 16M /dev/zero | tr '\0' '\021' >image
        bottom=$("$becket" attach --via $via --name bottom --fault \
            "error=read:EIO@1M+4K,error=read:ENODATA@2M+4K,error=write:ENOSPC@3M+4K,delay=read:3s@5M+4K" image)
        up $who "$bottom"
        tell "$who" "a bad sector (EIO), read" "$(on_top read $mib 4096)"
        tell "$who" "its neighbour, read" "$(on_top read $((mib + 4096)) 4096)"
        tell "$who" "a bad sector (ENODATA), read" "$(on_top read $((2 * mib)) 4096)"
        tell "$who" "no room (ENOSPC), written and synced" "$(on_top write $((3 * mib)) 4096)"
        on_top read $((5 * mib)) 4096 >/dev/null & late=$!
        begun=$SECONDS served=0
        while kill -0 $late 2>/dev/null && ((SECONDS - begun < 10)); do
            [[ $(on_top read $((6 * mib)) 4096) == ok* ]] && ((served++))
        done
        tell "$who" "one read 3 s late: others meanwhile" "$served"
        wait $late
        down
        "$becket" detach bottom >/dev/null

        bottom=$("$becket" attach --via $via --name bottom --fault "error=flush:EIO:0.5,seed=4" image)
        up $who "$bottom"
        tell "$who" "four syncs of a disk whose syncs fail" \
            "$(for _ in 1 2 3 4; do on_top flush 0 0; done | paste -sd, )"
        down
        "$becket" detach bottom >/dev/null 2>&1

        # A file system that is full, and then is not.
        mkdir -p small; mount -t tmpfs -o size=6m small small && mounted=$dir/small
        truncate -s 16M small/image
        head -c 3M payload >small/filler
        up $who "$dir/small/image"
        tell "$who" "8 MiB to a file system with room for 3" "$(on_top write 0 $((8 * mib)))"
        rm small/filler
        tell "$who" "1 MiB once there is room again" "$(on_top write 0 $mib)"
        down
        umount small && mounted=

        # The file gets shorter.
        head -c 8M payload >image
        up $who "$dir/image"
        truncate -s 1M image
        tell "$who" "a read behind the file's new end" "$(on_top read $((4 * mib)) 4096)"
        tell "$who" "a read before it" "$(on_top read 0 4096)"
        down

    fi

    # The server dies under a writer.
    head -c 8M /dev/zero >image
    up $who "$dir/image"
    case $who in
        loop) tell "$who" "its server is killed under a writer" "there is none" ;;
        *)
            killed=$server
            [[ $who == becket ]] && killed=$("$becket" list --json | grep -m1 -o '"worker_pid": [0-9]*' | tr -dc 0-9)
            if [[ $top == /dev/* ]]; then
                dd if=payload of="$top" oflag=direct conv=notrunc,fsync bs=4096 count=1500 >writer 2>&1 & writer=$!
            else
                qemu-io -f raw -c "write -P 0x77 0 4M" -c "sleep 1500" -c "write -P 0x77 4M 1M" "$top" >writer 2>&1 & writer=$!
            fi
            sleep 0.5
            kill -0 $writer || echo "the writer was faster"
            kill -KILL "$killed"
            # A writer that waits cannot be ended by a signal: its device has to go first.
            ended() { ! kill -0 $writer 2>/dev/null; }
            begun=$SECONDS
            if ! within 60 ended; then
                tell "$who" "its server is killed under a writer" "the writer waits, 60 s and more"
                down 2>/dev/null
                within 60 ended && echo "it has ended when the device was disconnected: $(tail -1 writer)"
                continue
            fi
            if wait $writer && ! grep -qi "error\|failed" writer; then said="the writer saw nothing"; else said="the writer: $(grep -im1 "error\|failed" writer)"; fi
            tell "$who" "its server is killed under a writer" "$said, after $((SECONDS - begun)) s"
            ;;
    esac
    down 2>/dev/null
done

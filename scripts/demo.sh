#!/usr/bin/env bash
# Shows becket with real images: an ext4 file system, a SquashFS, and a GPT disk with a partition of each.
# Every command is printed before it runs, with its real output; the demo ends at the first unexpected result.
set -euo pipefail

becket=${BECKET:-$(dirname "$0")/../target/release/becket}
here=$(cd "$(dirname "$0")/.." && pwd)

die() { printf 'demo: %s\n' "$*" >&2; exit 1; }
[[ -x $becket ]] || die "$becket is not built; \`make demo\` builds it"
becket=$(realpath "$becket")

if ((EUID != 0)); then
    command -v sudo >/dev/null ||
        die "a block device can be had only by root, and sudo is not here: run \`make demo\` as root"
    exec sudo BECKET="$becket" "$here/scripts/demo.sh"
fi

# On a disk rather than a tmpfs, so that direct I/O is part of what is shown.
work=$(mktemp -d "${TMPDIR:-/var/tmp}/becket-demo-XXXXXX")
bin=$work/bin
mkdir "$bin" && ln -s "$becket" "$bin/becket"
export PATH=$bin:$PATH:/usr/sbin:/sbin
# State of its own: devices attached by other users are neither listed nor touched.
export BECKET_RUNTIME_DIR=$work/state
mounts=()

clean_up() {
    local code=$?
    trap - EXIT
    set +e
    for dir in "${mounts[@]}"; do
        mountpoint -q "$dir" && umount "$dir"
    done
    becket detach --all >/dev/null 2>&1 || code=1
    cd / && rm -rf "$work"
    ((code == 0)) || echo "demo: FAILED" >&2
    exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'echo "demo: \`$BASH_COMMAND\` failed (line $LINENO)" >&2' ERR

heading() { printf '\n# %s\n' "$*"; }
show() {
    local line='$' word
    for word in "$@"; do
        [[ $word == *[\ \$\;]* ]] && word="'$word'"
        line+=" $word"
    done
    printf '%s\n' "$line"
    "$@"
}
mount_at() { # DEVICE DIR OPTIONS...
    mkdir -p "$2"
    mounts+=("$2")
    show mount "${@:3}" "$1" "$2"
}
# One line for each file and link below a directory: what two trees must agree on.
sums() {
    (cd "$1" && find . -path ./lost+found -prune -o -type f -print0 | sort -z | xargs -0 -r sha256sum)
    (cd "$1" && find . -type l -printf '%p -> %l\n' | sort)
}
compared=0
compare() { # DIR: the same as what went in?
    sums "$1" >"$work/found"
    diff -u "$work/expected" "$work/found" || die "$1 does not hold what went into its image"
    compared=$((compared + 1))
    echo "  $(wc -l <"$work/found") files below $1 have the checksums of what went in"
}

cd "$work"
heading "Real files: this checkout and the licences of this machine"
mkdir tree
tar -C "$here" --exclude=./target --exclude=./.git -cf - . | tar -C tree -xf -
cp -a /usr/share/common-licenses tree/
sums tree >expected
echo "$(wc -l <expected) files, $(du -sh tree | cut -f1)"

heading "An ext4 image, a SquashFS, and a disk with a partition of each"
truncate -s 128M root.ext4
show mke2fs -q -t ext4 -d tree root.ext4
show mksquashfs tree files.squashfs -quiet -no-progress
truncate -s 256M disk.img
printf 'label: gpt\nstart=1MiB, size=128MiB, name=root\nsize=100MiB, name=files\n' >table
show sfdisk -q disk.img <table
show sfdisk -l -o Device,Start,Sectors,Size,Name disk.img
dd if=root.ext4 of=disk.img bs=1M seek=1 conv=notrunc,sparse status=none
dd if=files.squashfs of=disk.img bs=1M seek=129 conv=notrunc,sparse status=none
show ls -l root.ext4 files.squashfs disk.img

heading "What works on this machine"
show becket doctor

heading "Attach all three: one device path a line, in the order given"
show becket attach root.ext4 files.squashfs disk.img | tee devices
mapfile -t device < <(grep '^/dev/' devices)
((${#device[@]} == 3)) || die "three images make three devices"
show becket list -v
transport=$(becket list | awk -v device="${device[0]}" '$2 == device { print $3 }')
disk=${device[2]}
for part in "${disk}p1" "${disk}p2"; do
    [[ -b $part ]] || die "the partition $part is not there"
done

heading "Mount, and compare every file with what went in"
mount_at "${device[0]}" "$work/mnt/ext4"
compare "$work/mnt/ext4"
mount_at "${device[1]}" "$work/mnt/squashfs" -o ro
compare "$work/mnt/squashfs"
mount_at "${disk}p1" "$work/mnt/p1" -o ro
compare "$work/mnt/p1"
mount_at "${disk}p2" "$work/mnt/p2" -o ro
compare "$work/mnt/p2"

heading "A device in use is not taken away from under its mount"
if show becket detach "${device[0]}"; then die "a mounted device was detached"; fi

heading "Write through the mount; the bytes are in the image afterwards"
show cp "$becket" "$work/mnt/ext4/written"
for dir in ext4 squashfs p1 p2; do show umount "$work/mnt/$dir"; done
show becket detach "${device[0]}" files.squashfs disk.img
# debugfs reads the image file itself: no device is in between.
show debugfs -R "dump /written read-back" root.ext4 2>/dev/null
cmp "$becket" read-back || die "what was written is not in the image"
show becket list
[[ -z $(losetup --noheadings --output BACK-FILE --list | grep -F "$work" || true) ]] || die "a loop device is left"

heading "A device exactly as long as a command, with the command's exit code"
show becket run root.ext4 -- fsck.ext4 -f -n '{}'
code=0
# The variable is the command's own.
# shellcheck disable=SC2016
show becket run root.ext4 -- sh -c 'blockdev --getsize64 $BECKET_DEVICE; exit 42' || code=$?
echo "exit code $code"
((code == 42)) || die "the exit code must be the command's own"

heading "Attach and mount in one; unmount and detach in one"
mkdir -p mnt/one
mounts+=("$work/mnt/one")
show becket mount files.squashfs "$work/mnt/one"
compare "$work/mnt/one"
show becket umount "$work/mnt/one"
show becket list
[[ -z $(becket list 2>/dev/null | tail -n +2) ]] || die "something is left attached"

printf '\n%s\n' "demo: proven over $transport: $compared file systems, $(wc -l <expected) files each, read back as they \
went in; a write reached its image; nothing is left attached"

#!/usr/bin/env bash
# Runs `make demo` and `make test` as on a new machine: in a fresh Debian 12, from a fresh clone. The
# container is a root directory with mount, process, host name and IPC namespaces of its own; the kernel, /dev
# and the network are this machine's. It shows whether the project depends on what one machine has.
set -euo pipefail

suite=bookworm
here=$(cd "$(dirname "$0")/.." && pwd)

usage() {
    cat <<END
Usage: scripts/pristine.sh [--keep] [--dir DIR | --root ROOT] [COMMAND]...

Makes a minimal Debian 12 with mmdebstrap, clones this checkout's last commit into it and runs each COMMAND there, as
a line of shell in the clone. Without COMMAND: 'make demo', then 'make test'. It stops at the first one that fails.

  --keep       keep the root directory, and print where it is
  --root ROOT  use the root directory that an earlier --keep left, with the last commit; it is removed without --keep
  --dir DIR    make it below DIR, which needs 20 GB and a real file system [default: /var/tmp]

Examples:
  scripts/pristine.sh
  scripts/pristine.sh 'make demo' 'cargo xtask ci --only test'
  scripts/pristine.sh --keep 'make setup' 'cargo test -p becket --test bad_input'
END
}
say() { printf 'pristine: %s\n' "$*"; }
die() { printf 'pristine: %s\n' "$*" >&2; exit 1; }

keep=no
root=
dir=/var/tmp
while (($#)); do
    case $1 in
    --keep) keep=yes ;;
    --root) [[ -d ${2:-}/root/becket ]] || die "--root needs the directory that --keep printed"; root=$(realpath "$2"); shift ;;
    --dir) [[ $# -ge 2 ]] || die "--dir needs a directory"; dir=$2; shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    -*) usage >&2; exit 2 ;;
    *) break ;;
    esac
    shift
done
commands=("$@")
((${#commands[@]})) || commands=('make demo' 'make test')

((EUID == 0)) || die "this must run as root: it mounts file systems and makes device nodes"
for tool in mmdebstrap unshare git rustc cargo apt-config; do
    command -v "$tool" >/dev/null || die "$tool is not installed (\`make setup\` installs Debian's packages)"
done

work=$(mktemp -d)
# The container's processes and mounts end with its namespaces, so only files are left to remove.
clean_up() {
    local code=$?
    trap - EXIT
    [[ $keep == no ]] || say "kept: $root (--root $root uses it again)"
    [[ $keep == yes ]] || rm -rf --one-file-system "$root"
    rm -rf --one-file-system "$work"
    exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

make_root() {
    # What this machine's apt needs to reach its mirror holds inside, too.
    apt-config dump Acquire | grep -E '^Acquire::(http|https|Check-|Retries)' >"$work/apt.conf" || true
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
        awk -v suite="$suite" '$2 == suite && !found { print $1; found = 1 }')
    [[ -n $mirror ]] || die "the apt sources of this machine do not name Debian's $suite"

    say "making a minimal $suite in $root"
    unshare --mount mmdebstrap --quiet --mode=root --variant=minbase --format=directory \
        --include=make,mount,ca-certificates --aptopt="$work/apt.conf" "$suite" "$root" "$mirror"
    rm -rf "$root/etc/apt"
    cp -a /etc/apt "$root/etc/apt"
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    printf '127.0.0.1 localhost pristine\n::1 localhost\n' >"$root/etc/hosts"
    echo pristine >"$root/etc/hostname"
    # Debian's installer makes this link, mmdebstrap does not; fusermount3 reads it.
    [[ -e $root/etc/mtab || -L $root/etc/mtab ]] || ln -s ../proc/self/mounts "$root/etc/mtab"
}

if [[ -z $root ]]; then
    root=$(mktemp -d "$dir/becket-pristine-XXXXXX")
    chmod 755 "$root"
    make_root
fi

[[ -z $(git -C "$here" status --porcelain) ]] || say "note: changes that are not committed are left out"
if [[ -d $root/root/becket ]]; then
    git -C "$root/root/becket" fetch --quiet --depth 1 "file://$here" HEAD
    git -C "$root/root/becket" reset --quiet --hard FETCH_HEAD
else
    git clone --quiet --depth 1 "file://$here" "$root/root/becket"
fi
say "cloned $(git -C "$root/root/becket" log -1 --format='%h %s')"

# The toolchain is bound read-only; the crates that the lock file names are fetched here and copied.
mkdir -p "$root/opt/rust" "$root/root/.cargo"
(cd "$root/root/becket" && cargo fetch --quiet --locked)
cargo_home=${CARGO_HOME:-$HOME/.cargo}
for item in registry git config.toml; do
    [[ ! -e $cargo_home/$item ]] || cp -a "$cargo_home/$item" "$root/root/.cargo/"
done

# A clean environment: only what reaching the network needs is passed on.
environment=(HOME=/root USER=root LOGNAME=root SHELL=/bin/bash
    PATH=/opt/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
while IFS= read -r name; do
    case ${name,,} in
    http_proxy | https_proxy | ftp_proxy | all_proxy | no_proxy) environment+=("$name=${!name}") ;;
    esac
done < <(compgen -e)

# Runs as process 1 of the container, with this machine's programs until the last line.
cat >"$work/enter.sh" <<'END'
set -euo pipefail
root=$1 rust=$2
shift 2
mount --make-rprivate /
hostname pristine
mount --bind "$root" "$root"
cd "$root"
mount --bind "$rust" opt/rust
mount -o remount,bind,ro opt/rust
mount -t proc proc proc
mount --rbind /sys sys
mount -t devtmpfs devtmpfs dev
mkdir -p dev/pts dev/shm old
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
mount -t tmpfs -o mode=755 tmpfs run
mkdir run/lock
# Where this machine has no udev, any user may open /dev/fuse all the same, as on a machine that has it.
if [[ -e dev/fuse ]]; then
    mknod -m 666 run/fuse c 10 229
    mount --bind run/fuse dev/fuse
fi
pivot_root . old
exec chroot . /usr/bin/env -i "$@"
END
cat >"$root/root/inside.sh" <<'END'
set -uo pipefail
umount -l /old && rmdir /old
cd /root/becket
code=0
for command in "$@"; do
    printf '\npristine: %s\n' "$command"
    begin=$SECONDS
    bash -c "$command"
    code=$?
    printf 'pristine: `%s` ended with %d after %d s\n' "$command" "$code" $((SECONDS - begin))
    ((code == 0)) || break
done
# Loop devices outlive the container; those over files of this root are nobody else's.
losetup --list --noheadings --output NAME,BACK-INO,BACK-FILE | while read -r name inode file; do
    [[ $(stat -c %i -- "$file" 2>/dev/null) == "$inode" ]] || continue
    echo "pristine: $name was left over $file"
    losetup --detach "$name"
done
exit "$code"
END
unshare --mount --propagation private --pid --fork --kill-child --uts --ipc \
    bash "$work/enter.sh" "$root" "$(rustc --print sysroot)" "${environment[@]}" \
    bash /root/inside.sh "${commands[@]}"
say "all ${#commands[@]} commands ended well"

#!/usr/bin/env bash
# Installs, upgrades and removes becket's Debian packages on minimal Debian 12 and 13 root file systems, the
# upgrade below a device that is written and compared the whole time. The kernel and /dev are this machine's.
set -euo pipefail

say() { printf 'try-packages: %s\n' "$*"; }
die() { printf 'try-packages: %s\n' "$*" >&2; exit 1; }
usage() {
    cat <<END
Usage: scripts/try-packages.sh [BECKET] [SUITE]...

Needs root, mmdebstrap, lintian and about 1 GB below /var/tmp.
BECKET is a command that is built [default: target/release/becket]; SUITE is bookworm or trixie [default: both].
END
}
case ${1:-} in -h | --help) usage; exit 0 ;; esac
((EUID == 0)) || die "this must run as root: it makes root file systems and attaches devices"
cd "$(dirname "$0")/.."
becket=${1:-target/release/becket}
shift || true
suites=("$@")
((${#suites[@]})) || suites=(bookworm trixie)
for tool in mmdebstrap lintian unshare; do command -v "$tool" >/dev/null || die "$tool is not installed"; done

work=$(mktemp -d /var/tmp/becket-packages-XXXXXX)
chmod 755 "$work"
trap 'rm -rf --one-file-system "$work"' EXIT

scripts/package.sh deb "$becket" "$work/one" >/dev/null
scripts/package.sh deb "$becket" "$work/again" >/dev/null
diff -r "$work/one" "$work/again" || die "the same build made other packages the second time"
version=$("$becket" --version | cut -d' ' -f2)
scripts/package.sh deb "$becket" "$work/next" "$version+next" >/dev/null
lintian --fail-on error,warning "$work"/one/*.deb || die "lintian has objections"
say "twice the same packages, and lintian has no objection"

cat >"$work/inside.sh" <<'END'
set -euo pipefail
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm
mount -t tmpfs tmpfs /run
fail() { echo "inside: $*" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive

dpkg -i /packages/one/becket_*.deb /packages/one/becket-dbgsym_*.deb >/dev/null
dpkg -V becket || fail "installed files differ"
becket doctor >/root/doctor
head -1 /root/doctor
[[ -e /usr/share/man/man1/becket-attach.1.gz && -e /lib/systemd/system/becket.socket ]] || fail "files are missing"

truncate -s 64M /root/image
device=$(becket attach --via fuse --name load /root/image)
trap 'becket detach load >/dev/null 2>&1 || true' EXIT
server() { becket doctor --json | sed -n '/"server"/,/}/ s/.*"pid": \([0-9]*\).*/\1/p'; }
before=$(server)
worker() { becket doctor --json | sed -n '/"server"/,/}/ s/.*"worker_pid": \([0-9]*\).*/\1/p'; }
worker_before=$(worker)

# Writes a new pattern to each MiB in turn and reads it back; the number of rounds goes to /root/rounds.
load() {
    local round=0 at
    while [[ ! -e /root/stop ]]; do
        at=$((round % 64))
        head -c 1M /dev/urandom >/root/pattern.$at
        dd if=/root/pattern.$at of="$device" bs=1M seek=$at oflag=direct conv=notrunc,fsync status=none ||
            { echo "write $round" >>/root/errors; }
        dd if="$device" bs=1M skip=$at count=1 iflag=direct status=none | cmp - /root/pattern.$at ||
            { echo "read $round" >>/root/errors; }
        round=$((round + 1))
        echo $round >/root/rounds.new && mv /root/rounds.new /root/rounds
    done
}
load &
loader=$!
rounds() { cat /root/rounds 2>/dev/null || echo 0; }
for _ in {1..600}; do (($(rounds) > 5)) && break; sleep 0.1; done
(($(rounds) > 5)) || fail "$(rounds) rounds of the load in a minute"
dpkg -i /packages/next/becket_*.deb /packages/next/becket-dbgsym_*.deb >/dev/null
for _ in {1..600}; do
    after=$(server || true)
    [[ -n $after && $after != "$before" ]] && break
    sleep 0.1
done
[[ -n $after && $after != "$before" ]] || fail "the server was not replaced: $before, $after"
at=$(rounds)
for _ in {1..600}; do (($(rounds) > at + 5)) && break; sleep 0.1; done
(($(rounds) > at + 5)) || fail "the load does not go on after the upgrade"
touch /root/stop
wait $loader
[[ ! -s /root/errors ]] || fail "$(wc -l </root/errors) errors: $(head -3 /root/errors)"
echo "inside: server $before -> $after, worker $worker_before -> $(worker), $(rounds) rounds, 0 errors"

if dpkg -r becket becket-dbgsym >/dev/null 2>/root/refusal; then fail "removed below a device"; fi
grep -q 'devices are attached: load' /root/refusal || fail "$(cat /root/refusal)"
[[ $(becket list | awk 'NR > 1 { print $1 }') == load ]] || fail "the refusal took the device away"
becket detach load
for at in /root/pattern.*; do
    dd if=/root/image bs=1M skip="${at##*.}" count=1 status=none | cmp - "$at" || fail "lost: $at"
done
dpkg --purge becket becket-dbgsym >/dev/null 2>&1
left=$(find / -xdev -path '*becket*' -not -path '/packages*' -not -path '/root*' -not -path '/run*' -not -path '/proc*' -not -path '/var/log*')
[[ -z $left ]] || fail "left behind: $left"
echo "inside: removed, nothing is left"
END

mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
    awk '$2 == "bookworm" && !found { print $1; found = 1 }')
[[ -n $mirror ]] || die "the apt sources of this machine do not name Debian's bookworm"
{
    apt-config dump Acquire | grep -E '^Acquire::(http|https|Check-)' || true
    echo 'Acquire::Retries "5";'
} >"$work/apt.conf"
for suite in "${suites[@]}"; do
    root=$work/$suite
    unshare --mount mmdebstrap --quiet --mode=root --variant=minbase --format=directory --include=mount,fuse3 \
        --aptopt="$work/apt.conf" "$suite" "$root" "$mirror"
    mkdir "$root/packages"
    cp -r "$work/one" "$work/next" "$root/packages/"
    cp "$work/inside.sh" "$root/root/inside.sh"
    unshare --mount --propagation private --pid --fork --kill-child --uts --ipc \
        chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin bash /root/inside.sh ||
        die "$suite: failed"
    say "$suite: installed, upgraded below a load, removed"
    rm -rf --one-file-system "$root"
done

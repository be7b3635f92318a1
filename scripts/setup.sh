#!/usr/bin/env bash
# Installs the Debian packages that building, testing and the demo need, and that are missing here.
# Safe to run again; touches no apt source of the machine.
set -euo pipefail

# What is built and tested with. libclang and other heavy things are left out on purpose.
packages=(
    gcc libc6-dev make pkg-config           # a linker for cargo, and this Makefile
    e2fsprogs fdisk gdisk util-linux mount  # mke2fs, sfdisk, sgdisk, losetup, mount
    util-linux-extra                        # fincore
    xfsprogs btrfs-progs dosfstools         # file systems of the tests
    ntfs-3g exfatprogs exfat-fuse           # file systems of Windows, made and filled
    f2fs-tools udftools                     # file systems that becket only names
    jfsutils reiserfsprogs bcache-tools
    squashfs-tools fio strace procps kmod   # the demo's SquashFS, fio --verify, tracing, depmod
    git sqlite3                             # loads of the campaign
    fuse3                               # images as files, for users who are not root
    genisoimage erofs-utils mtools lvm2     # images inside images, made by the real tools
    cryptsetup-bin qemu-utils               # dm-crypt on top; image locks beside QEMU's
    nbdkit libnbd-bin python3-libnbd        # foreign NBD servers and clients
    gnutls-bin                              # certificates for tests of TLS
    nginx-light openssl                     # a foreign web server, with TLS
    docker-registry python3-venv            # a registry of containers; moto, a server of S3, see below
    mmdebstrap debian-archive-keyring       # the guest's root file system
    systemd                                 # systemd-analyze, for the units
    prometheus                              # scrapes becket's metrics; promtool checks them
    lintian                                 # Debian's rules for packages
    xz-utils zstd tabix                     # compressed images; tabix brings bgzip
    ceph-mon ceph-osd ceph-common librbd1   # a cluster for tests: scripts/ceph.sh
    radosgw                                 # S3 of that cluster
    python3-jsonschema                      # whether --json prints what its schema says
    bzip2 lz4 lzip lzop                     # compressed files that becket only recognises,
    zip unzip p7zip-full cpio               # and archives, unpacked by the commands in its hints
)
qemu_needed=10

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

command -v dpkg-query >/dev/null || die "this needs Debian 12 or later (dpkg is not here)"

# From PyPI, because no distribution has it. Tests look for it here.
moto=$(dirname "$0")/../target/moto
install_moto() {
    [[ -x $moto/bin/moto_server ]] && return
    say "installing moto"
    python3 -m venv "$moto" && "$moto/bin/pip" -q install 'moto[s3,server]'
}

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null || true)
    [[ $status == ii* ]] || missing+=("$package")
done

qemu_major() {
    local version
    version=$(qemu-system-x86_64 --version 2>/dev/null) || { echo 0; return; }
    [[ $version =~ version\ ([0-9]+) ]] && echo "${BASH_REMATCH[1]}" || echo 0
}
qemu_missing=no
(($(qemu_major) >= qemu_needed)) || qemu_missing=yes

# The guide's program in Go; any Go will do.
command -v go >/dev/null || missing+=(golang-go)

if ((${#missing[@]} == 0)) && [[ $qemu_missing == no ]]; then
    install_moto
    say "every Debian package that becket's tests and demo need is installed"
    exit 0
fi

root=()
if ((EUID != 0)); then
    command -v sudo >/dev/null || die "root is needed to install: ${missing[*]} (run this as root)"
    root=(sudo)
fi
apt_get() {
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0 -o Acquire::Retries=3 "$@"
}

if ((${#missing[@]} > 0)); then
    say "installing ${missing[*]}"
    apt_get update
    apt_get install --no-install-recommends "${missing[@]}"
fi

if [[ $qemu_missing == yes ]]; then
    # Debian 12's own QEMU (7.2) dies with two emulated CPUs in the guest's code patching; its backports have
    # 10. They are read through a sources list of our own, so the machine's stays as it is.
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    options=()
    if [[ $codename == bookworm ]]; then
        mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
            awk -v suite="$codename" '$2 == suite && !found { print $1; found = 1 }')
        [[ -n $mirror ]] || die "the apt sources of this machine do not name $codename"
        private=$(mktemp -d)
        trap 'rm -rf "$private"' EXIT
        chmod 755 "$private"
        mkdir -p "$private/lists/partial" "$private/empty"
        for suite in "$codename" "$codename-backports"; do
            echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main"
        done >"$private/sources.list"
        options=(
            -o "Dir::Etc::sourcelist=$private/sources.list" -o "Dir::Etc::sourceparts=$private/empty"
            -o "Dir::State::lists=$private/lists" -o Acquire::Languages=none
            -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
            -o APT::Sandbox::User=root -t "$codename-backports"
        )
    fi
    say "installing QEMU $qemu_needed or later"
    apt_get "${options[@]}" update
    apt_get "${options[@]}" install --no-install-recommends qemu-system-x86
    (($(qemu_major) >= qemu_needed)) || die "the archive's QEMU is older than $qemu_needed"
fi
install_moto
say "done"

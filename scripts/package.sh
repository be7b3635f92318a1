#!/usr/bin/env bash
# Makes packages of a becket that is built: `make deb`, `make tarball`. Every file has the time of the last
# commit, so the same build makes the same packages, byte for byte.
set -euo pipefail

die() { printf 'package: %s\n' "$*" >&2; exit 1; }
usage() { echo "Usage: scripts/package.sh deb|tarball BECKET OUT [VERSION]" >&2; exit 2; }

(($# == 3 || $# == 4)) || usage
kind=$1 becket=$(realpath "$2") out=$3
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
{ [[ -x $becket && -f $becket.debug ]] && readelf -SW "$becket" | grep gnu_debuglink >/dev/null; } ||
    die "$2 or $2.debug is missing, or still in one file: run \`make build\`"
version=${4:-$("$becket" --version | cut -d' ' -f2)}

# The last commit says when, and by whom; where there is none (an unpacked archive), the environment does.
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || echo 0)}"
export SOURCE_DATE_EPOCH TZ=UTC LC_ALL=C
if [[ -n ${DEBEMAIL:-} ]]; then
    maintainer="${DEBFULLNAME:-becket} <$DEBEMAIL>"
else
    maintainer=$(git log -1 --format='%an <%ae>' 2>/dev/null || true)
    [[ -n $maintainer ]] || die "who makes this? set DEBFULLNAME and DEBEMAIL"
fi

mkdir -p "$out"
out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022

same_times() { find "$1" -depth -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +; }
install_to() { make --no-print-directory -s install BECKET="$becket" DESTDIR="$1" PREFIX=/usr; }
bill() { scripts/bill-of-materials.py "$version" >"$1"; }

make_tarball() {
    local name=becket-$version-$(uname -m)
    install_to "$work/$name" >/dev/null
    install -D -m 644 -t "$work/$name/usr/share/doc/becket" README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE
    bill "$work/$name/usr/share/doc/becket/becket.cdx.json"
    same_times "$work/$name"
    tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --format=gnu -cf - "$name" |
        xz -6 -T1 >"$out/$name.tar.xz"
    echo "$out/$name.tar.xz"
}

# control PACKAGE, with further fields from standard input
control() {
    local root=$work/$1 size
    size=$(du -k -s --apparent-size "$root" | cut -f1)
    mkdir -p "$root/DEBIAN"
    {
        printf 'Package: %s\nSource: becket\nVersion: %s\nArchitecture: %s\n' "$1" "$version" "$architecture"
        printf 'Maintainer: %s\nInstalled-Size: %s\n' "$maintainer" "$size"
        cat
    } | sed "$([[ $1 == becket ]] && echo /^Source/d)" >"$root/DEBIAN/control"
    (cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
}

pack() {
    same_times "$work/$1"
    # $2: how hard it is compressed. Debug information is large, and few fetch it.
    dpkg-deb --root-owner-group -Zxz -z"${2:-6}" --build "$work/$1" "$out/$1_${version}_$architecture.deb" >/dev/null
    echo "$out/$1_${version}_$architecture.deb"
}

make_deb() {
    local architecture doc build_id path
    architecture=$(dpkg --print-architecture)
    doc=$work/becket/usr/share/doc/becket
    install_to "$work/becket" >/dev/null
    if [[ -e $work/becket/usr/libexec/becket/becket-rbd ]]; then
        make_rbd
        rm -r "$work/becket/usr/libexec"
    fi
    find "$work/becket/usr/share/man" -type f -exec gzip -9n {} +
    install -D -m 644 -t "$doc" dist/debian/copyright
    install -D -m 644 CHANGELOG.md "$doc/NEWS"
    bill "$doc/becket.cdx.json"
    {
        printf 'becket (%s) unstable; urgency=medium\n\n  * See NEWS for what is new.\n\n' "$version"
        printf ' -- %s  %s\n' "$maintainer" "$(date -R -d "@$SOURCE_DATE_EPOCH")"
    } | gzip -9n >"$doc/changelog.gz"
    gzip -9n "$doc/NEWS" "$doc/becket.cdx.json"
    install -D -m 644 dist/debian/lintian-overrides "$work/becket/usr/share/lintian/overrides/becket"
    control becket <<END
Depends: init-system-helpers (>= 1.54~)
Recommends: fuse3
Suggests: becket-rbd
Section: admin
Priority: optional
Description: attach disk images as block devices
 becket is the Linux loop device rebuilt in user space. It attaches raw,
 qcow2, VMDK, VDI, VHD, VHDX and compressed images, partitions and images
 inside images over the best path that the kernel has: ublk,
 device-mapper, the loop driver or FUSE.
 .
 Devices go on while their server is replaced, also by an upgrade of
 this package.
END
    install -m 755 -t "$work/becket/DEBIAN" dist/debian/postinst dist/debian/prerm dist/debian/postrm
    pack becket

    build_id=$(readelf -n "$becket" | awk '/Build ID:/ { print $3 }')
    [[ -n $build_id ]] || die "$becket has no build id"
    path=$work/becket-dbgsym/usr/lib/debug/.build-id/${build_id::2}/${build_id:2}.debug
    install -D -m 644 "$becket.debug" "$path"
    mkdir -p "$work/becket-dbgsym/usr/share/doc"
    ln -s becket "$work/becket-dbgsym/usr/share/doc/becket-dbgsym"
    control becket-dbgsym <<END
Depends: becket (= $version)
Section: debug
Priority: optional
Auto-Built-Package: debug-symbols
Build-Ids: $build_id
Description: debug symbols for becket
END
    pack becket-dbgsym 1
}

# What reaches Ceph needs libraries that few machines want: a package of its own.
make_rbd() {
    local libc
    mkdir -p "$work/becket-rbd/usr/libexec/becket" "$work/becket-rbd/usr/share/doc"
    cp -p "$work/becket/usr/libexec/becket/becket-rbd" "$work/becket-rbd/usr/libexec/becket/"
    ln -s becket "$work/becket-rbd/usr/share/doc/becket-rbd"
    libc=$(objdump -T "$work/becket-rbd/usr/libexec/becket/becket-rbd" |
        grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1 | sed 's/GLIBC_//')
    control becket-rbd <<END
Depends: becket (= $version), librbd1, librados2, libgcc-s1, libc6 (>= ${libc:-2.36})
Section: admin
Priority: optional
Description: images of Ceph clusters for becket
 With this package, becket attaches and reads images of a Ceph cluster
 (rbd:POOL/IMAGE) by librbd, in a process of its own.
END
    pack becket-rbd
}

case $kind in
deb) make_deb ;;
tarball) make_tarball ;;
*) usage ;;
esac

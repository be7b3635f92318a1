#!/usr/bin/env bash
# Reads the test images of e2fsprogs and btrfs-progs, most of them damaged on purpose, with becket.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: scripts/corpora.sh [BECKET]

Gets the Debian sources of e2fsprogs and btrfs-progs into target/corpora, once, and goes through their test images:

- ls -R and cp -r of each image, as it is, end within 20 s with status 0 or 1: no crash, no endless work;
- of ext images that e2fsck can repair, what cp -r takes out is what the kernel shows, or a sentence says what
  becket does not support.

Needs root, e2fsprogs, apt and its archive. BECKET is target/release/becket if not given. Ends with 1 if anything
went wrong.
HELP
}

die() { echo "corpora: $*" >&2 && exit 1; }
[[ ${1:-} == -h || ${1:-} == --help ]] && usage && exit
cd "$(dirname "$0")/.."
becket=$(realpath "${1:-target/release/becket}")
[[ -x $becket ]] || die "there is no $becket: make build"
[[ $(id -u) == 0 ]] || die "mounting needs root"

corpora=$PWD/target/corpora
get() {
    compgen -G "$corpora/$1-*/" >/dev/null && return
    mkdir -p "$corpora/lists/partial" "$corpora/sources"
    # The archive that this machine has its packages from, asked for their sources.
    { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
        sed -n 's/^deb /deb-src /p' >"$corpora/sources/all.list"
    { cat /etc/apt/sources.list.d/*.sources 2>/dev/null || true; } |
        sed 's/^Types:.*/Types: deb-src/' >"$corpora/sources/all.sources"
    local apt=(apt-get -qq -o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$corpora/sources"
        -o "Dir::State::Lists=$corpora/lists" -o APT::Sandbox::User=root)
    # An archive of others that does not answer is none that is needed.
    "${apt[@]}" update || true
    (cd "$corpora" && "${apt[@]}" source --download-only "$1")
    mkdir -p "$corpora/$1-source"
    tar -xf "$corpora/$1"_*.orig.tar.?z -C "$corpora/$1-source"
}
get e2fsprogs
get btrfs-progs

work=$(mktemp -d)
trap 'mountpoint -q "$work/m" && umount "$work/m"; rm -rf "$work"' EXIT
mkdir "$work/m"
cd "$work"
images=0 compared=0 unsupported=0 wrong=0
bad() { echo "$*" && wrong=$((wrong + 1)); }

# as_it_is NAME: any answer will do, but it must be one.
as_it_is() {
    local status words
    images=$((images + 1))
    for words in 'ls -R' 'cp -r --force --tar /dev/null'; do
        status=0
        # shellcheck disable=SC2086
        timeout 20 "$becket" $words a.img/. >said 2>&1 || status=$?
        ((status <= 1)) || bad "$1: $words ends with $status: $(tail -n 1 said)"
    done
}

# repaired NAME: what the kernel shows of it is what becket takes out.
repaired() {
    e2fsck -fy a.img >said 2>&1 || true
    e2fsck -fn a.img >said 2>&1 || return 0
    mount -o ro,loop,noload a.img m 2>said || return 0
    rm -rf out && mkdir out
    if "$becket" cp -r -p a.img/. out >said 2>&1; then
        compared=$((compared + 1))
        # What the kernel itself cannot read is compared with nothing.
        LC_ALL=C diff -r --no-dereference m out 2>&1 | grep -v '^diff: m/\| while file ' >differ || true
        [[ ! -s differ ]] || bad "$1: $(head -n 1 differ)"
    elif grep -q 'not supported\|no space left' said; then
        unsupported=$((unsupported + 1))
    else
        bad "$1: $(head -n 1 said)"
    fi
    umount m
}

while read -r file; do
    gzip -dc "$file" >a.img && as_it_is "$(basename "$(dirname "$file")")"
    repaired "$(basename "$(dirname "$file")")"
done < <(find "$corpora/e2fsprogs-source" -name image.gz | sort)
while read -r file; do
    xz -dc "$file" >a.img && as_it_is "$(basename "$file")"
done < <(find "$corpora/btrfs-progs-source" -name '*.raw.xz' -o -name '*.img.xz' | sort)

echo "$images images, $wrong wrong; of those that e2fsck repairs $compared are as the kernel shows them, \
and $unsupported have something that becket names as not supported"
((images > 200 && compared > 100 && wrong == 0))

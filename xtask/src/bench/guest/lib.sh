# What every benchmark needs, in the guest and on the host. Expects REPORT.
set -u

say() { printf '%s\n' "$*"; }
section() { printf '@@ %s\n' "$*" >>"$REPORT"; }
fail() {
    say "bench: $*"
    exit 1
}

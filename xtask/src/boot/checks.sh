# What every script of checks has; each `test` line is a case for CI.
code=0
check() { # NAME COMMAND...: a case
    local name=$1 said
    shift
    if said=$("$@" 2>&1); then
        echo "test boot::$name ... ok"
    else
        printf '%s\n' "$said"
        echo "test boot::$name ... FAILED"
        code=1
    fi
}
within() { # SECONDS COMMAND...: until it succeeds
    local until=$((SECONDS + $1))
    shift
    until "$@"; do ((SECONDS < until)) || return; sleep 0.1; done
}

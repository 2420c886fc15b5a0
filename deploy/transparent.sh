#!/bin/sh
# Redirects outgoing connections of this machine, container or network namespace to the sidecar's
# transparent way in (sidecar.transparent), and takes that back.
#
#   deploy/transparent.sh up --exclude-uid UID [--port 15001] [--ports 80,443,8000]
#   deploy/transparent.sh down
#
# The sidecar must run as the excluded user: its own connections would come back to it otherwise.
# Both commands may be repeated. They only touch the chain RIDEALONG of the table nat, and one rule in
# OUTPUT that leads there. Needs root (CAP_NET_ADMIN). Connections to the loopback interface are left
# alone.
set -eu

CHAIN=RIDEALONG
MAX_PORTS=15 # Of the multiport match.

usage() {
    sed -n '5,6s/^# *//p' "$0" >&2
    exit 2
}

fail() {
    echo "transparent.sh: $1" >&2
    exit 2
}

number() {
    case $2 in
    '' | *[!0-9]*) fail "$1 $2: give a number" ;;
    esac
}

# An IPv6 stack may be missing where the program is there.
tools() {
    for tool in iptables ip6tables; do
        if command -v "$tool" >/dev/null && "$tool" -w -t nat -L OUTPUT -n >/dev/null 2>&1; then
            echo "$tool"
        fi
    done
}

down() {
    while "$1" -w -t nat -D OUTPUT -p tcp -j "$CHAIN" 2>/dev/null; do :; done
    "$1" -w -t nat -F "$CHAIN" 2>/dev/null || true
    "$1" -w -t nat -X "$CHAIN" 2>/dev/null || true
}

# The rule in OUTPUT comes last, so that nothing is redirected by half a set of rules.
up() {
    "$1" -w -t nat -N "$CHAIN" &&
        "$1" -w -t nat -A "$CHAIN" -m owner --uid-owner "$uid" -j RETURN &&
        "$1" -w -t nat -A "$CHAIN" -o lo -j RETURN &&
        "$1" -w -t nat -A "$CHAIN" -p tcp -m multiport --dports "$ports" \
            -j REDIRECT --to-ports "$port" &&
        "$1" -w -t nat -A OUTPUT -p tcp -j "$CHAIN"
}

[ $# -ge 1 ] || usage
action=$1
shift
uid= port=15001 ports=80,443,8000
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || usage
    case $1 in
    --exclude-uid) uid=$2 ;;
    --port) port=$2 ;;
    --ports) ports=$2 ;;
    *) usage ;;
    esac
    shift 2
done

found=$(tools)
case $action in
up)
    [ -n "$uid" ] || fail "name the user that the sidecar runs as: --exclude-uid UID"
    case $uid in *[!0-9]*) uid=$(id -u "$uid" 2>/dev/null) || fail "there is no such user" ;; esac
    number --port "$port"
    for one in $(echo "$ports" | tr , ' '); do number --ports "$one"; done
    [ "$(echo "$ports" | tr , '\n' | wc -l)" -le "$MAX_PORTS" ] || fail "at most $MAX_PORTS ports"
    case $found in
    iptables*) ;;
    *) fail "iptables can't be used here: install it, and run this as root" ;;
    esac
    for tool in $found; do
        down "$tool"
        if ! up "$tool"; then
            for each in $found; do down "$each"; done
            fail "$tool refused a rule; nothing is redirected"
        fi
    done
    ;;
down)
    for tool in $found; do down "$tool"; done
    ;;
*) usage ;;
esac

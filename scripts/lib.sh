# Sourced by the scripts beside it: where things are, and how to talk.
# shellcheck shell=bash

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

# CI runners may start us without a home, a terminal or cargo on the PATH.
export HOME=${HOME:-$(getent passwd "$(id -u)" 2>/dev/null | cut -d: -f6)}
export HOME=${HOME:-/root}
export PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin:/usr/local/sbin:/usr/sbin:/sbin
export LC_ALL=C.UTF-8 CARGO_TERM_PROGRESS_WHEN=${CARGO_TERM_PROGRESS_WHEN:-never}

# Everything of the demo and the tests; removed by `make clean`.
STATE=$ROOT/.keiki
# Kernels and root disks, shared by demo, tests and benchmarks.
export KEIKI_IMAGE_CACHE=${KEIKI_IMAGE_CACHE:-$STATE/cache}
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
# What scripts/build.sh leaves: keiki and keiki-guest.
OUT=$TARGET/keiki
mkdir -p "$STATE"

say() { printf '%s\n' "$*"; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# A file that lets a step be skipped while its inputs are the same: fresh STAMP INPUT...
fresh() {
    local stamp=$STATE/$1.stamp
    shift
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(sha256sum "$@" | sha256sum | cut -d' ' -f1)" ]
}
stamp() {
    local name=$1
    shift
    sha256sum "$@" | sha256sum | cut -d' ' -f1 >"$STATE/$name.stamp.new"
    mv "$STATE/$name.stamp.new" "$STATE/$name.stamp"
}

# Runs a command with its output in a log; shows the log's end only if it fails: quietly LOG COMMAND...
quietly() {
    local log=$STATE/$1.log
    shift
    if ! "$@" >"$log" 2>&1 </dev/null; then
        tail -n 25 "$log" >&2
        return 1
    fi
}

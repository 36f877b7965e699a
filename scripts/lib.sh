# Sourced by the scripts beside it: where things are, and how to talk.
# shellcheck shell=bash

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

# CI runners may start us without a home, a terminal or cargo on the PATH.
export HOME=${HOME:-$(getent passwd "$(id -u)" 2>/dev/null | cut -d: -f6)}
export HOME=${HOME:-/root}
export PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin:/usr/local/sbin:/usr/sbin:/sbin
# Incremental builds help people who change code; elsewhere they cost disk and time.
[ -z "${CI:-}" ] || export CARGO_INCREMENTAL=0
export LC_ALL=C.UTF-8 CARGO_TERM_PROGRESS_WHEN=${CARGO_TERM_PROGRESS_WHEN:-never}

# Everything of the demo and the tests; removed by `make clean`.
STATE=$ROOT/.keiki
# Kernels and root disks, shared by demo, tests and benchmarks.
export KEIKI_IMAGE_CACHE=${KEIKI_IMAGE_CACHE:-$STATE/cache}
TARGET=${CARGO_TARGET_DIR:-$ROOT/target}
# What scripts/build.sh leaves: keiki, keiki-vmm and keiki-guest.
OUT=$TARGET/keiki
# What tests run.
OUT_DEV=$TARGET/keiki-dev
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

# Every program that tests need, the end to end tests among them. Cargo is always asked for the whole workspace: for some
# packages alone it chooses other features, and compiles what they need once more.
build_dev() { cargo build --locked "$@" --workspace --bins --examples --target-dir "$TARGET"; }

# The programs that cargo makes of all tests of a package, or of a test or benchmark of it: built test|bench PACKAGE [NAME]
# A benchmark is optimised, as what users run is.
built() {
    local profile=dev
    [ "$1" != bench ] || profile=bench
    cargo "$1" --locked -q --profile "$profile" --workspace ${3:+"--$1" "$3"} --no-run --message-format json-render-diagnostics |
        sed -n "s/.*\"package_id\":\"[^\"]*#$2@.*\"overflow_checks\":[a-z]*,\"test\":true.*\"executable\":\"\([^\"]*\)\".*/\1/p"
}

# Mounts an XFS image on a directory until the shell ends.
with_reflinks() {
    local image=$1.xfs
    rm -f "$image"
    truncate -s 8G "$image"
    mkfs.xfs -q -m reflink=1 "$image"
    mount -o loop "$image" "$1"
    # shellcheck disable=SC2064
    trap "umount '$1' && rm -f '$image'" EXIT
}

# A node on its own data below .keiki/NAME and a free port, stopped with everything it made when the script ends:
# start_node NAME DIRECTORY-OF-PROGRAMS
start_node() {
    local home=$STATE/$1 bin=$2
    # The path of a socket must be short.
    NODE_RUN=$(mktemp -d /tmp/keiki.XXXXXX)
    NODE_PID=
    trap stop_node EXIT
    mkdir -p "$home"
    "$bin/keiki" node --data-dir "$home/data" --run-dir "$NODE_RUN/r" --cache-dir "$KEIKI_IMAGE_CACHE" \
        --guest-binary "$bin/keiki-guest" --listen 127.0.0.1:0 --port-file "$NODE_RUN/port" --store-gib "${KEIKI_STORE_GIB:-8}" \
        --slot-range "${KEIKI_SLOT_RANGE:-10.211.0.0/16}" --ephemeral </dev/null >"$home/node.out" 2>"$home/node.log" &
    NODE_PID=$!
    local tries=0
    until [ -s "$NODE_RUN/port" ]; do
        kill -0 "$NODE_PID" 2>/dev/null || { tail -n 5 "$home/node.log" >&2; die "the node did not start"; }
        tries=$((tries + 1))
        [ "$tries" -lt 600 ] || die "the node does not listen; see $home/node.log"
        sleep 0.1
    done
    KEIKI_URL=http://127.0.0.1:$(cat "$NODE_RUN/port")
    export KEIKI_URL
}

stop_node() {
    trap - EXIT
    if [ -n "${NODE_PID:-}" ]; then
        kill -TERM "$NODE_PID" 2>/dev/null || true
        wait "$NODE_PID" || true
        NODE_PID=
    fi
    rm -rf "${NODE_RUN:?}"
}

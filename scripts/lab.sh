#!/usr/bin/env bash
# The kvm engine with real Linux guests: in the lab, or here where KVM runs guests at the processor's speed.
#
#   scripts/lab.sh e2e [FILTER...]      the end to end tests
#   scripts/lab.sh engine [FILTER...]   the engine's own tests, and the monitor's of memory limits
#   scripts/lab.sh all                  both
#   scripts/lab.sh bench                ratios of two things of one run, into bench-lab.json
#
# Built before: scripts/build.sh dev, and the parts of the base template in the image cache. Logs: .keiki/lab/out/.
# KEIKI_LAB says where: `always` in the lab, `never` here, unset wherever KVM is native.
. "$(dirname "$0")/lib.sh"

# Emulated machines are slow: seconds after which the lab is ended.
LIMIT=${KEIKI_LAB_LIMIT:-3000}
# Guest instructions a second that only hardware reaches; keiki's own probe has the same.
NATIVE=100000000

native() {
    local speed
    case ${KEIKI_LAB:-} in
    always) return 1 ;;
    never) return 0 ;;
    esac
    speed=$("$OUT_DEV/keiki-vmm" --probe 2>/dev/null | cut -d' ' -f3)
    [ "${speed:-0}" -ge "$NATIVE" ]
}

# in_lab OPTION... -- COMMAND...
in_lab() {
    cargo xtask lab --limit "$LIMIT" --out "$LAB_OUT" --put "$OUT_DEV:bin" "$@"
}

# Where what a part leaves is found: out PART
out() {
    LAB_OUT=$STATE/lab/out/$1
    rm -rf "$LAB_OUT"
    mkdir -p "$LAB_OUT"
}

run_e2e() {
    local name
    out e2e
    build_dev -q
    if native; then
        KEIKI_ENGINE=kvm KEIKI_E2E_BIN=$OUT_DEV KEIKI_E2E_CACHE=$KEIKI_IMAGE_CACHE KEIKI_E2E_DIR=$STATE/e2e-kvm \
            "$TARGET/debug/keiki-e2e" "$@"
        return
    fi
    # What tests build in there, which has no network.
    for name in own code-interpreter; do
        "$TARGET/debug/examples/build" "$KEIKI_IMAGE_CACHE" "$OUT_DEV/keiki-guest" "$name" e2e/templates
    done
    # shellcheck disable=SC2016 # for the shell in there
    in_lab --cache --put "$TARGET/debug/keiki-e2e" --env KEIKI_ENGINE=kvm --env KEIKI_E2E_BIN=/lab/in/bin \
        --env KEIKI_E2E_CACHE=/lab/cache --env KEIKI_E2E_DIR=/store/e2e --env KEIKI_E2E_KEEP_LOGS=1 --env KEIKI_E2E_PATIENCE=6 \
        --env KEIKI_E2E_CLOCK=1 -- \
        bash -c './keiki-e2e "$@"; status=$?; cp /store/e2e/*/node.log /lab/out/ --backup=numbered; exit $status' e2e "$@"
}

# with_guests KIND PACKAGE/NAME... -- SCRIPT ARG...: programs that make their own guests, in tests/, and the monitor in bin/.
with_guests() {
    local kernel here=$STATE/lab/guests kind=$1 name program
    shift
    rm -rf "$here"
    mkdir -p "$here/tests" "$here/kernel/boot"
    while [ "$1" != -- ]; do
        name=${1#*/}
        program=$(built "$kind" "${1%/*}" "$name")
        [ -n "$program" ] || die "the $kind $name was not built"
        ln -s "$program" "$here/tests/$name"
        shift
    done
    shift
    kernel=$(dirname "$(find "$KEIKI_IMAGE_CACHE/kernel" -name vmlinuz | head -n 1)")
    ln -s "$kernel/vmlinuz" "$here/kernel/boot/vmlinuz-test"
    if native; then
        ln -s "$kernel/lib" "$here/kernel/lib"
        ln -s "$OUT_DEV" "$here/bin"
        guests_here "$here" "$@"
    else
        guests_in_lab "$here" "$kernel/lib" "$@"
    fi
}

# In a shell of its own, whose end unmounts the store.
guests_here() (
    mkdir -p "$1/store"
    with_reflinks "$1/store"
    cd "$1"
    shift
    KEIKI_ENGINE=kvm KEIKI_TEST_VMM=$OUT_DEV/keiki-vmm KEIKI_TEST_KERNEL_DIR=$PWD/kernel KEIKI_TEST_STORE=$PWD/store \
        KEIKI_BENCH_LAB=$LAB_OUT/bench-lab.json bash -c "$@"
)

guests_in_lab() {
    local here=$1 modules=$2 options=() program
    shift 2
    for program in "$here"/tests/*; do
        options+=(--put "$(readlink "$program"):tests/$(basename "$program")")
    done
    in_lab "${options[@]}" --put "$(readlink "$here/kernel/boot/vmlinuz-test"):kernel/boot/vmlinuz-test" \
        --put "$modules:kernel/lib" --env KEIKI_ENGINE=kvm --env KEIKI_TEST_VMM=/lab/in/bin/keiki-vmm \
        --env KEIKI_TEST_KERNEL_DIR=/lab/in/kernel --env KEIKI_TEST_STORE=/store \
        --env KEIKI_BENCH_LAB=/lab/out/bench-lab.json -- bash -c "$@"
}

run_engine() {
    out engine
    # The monitor's own test has the path of the monitor that cargo built for it.
    # shellcheck disable=SC2016 # for the shell in there
    with_guests test keiki-engine/{fork,snapshot,hostile,adopt,jail,linux,kvm} keiki-vmm/memory -- '
        monitor=$1; shift
        [ -e "$monitor" ] || { mkdir -p "$(dirname "$monitor")" && cp bin/keiki-vmm "$monitor"; }
        status=0
        for test in tests/*; do "$test" --test-threads 1 "$@" || status=1; done
        exit $status' engine "$TARGET/debug/keiki-vmm" "$@"
}

run_bench() {
    out bench
    with_guests bench keiki-engine/ratios -- tests/ratios
    cp "$LAB_OUT/bench-lab.json" bench-lab.json
    say "bench: see bench-lab.json"
}

main() {
    local what=${1:-}
    [ $# -eq 0 ] || shift
    case $what in
    e2e) run_e2e "$@" ;;
    engine) run_engine "$@" ;;
    all)
        local status=0
        run_engine || status=1
        run_e2e || status=1
        return "$status"
        ;;
    bench) run_bench ;;
    *) die "no such part: e2e, engine, all or bench" ;;
    esac
}

main "$@"

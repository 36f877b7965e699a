#!/usr/bin/env bash
# The kvm engine with real Linux guests: in the lab, or here where KVM runs guests at the processor's speed.
#
#   scripts/lab.sh e2e [FILTER...]      the end to end tests
#   scripts/lab.sh engine [FILTER...]   the engine's own tests
#   scripts/lab.sh all                  both
#   scripts/lab.sh bench                ratios of two things of one run, into bench-lab.json
#
# Built before: scripts/build.sh dev, and the parts of the base template in the image cache. Logs: .keiki/lab/out/.
. "$(dirname "$0")/lib.sh"

# Emulated machines are slow: seconds after which the lab is ended.
LIMIT=${KEIKI_LAB_LIMIT:-3000}
# Guest instructions a second that only hardware reaches; keiki's own probe has the same.
NATIVE=100000000

native() {
    local speed
    [ "${KEIKI_LAB:-}" != always ] || return 1
    speed=$("$OUT_DEV/keiki-vmm" --probe 2>/dev/null | cut -d' ' -f3)
    [ "${speed:-0}" -ge "$NATIVE" ]
}

# The program that cargo makes of a test or benchmark of the engine: built test|bench NAME
built() {
    cargo "$1" --locked --profile dev -p keiki-engine "--$1" "$2" --no-run --message-format json 2>/dev/null |
        sed -n "s/.*\"name\":\"$2\".*\"executable\":\"\\([^\"]*\\)\".*/\\1/p" | tail -n 1
}

# in_lab OPTION... -- COMMAND...
in_lab() {
    # The part that runs.
    LAB_OUT=$STATE/lab/out/${FUNCNAME[1]}
    rm -rf "$LAB_OUT"
    cargo xtask lab --limit "$LIMIT" --out "$LAB_OUT" --put "$OUT_DEV:bin" "$@"
}

run_e2e() {
    cargo build --locked -q -p keiki-e2e
    if native; then
        KEIKI_ENGINE=kvm KEIKI_E2E_BIN=$OUT_DEV KEIKI_E2E_CACHE=$KEIKI_IMAGE_CACHE KEIKI_E2E_DIR=$STATE/e2e-kvm \
            "$TARGET/debug/keiki-e2e" "$@"
        return
    fi
    # shellcheck disable=SC2016 # for the shell in there
    in_lab --cache --put "$TARGET/debug/keiki-e2e" --env KEIKI_ENGINE=kvm --env KEIKI_E2E_BIN=/lab/in/bin \
        --env KEIKI_E2E_CACHE=/lab/cache --env KEIKI_E2E_DIR=/store/e2e --env KEIKI_E2E_KEEP_LOGS=1 --env KEIKI_E2E_PATIENCE=6 -- \
        bash -c './keiki-e2e "$@"; status=$?; cp /store/e2e/*/node.log /lab/out/ --backup=numbered; exit $status' e2e "$@"
}

# with_guests KIND NAME... -- SCRIPT ARG...: programs that make their own guests, in tests/.
with_guests() {
    local kernel options=() kind=$1 name program
    shift
    while [ "$1" != -- ]; do
        name=$1
        program=$(built "$kind" "$name")
        [ -n "$program" ] || die "the engine's $kind $name was not built"
        options+=(--put "$program:tests/$name")
        shift
    done
    shift
    kernel=$(dirname "$(find "$KEIKI_IMAGE_CACHE/kernel" -name vmlinuz | head -n 1)")
    in_lab "${options[@]}" --put "$kernel/vmlinuz:kernel/boot/vmlinuz-test" --put "$kernel/lib:kernel/lib" \
        --env KEIKI_ENGINE=kvm --env KEIKI_TEST_VMM=/lab/in/bin/keiki-vmm --env KEIKI_TEST_KERNEL_DIR=/lab/in/kernel \
        --env KEIKI_TEST_STORE=/store --env KEIKI_BENCH_LAB=/lab/out/bench-lab.json -- bash -c "$@"
}

run_engine() {
    # shellcheck disable=SC2016 # for the shell in there
    with_guests test fork snapshot hostile adopt jail -- \
        'status=0; for test in tests/*; do "$test" --test-threads 1 "$@" || status=1; done; exit $status' engine "$@"
}

run_bench() {
    with_guests bench ratios -- tests/ratios
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

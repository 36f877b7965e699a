#!/usr/bin/env bash
# The kvm engine with real Linux guests: in the lab, or here where KVM runs guests at the processor's speed.
#
#   scripts/lab.sh e2e [FILTER...]      the end to end tests
#   scripts/lab.sh engine [FILTER...]   the engine's own tests, and the monitor's of memory limits and of stored machines
#   scripts/lab.sh all                  both, in machines beside each other where there are processors and memory for them
#   scripts/lab.sh bench                ratios of two things of one run, into bench-lab.json
#   scripts/lab.sh release              one of them alone: what the release gate is of a create; the others stay
#
# Built before: scripts/build.sh dev, and the parts of the base template in the image cache; what is measured is what
# users run, and built here. Logs: .keiki/lab/out/.
# KEIKI_LAB says where: `always` in the lab, `never` here, unset wherever KVM is native.
. "$(dirname "$0")/lib.sh"

# Emulated machines are slow: seconds after which the lab is ended.
LIMIT=${KEIKI_LAB_LIMIT:-5000}
# What an emulated machine takes of this one's memory, in MiB.
MACHINE_MIB=8192
# What is measured of the release gate.
RELEASE=release,release_step,release_share,create_first_exec
# So many machines share the end to end tests.
E2E_PARTS=2
# The programs that a machine runs.
PROGRAMS=$OUT_DEV
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
    # Tests of the other engine are not for here.
    cargo xtask lab --limit "$LIMIT" --out "$LAB_OUT" --put "$PROGRAMS:bin" \
        --env KEIKI_TEST_STRICT="${KEIKI_TEST_STRICT:-}" --env KEIKI_TEST_WITHOUT=engine "$@"
}

# Where what a part leaves is found: out PART
out() {
    LAB_OUT=$STATE/lab/out/$1
    rm -rf "$LAB_OUT"
    mkdir -p "$LAB_OUT"
}

# What the end to end tests need that is made out here, where there is a network.
prepare_e2e() {
    local name
    build_dev -q
    for name in code-interpreter own services; do
        build_template "$name" e2e/templates
    done
    build_template prefork examples/prefork
}

build_template() {
    "$TARGET/debug/examples/build" "$KEIKI_IMAGE_CACHE" "$OUT_DEV/keiki-guest" "$@"
}

# part_of_e2e K/N [FILTER...]
part_of_e2e() {
    local part=$1 program
    shift
    program=$(built test keiki-e2e e2e)
    out "e2e-${part%/*}"
    # shellcheck disable=SC2016 # for the shell in there
    in_lab --cache --put "$program:e2e" --put examples --put sdk/python/src:sdk/python/src \
        --env KEIKI_ENGINE=kvm --env KEIKI_E2E_BIN=/lab/in/bin --env KEIKI_E2E_CACHE=/lab/cache \
        --env KEIKI_E2E_DIR=/store/e2e --env KEIKI_E2E_KEEP_LOGS=1 --env KEIKI_E2E_PATIENCE=6 --env KEIKI_E2E_CLOCK=1 \
        --env KEIKI_E2E_PART="$part" --env KEIKI_E2E_ONLY="$*" --env KEIKI_E2E_PASSED=/lab/out/passed -- \
        bash -c './e2e --ignored --test-threads 1; status=$?; cp /store/e2e/*/node.log /lab/out/ --backup=numbered; exit $status'
}

run_e2e() {
    if native; then
        KEIKI_ENGINE=kvm KEIKI_E2E_BIN=$OUT_DEV KEIKI_E2E_CACHE=$KEIKI_IMAGE_CACHE KEIKI_E2E_DIR=$STATE/e2e-kvm \
            KEIKI_E2E_ONLY="$*" "$(built test keiki-e2e e2e)" --ignored --test-threads 1
        return
    fi
    prepare_e2e
    part_of_e2e 1/1 "$@"
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
        ln -s "$PROGRAMS" "$here/bin"
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
    KEIKI_ENGINE=kvm KEIKI_TEST_VMM=$PROGRAMS/keiki-vmm KEIKI_TEST_KERNEL_DIR=$PWD/kernel KEIKI_TEST_STORE=$PWD/store \
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
    # Not those of the other engine alone. The monitor's own test has the path of the monitor that cargo built for it.
    # shellcheck disable=SC2016 # for the shell in there
    with_guests test keiki-engine/{kvm,net,adopt,fork,snapshot,linux} keiki-vmm/{memory,stored} -- '
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
    run_release
    say "bench: see bench-lab.json"
}

# What the release gate is of a create, on a node: added to bench-lab.json.
run_release() {
    local known=()
    if native; then
        KEIKI_ENGINE=kvm start_node bench-lab "$PROGRAMS"
        "$PROGRAMS/keiki" template build base --memory 256
        "$PROGRAMS/keiki" bench --only "$RELEASE" --into bench-lab.json
        stop_node
        return
    fi
    out release
    [ ! -e bench-lab.json ] || known=(--put bench-lab.json)
    # shellcheck disable=SC2016 # for the shell in there
    in_lab --cache --put scripts "${known[@]}" --env KEIKI_IMAGE_CACHE=/lab/cache -- bash -c '
        . scripts/lib.sh
        STATE=/store
        KEIKI_ENGINE=kvm start_node bench /lab/in/bin
        exec 2>/lab/out/progress
        bin/keiki template build base --memory 256
        bin/keiki bench --only "$1" --into bench-lab.json
        stop_node
        cp bench-lab.json /store/bench/node.log /lab/out/' bench "$RELEASE"
    cp "$LAB_OUT/bench-lab.json" bench-lab.json
}

# How many machines have a processor and memory here.
room() {
    local cpus memory
    cpus=$(nproc)
    memory=$(($(awk '$1 == "MemAvailable:" { print $2 }' /proc/meminfo) / 1024 / MACHINE_MIB))
    [ "$memory" -lt "$cpus" ] || memory=$cpus
    say "$((memory > 0 ? memory : 1))"
}

# All parts, each in a machine of its own, so many at a time as there is room for. All are run, whatever fails.
run_machines() {
    local part status=0 logs=$STATE/lab/logs parts=(engine) room
    prepare_e2e
    room=$(room)
    for ((part = 1; part <= E2E_PARTS; part++)); do parts+=("e2e-$part"); done
    rm -rf "$logs"
    mkdir -p "$logs"
    say "lab: ${parts[*]}, $room at a time; what they say is in $logs meanwhile"
    # Each is a group of processes, to be ended with all it started.
    set -m
    trap 'for part in $(jobs -p); do kill -- "-$part" 2>/dev/null || true; done; wait; exit 130' INT TERM
    for part in "${parts[@]}"; do
        while [ "$(jobs -rp | wc -l)" -ge "$room" ]; do wait -n || true; done
        run_part "$part" "$logs" &
    done
    wait
    trap - INT TERM
    set +m
    for part in "${parts[@]}"; do
        say "== $part"
        cat "$logs/$part"
    done
    for part in "${parts[@]}"; do
        read -r took ended <"$logs/$part.end"
        printf '%-8s %-8s %5s s\n' "$part" "$([ "$ended" = 0 ] && say ok || say FAILED)" "$took"
        [ "$ended" = 0 ] || status=1
    done
    return "$status"
}

# run_part NAME LOGS: how long it took and how it ended is in NAME.end.
run_part() {
    local started=$SECONDS ended=0
    case $1 in
    engine) (run_engine) ;;
    e2e-*) (part_of_e2e "${1#e2e-}/$E2E_PARTS") ;;
    esac </dev/null >"$2/$1" 2>&1 || ended=$?
    say "$((SECONDS - started)) $ended" >"$2/$1.end"
    say "lab: $1 ended with $ended after $((SECONDS - started)) s"
}

main() {
    local what=${1:-}
    [ $# -eq 0 ] || shift
    case $what in
    e2e) run_e2e "$@" ;;
    engine) run_engine "$@" ;;
    all)
        native || { run_machines; return; }
        local status=0
        run_engine || status=1
        run_e2e || status=1
        return "$status"
        ;;
    bench | release)
        scripts/build.sh
        PROGRAMS=$OUT
        "run_$what"
        ;;
    *) die "no such part: e2e, engine, all, bench or release" ;;
    esac
}

main "$@"

#!/usr/bin/env bash
# Coverage-guided fuzzing with the project's own compiler: libFuzzer only needs LLVM's instrumentation, which has
# flags. Inputs that add coverage stay below .keiki/fuzz/TARGET for the next run; fuzz/seeds does not change.
#
#   scripts/fuzz.sh                          every target, one minute each
#   scripts/fuzz.sh -s 3600 device state     these targets, one hour each
#   scripts/fuzz.sh -r device FILE...        run a target on these inputs
#   scripts/fuzz.sh -m device                copy inputs that add coverage into fuzz/seeds; review before you commit
. "$(dirname "$0")/lib.sh"

TARGETS=(control device frozen layer state)
TRIPLE=$(uname -m)-unknown-linux-gnu
BUILT=$TARGET/fuzz/$TRIPLE/release
# An input that takes more seconds or more MiB than this is a finding.
SLOW=20
MEMORY=2048
# Longer inputs find nothing new, and slow down the search.
LONGEST=4096
# Seeds should be readable by people.
SEED_BYTES=512

build() {
    # libFuzzer itself is C++.
    have c++ || have g++ || die "libFuzzer needs a C++ compiler: install g++"
    local flags=(-Cpasses=sancov-module -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks --cfg fuzzing) option
    for option in level=4 inline-8bit-counters pc-table trace-compares; do
        flags+=("-Cllvm-args=-sanitizer-coverage-$option")
    done
    # With a triple, build scripts are not instrumented.
    RUSTFLAGS="${flags[*]}" cargo build --locked -q --release --manifest-path fuzz/Cargo.toml --target "$TRIPLE" \
        --target-dir "$TARGET/fuzz" "${TARGETS[@]/#/--bin=}"
}

# run TARGET OPTION...
run() {
    local target=$1
    shift
    [ -x "$BUILT/$target" ] || die "no such target: $target (expected one of: ${TARGETS[*]})"
    "$BUILT/$target" -timeout=$SLOW -rss_limit_mb=$MEMORY -max_len=$LONGEST "$@"
}

fuzz() {
    local target=$1 seconds=$2 corpus=$STATE/fuzz/$1
    mkdir -p "$corpus" "$STATE/fuzz/found"
    if ! run "$target" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix="$STATE/fuzz/found/$target-" \
        "$corpus" "fuzz/seeds/$target" >"$STATE/fuzz/$target.log" 2>&1 </dev/null; then
        tail -n 40 "$STATE/fuzz/$target.log" >&2
        die "$target: failing input; see .keiki/fuzz/found and .keiki/fuzz/$target.log"
    fi
    # libFuzzer's counts: code covered, features seen, size of the corpus.
    say "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$STATE/fuzz/$target.log") executions," \
        "$(sed -n 's/.*\(cov: [0-9]* ft: [0-9]* corp: [0-9]*\).*/\1/p' "$STATE/fuzz/$target.log" | tail -n 1)"
}

merge() {
    local target=$1 small=$STATE/fuzz/small file
    rm -rf "$small"
    mkdir -p "$small"
    find "$STATE/fuzz/$target" -type f -size -"$((SEED_BYTES + 1))"c -exec cp -t "$small" {} +
    run "$target" -set_cover_merge=1 "fuzz/seeds/$target" "$small" 2>&1 </dev/null | grep '^MERGE-OUTER' | tail -n 1
}

main() {
    local what=fuzz seconds=60 target option failed=0
    while getopts s:rm option; do
        case $option in
        s) seconds=$OPTARG ;;
        r) what=run ;;
        m) what=merge ;;
        *) die "usage: see the top of the script" ;;
        esac
    done
    shift $((OPTIND - 1))
    build
    if [ "$what" = run ]; then
        run "$@"
        return
    fi
    [ $# -gt 0 ] || set -- "${TARGETS[@]}"
    for target in "$@"; do
        ("$what" "$target" "$seconds") || failed=1
    done
    return "$failed"
}

main "$@"

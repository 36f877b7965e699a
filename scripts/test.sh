#!/usr/bin/env bash
# Every test and gate; what CI runs. Stages go on after a failure, so that one run shows all of them.
#
#   scripts/test.sh          all stages
#   scripts/test.sh STAGE... some of them
#   KEIKI_TEST_ALL=1         the long ones too
#   KEIKI_TEST_NEED_KVM=1    a test that finds no KVM fails instead of skipping itself; set where there is /dev/kvm
. "$(dirname "$0")/lib.sh"

[ ! -e /dev/kvm ] || export KEIKI_TEST_NEED_KVM=${KEIKI_TEST_NEED_KVM-1}
STAGES=(setup fmt tidy deny clippy build unit template guests e2e lab conformance sdk)
# Neighbours that run beside each other: one of them waits much, for the network or for its guests, and none measures.
BESIDE=('unit template' 'conformance sdk')
LOGS=$STATE/logs
PASSED=0 FAILED=0
declare -A RESULT TIME
mkdir -p "$LOGS"

stage_setup() { scripts/setup.sh; }
stage_fmt() { cargo fmt --all --check; }
stage_tidy() { cargo xtask tidy; }
stage_clippy() {
    cargo clippy --locked --workspace --all-targets -- -D warnings
    # Without the fuzzer, which is C++ (scripts/fuzz.sh). What the targets do with the seeds is among the unit tests.
    cargo clippy --locked --manifest-path fuzz/Cargo.toml --no-default-features --target-dir "$TARGET/fuzz" -- -D warnings
}
stage_build() { scripts/build.sh dev; }

stage_deny() {
    if ! cargo deny --version >/dev/null 2>&1; then
        say "skipped: cargo-deny is not installed; bans, licences and sources were not checked"
        return 0
    fi
    cargo deny --offline check bans licenses sources
}

stage_unit() { run_tests --workspace; }

# The parts that every real guest needs, made once and shared by all tests. Cargo, which other stages may hold, comes last.
stage_template() {
    # Its output is kept apart: others read from this stage's which parts there are.
    local build=$TARGET/debug/examples/build program
    quietly code-interpreter "$build" "$KEIKI_IMAGE_CACHE" "$OUT_DEV/keiki-guest" code-interpreter
    "$build" "$KEIKI_IMAGE_CACHE" "$OUT_DEV/keiki-guest"
    program=$(built test keiki-image build)
    KEIKI_TEST_IMAGE=1 KEIKI_TEST_CACHE=$KEIKI_IMAGE_CACHE "$program"
}

# The engine and the agent by themselves, each with real guests.
stage_guests() {
    local parts=$LOGS/template.log store=$STATE/guests package=$STATE/guests/kernel kernel program programs status=0
    # `build` names the parts it made: kernel RELEASE PATH, initramfs PATH, rootfs PATH.
    kernel=$(awk '$1 == "kernel" && $3 ~ "^/" { print $3 }' "$parts")
    mkdir -p "$store"
    with_reflinks "$store"
    mkdir -p "$package/boot"
    cp "$kernel" "$package/boot/vmlinuz-test"
    ln -sfn "$(dirname "$kernel")/lib" "$package/lib"
    programs=$(built test keiki-engine)
    for program in $programs; do
        KEIKI_TEST_KERNEL_DIR=$package KEIKI_TEST_STORE=$store KEIKI_TEST_VMM=$OUT_DEV/keiki-vmm \
            "$program" --test-threads 2 || status=1
    done
    program=$(built test keiki-guest real_guest)
    KEIKI_TEST_KERNEL=$kernel KEIKI_TEST_INITRD=$(awk '$1 == "initramfs" { print $2 }' "$parts") \
        KEIKI_TEST_DISK=$(awk '$1 == "rootfs" && $2 ~ "^/" { print $2 }' "$parts") TMPDIR=$store \
        timeout 300 "$program" --ignored --test-threads 1 || status=1
    return "$status"
}

# Two nodes, each with a test at a time: most tests wait much. What measures runs by itself in the end.
stage_e2e() {
    build_dev -q
    ${KEIKI_TEST_ALL:+env KEIKI_E2E_LONG=1} env KEIKI_E2E_LANES="${KEIKI_E2E_LANES:-2}" KEIKI_E2E_BIN=$OUT_DEV KEIKI_E2E_CACHE=$KEIKI_IMAGE_CACHE KEIKI_E2E_DIR=$STATE/e2e \
        "$TARGET/debug/keiki-e2e" ${KEIKI_E2E_FILTER:-}
}

# Our own monitor with real Linux guests: a few tests here, all of them with `make test-lab`.
stage_lab() { KEIKI_LAB_LIMIT=${KEIKI_LAB_LIMIT:-360} scripts/lab.sh e2e ${KEIKI_LAB_FILTER:-state::memory lifecycle::paused lineage::a_fork_of_a_fork clones::identity clones::hooks clones::connections clones::secrets memory::}; }
stage_lab-all() { scripts/lab.sh all; }

# The committed document against a live node: 100 seconds of it, or ten minutes.
stage_conformance() {
    local schemathesis=$STATE/venv-conformance/bin/schemathesis
    if ! "$schemathesis" --version >/dev/null 2>&1; then
        rm -rf "$STATE/venv-conformance"
        python3 -m venv "$STATE/venv-conformance"
        "$STATE/venv-conformance/bin/pip" install -q --disable-pip-version-check schemathesis
    fi
    start_node conformance "$OUT_DEV"
    "$OUT_DEV/keiki" template build base
    python3 openapi/conformance/run.py "$schemathesis" "$KEIKI_URL" ${KEIKI_TEST_ALL:+600}
    stop_node
}

stage_sdk() {
    [ -d sdk/python ] || { say "skipped: sdk/python is not there"; return 0; }
    local python=$STATE/venv/bin/python
    if ! "$python" -c 'import pytest, httpx, mypy, ruff' 2>/dev/null; then
        rm -rf "$STATE/venv"
        python3 -m venv "$STATE/venv"
        "$python" -m pip install -q --disable-pip-version-check pytest httpx mypy ruff
    fi
    "$python" -m ruff check -q sdk/python
    "$python" -m ruff format -q --check sdk/python
    KEIKI_BIN=$OUT_DEV/keiki KEIKI_GUEST=$OUT_DEV/keiki-guest KEIKI_TEST_DIR=$STATE/sdk "$python" -m pytest -q sdk/python
}

# nextest where it is installed: it runs tests beside each other and names the slow ones.
run_tests() {
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run --locked --no-fail-fast --no-tests=pass --status-level fail --final-status-level slow "$@"
    else
        say "cargo-nextest is not installed: using cargo test"
        cargo test --locked --no-fail-fast "$@"
    fi
}

# Adds up what nextest, cargo test and pytest say of themselves; a stage without tests counts as one.
count() {
    local log=$1 ok=$2 sums
    sums=$(sed 's/\x1b\[[0-9;]*m//g' "$log" | awk '
        /^ *Summary \[/ || /^test result:/ || /^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$/ || /^(=+ )?[0-9]+ (passed|failed).* in [0-9.]+s/ {
            for (i = 2; i <= NF; i++) {
                if ($i ~ /^passed/) pass += $(i - 1)
                if ($i ~ /^failed/) fail += $(i - 1)
            }
        }
        END { print pass + 0, fail + 0 }')
    local pass=${sums% *} fail=${sums#* }
    if [ "$ok" = 0 ] && [ "$fail" = 0 ] && [ "$pass" = 0 ]; then
        grep -q '^skipped: ' "$log" || pass=1
    fi
    if [ "$ok" != 0 ] && [ "$fail" = 0 ]; then fail=1; fi
    PASSED=$((PASSED + pass)) FAILED=$((FAILED + fail))
    COUNTED="$pass passed, $fail failed"
}

# Which stages run with this one, itself among them: beside STAGE ALL...
beside() {
    local stage=$1 together
    shift
    for together in "${BESIDE[@]}"; do
        # Nodes beside each other need networks of their own: not where one is given. Nor what is not to run any more.
        if [[ -z $broken && -z ${KEIKI_SLOT_RANGE:-} && " $together " == *" $stage "* && " $* " == *" $together "* ]]; then
            stage=$together
        fi
    done
    say "$stage"
}

# A stage, or several at the same time; what these say comes one after the other.
run_stages() {
    local stage started=$SECONDS ok
    # In a shell of its own, so that a failing command ends the stage and nothing else. Where the caller looks at the
    # outcome with `if` or `||`, -e would be off in there too.
    if [ $# = 1 ]; then
        say "== $1"
        (set -e; "stage_$1") </dev/null 2>&1 | tee "$LOGS/$1.log"
        settle "$1" "$started" "${PIPESTATUS[0]}"
        return
    fi
    local -A pid=()
    say "== $*, beside each other"
    # Each is a group of processes, to be interrupted like one in the foreground.
    set -m
    for stage in "$@"; do
        (set -e; "stage_$stage") </dev/null >"$LOGS/$stage.log" 2>&1 &
        pid[$stage]=$!
    done
    set +m
    trap 'for stage in "${!pid[@]}"; do kill -INT -- "-${pid[$stage]}" 2>/dev/null || true; done; wait; exit 130' INT TERM
    for stage in "$@"; do
        wait "${pid[$stage]}"
        ok=$?
        say "== $stage"
        cat "$LOGS/$stage.log"
        settle "$stage" "$started" "$ok"
    done
    trap - INT TERM
}

# What became of a stage: settle STAGE STARTED STATUS
settle() {
    local stage=$1 log=$LOGS/$1.log started=$2 ok=$3
    count "$log" "$ok"
    TIME[$stage]=$((SECONDS - started))
    RESULT[$stage]=$([ "$ok" = 0 ] && printf 'ok' || printf 'FAILED')
    if [ "$ok" = 0 ] && grep -q '^skipped: ' "$log"; then RESULT[$stage]=skipped; fi
    say "== $stage: ${RESULT[$stage]}, $COUNTED, ${TIME[$stage]} s"
    return "$ok"
}

skip_stage() {
    RESULT[$1]="FAILED (needs $2)" TIME[$1]=0
    FAILED=$((FAILED + 1))
    say "== $1: not run, $2 failed"
}

main() {
    local stage broken='' started=$SECONDS
    [ $# -gt 0 ] || set -- "${STAGES[@]}"
    for stage in "$@"; do
        declare -F "stage_$stage" >/dev/null || die "no stage $stage: ${STAGES[*]}"
    done
    for stage in "$@"; do
        case "$broken:$stage" in
        :* | *:fmt | *:tidy | *:deny | *:clippy | *:unit) ;;
        *)
            skip_stage "$stage" "$broken"
            continue
            ;;
        esac
        set +e
        if [ -z "${RESULT[$stage]:-}" ]; then
            # shellcheck disable=SC2046 # one word a stage
            run_stages $(beside "$stage" "$@")
        fi
        set -e
        # Real guests need all of these.
        [ "${RESULT[$stage]}" != FAILED ] || case $stage in setup | build | template) broken=$stage ;; esac
    done
    say
    for stage in "$@"; do
        printf '%-10s %-8s %5s s\n' "$stage" "${RESULT[$stage]}" "${TIME[$stage]}"
    done
    say "$PASSED passed, $FAILED failed in $((SECONDS - started)) s"
    [ "$FAILED" = 0 ]
}

main "$@"

#!/usr/bin/env bash
# The demo: sets up, builds, starts a node of its own on a free port, bakes the base template the first time, and
# lets `keiki demo` tell the story. What was finished stays finished: an interrupted run goes on, a second takes
# seconds.
. "$(dirname "$0")/lib.sh"

scripts/setup.sh
[ -x "$OUT/keiki" ] || say "demo: building (the first time takes minutes)"
scripts/build.sh
start_node demo "$OUT"
"$OUT/keiki" template build base
"$OUT/keiki" demo "$@" | tee "$STATE/demo.out"
stop_node
# The demo's own last words, after the node is gone and everything is removed.
grep -q '^demo: ok' "$STATE/demo.out"

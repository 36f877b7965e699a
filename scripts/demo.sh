#!/usr/bin/env bash
# The demo: sets up, builds, starts a private node on a free port, bakes the base template the first time, and runs
# `keiki demo`. An interrupted run continues where it stopped; a second run takes seconds.
. "$(dirname "$0")/lib.sh"

scripts/setup.sh
[ -x "$OUT/keiki" ] || say "demo: building (the first time takes minutes)"
scripts/build.sh
start_node demo "$OUT"
"$OUT/keiki" template build base
"$OUT/keiki" demo "$@" | tee "$STATE/demo.out"
stop_node
# Checked last, after the node has exited and everything is removed.
grep -q '^demo: ok' "$STATE/demo.out"

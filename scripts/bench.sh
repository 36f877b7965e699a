#!/usr/bin/env bash
# Measures this machine into bench.json, on a node of its own.
. "$(dirname "$0")/lib.sh"

scripts/setup.sh
scripts/build.sh
start_node bench "$OUT"
"$OUT/keiki" template build base
"$OUT/keiki" bench -o json "$@" >bench.json.new
mv bench.json.new bench.json
stop_node
say "bench: see bench.json"

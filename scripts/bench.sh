#!/usr/bin/env bash
# Measures this machine and leaves bench.json.
. "$(dirname "$0")/lib.sh"

scripts/setup.sh
scripts/build.sh
"$OUT/keiki" bench -o json "$@" >bench.json.new
mv bench.json.new bench.json
say "bench: see bench.json"

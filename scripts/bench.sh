#!/usr/bin/env bash
# Measures this machine into bench.json, on a private node, and draws docs/benchmarks.svg. Arguments go to
# `keiki bench`, which then replaces the full run.
. "$(dirname "$0")/lib.sh"

# RAM of the guests in MiB: most of them, and the one that holds a model of 1 GiB.
GUEST=256 MODEL_GUEST=1536

scripts/setup.sh
scripts/build.sh
# The store holds a model, its forks and their base.
KEIKI_STORE_GIB=${KEIKI_STORE_GIB:-16}
start_node bench "$OUT"
"$OUT/keiki" template build base --memory "$GUEST"
if [ $# -gt 0 ]; then
    "$OUT/keiki" bench --into bench.json "$@"
else
    rm -f bench.json
    # A measurement that fails is printed and in the report; the rest continues.
    ok=0
    "$OUT/keiki" bench --only create,exec,fork,memory,snapshot,boot --into bench.json >/dev/null || ok=$?
    "$OUT/keiki" template build base --memory "$MODEL_GUEST"
    "$OUT/keiki" bench --only model --into bench.json --chart docs/benchmarks.svg || ok=$?
fi
stop_node
[ "${ok:-0}" = 0 ] || exit "$ok"
say "bench: see bench.json"

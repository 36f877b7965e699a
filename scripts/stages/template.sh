#!/usr/bin/env bash
# The parts that every real guest needs, made once and shared by all tests. Cargo, which other stages may hold, comes last.
. "$(dirname "$0")/../lib.sh"

# Its output is kept apart: others read from this stage's which parts there are.
build=$TARGET/debug/examples/build
quietly code-interpreter "$build" "$KEIKI_IMAGE_CACHE" "$OUT_DEV/keiki-guest" code-interpreter
"$build" "$KEIKI_IMAGE_CACHE" "$OUT_DEV/keiki-guest" | tee "$STATE/parts"
program=$(built test keiki-image build)
KEIKI_TEST_IMAGE=1 KEIKI_TEST_CACHE=$KEIKI_IMAGE_CACHE "$program"

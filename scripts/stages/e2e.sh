#!/usr/bin/env bash
# The end to end tests on real guests: all, or those whose names contain a word of KEIKI_E2E_ONLY.
. "$(dirname "$0")/../lib.sh"

export KEIKI_E2E_BIN=$OUT_DEV KEIKI_E2E_CACHE=$KEIKI_IMAGE_CACHE KEIKI_E2E_DIR=$STATE/e2e
exec "$(built test keiki-e2e e2e)" --ignored --test-threads "${KEIKI_E2E_LANES:-2}"

#!/usr/bin/env bash
# The demo: sets up, builds, then `keiki demo` does the rest on a data directory of its own.
. "$(dirname "$0")/lib.sh"

scripts/setup.sh
say "demo: building (the first time takes minutes)"
scripts/build.sh
exec "$OUT/keiki" demo --data-dir "$STATE/demo" "$@"

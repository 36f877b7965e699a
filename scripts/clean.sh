#!/usr/bin/env bash
# Removes what was built, and the data of demo and tests. Refuses while something there is mounted: a node that
# runs has its store there.
. "$(dirname "$0")/lib.sh"

if grep -qF " $STATE/" /proc/self/mounts; then
    die "a node's store under .keiki is still mounted: stop the node first"
fi
cargo clean -q
rm -rf "$STATE" bench.json

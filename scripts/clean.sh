#!/usr/bin/env bash
# Removes build output, and the data of the demo and the tests. Fails while a node's store is mounted there.
. "$(dirname "$0")/lib.sh"

if grep -qF " $STATE/" /proc/self/mounts; then
    die "a node's store under .keiki is still mounted: stop the node first"
fi
cargo clean -q
rm -rf "$STATE" bench.json

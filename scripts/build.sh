#!/usr/bin/env bash
# Builds keiki and the guest agent into target/keiki/. The guest is static: it runs as PID 1 of any root disk.
. "$(dirname "$0")/lib.sh"

TRIPLE=$(uname -m)-unknown-linux-gnu
mkdir -p "$OUT"

# put FILE: into place at once, so that a running copy keeps its file.
put() {
    cmp -s "$1" "$OUT/$(basename "$1")" && return
    cp "$1" "$OUT/.$(basename "$1").new"
    mv "$OUT/.$(basename "$1").new" "$OUT/$(basename "$1")"
}

# guest: the agent alone; all: the agent and keiki.
RUSTFLAGS='-C target-feature=+crt-static' cargo build --locked -p keiki-guest --profile guest \
    --target "$TRIPLE" --target-dir "$TARGET/guest"
put "$TARGET/guest/$TRIPLE/guest/keiki-guest"
[ "${1:-all}" = guest ] && exit
cargo build --locked --release -p keiki-cli --target-dir "$TARGET"
put "$TARGET/release/keiki"

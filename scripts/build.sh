#!/usr/bin/env bash
# Builds keiki, its monitor and the guest agent. The guest is static: it runs as PID 1 of any root disk.
#
#   scripts/build.sh          what users run, into target/keiki/
#   scripts/build.sh dev      what tests run, into target/keiki-dev/, and what runs them: quicker to build, slower to run
#   scripts/build.sh guest    the agent alone
. "$(dirname "$0")/lib.sh"

KIND=${1:-release}
TRIPLE=$(uname -m)-unknown-linux-gnu

# put DIRECTORY FILE: into place at once, so that a running copy keeps its file.
put() {
    local name
    name=$(basename "$2")
    mkdir -p "$1"
    cmp -s "$2" "$1/$name" && return
    cp "$2" "$1/.$name.new"
    mv "$1/.$name.new" "$1/$name"
}

RUSTFLAGS='-C target-feature=+crt-static' cargo build --locked -p keiki-guest --profile guest \
    --target "$TRIPLE" --target-dir "$TARGET/guest"
GUEST=$TARGET/guest/$TRIPLE/guest/keiki-guest
RECORDER=$TARGET/guest/$TRIPLE/guest/keiki-recorder
case $KIND in
guest) put "$OUT" "$GUEST" ;;
dev)
    put "$OUT_DEV" "$GUEST"
    put "$OUT_DEV" "$RECORDER"
    build_dev
    put "$OUT_DEV" "$TARGET/debug/keiki"
    put "$OUT_DEV" "$TARGET/debug/keiki-vmm"
    ;;
release)
    put "$OUT" "$GUEST"
    cargo build --locked --release -p keiki-cli -p keiki-vmm --target-dir "$TARGET"
    put "$OUT" "$TARGET/release/keiki"
    put "$OUT" "$TARGET/release/keiki-vmm"
    ;;
*) die "no build $KIND: release, dev or guest" ;;
esac

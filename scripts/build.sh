#!/usr/bin/env bash
# Builds keiki, its monitor and the guest agent. The agent is static: it runs as PID 1 on any root disk.
#
#   scripts/build.sh          release programs, into target/keiki/
#   scripts/build.sh dev      development programs, into target/keiki-dev/, and the tests: build faster, run slower
#   scripts/build.sh guest    only the agent
. "$(dirname "$0")/lib.sh"

KIND=${1:-release}
TRIPLE=$(uname -m)-unknown-linux-gnu

# put DIRECTORY FILE: copies and renames, so that a running program keeps its file.
put() {
    local name
    name=$(basename "$2")
    mkdir -p "$1"
    cmp -s "$2" "$1/$name" && return
    cp "$2" "$1/.$name.new"
    mv "$1/.$name.new" "$1/$name"
}

# build_guest PROGRAM...
build_guest() {
    RUSTFLAGS='-C target-feature=+crt-static' cargo build --locked -p keiki-guest "${@/#/--bin=}" --profile guest \
        --target "$TRIPLE" --target-dir "$TARGET/guest"
}

GUEST=$TARGET/guest/$TRIPLE/guest/keiki-guest
RECORDER=$TARGET/guest/$TRIPLE/guest/keiki-recorder
case $KIND in
guest)
    build_guest keiki-guest
    put "$OUT" "$GUEST"
    ;;
dev)
    build_guest keiki-guest keiki-recorder
    put "$OUT_DEV" "$GUEST"
    put "$OUT_DEV" "$RECORDER"
    build_dev
    put "$OUT_DEV" "$TARGET/debug/keiki"
    put "$OUT_DEV" "$TARGET/debug/keiki-vmm"
    ;;
release)
    # The end of each build is one program that keeps one processor busy: the two fill each other's gaps.
    build_guest keiki-guest &
    guest=$!
    status=0
    cargo build --locked --release -p keiki-cli -p keiki-vmm --target-dir "$TARGET" || status=1
    wait "$guest" || status=1
    [ "$status" = 0 ] || exit 1
    put "$OUT" "$GUEST"
    put "$OUT" "$TARGET/release/keiki"
    put "$OUT" "$TARGET/release/keiki-vmm"
    ;;
*) die "not a build: $KIND (expected release, dev or guest)" ;;
esac

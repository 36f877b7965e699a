#!/usr/bin/env bash
# Installs keiki, its monitor and its guest agent under PREFIX (default /usr/local), below DESTDIR if that is set.
. "$(dirname "$0")/lib.sh"

PREFIX=${PREFIX:-/usr/local}
[ -x "$OUT/keiki" ] && [ -x "$OUT/keiki-vmm" ] && [ -x "$OUT/keiki-guest" ] || die "nothing is built yet: run scripts/build.sh"
# Strips the line tables, which are for profiling: a fifth of the size.
install -D -s -m 755 "$OUT/keiki" "${DESTDIR:-}$PREFIX/bin/keiki"
install -D -s -m 755 "$OUT/keiki-vmm" "${DESTDIR:-}$PREFIX/lib/keiki/keiki-vmm"
install -D -m 755 "$OUT/keiki-guest" "${DESTDIR:-}$PREFIX/lib/keiki/keiki-guest"
say "installed ${DESTDIR:-}$PREFIX/bin/keiki; next: keiki doctor"

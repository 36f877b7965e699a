#!/usr/bin/env bash
# The engine and the agent by themselves, each with real guests.
. "$(dirname "$0")/../lib.sh"

store=$STATE/guests package=$STATE/guests/kernel status=0
# The template's stage names the parts it made: kernel RELEASE PATH, initramfs PATH, rootfs PATH.
part() { awk -v part="$1" '$1 == part { for (i = 2; i <= NF; i++) if ($i ~ "^/") print $i }' "$STATE/parts"; }
kernel=$(part kernel)
mkdir -p "$store"
with_reflinks "$store"
mkdir -p "$package/boot"
cp "$kernel" "$package/boot/vmlinuz-test"
ln -sfn "$(dirname "$kernel")/lib" "$package/lib"
# Tests of our own monitor's engine with these guests are for the lab.
export KEIKI_TEST_WITHOUT=engine,${KEIKI_TEST_WITHOUT:-}
[ -e /dev/kvm ] || KEIKI_TEST_WITHOUT+=,kvm
programs=$(built test keiki-engine)
for program in $programs; do
    KEIKI_TEST_KERNEL_DIR=$package KEIKI_TEST_STORE=$store KEIKI_TEST_VMM=$OUT_DEV/keiki-vmm \
        "$program" --test-threads 2 || status=1
done
program=$(built test keiki-guest real_guest)
KEIKI_TEST_KERNEL=$kernel KEIKI_TEST_INITRD=$(part initramfs) KEIKI_TEST_DISK=$(part rootfs) TMPDIR=$store \
    timeout 300 "$program" --ignored --test-threads 1 || status=1
exit "$status"

#!/usr/bin/env bash
# Every test and gate; what CI runs. Sets up what compiling needs; `cargo xtask ci` does the rest (xtask/src/ci/mod.rs).
#
#   scripts/test.sh          all stages
#   scripts/test.sh STAGE... some of them
#   KEIKI_TEST_ALL=1         the long ones too
. "$(dirname "$0")/lib.sh"

case " ${*:-setup} " in *' setup '*) scripts/setup.sh ;; esac
exec cargo xtask ci "$@"

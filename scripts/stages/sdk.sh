#!/usr/bin/env bash
# The Python client: its style, and its tests against a node of their own.
. "$(dirname "$0")/../lib.sh"

python=$STATE/venv/bin/python
if ! "$python" -c 'import pytest, httpx, mypy, ruff' 2>/dev/null; then
    rm -rf "$STATE/venv"
    python3 -m venv "$STATE/venv"
    "$python" -m pip install -q --disable-pip-version-check pytest httpx mypy ruff
fi
"$python" -m ruff check -q sdk/python
"$python" -m ruff format -q --check sdk/python
# Of the whole workspace: for one package cargo chooses other features, and compiles its libraries again.
cargo build -q --locked --workspace --bin keiki-fake-node --features keiki-http/fake --target-dir "$TARGET"
export KEIKI_FAKE_NODE=$TARGET/debug/keiki-fake-node
KEIKI_BIN=$OUT_DEV/keiki KEIKI_GUEST=$OUT_DEV/keiki-guest KEIKI_TEST_DIR=$STATE/sdk "$python" -m pytest -q sdk/python

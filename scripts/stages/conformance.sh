#!/usr/bin/env bash
# The committed document against a live node: 100 seconds of it, or as many as are given.
. "$(dirname "$0")/../lib.sh"

schemathesis=$STATE/venv-conformance/bin/schemathesis
if ! "$schemathesis" --version >/dev/null 2>&1; then
    rm -rf "$STATE/venv-conformance"
    python3 -m venv "$STATE/venv-conformance"
    "$STATE/venv-conformance/bin/pip" install -q --disable-pip-version-check schemathesis
fi
start_node conformance "$OUT_DEV"
"$OUT_DEV/keiki" template build base
python3 openapi/conformance/run.py "$schemathesis" "$KEIKI_URL" "$@"
stop_node

#!/usr/bin/env python3
"""Sends a running node valid and invalid requests for its OpenAPI document, with schemathesis.

    run.py SCHEMATHESIS URL [SECONDS]

Every response must have a status that the document declares for the operation, and the declared type and schema, and
must not be a 500. Leaves the node as it was.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance,never_500,errors_are_sentences"
SPARES = 3


def call(url, method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, method=method, data=data)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def ids(url, what):
    return {item["id"] for item in call(url, "GET", f"/v1/{what}").get("items" if what == "sandboxes" else what, [])}


def main():
    schemathesis, url, seconds = os.path.abspath(sys.argv[1]), sys.argv[2].rstrip("/"), sys.argv[3] if len(sys.argv) > 3 else "100"
    before = {what: ids(url, what) for what in ("sandboxes", "snapshots")}
    try:
        sandbox = call(url, "POST", "/v1/sandboxes", {})["id"]
        known = {
            "sandbox": sandbox,
            "snapshot": call(url, "POST", f"/v1/sandboxes/{sandbox}/snapshots")["id"],
            "spare": [call(url, "POST", "/v1/sandboxes", {})["id"] for _ in range(SPARES)],
        }
        command = [
            schemathesis, "run", str(HERE.parent / "v1.json"), "--url", url, "--checks", CHECKS, "--phases",
            "examples,coverage,fuzzing", "--max-time", seconds, "--workers", "1", "--request-timeout", "60",
            "--continue-on-failure", "--no-shrink", "--max-examples", "40", "--suppress-health-check", "all",
            "--warnings", "off", "--generation-database", "none", "--no-color",
        ]
        hooks = {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HERE), "KEIKI_CONFORMANCE_IDS": json.dumps(known)}
        # Schemathesis writes files to its working directory.
        with tempfile.TemporaryDirectory() as here:
            return subprocess.run(command, env={**os.environ, **hooks}, cwd=here, check=False).returncode
    finally:
        for what, known in before.items():
            for left in ids(url, what) - known:
                call(url, "DELETE", f"/v1/{what}/{left}")


if __name__ == "__main__":
    sys.exit(main())

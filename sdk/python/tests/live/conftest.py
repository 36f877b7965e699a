"""A node for the live tests: the one at `KEIKI_URL`, else one of our own, made with the program `KEIKI_BIN`.

Our own node keeps its data in `KEIKI_TEST_DIR`, so that the template is built once for many runs, listens on
a free port, and asks for a key, so that refusals are tested too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import keiki

#: For a node to serve, and for a first build of the template under software emulation.
START_SECONDS, BUILD_SECONDS = 120, 900
#: Its network.
SLOTS = os.environ.get("KEIKI_SLOT_RANGE", "10.221.0.0/20")


@pytest.fixture(scope="session", autouse=True)
def node() -> Iterator[None]:
    """Sets `KEIKI_URL` and `KEIKI_API_KEY` for the session. Does nothing where there is no program."""
    program = os.environ.get("KEIKI_BIN")
    if os.environ.get("KEIKI_URL") or not program:
        yield
        return
    data = Path(os.environ.get("KEIKI_TEST_DIR") or tempfile.mkdtemp(prefix="keiki-sdk-")).absolute()
    data.mkdir(parents=True, exist_ok=True)
    # The path of a socket must be short.
    run = Path(tempfile.mkdtemp(prefix="kksdk-", dir="/tmp"))
    keys, port, log = run / "keys", run / "port", data / "node.log"
    key = secrets.token_hex(16)
    keys.write_text(key + "\n")
    keys.chmod(0o600)
    command = [program, "node", "--data-dir", data / "node", "--run-dir", run / "run", "--port-file", port]
    command += ["--listen", "127.0.0.1:0", "--api-key-file", keys, "--slot-range", SLOTS]
    command += ["--store-gib", "6", "--ephemeral"]
    if cache := os.environ.get("KEIKI_IMAGE_CACHE"):
        command += ["--cache-dir", cache]
    if guest := os.environ.get("KEIKI_GUEST"):
        command += ["--guest-binary", guest]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        wait_for(port.exists, process, log, START_SECONDS)
        os.environ.update(KEIKI_URL=f"http://127.0.0.1:{port.read_text().strip()}", KEIKI_API_KEY=key)
        keiki.default_client().build_template("base", timeout_seconds=BUILD_SECONDS)
        yield
        for sandbox in keiki.Sandbox.list():
            with contextlib.suppress(keiki.NotFoundError):
                sandbox.kill()
    finally:
        os.environ.pop("KEIKI_URL", None)
        os.environ.pop("KEIKI_API_KEY", None)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(run, ignore_errors=True)


def wait_for(done, process: subprocess.Popen, log: Path, seconds: float) -> None:  # type: ignore[no-untyped-def]
    """Waits until `done`; shows the end of the node's log where that does not come."""
    end = time.monotonic() + seconds
    while not done():
        if process.poll() is not None or time.monotonic() > end:
            tail = log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the node did not get ready (exit code {process.poll()}):\n{tail}")
        time.sleep(0.2)

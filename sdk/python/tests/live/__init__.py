"""Tests against a node: at `KEIKI_URL`, with the key `KEIKI_API_KEY`, and a ready template `base`.

Under pytest, `KEIKI_BIN` does instead of `KEIKI_URL`: `conftest.py` then starts a node of that program. The
tests run in real guests and may do so under software emulation, so they keep the work in the guest light.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import unittest

import keiki
from keiki import Sandbox, Snapshot

#: A process that keeps something in RAM which cost time to make, and tells it to whoever asks.
HOLDER = textwrap.dedent(
    """\
    import os, socket, hashlib
    fixtures = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(20000)]
    made_by = os.urandom(8).hex()
    asked = 0
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("/run/holder.sock")
    listener.listen()
    while True:
        peer, _ = listener.accept()
        asked += 1
        peer.sendall(f"{made_by} {len(fixtures)} {fixtures[-1][:8]} {asked}".encode())
        peer.close()
    """
)

#: Asks it. Prints: who made the state, how much, its end, and how often this copy was asked.
ASK = textwrap.dedent(
    """\
    import socket, sys, time
    for _ in range(200):
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect("/run/holder.sock")
            break
        except OSError:
            time.sleep(0.05)
    print(peer.makefile().read(), *sys.argv[1:])
    """
)


class LiveTest(unittest.TestCase):
    """Deletes what a test made, also where it fails."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        if not os.environ.get("KEIKI_URL"):
            raise unittest.SkipTest("KEIKI_URL is unset: these tests need a running node")

    def keep(self, sandbox: Sandbox) -> Sandbox:
        """Sees to it that the sandbox is gone after the test."""

        def kill() -> None:
            with contextlib.suppress(keiki.NotFoundError):
                sandbox.kill()

        self.addCleanup(kill)
        return sandbox

    def keep_snapshot(self, snapshot: Snapshot) -> Snapshot:
        """The same for a snapshot."""

        def delete() -> None:
            with contextlib.suppress(keiki.NotFoundError):
                snapshot.delete()

        self.addCleanup(delete)
        return snapshot

    def start_holder(self, sandbox: Sandbox) -> list[str]:
        """Leaves a process with state in RAM behind; returns what it says first."""
        sandbox.filesystem.write("/app/holder.py", HOLDER)
        sandbox.filesystem.write("/app/ask.py", ASK)
        sandbox.exec("setsid python3 /app/holder.py </dev/null >/tmp/holder.log 2>&1 &", check=True)
        return self.ask(sandbox)

    def ask(self, sandbox: Sandbox, *words: str) -> list[str]:
        """What the process in this copy of the machine says."""
        result = sandbox.exec(["python3", "/app/ask.py", *words], timeout_seconds=60, check=True)
        return result.stdout.split()

"""The client against `keiki-fake-node`: what needs a node but no guest. `KEIKI_FAKE_NODE` is the program."""

from __future__ import annotations

import json
import os
import subprocess
import unittest
import urllib.error
import urllib.request
from typing import Any

import keiki

NOWHERE = "00000000-0000-7000-8000-000000000000"
KEY = "the-key"


class FakeNode(unittest.TestCase):
    url: str
    client: keiki.Client

    @classmethod
    def setUpClass(cls) -> None:
        program = os.environ.get("KEIKI_FAKE_NODE")
        if not program:
            raise unittest.SkipTest("KEIKI_FAKE_NODE is unset: these tests need that program")
        process = subprocess.Popen([program, KEY], stdout=subprocess.PIPE, text=True)
        cls.addClassCleanup(process.wait)
        cls.addClassCleanup(process.terminate)
        assert process.stdout
        cls.addClassCleanup(process.stdout.close)
        cls.url = process.stdout.readline().strip()
        cls.client = keiki.Client(cls.url, api_key=KEY)
        cls.addClassCleanup(cls.client.close)

    def status_and_error(self, method: str, path: str, key: str = KEY) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{self.url}/v1{path}", method=method, headers=headers)
        with self.assertRaises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        with refused.exception as answer:
            return answer.code, json.load(answer)["error"]

    def test_keys_and_unknown_ids(self) -> None:
        for method, path in (
            ("GET", f"/sandboxes/{NOWHERE}"),
            ("DELETE", f"/sandboxes/{NOWHERE}"),
            ("POST", f"/sandboxes/{NOWHERE}/pause"),
            ("GET", f"/snapshots/{NOWHERE}"),
            ("GET", "/no/such/route"),
        ):
            status, error = self.status_and_error(method, path)
            self.assertEqual(status, 404, (method, path))
            self.assertIs(type(error), str)
        for key in ("", "wrong"):
            status, error = self.status_and_error("GET", "/sandboxes", key)
            self.assertEqual(status, 401)
            self.assertIs(type(error), str)

    def test_wrong_requests_name_the_field(self) -> None:
        with self.assertRaisesRegex(keiki.BadRequestError, "ttl_seconds"):
            keiki.Sandbox.create(ttl_seconds=0, client=self.client)
        with self.assertRaises(keiki.NotFoundError):
            keiki.Sandbox.create(template="no-such-template", client=self.client)
        with self.assertRaisesRegex(keiki.BadRequestError, "count must be from 1 to 64"):
            keiki.Sandbox.create(client=self.client).fork(count=65)

    def test_a_sandbox_from_create_to_kill(self) -> None:
        sandbox = keiki.Sandbox.create(metadata={"k": "v"}, client=self.client)
        self.assertIn(sandbox.id, [one.id for one in keiki.Sandbox.list(client=self.client)])
        sandbox.filesystem.write("/tmp/a b/\u00e9", b"\x00\xff")
        self.assertEqual(sandbox.filesystem.read("/tmp/a b/\u00e9"), b"\x00\xff")
        children = sandbox.fork(count=2)
        self.assertEqual([child.metadata for child in children], [{"k": "v"}] * 2)
        self.assertEqual(sandbox.exec("echo hello").stdout, "hello\n")
        sandbox.kill()
        with self.assertRaises(keiki.NotFoundError):
            sandbox.refresh()


if __name__ == "__main__":
    unittest.main()

"""The wire contract, checked with nothing but `http.client`: what any other client of `/v1` may rely on."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
import unittest
import urllib.parse
from dataclasses import dataclass
from typing import Any

from live import ASK, HOLDER, LiveTest


@dataclass
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def call(method: str, path: str, body: Any = None, key: str | None = None, **headers: str) -> Reply:
    """One request on a connection of its own. Without a body: `Content-Length: 0`, no type."""
    url = urllib.parse.urlsplit(os.environ["KEIKI_URL"])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=120)
    key = os.environ.get("KEIKI_API_KEY", "any") if key is None else key
    headers = {"Authorization": f"Bearer {key}", "Accept": "application/json", **headers}
    if isinstance(body, bytes):
        headers["Content-Type"] = "application/octet-stream"
    elif body is not None:
        headers["Content-Type"] = "application/json"
        body = json.dumps(body).encode()
    try:
        connection.request(method, f"{url.path.rstrip('/')}/v1{path}", body=body, headers=headers)
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read())
    finally:
        connection.close()


def stream(
    path: str, body: Any, **headers: str
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """The head of a streamed answer."""
    url = urllib.parse.urlsplit(os.environ["KEIKI_URL"])
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
    key = os.environ.get("KEIKI_API_KEY", "any")
    headers = {"Authorization": f"Bearer {key}", "Accept": "text/event-stream"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    connection.request(
        "GET" if body is None else "POST",
        f"{url.path.rstrip('/')}/v1{path}",
        body=None if body is None else json.dumps(body).encode(),
        headers=headers,
    )
    return connection, connection.getresponse()


def frames(text: bytes) -> list[tuple[str, Any]]:
    """The events of an SSE body as strict as the oldest reader: LF lines, one `data` each."""
    found = []
    for block in text.decode("ascii").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if "data" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


class Contract(LiveTest):
    def create(self, **request: Any) -> dict[str, Any]:
        reply = call("POST", "/sandboxes", {"template": "base", **request})
        self.assertEqual(reply.status, 201, reply.body)
        return self.later(reply.json)

    def later(self, sandbox: dict[str, Any]) -> dict[str, Any]:
        self.addCleanup(call, "DELETE", f"/sandboxes/{sandbox['id']}")
        return sandbox

    def exec(self, sandbox: dict[str, Any], cmd: str, **request: Any) -> str:
        reply = call("POST", f"/sandboxes/{sandbox['id']}/exec", {"cmd": cmd, **request})
        self.assertEqual(reply.status, 200, reply.body)
        self.assertEqual(reply.json["exit_code"], 0, reply.json)
        return str(reply.json["stdout"])

    def warm(self, sandbox: dict[str, Any]) -> str:
        """State in a file, in tmpfs and in the RAM of a process; returns how to ask for all three."""
        base = f"/sandboxes/{sandbox['id']}/fs?path="
        for name, text in (("holder.py", HOLDER), ("ask.py", ASK)):
            self.assertEqual(call("PUT", f"{base}/app/{name}", text.encode()).status // 100, 2)
        self.exec(sandbox, "echo disk >/app/state; echo memory >/dev/shm/state; sync")
        self.exec(sandbox, "setsid python3 /app/holder.py </dev/null >/dev/null 2>&1 &")
        return "cat /app/state /dev/shm/state; python3 /app/ask.py | cut -d' ' -f1-3"

    def test_01_create_is_ready_when_it_answers(self) -> None:
        sandbox = self.create()
        self.exec(sandbox, "true")
        self.assertIs(type(sandbox["boot_ms"]), int)
        self.assertIs(type(sandbox["cpu"]), int)
        self.assertIs(type(sandbox["memory_mb"]), int)
        self.assertIs(type(sandbox["persistent"]), bool)
        self.assertEqual((sandbox["template"], sandbox["status"]), ("base", "running"))
        self.assertIsInstance(sandbox["metadata"], dict)

    def test_02_fork_without_a_body_carries_memory_and_files(self) -> None:
        parent = self.create()
        ask = self.warm(parent)
        before = self.exec(parent, ask)
        reply = call("POST", f"/sandboxes/{parent['id']}/fork")
        self.assertEqual(reply.status // 100, 2, reply.body)
        for one in reply.json["children"]:
            self.later(one)
        self.assertEqual(len(reply.json["children"]), 1)
        self.assertEqual(reply.json["sandbox"]["id"], reply.json["children"][0]["id"])
        self.assertEqual(reply.json["parent_id"], parent["id"])
        self.assertEqual(self.exec(reply.json["sandbox"], ask), before)

    def test_03_fork_tree_and_promote(self) -> None:
        parent = self.create()
        reply = call("POST", f"/sandboxes/{parent['id']}/fork-tree", {"count": 3})
        self.assertEqual(reply.status // 100, 2, reply.body)
        children = [self.later(child) for child in reply.json["children"]]
        self.assertEqual(len({child["id"] for child in children}), 3)
        self.assertEqual(len({child["metadata"]["fork_tree_id"] for child in children}), 1)
        self.assertTrue(all(type(child["boot_ms"]) is int for child in children))
        winner, *losers = [child["id"] for child in children]
        reply = call("POST", f"/sandboxes/{winner}/promote", {"cleanup_siblings": True})
        self.assertEqual(reply.status // 100, 2, reply.body)
        self.assertEqual(reply.json["winner"], winner)
        self.assertEqual((sorted(reply.json["deleted"]), reply.json["failures"]), (sorted(losers), {}))
        statuses = [call("GET", f"/sandboxes/{id}").status for id in (parent["id"], winner, *losers)]
        self.assertEqual(statuses, [200, 200, 404, 404])

    def test_05_timeout_ends_the_command(self) -> None:
        sandbox = self.create()
        started = time.monotonic()
        reply = call("POST", f"/sandboxes/{sandbox['id']}/exec", {"cmd": "sleep 54321", "timeout_seconds": 1})
        self.assertLess(time.monotonic() - started, 5)
        self.assertEqual(reply.status, 504)
        self.assertIn("timeout", reply.json["error"].lower())
        self.assertNotIn("i/o timeout", reply.json["error"].lower())
        self.assertNotIn("54321", self.exec(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))

    def test_06_streamed_output_is_exact(self) -> None:
        sandbox = self.create()
        path = f"/sandboxes/{sandbox['id']}/exec/stream"
        text = "х…Å\u2028é"
        octal = "".join(f"\\{byte:03o}" for byte in text.encode())
        connection, response = stream(path, {"cmd": f"printf '{octal}'; echo no >&2; exit 3"})
        with contextlib.closing(connection):
            self.assertEqual(response.status, 200)
            content_type = response.headers["Content-Type"].replace(" ", "").lower()
            self.assertEqual(content_type, "text/event-stream;charset=utf-8")
            self.assertEqual(response.headers["Transfer-Encoding"], "chunked")
            body = response.read()  # ends: the stream is closed after the exit
        got = frames(body)
        self.assertEqual("".join(data["chunk"] for name, data in got if name == "stdout"), text)
        self.assertEqual("".join(data["chunk"] for name, data in got if name == "stderr"), "no\n")
        self.assertEqual(got[-1][0], "exit")
        self.assertEqual(got[-1][1]["exit_code"], 3)

    def test_06_a_machine_that_goes_away_is_no_exit(self) -> None:
        sandbox = self.create()
        path = f"/sandboxes/{sandbox['id']}/exec/stream"
        connection, response = stream(path, {"cmd": "echo begun; sleep 60"})
        with contextlib.closing(connection):
            begun = b""
            while b"\n\n" not in begun:
                begun += response.read1(100)
            self.assertEqual(call("DELETE", f"/sandboxes/{sandbox['id']}").status // 100, 2)
            try:
                rest = response.read()
            except http.client.IncompleteRead as cut:
                rest = cut.partial
        self.assertNotIn("exit", [name for name, _ in frames(begun + rest)])

    def test_07_missing_files_are_404_and_names_are_decoded(self) -> None:
        sandbox = self.create()
        base = f"/sandboxes/{sandbox['id']}/fs"
        for path in (f"{base}?path=/nope", f"{base}/stat?path=/nope", f"{base}/dir?path=/nope"):
            reply = call("GET", path)
            self.assertEqual(reply.status, 404, path)
            self.assertIs(type(reply.json["error"]), str)
        data = bytes(range(256))
        reply = call("PUT", f"{base}?path=%2Ftmp%2Fa+b%2F%C3%A9", data)
        self.assertEqual((reply.status // 100, reply.json), (2, {"path": "/tmp/a b/é", "bytes": 256}))
        self.assertEqual(call("GET", f"{base}?path=/tmp/a%20b/%C3%A9").body, data)
        self.assertEqual(call("PUT", f"{base}?path=/tmp/empty", b"").json["bytes"], 0)
        [entry] = call("GET", f"{base}/dir?path=%2Ftmp%2Fa+b").json["entries"]
        self.assertEqual((entry["name"], entry["is_dir"], entry["size"]), ("é", False, 256))
        self.assertEqual((type(entry["mode"]), type(entry["mtime"])), (str, int))

    def test_08_logs(self) -> None:
        sandbox = self.create()
        reply = call("GET", f"/sandboxes/{sandbox['id']}/logs?stream=both&follow=false")
        self.assertEqual(reply.status, 200)
        self.assertIn("charset=utf-8", reply.headers["Content-Type"].lower())
        self.exec(sandbox, "echo from the guest >/dev/console")
        connection, response = stream(f"/sandboxes/{sandbox['id']}/logs?stream=both&follow=true", None)
        with contextlib.closing(connection):
            self.assertEqual(response.status, 200)
            self.assertIn("text/event-stream", response.headers["Content-Type"])
            seen = b""
            while b"from the guest" not in seen:
                part = response.read1(1000)
                self.assertTrue(part, "the stream ended before the line")
                seen += part

    def test_10_pause_hibernate_snapshot(self) -> None:
        sandbox = self.create()
        ask = self.warm(sandbox)
        before = self.exec(sandbox, ask)
        base = f"/sandboxes/{sandbox['id']}"
        self.assertEqual(call("POST", f"{base}/pause").status // 100, 2)
        reply = call("POST", f"{base}/exec", {"cmd": "true"})
        self.assertEqual(reply.status, 409)
        self.assertIn("paused", reply.json["error"])
        self.assertEqual(call("POST", f"{base}/resume").status // 100, 2)
        self.assertEqual(self.exec(sandbox, ask), before)
        self.assertEqual(call("POST", f"{base}/hibernate").status // 100, 2)
        self.assertEqual(call("GET", base).json["status"], "hibernated")
        self.assertEqual(self.exec(sandbox, ask), before, "exec wakes it")
        self.assertEqual(call("POST", f"{base}/wake").status // 100, 2, "wake of a running one is no error")
        reply = call("POST", f"{base}/snapshots")
        self.assertEqual(reply.status // 100, 2, reply.body)
        snapshot = reply.json["id"]
        self.addCleanup(call, "DELETE", f"/snapshots/{snapshot}")
        self.assertEqual(self.exec(self.create(from_snapshot=snapshot), ask), before)
        listed = call("GET", f"/snapshots?sandbox_id={sandbox['id']}").json["snapshots"]
        self.assertEqual([one["id"] for one in listed], [snapshot])
        self.assertEqual({"id", "sandbox_id", "template", "size_bytes", "created_at"} - set(listed[0]), set())

    def test_12_lists_and_lifecycle(self) -> None:
        sandbox = self.create(metadata={"k": "v"}, ttl_seconds=77)
        listed = call("GET", "/sandboxes").json
        listed = listed if isinstance(listed, list) else listed["items"]
        [mine] = [one for one in listed if one["id"] == sandbox["id"]]
        self.assertEqual(mine["metadata"], {"k": "v"})
        self.assertIsInstance(call("GET", "/snapshots").json["snapshots"], list)
        templates = call("GET", "/templates").json
        templates = templates if isinstance(templates, list) else templates["items"]
        self.assertIn("base", [one["name"] for one in templates])
        path = f"/sandboxes/{sandbox['id']}/lifecycle"
        state = call("GET", path).json
        self.assertEqual((state["ttl_seconds"], state["persistent"]), (77, False))
        self.assertIs(type(state["idle_seconds"]), int)
        self.assertEqual(call("PATCH", path, {"persistent": True}).json["persistent"], True)
        reply = call("PATCH", path, {"ttl_seconds": 0})
        self.assertEqual(reply.status, 400)
        self.assertIn("ttl_seconds", reply.json["error"])
        reply = call("GET", f"/sandboxes/{sandbox['id']}", **{"X-Request-Id": "mine-1"})
        self.assertEqual(reply.headers["X-Request-Id"], "mine-1")
        reply = call("POST", "/sandboxes", b"{not json")
        self.assertEqual(reply.status // 100, 4)
        self.assertIs(type(reply.json["error"]), str)


if __name__ == "__main__":
    unittest.main()

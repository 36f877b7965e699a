"""What each call sends and what it makes of the answer."""

from __future__ import annotations

import base64
import io
import json
import time
import unittest
from unittest import mock

from twins import both
from wire import SANDBOX, WireTest, answer, child, chunked

import keiki

ID = SANDBOX["id"]
SNAPSHOT = {"id": "0189-snap", "sandbox_id": ID, "template": "base", "size_bytes": 4096, "metadata": None}


def frame(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


@both
class Verbs(WireTest):
    def setUp(self) -> None:
        super().setUp()
        self.sandbox = self.api.Sandbox(SANDBOX, self.client)

    def sent(self, at: int = -1) -> tuple[str, str, object]:
        request = self.requests[at]
        return request.method, request.path, json.loads(request.body) if request.body else None

    def test_create_sends_only_what_was_given(self) -> None:
        self.script(answer(201, SANDBOX), answer(201, SANDBOX))
        sandbox = self.api.Sandbox.create(client=self.client)
        self.assertEqual(self.sent(), ("POST", "/v1/sandboxes", {}))
        self.api.Sandbox.create(
            template="base", ttl_seconds=0, persistent=True, metadata={"k": "v"}, client=self.client
        )
        wanted = {"template": "base", "ttl_seconds": 0, "persistent": True, "metadata": {"k": "v"}}
        self.assertEqual(self.sent(), ("POST", "/v1/sandboxes", wanted))
        self.assertEqual((sandbox.id, sandbox.status, sandbox.metadata), (ID, "running", {"a": "b"}))
        self.assertEqual(sandbox.timings.thaw_ms, 80.25)
        self.assertEqual(sandbox.timings.steps[0], keiki.Step("slot", 1.5))
        self.assertIsNone(sandbox.timings.vcpu_pause_ms)

    def test_secrets_are_sent_and_not_shown(self) -> None:
        fate = keiki.Secret("s3cret", on_fork="drop", on_restore="replace", owner="nobody")
        self.assertNotIn("s3cret", repr(fate))
        given = {"key": "plain", "token": fate}
        wire = {
            "key": {"value": "plain"},
            "token": {"value": "s3cret", "on_fork": "drop", "on_restore": "replace", "owner": "nobody"},
        }
        kids = answer(201, {"sandbox": child(2), "children": [child(2)]})
        self.script(answer(201, SANDBOX), kids, answer(201, child(3)))
        self.api.Sandbox.create("base", secrets=given, client=self.client)
        self.assertEqual(self.sent()[2], {"template": "base", "secrets": wire})
        self.sandbox.fork(secrets=given)
        self.assertEqual(self.sent()[2], {"secrets": wire})
        self.api.Snapshot(SNAPSHOT, self.client).restore(secrets={"key": "plain"})
        self.assertEqual(self.sent()[2], {"from_snapshot": "0189-snap", "secrets": {"key": wire["key"]}})

    def test_ports_previews_and_memory(self) -> None:
        memory = {"guest_bytes": 9, "rss_bytes": 8, "pss_bytes": 5, "private_bytes": 4, "shared_bytes": 3}
        self.script(
            answer(200, {"items": [{"port": 80, "address": "::", "pid": 7, "process": "web"}, {"port": 81}]}),
            answer(201, {"url": "http://x/", "port": 80, "expires_at": "2026-01-01T00:00:00Z"}),
            answer(200, {"items": [dict(SANDBOX, memory=memory)]}),
        )
        web, other = self.sandbox.ports()
        self.assertEqual(web, keiki.Port(80, "::", 7, "web"))
        self.assertEqual((other.pid, other.process), (None, None))
        link = self.sandbox.preview(80, ttl_seconds=60)
        self.assertEqual(
            self.sent(), ("POST", f"/v1/sandboxes/{ID}/previews", {"port": 80, "ttl_seconds": 60})
        )
        self.assertEqual((link.url, link.port, link.expires_at), ("http://x/", 80, "2026-01-01T00:00:00Z"))
        [seen] = self.api.Sandbox.list(memory=True, client=self.client)
        self.assertEqual(self.sent()[1], "/v1/sandboxes?memory=true")
        self.assertEqual(seen.memory, keiki.MemoryUse(9, 8, 5, 4, 3))

    def test_templates(self) -> None:
        template = {"name": "base", "status": "ready", "version": "v1", "memory_mb": 256}
        runs = {"id": "b1", "ended_at": "", "status": "running", "error": ""}
        self.script(
            answer(200, {"items": [template]}),
            answer(202, runs),
            answer(200, dict(runs, ended_at="now", status="done")),
            answer(200, template),
            answer(202, dict(runs, ended_at="now", status="failed", error="no room")),
            answer(202, runs),
        )
        self.assertEqual([one.memory_mb for one in self.client.templates()], [256])
        self.assertEqual(self.client.build_template("base", rebake=True).version, "v1")
        paths = [request.path for request in self.requests[1:4]]
        self.assertEqual(paths, [f"/v1/templates/{end}" for end in ("build", "builds/b1", "base")])
        self.assertEqual(self.requests[1].json(), {"name": "base", "rebake": True, "force": False})
        with self.assertRaisesRegex(keiki.ServerError, "no room"):
            self.client.build_template("base")
        with self.assertRaises(keiki.TimeoutError_):
            self.client.build_template("base", timeout_seconds=0)

    def test_fork_one_and_many(self) -> None:
        self.script(
            answer(201, {"sandbox": child(2), "children": [child(2)]}),
            answer(201, {"sandbox": child(2), "children": [child(2), child(3)]}),
        )
        one = self.sandbox.fork()
        self.assertEqual(self.sent(), ("POST", f"/v1/sandboxes/{ID}/fork", None))
        many = self.sandbox.fork(count=2, ttl_seconds=9, metadata={})
        self.assertEqual(
            self.sent(), ("POST", f"/v1/sandboxes/{ID}/fork", {"count": 2, "ttl_seconds": 9, "metadata": {}})
        )
        self.assertEqual(one.parent_sandbox_id, ID)
        self.assertEqual([kid.id for kid in many], [child(2)["id"], child(3)["id"]])

    def test_fewer_children_than_asked_for_are_an_error(self) -> None:
        self.script(answer(201, {"sandbox": child(2), "children": [child(2)]}))
        with self.assertRaises(keiki.ServerError):
            self.sandbox.fork(count=2)

    def test_snapshots(self) -> None:
        self.script(
            answer(201, dict(SNAPSHOT, timings={"total_ms": 9, "vcpu_pause_ms": 4.5})),
            answer(201, child(2)),
            answer(201, child(3)),
            answer(200, {"snapshots": [SNAPSHOT]}),
            answer(200, SNAPSHOT),
            answer(204),
        )
        snapshot = self.sandbox.snapshot()
        self.assertEqual(self.sent(), ("POST", f"/v1/sandboxes/{ID}/snapshots", None))
        self.assertEqual(snapshot.timings.vcpu_pause_ms, 4.5)
        self.assertEqual(snapshot.fork(ttl_seconds=300).id, child(2)["id"])
        self.assertEqual(
            self.sent(), ("POST", "/v1/sandboxes", {"from_snapshot": SNAPSHOT["id"], "ttl_seconds": 300})
        )
        self.assertEqual(snapshot.restore().id, child(3)["id"])
        [listed] = self.api.Snapshot.list(sandbox_id=ID, client=self.client)
        self.assertEqual(self.sent(), ("GET", f"/v1/snapshots?sandbox_id={ID}", None))
        self.assertEqual((listed.id, listed.metadata, listed.timings), (SNAPSHOT["id"], {}, None))
        self.api.Snapshot.get(SNAPSHOT["id"], client=self.client).delete()
        self.assertEqual(self.sent(), ("DELETE", f"/v1/snapshots/{SNAPSHOT['id']}", None))

    def test_life(self) -> None:
        paused = dict(SANDBOX, status="paused")
        state = {"ttl_seconds": 60, "persistent": True, "idle_seconds": 3}
        self.script(
            answer(200, paused), answer(204), answer(200, SANDBOX), answer(200, state), answer(200, state)
        )
        self.sandbox.pause()
        self.assertEqual(self.sandbox.status, "paused")
        self.sandbox.resume()  # an empty answer: asks
        self.assertEqual(self.sandbox.status, "running")
        self.assertEqual(self.sandbox.set_ttl(60), keiki.Lifecycle(60, True, 3))
        self.assertEqual(self.sent(), ("PATCH", f"/v1/sandboxes/{ID}/lifecycle", {"ttl_seconds": 60}))
        self.assertTrue(self.sandbox.persistent)
        self.assertEqual(self.sandbox.lifecycle().idle_seconds, 3)
        self.script(answer(200, "gone to sleep\nü".encode()))
        self.assertEqual(self.sandbox.logs(), "gone to sleep\nü")

    def test_events(self) -> None:
        event = {"seq": 12, "at": "t", "sandbox_id": ID, "kind": "forked", "children": ["a", "b"], "later": 1}
        self.script(answer(200, {"items": [event]}), answer(200, {"items": []}))
        [got] = self.sandbox.events(since=7, limit=5)
        self.assertEqual(self.sent(), ("GET", f"/v1/sandboxes/{ID}/events?since=7&limit=5", None))
        self.assertEqual((got.seq, got.kind, got.children, got.ms), (12, "forked", ("a", "b"), None))
        self.assertEqual(self.client.events(), [])
        self.assertEqual(self.sent()[1], "/v1/events")

    def test_followed_events_go_on_where_the_connection_broke(self) -> None:
        def happened(seq: int, **more: object) -> bytes:
            return frame("x", {"seq": seq, "at": "t", "sandbox_id": ID, "kind": "paused", **more})

        self.script(
            chunked(happened(3), happened(5, ms=1.5), finish=False),
            chunked(b": nothing happens\n\n", finish=False),
            chunked(happened(8)),
        )
        with mock.patch("random.uniform", lambda low, high: 0.0):
            with self.sandbox.events_stream() as events:
                self.assertEqual(
                    [(event.seq, event.ms) for event in events], [(3, None), (5, 1.5), (8, None)]
                )
        self.assertEqual(
            [request.path.partition("?")[2] for request in self.requests],
            ["follow=true", "since=5&follow=true", "since=5&follow=true"],
        )
        self.script(*[chunked(finish=False)] * 3)
        with mock.patch("random.uniform", lambda low, high: 0.0):
            with self.assertRaises(keiki.ConnectionError):
                list(self.client.events_stream(since=1))
        self.assertEqual(len(self.requests), 6, "not for ever")

    def test_context_manager(self) -> None:
        self.script(answer(204))
        with self.sandbox:
            pass
        self.assertEqual(self.sent(), ("DELETE", f"/v1/sandboxes/{ID}", None))
        self.requests.clear()
        with self.api.Sandbox(dict(SANDBOX, persistent=True), self.client):
            pass
        with self.sandbox:  # killed by hand already
            pass
        self.assertEqual(self.requests, [])
        self.script(answer(404, {"error": "gone"}))
        with self.api.Sandbox(SANDBOX, self.client):
            pass


@both
class Exec(WireTest):
    def setUp(self) -> None:
        super().setUp()
        self.sandbox = self.api.Sandbox(SANDBOX, self.client)

    def test_buffered(self) -> None:
        raw = b"\xff\x00"
        reply = {
            "stdout": "\ufffd\x00",
            "stdout_base64": base64.b64encode(raw).decode(),
            "stderr": "é",
            "exit_code": 3,
            "duration_ms": 12,
            "truncated": True,
        }
        self.script(answer(200, reply))
        result = self.sandbox.exec(
            "cat", timeout_seconds=1.5, env={"A": "b"}, cwd="/tmp", user="nobody", stdin=raw
        )
        self.assertEqual(
            self.requests[0].json(),
            {
                "cmd": "cat",
                "timeout_seconds": 1.5,
                "env": {"A": "b"},
                "cwd": "/tmp",
                "user": "nobody",
                "stdin_base64": "/wA=",
            },
        )
        self.assertEqual((result.stdout_bytes, result.stderr_bytes), (raw, "é".encode()))
        self.assertEqual((result.exit_code, result.duration_ms, result.truncated), (3, 12, True))

    def test_argv_and_text_input(self) -> None:
        self.script(answer(200, {"stdout": "", "stderr": "", "exit_code": 0}))
        self.sandbox.exec(["echo", "a b"], stdin="x")
        self.assertEqual(self.requests[0].json(), {"argv": ["echo", "a b"], "stdin": "x"})

    def test_check(self) -> None:
        self.script(answer(200, {"stdout": "o", "stderr": "it broke\n", "exit_code": 2}))
        with self.assertRaisesRegex(keiki.CommandFailed, "exit code 2: it broke") as caught:
            self.sandbox.exec("false", check=True)
        self.assertEqual((caught.exception.exit_code, caught.exception.stdout), (2, "o"))

    def test_streamed_over_any_border(self) -> None:
        stream = b"".join(
            [
                frame("stdout", {"chunk": "х…Å\u2028é"}),
                b": ping\n\n",
                frame("stderr", {"chunk": "\ufffd", "base64": "/w=="}),
                frame("a kind of tomorrow", {"x": 1}),
                frame("stdout", {"chunk": "end\n"}),
                frame("exit", {"exit_code": 130}),
            ]
        )
        for size in (1, 7, len(stream)):
            self.script(chunked(*[stream[at : at + size] for at in range(0, len(stream), size)]))
            out: list[str] = []
            err: list[str] = []
            result = self.sandbox.exec("x", on_stdout=out.append, on_stderr=err.append)
            self.assertEqual(out, ["х…Å\u2028é", "end\n"])
            self.assertEqual(err, ["\ufffd"])
            self.assertEqual(result.stdout, "х…Å\u2028éend\n")
            self.assertEqual(result.stderr_bytes, b"\xff")
            self.assertEqual((result.exit_code, result.truncated), (130, False))
            self.assertEqual(self.requests[-1].path, f"/v1/sandboxes/{ID}/exec/stream")
            self.assertEqual(self.requests[-1].headers["Accept"], "text/event-stream")

    def test_output_is_handed_over_as_it_comes(self) -> None:
        self.script(chunked(frame("stdout", {"chunk": "1"}), frame("exit", {"exit_code": 0}), pause=2.0))
        started = time.monotonic()
        seen: list[float] = []
        self.sandbox.exec("x", on_stdout=lambda _: seen.append(time.monotonic() - started))
        self.assertLess(seen[0], 1.5)

    def test_the_result_keeps_a_bounded_part(self) -> None:
        self.script(chunked(*[frame("stdout", {"chunk": "abcdé"})] * 3, frame("exit", {"exit_code": 0})))
        seen: list[str] = []
        with mock.patch("keiki._exec.KEEP_BYTES", 8):
            result = self.sandbox.exec("x", on_stdout=seen.append)
        self.assertEqual("".join(seen), "abcdé" * 3)
        self.assertEqual((result.stdout_bytes, result.truncated), (b"abcd\xc3\xa9ab", True))

    def test_timeout_and_failure_in_the_stream(self) -> None:
        self.script(
            chunked(
                frame("stdout", {"chunk": "so far"}), frame("error", {"error": "command timeout after 1s"})
            ),
            chunked(frame("error", {"error": "the machine has ended"})),
        )
        with self.assertRaises(keiki.SandboxTimeout) as caught:
            self.sandbox.exec("x", on_stdout=lambda _: None, timeout_seconds=1)
        self.assertEqual(caught.exception.stdout, "so far")
        with self.assertRaisesRegex(keiki.ServerError, "has ended"):
            self.sandbox.exec("x", on_stdout=lambda _: None)

    def test_a_stream_without_its_end_is_no_success(self) -> None:
        for finish in (True, False):
            self.script(chunked(frame("stdout", {"chunk": "part"}), finish=finish))
            with self.subTest(finish=finish), self.assertRaises(keiki.ExecInterrupted) as caught:
                self.sandbox.exec("x", on_stdout=lambda _: None)
            self.assertEqual(caught.exception.stdout, "part")

    def test_a_callback_that_raises_ends_the_stream(self) -> None:
        self.script(
            chunked(*[frame("stdout", {"chunk": "x"})] * 50, frame("exit", {"exit_code": 0}), pause=0.01)
        )

        def fail(_: str) -> None:
            raise LookupError

        with self.assertRaises(LookupError):
            self.sandbox.exec("x", on_stdout=fail)
        self.script(answer(200, SANDBOX))
        self.sandbox.refresh()
        self.assertEqual(
            len({request.peer for request in self.requests}), 2, "a half-read connection was kept"
        )

    def test_events(self) -> None:
        self.script(
            chunked(frame("stdout", {"chunk": "a"}), frame("exit", {"exit_code": 1, "duration_ms": 5}))
        )
        got = list(self.sandbox.exec_stream("x"))
        self.assertEqual([event.kind for event in got], ["stdout", "exit"])
        self.assertEqual((got[0].data, got[1].exit_code, got[1].duration_ms), (b"a", 1, 5))


@both
class Commands(WireTest):
    def setUp(self) -> None:
        super().setUp()
        self.sandbox = self.api.Sandbox(SANDBOX, self.client)

    def test_start_find_and_end(self) -> None:
        running = {"id": "c1", "status": "running", "argv": ["cat"], "pid": 4, "stdout_bytes": 0}
        ended = dict(running, status="exited", exit_code=3, duration_ms=7)
        self.script(
            answer(201, running),
            answer(200, {"bytes": 2}),
            answer(200, {"bytes": 0}),
            answer(204),
            answer(200, {"items": [running, ended]}),
            answer(200, ended),
            answer(204),
        )
        command = self.sandbox.start(["cat"], stdin_open=True)
        self.assertEqual((command.id, command.status, command.exit_code), ("c1", "running", None))
        self.assertEqual(command.write("hi"), 2)
        command.close_stdin()
        command.signal("TERM")
        self.assertEqual([other.exit_code for other in self.sandbox.commands()], [None, 3])
        found = self.sandbox.command("c1")
        self.assertEqual((found.exit_code, found.duration_ms, found.argv), (3, 7, ("cat",)))
        found.kill()
        sent = [(r.method, r.path.removeprefix(f"/v1/sandboxes/{ID}/execs"), r.body) for r in self.requests]
        self.assertEqual(
            sent,
            [
                ("POST", "", b'{"argv": ["cat"], "stdin_open": true}'),
                ("POST", "/c1/stdin", b"hi"),
                ("POST", "/c1/stdin?eof=true", b""),
                ("POST", "/c1/signal", b'{"signal": "TERM"}'),
                ("GET", "", b""),
                ("GET", "/c1", b""),
                ("DELETE", "/c1", b""),
            ],
        )

    def test_a_reader_goes_on_where_the_connection_broke(self) -> None:
        command = self.api.Command({"id": "c1"}, self.client, ID)
        first = b'id: 4-0\nevent: stdout\ndata: {"chunk":"abcd","offset":0}\n\n'
        more = b'id: 6-0\nevent: stdout\ndata: {"chunk":"ef","offset":4}\n\n'
        self.script(chunked(first, finish=False), chunked(more, frame("exit", {"exit_code": 5})))
        with mock.patch("random.uniform", lambda low, high: 0.0):
            events = list(command.stream(stdout_offset=0))
        self.assertEqual(
            [(e.kind, e.text, e.offset) for e in events[:2]], [("stdout", "abcd", 0), ("stdout", "ef", 4)]
        )
        self.assertEqual(events[2].exit_code, 5)
        self.assertEqual([r.headers.get("Last-Event-ID") for r in self.requests], [None, "4-0"])
        self.assertEqual(
            {r.path for r in self.requests}, {f"/v1/sandboxes/{ID}/execs/c1/stream?stdout_offset=0"}
        )

    def test_waiting_has_a_limit(self) -> None:
        command = self.api.Command({"id": "c1"}, self.client, ID)
        running, ended = {"id": "c1", "status": "running"}, {"id": "c1", "status": "exited", "exit_code": 0}
        self.script(answer(200, running), answer(200, running), answer(200, ended))
        self.assertEqual(command.wait(), 0)
        self.script(answer(200, running))
        with self.assertRaises(keiki.TimeoutError_):
            command.wait(timeout_seconds=0)


@both
class Files(WireTest):
    def setUp(self) -> None:
        super().setUp()
        self.files = self.api.Sandbox(SANDBOX, self.client).filesystem

    def test_bytes_stay_bytes(self) -> None:
        every = bytes(range(256)) * 700
        self.script(answer(200, every), chunked(every[:5], every[5:]), answer(200, "é".encode()))
        self.assertEqual(self.files.read("/x"), every)
        self.assertEqual(b"".join(self.files.read_stream("/x")), every)
        self.assertEqual(self.files.read_text("/x"), "é")
        peers = {request.peer for request in self.requests}
        self.assertEqual(len(peers), 1, "a body of known length gives its connection back")

    def test_a_file_that_was_cut_off_is_no_file(self) -> None:
        def short(handler) -> None:  # type: ignore[no-untyped-def]
            handler.send_response(200)
            handler.send_header("Content-Length", "10")
            handler.end_headers()
            handler.wfile.write(b"half")
            handler.close_connection = True

        self.script(short, chunked(b"half", finish=False))
        for _ in range(2):
            with self.assertRaises(keiki.ConnectionError):
                self.files.read("/x")

    def test_write(self) -> None:
        for data in (b"\x00\xff", "é", io.BytesIO(b"abc"), b""):
            self.script(answer(200, {"path": "/x", "bytes": 3}))
            self.assertEqual(self.files.write("/x", data, mode=0o755), 3)
        bodies = [request.body for request in self.requests]
        self.assertEqual(bodies, [b"\x00\xff", "é".encode(), b"abc", b""])
        self.assertEqual(
            {request.path for request in self.requests}, {f"/v1/sandboxes/{ID}/fs?path=%2Fx&mode=0755"}
        )
        self.assertEqual({r.headers["Content-Type"] for r in self.requests}, {"application/octet-stream"})
        self.assertEqual(self.requests[2].headers["Transfer-Encoding"], "chunked")
        self.assertEqual(self.requests[3].headers["Content-Length"], "0")

    def test_list_stat_exists(self) -> None:
        entry = {"name": "a", "path": "/t/a", "is_dir": False, "size": 3, "mode": "0644", "mtime": 5}
        entry = dict(entry, kind="symlink", uid=1, gid=2, target="/b")
        self.script(
            answer(200, {"entries": [entry]}),
            answer(200, {"entries": None}),
            answer(200, entry),
            answer(200, entry),
            answer(404, {"error": "no such file"}),
        )
        [listed] = self.files.list("/t")
        self.assertEqual((listed.path, listed.mode, listed.target), ("/t/a", "0644", "/b"))
        self.assertEqual(self.files.list("/empty"), [])
        self.assertEqual(self.files.stat("/t/a"), listed)
        self.assertEqual([self.files.exists("/t/a"), self.files.exists("/no")], [True, False])

    def test_changes(self) -> None:
        self.script(*[answer(204)] * 5)
        self.files.mkdir("/d", parents=True, mode=0o700)
        self.files.rename("/a", "/b")
        self.files.remove("/d", recursive=True)
        self.files.chmod("/b", "755")
        self.files.symlink("/target", "/link")
        sent = [(request.path.rpartition("/")[2], request.json()) for request in self.requests]
        self.assertEqual(
            sent,
            [
                ("mkdir", {"path": "/d", "recursive": True, "mode": "0700"}),
                ("rename", {"path": "/b", "from": "/a"}),
                ("remove", {"path": "/d", "recursive": True}),
                ("chmod", {"path": "/b", "mode": "0755"}),
                ("symlink", {"path": "/link", "target": "/target"}),
            ],
        )
        with self.assertRaises(ValueError):
            self.files.chmod("/b", 0o10000)


if __name__ == "__main__":
    unittest.main()

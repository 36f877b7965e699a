"""Connections, errors and repeated requests, against a real server."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import threading
import time
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

from twins import both
from wire import SANDBOX, WireTest, answer, child, hang_up

import keiki


@both
class Connections(WireTest):
    def test_one_connection_serves_many_requests(self) -> None:
        self.script(*[answer(200, SANDBOX) for _ in range(3)], answer(204), answer(200, SANDBOX))
        sandbox = self.api.Sandbox.get(SANDBOX["id"], client=self.client)
        sandbox.refresh()
        sandbox.refresh()
        sandbox.kill()
        sandbox.refresh()
        self.assertEqual(len({request.peer for request in self.requests}), 1)

    def test_a_connection_that_ended_at_rest_is_not_used_again(self) -> None:
        def last(handler) -> None:  # type: ignore[no-untyped-def]
            answer(200, SANDBOX)(handler)  # promises to keep the connection,
            hang_up(handler)  # and does not

        self.script(last, answer(201, child(2)))
        self.api.Sandbox.get(SANDBOX["id"], client=self.client)
        self._wait_for_end()
        self.assertEqual(self.api.Sandbox.create(client=self.client).id, child(2)["id"])
        self.assertEqual([request.method for request in self.requests], ["GET", "POST"])

    def test_get_is_repeated_where_a_kept_connection_breaks_under_it(self) -> None:
        self.script(answer(200, SANDBOX), hang_up, answer(200, SANDBOX))
        sandbox = self.api.Sandbox.get(SANDBOX["id"], client=self.client)
        sandbox.refresh()
        self.assertEqual(len(self.requests), 3)

    def test_what_makes_is_repeated_under_one_name(self) -> None:
        sandbox = self.api.Sandbox(SANDBOX, self.client)
        snapshot = self.api.Snapshot({"id": "s", "sandbox_id": SANDBOX["id"]}, self.client)
        kids = {"sandbox": child(2), "children": [child(2), child(3)]}
        made = [
            (lambda **key: self.api.Sandbox.create(client=self.client, **key), SANDBOX),
            (lambda **key: sandbox.fork(count=2, **key), kids),
            (sandbox.snapshot, {"id": "s", "sandbox_id": SANDBOX["id"]}),
            (snapshot.restore, SANDBOX),
        ]
        names: list[str] = []
        with mock.patch("random.uniform", lambda low, high: 0.0):
            for make, body in made:
                self.requests.clear()
                self.script(answer(200, SANDBOX), hang_up, hang_up, answer(201, body))
                sandbox.refresh()
                make()
                sent = self.requests[1:]
                self.assertEqual(len(sent), 3)
                self.assertEqual(len({(r.path, r.body, r.headers["Idempotency-Key"]) for r in sent}), 1)
                names.append(sent[0].headers["Idempotency-Key"])
                self.script(answer(201, body))
                make(idempotency_key="mine")
                self.assertEqual(self.requests[-1].headers["Idempotency-Key"], "mine")
            self.assertEqual(len(set(names)), len(made), "each has its own name")

            self.requests.clear()
            self.script(hang_up, hang_up, hang_up)
            with self.assertRaises(keiki.ConnectionError):
                self.api.Sandbox.create(client=self.client)
            self.assertEqual(len(self.requests), 3, "not for ever")
            client = self.api.Client(self.server.url, "key", connection_retries=0)
            self.script(hang_up)
            with self.assertRaises(keiki.ConnectionError):
                self.api.Sandbox.create(client=client)
            self.assertEqual(len(self.requests), 4)

    def test_nothing_else_that_acts_is_repeated(self) -> None:
        sandbox = self.api.Sandbox(SANDBOX, self.client)
        acts = [
            sandbox.kill,
            sandbox.pause,
            lambda: sandbox.exec("true"),
            lambda: sandbox.exec("true", on_stdout=print),
            lambda: sandbox.filesystem.write("/x", b"y"),
        ]
        for act in acts:
            self.requests.clear()
            self.script(answer(200, SANDBOX), hang_up)
            sandbox.refresh()
            with self.assertRaises(keiki.ConnectionError):
                act()
            self.assertEqual(len(self.requests), 2, "sent once")

    def test_an_early_answer_to_a_large_body_is_read(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = self.api.Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "key", timeout=5.0)
            body = io.BytesIO(bytes(32 << 20))

            def refuse() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    text = b'{"error":"body too large"}'
                    head = b"HTTP/1.1 413 No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(text)
                    connection.sendall(head + text)
                    connection.shutdown(socket.SHUT_WR)
                    # Reading on for a while keeps the kernel from dropping the answer with a reset.
                    connection.settimeout(0.5)
                    try:
                        while connection.recv(1 << 20):
                            pass
                    except OSError:
                        pass

            thread = threading.Thread(target=refuse)
            thread.start()
            with self.assertRaisesRegex(keiki.BadRequestError, "too large"):
                self.api.Sandbox(SANDBOX, client).filesystem.write("/x", body)
            thread.join()

    @unittest.skipUnless(hasattr(os, "fork"), "os.fork is not available here")
    def test_a_forked_process_opens_its_own_connection(self) -> None:
        if not self.api.blocking:
            self.skipTest("an event loop does not go on in a forked process")
        self.script(*[answer(200, SANDBOX) for _ in range(3)])
        sandbox = self.api.Sandbox.get(SANDBOX["id"], client=self.client)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                sandbox.refresh()
                code = 0
            finally:
                os._exit(code)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        sandbox.refresh()
        peers = [request.peer for request in self.requests]
        self.assertEqual(peers[0], peers[2])
        self.assertNotEqual(peers[0], peers[1])

    def test_no_node_and_no_answer(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with self.assertRaises(keiki.TimeoutError_):
                self.api.Sandbox.list(client=self.api.Client(url, "key", timeout=0.2))
        with self.assertRaisesRegex(keiki.ConnectionError, "cannot connect"):
            self.api.Sandbox.list(client=self.api.Client(url, "key", timeout=0.2))

    def _wait_for_end(self) -> None:
        if not self.api.blocking:
            time.sleep(0.3)  # httpx does not show its sockets
            return
        [connection] = self.client._transport._idle
        self.assertEqual(connection.sock.recv(1, socket.MSG_PEEK), b"")


@both
class Requests(WireTest):
    def test_path_key_and_query(self) -> None:
        for suffix in ("", "/", "/v1", "/v1/"):
            self.script(answer(200, b"x"))
            client = self.api.Client(self.server.url + suffix, "se-cret")
            self.api.Sandbox(SANDBOX, client).filesystem.read("/a b/ü&=?")
            request = self.requests[-1]
            self.assertEqual(request.path, f"/v1/sandboxes/{SANDBOX['id']}/fs?path=%2Fa+b%2F%C3%BC%26%3D%3F")
            self.assertEqual(request.headers["Authorization"], "Bearer se-cret")

    def test_environment(self) -> None:
        with mock.patch.dict(os.environ, {"KEIKI_URL": self.server.url, "KEIKI_API_KEY": "of-env"}):
            self.script(answer(200, {"items": []}))
            self.assertEqual(self.api.Sandbox.list(), [])
        self.assertEqual(self.requests[0].headers["Authorization"], "Bearer of-env")

    def test_bad_settings_are_refused_here(self) -> None:
        for url in ("ftp://x", "http://", "http://x:99999", "localhost:7777", "host"):
            with self.assertRaises(ValueError):
                self.api.Client(url)
        with self.assertRaises(ValueError):
            self.api.Client("http://x", "a\r\nb")
        with self.assertRaises(ValueError):
            self.api.Sandbox.get("", client=self.client)

    def test_an_id_cannot_leave_its_place_in_the_path(self) -> None:
        self.script(answer(404, {"error": "no"}))
        with self.assertRaises(keiki.NotFoundError):
            self.api.Sandbox.get("../snapshots/x?y", client=self.client)
        self.assertEqual(self.requests[0].path, "/v1/sandboxes/..%2Fsnapshots%2Fx%3Fy")


@both
class Errors(WireTest):
    def test_statuses(self) -> None:
        expected = {
            400: keiki.BadRequestError,
            401: keiki.AuthError,
            403: keiki.AuthError,
            404: keiki.NotFoundError,
            409: keiki.ConflictError,
            413: keiki.BadRequestError,
            422: keiki.IdempotencyError,
            429: keiki.CapacityError,
            500: keiki.ServerError,
            502: keiki.ServerError,
            503: keiki.CapacityError,
            504: keiki.TimeoutError_,
            507: keiki.CapacityError,
        }
        for status, kind in expected.items():
            self.script(answer(status, {"error": f"sentence {status}"}, X_Request_Id="r-1"))
            with self.subTest(status=status), self.assertRaises(keiki.KeikiError) as caught:
                self.api.Sandbox.list(client=self.client)
            self.assertIs(type(caught.exception), kind)
            self.assertEqual(str(caught.exception), f"sentence {status}")
            self.assertEqual((caught.exception.status, caught.exception.request_id), (status, "r-1"))

    def test_an_error_without_json_still_says_something(self) -> None:
        self.script(answer(502, b"<h1>bad gateway</h1>"), answer(500))
        with self.assertRaisesRegex(keiki.ServerError, "bad gateway"):
            self.api.Sandbox.list(client=self.client)
        with self.assertRaisesRegex(keiki.ServerError, "HTTP 500"):
            self.api.Sandbox.list(client=self.client)

    def test_504_of_a_command_is_its_timeout(self) -> None:
        self.script(answer(504, {"error": "command timeout after 1s"}))
        with self.assertRaisesRegex(keiki.SandboxTimeout, "after 1s"):
            self.api.Sandbox(SANDBOX, self.client).exec("sleep 5", timeout_seconds=1)

    def test_built_in_names_catch_too(self) -> None:
        self.assertTrue(issubclass(keiki.SandboxTimeout, TimeoutError))
        self.assertTrue(issubclass(keiki.ConnectionError, ConnectionError))


@both
class Capacity(WireTest):
    def setUp(self) -> None:
        super().setUp()
        self.naps: list[float] = []
        self.clock = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.clock)
        fake = mock.patch.multiple(f"{self.api.package}.client", time=clock, sleep=self._sleep)
        fake.start()
        self.addCleanup(fake.stop)

    def _sleep(self, seconds: float) -> Any:
        self.naps.append(seconds)
        self.clock += seconds
        return None if self.api.blocking else asyncio.sleep(0)

    def test_create_waits_as_told(self) -> None:
        self.script(
            answer(503, {"error": "template base is being built"}, Retry_After="5"),
            answer(429, {"error": "too many"}, Retry_After="1"),
            answer(201, SANDBOX),
        )
        self.api.Sandbox.create("base", client=self.client)
        self.assertEqual(len(self.requests), 3)
        self.assertTrue(5 <= self.naps[0] <= 6 and 1 <= self.naps[1] <= 3, self.naps)

    def test_fork_and_restore_do_too(self) -> None:
        refusal = answer(503, {"error": "busy"}, Retry_After="1")
        self.script(refusal, answer(201, {"sandbox": child(2), "children": [child(2)]}))
        self.assertEqual(self.api.Sandbox(SANDBOX, self.client).fork().id, child(2)["id"])
        self.script(refusal, answer(201, child(3)))
        snapshot = self.api.Snapshot({"id": "s", "sandbox_id": SANDBOX["id"]}, self.client)
        self.assertEqual(snapshot.fork().id, child(3)["id"])

    def test_the_budget_ends_it(self) -> None:
        self.script(*[answer(503, {"error": "busy"}, Retry_After="20")] * 9)
        with self.assertRaises(keiki.CapacityError) as caught:
            self.api.Sandbox.create(client=self.client)
        self.assertEqual(caught.exception.retry_after, 20.0)
        self.assertLessEqual(sum(self.naps), 60.0)
        self.assertLess(len(self.requests), 5)

    def test_without_the_promise_nothing_is_repeated(self) -> None:
        refusals = [
            answer(503, {"error": "no hint"}),
            answer(503, b"a proxy's page", Retry_After="1"),
            answer(507, {"error": "no room"}, Retry_After="1"),
            answer(500, {"error": "failed"}, Retry_After="1"),
            answer(503, {"error": "x"}, Retry_After="soon"),
        ]
        for refusal in refusals:
            self.requests.clear()
            self.script(refusal)
            with self.assertRaises(keiki.KeikiError):
                self.api.Sandbox.create(client=self.client)
            self.assertEqual((len(self.requests), self.naps), (1, []))

    def test_a_budget_of_zero_is_no_retry(self) -> None:
        client = self.api.Client(self.server.url, "key", capacity_retry_seconds=0)
        self.script(answer(503, {"error": "busy"}, Retry_After="0"))
        with self.assertRaises(keiki.CapacityError):
            self.api.Sandbox.create(client=client)
        self.assertEqual(len(self.requests), 1)

    def test_other_calls_are_not_repeated(self) -> None:
        self.script(answer(503, {"error": "busy"}, Retry_After="1"))
        with self.assertRaises(keiki.CapacityError):
            self.api.Sandbox(SANDBOX, self.client).exec("true")
        self.assertEqual(len(self.requests), 1)


if __name__ == "__main__":
    unittest.main()

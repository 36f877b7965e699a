"""A small real HTTP server whose answers a test writes down beforehand."""

from __future__ import annotations

import json
import socket
import threading
import time
import unittest
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable

from twins import BLOCKING


@dataclass
class Request:
    """What the client sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    #: Which connection it came on.
    peer: tuple[str, int]

    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[[BaseHTTPRequestHandler], None]


def answer(status: int = 200, body: object = None, **headers: str) -> Answer:
    """A whole answer. Header names are given with underscores."""

    def send(handler: BaseHTTPRequestHandler) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return send


def chunked(*pieces: bytes, finish: bool = True, pause: float = 0.0) -> Answer:
    """A streamed answer, each piece a chunk and a packet. Without `finish` the connection is cut."""

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for piece in pieces:
            try:
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                handler.wfile.flush()
            except OSError:
                return
            time.sleep(pause)
        if finish:
            handler.wfile.write(b"0\r\n\r\n")
        else:
            hang_up(handler)

    return send


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Ends the connection at once."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


class Server:
    """Gives the scripted answers in order, one for each request, and records the requests."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.requests: list[Request] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            read_body = True

            def handle_one(self) -> None:
                body = self._body()
                outer.requests.append(
                    Request(self.command, self.path, dict(self.headers), body, self.client_address)
                )
                if outer.script:
                    outer.script.pop(0)(self)
                else:
                    answer(500, {"error": "the test wrote down no answer for this request"})(self)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_one

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = b""
                    while True:
                        size = int(self.rfile.readline(), 16)
                        body += self.rfile.read(size)
                        self.rfile.readline()
                        if size == 0:
                            return body
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class WireTest(unittest.TestCase):
    """A server and a client that talks to it."""

    #: The classes of the client under test.
    api: Any = BLOCKING

    def setUp(self) -> None:
        self.server = Server()
        self.addCleanup(self.server.close)
        self.client = self.api.Client(self.server.url, "key", timeout=5.0)
        self.addCleanup(self.client.close)

    def script(self, *answers: Answer) -> None:
        self.server.script.extend(answers)

    @property
    def requests(self) -> list[Request]:
        return self.server.requests


#: A sandbox as a node shows it.
SANDBOX = {
    "id": "01890000-0000-7000-8000-000000000001",
    "template": "base",
    "template_version": "v",
    "cpu": 1,
    "memory_mb": 256,
    "disk_mb": 2048,
    "status": "running",
    "guest_ip": "10.200.0.2",
    "created_at": "2026-01-01T00:00:00Z",
    "metadata": {"a": "b"},
    "from_snapshot": None,
    "boot_ms": 120,
    "boot_mode": "create",
    "persistent": False,
    "ttl_seconds": 3600,
    "idle_seconds": 0,
    "parent_sandbox_id": None,
    "parent_snapshot_id": None,
    "generation": 7,
    "engine": "qemu",
    "timings": {"total_ms": 120.5, "thaw_ms": 80.25, "steps": [{"name": "slot", "ms": 1.5}]},
    "a_field_of_tomorrow": {"x": 1},
}


def child(number: int) -> dict[str, Any]:
    """Another sandbox, forked off the first."""
    fresh = f"01890000-0000-7000-8000-{number:012d}"
    return dict(SANDBOX, id=fresh, boot_mode="fork", parent_sandbox_id=SANDBOX["id"])

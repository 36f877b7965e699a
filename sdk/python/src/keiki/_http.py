"""Blocking HTTP to one node, with kept-alive connections. Never resends a request that could act
twice.

The node may close a kept-alive connection at any time. A connection with something to read has
ended, and is not reused. That leaves a short race in which the node closes the connection while a
request is on its way. Then only GET and HEAD are sent again; everything else raises
:class:`~keiki.errors.ConnectionError`, because the outcome is unknown.
"""

from __future__ import annotations

import http.client
import os
import select
import socket
import ssl
import threading
import time
from types import TracebackType
from typing import Any, BinaryIO, Callable, Iterator, List, Mapping, Tuple, Type, TypeVar, Union

from . import errors
from ._wire import address

T = TypeVar("T")
Body = Union[None, bytes, BinaryIO]

#: Most idle connections to keep.
MAX_IDLE = 8
_REPEATABLE = ("GET", "HEAD")


class Response:
    """An answer with its body unread. Close it, or use it as a context manager."""

    def __init__(
        self,
        transport: Transport,
        connection: http.client.HTTPConnection,
        raw: http.client.HTTPResponse,
        reusable: bool,
    ) -> None:
        self.status = raw.status
        self.request_id: str | None = raw.getheader("x-request-id")
        self.retry_after: str | None = raw.getheader("retry-after")
        self._transport = transport
        self._connection = connection
        self._raw = raw
        self._reusable = reusable and not raw.will_close

    def read(self) -> bytes:
        """Reads the whole body."""
        with _as_ours("cannot read the answer"):
            return self._raw.read()

    def chunks(self, size: int = 65536) -> Iterator[bytes]:
        """Streams the body. Raises if it is cut off."""
        while True:
            with _as_ours("cannot read the answer"):
                chunk = self._raw.read1(size)
            if not chunk:
                break
            yield chunk
        left = self._raw.length
        if left:
            raise errors.ConnectionError(f"the connection broke {left} bytes before the end of the answer")
        self._raw.read()  # marks a body of known length as read

    def close(self) -> None:
        """Returns the connection for reuse if the body was read to its end; closes it otherwise."""
        reusable = self._reusable and self._raw.isclosed()
        self._raw.close()
        if reusable:
            self._transport._put(self._connection)
        else:
            self._connection.close()

    def __enter__(self) -> Response:
        return self

    def __exit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Transport:
    """Connections to one base URL. Safe to share between threads; reconnects after ``os.fork``."""

    def __init__(self, url: str) -> None:
        at = address(url)
        self._tls = ssl.create_default_context() if at.tls else None
        self._host, self._port, self._prefix = at.host, at.port, at.prefix
        self._idle: List[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(
        self, method: str, path: str, headers: Mapping[str, str], body: Body, timeout: float | None
    ) -> Response:
        """Sends a request and returns when the headers of the answer arrive, whatever the status."""
        target = self._prefix + path
        connection, fresh = self._get(timeout)
        while True:
            try:
                return self._exchange(connection, method, target, headers, body)
            except (ConnectionError, http.client.BadStatusLine) as error:
                connection.close()
                # An idle connection may have been closed meanwhile; a new one that fails is an
                # error.
                if fresh or method not in _REPEATABLE:
                    raise errors.ConnectionError(
                        f"the node closed the connection without an answer: {error}"
                    ) from error
            except BaseException:
                connection.close()
                raise
            connection, fresh = self._connect(timeout), True

    def close(self) -> None:
        """Closes idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body,
    ) -> Response:
        sent = True
        try:
            try:
                connection.request(method, target, body=body, headers=dict(headers))
            except (BrokenPipeError, ConnectionResetError):
                # The node may refuse before it reads the whole body: its answer says why.
                if body is None:
                    raise
                sent = False
            return Response(self, connection, connection.getresponse(), reusable=sent)
        except socket.timeout as error:
            raise errors.TimeoutError_(f"no answer from the node within {connection.timeout} s") from error
        except (ConnectionError, http.client.BadStatusLine):
            raise
        except (OSError, http.client.HTTPException) as error:
            raise errors.ConnectionError(f"cannot talk to the node: {error!r}") from error

    def _get(self, timeout: float | None) -> Tuple[http.client.HTTPConnection, bool]:
        """Returns a connection, and whether it is new."""
        with self._lock:
            if self._pid != os.getpid():
                # A forked process must not use its parent's connections.
                self._idle, self._pid = [], os.getpid()
            while self._idle:
                connection = self._idle.pop()
                if _rests(connection.sock):
                    connection.timeout = timeout
                    connection.sock.settimeout(timeout)
                    return connection, False
                connection.close()
        return self._connect(timeout), True

    def _connect(self, timeout: float | None) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if self._tls:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            at = f"{self._host}:{connection.port}"
            raise errors.ConnectionError(f"cannot connect to the node at {at}: {error}") from error
        # A command may be silent for hours: let the kernel detect a lost peer.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    def _put(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if self._pid == os.getpid() and len(self._idle) < MAX_IDLE and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()


def sleep(seconds: float) -> None:
    """Sleeps."""
    time.sleep(seconds)


def settle(answer: T) -> T:
    """The result of a callback; the async version awaits coroutines."""
    return answer


def aside(work: Callable[..., T], *args: Any) -> T:
    """Runs ``work``; the async version runs it in a thread."""
    return work(*args)


def _rests(sock: socket.socket | None) -> bool:
    """Is the connection open and silent? A closed one is readable."""
    if sock is None:
        return False
    try:
        if not hasattr(select, "poll"):
            return not select.select([sock], [], [], 0)[0]
        poll = select.poll()
        poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
        return not poll.poll(0)
    except (OSError, ValueError):
        return False


class _as_ours:
    """Converts connection errors to errors of this package."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(value, socket.timeout):
            raise errors.TimeoutError_(f"{self._what}: the client's timeout expired") from value
        if isinstance(value, (OSError, http.client.HTTPException)) and not isinstance(
            value, errors.KeikiError
        ):
            raise errors.ConnectionError(f"{self._what}: {value!r}") from value

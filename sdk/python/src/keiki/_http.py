"""HTTP to one node, blocking: kept-alive connections, and no request ever sent twice that could act twice.

A kept-alive connection may be closed by the node at any time. Before one is used again it is looked at: one
that has something to read has ended. What is left is the short race in which the node closes while the
request is on its way; then only GET and HEAD are sent again, everything else raises
:class:`~keiki.errors.ConnectionError`, because nobody can know whether it was carried out.
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

#: Kept-alive connections at rest.
MAX_IDLE = 8
_REPEATABLE = ("GET", "HEAD")


class Response:
    """An answer whose body has not been read yet. Close it, or use it as a context manager."""

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
        """The whole body."""
        with _as_ours("reading the answer"):
            return self._raw.read()

    def chunks(self, size: int = 65536) -> Iterator[bytes]:
        """The body as it arrives. A body that was cut off raises."""
        while True:
            with _as_ours("reading the answer"):
                chunk = self._raw.read1(size)
            if not chunk:
                break
            yield chunk
        left = self._raw.length
        if left:
            raise errors.ConnectionError(f"the connection ended {left} bytes before the end of the answer")
        self._raw.read()  # marks a body of known length as read

    def close(self) -> None:
        """Gives the connection back if the body was read to its end, else ends it."""
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
    """Connections to one base URL. Safe to share between threads; starts anew after ``os.fork``."""

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
        """Sends one request; returns once the head of the answer is there, whatever its status."""
        target = self._prefix + path
        connection, fresh = self._get(timeout)
        while True:
            try:
                return self._exchange(connection, method, target, headers, body)
            except (ConnectionError, http.client.BadStatusLine) as error:
                connection.close()
                # One at rest may have ended meanwhile, which says nothing; a new one that fails has failed.
                if fresh or method not in _REPEATABLE:
                    raise errors.ConnectionError(
                        f"the node ended the connection without an answer: {error}"
                    ) from error
            except BaseException:
                connection.close()
                raise
            connection, fresh = self._connect(timeout), True

    def close(self) -> None:
        """Ends the connections at rest."""
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
                # The node may have refused before it read the whole body: its answer says why.
                if body is None:
                    raise
                sent = False
            return Response(self, connection, connection.getresponse(), reusable=sent)
        except socket.timeout as error:
            raise errors.TimeoutError_(f"no answer from the node within {connection.timeout} s") from error
        except (ConnectionError, http.client.BadStatusLine):
            raise
        except (OSError, http.client.HTTPException) as error:
            raise errors.ConnectionError(f"talking to the node failed: {error!r}") from error

    def _get(self, timeout: float | None) -> Tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it is new."""
        with self._lock:
            if self._pid != os.getpid():
                # A forked process must not talk on its parent's connections.
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
        # A command may be silent for hours: let the kernel notice a peer that vanished.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    def _put(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if self._pid == os.getpid() and len(self._idle) < MAX_IDLE and connection.sock is not None:
                self._idle.append(connection)
                return
        connection.close()


def sleep(seconds: float) -> None:
    """Waits."""
    time.sleep(seconds)


def settle(answer: T) -> T:
    """What a callback came to; its twin waits for callbacks that are coroutines."""
    return answer


def aside(work: Callable[..., T], *args: Any) -> T:
    """Work; its twin does it in a thread."""
    return work(*args)


def _rests(sock: socket.socket | None) -> bool:
    """Open and silent: an ended connection is readable."""
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
    """Turns errors of the connection into errors of this package."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(value, socket.timeout):
            raise errors.TimeoutError_(f"{self._doing} took longer than the client's timeout") from value
        if isinstance(value, (OSError, http.client.HTTPException)) and not isinstance(
            value, errors.KeikiError
        ):
            raise errors.ConnectionError(f"{self._doing} failed: {value!r}") from value

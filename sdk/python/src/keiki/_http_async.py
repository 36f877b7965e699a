"""HTTP to one node for the async client, on httpx; ``_http.py`` does the same with ``http.client``.

httpx is imported by the first async client, so the blocking client does not need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    AsyncGenerator,
    AsyncIterator,
    BinaryIO,
    Callable,
    Iterator,
    Mapping,
    Type,
    TypeVar,
    Union,
)

from . import errors
from ._wire import address

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
Body = Union[None, bytes, BinaryIO]

#: Most idle connections to keep.
MAX_IDLE = 8
#: Bytes per read of a file.
PIECE = 65536
_REPEATABLE = ("GET", "HEAD")


class Response:
    """An answer with its body unread. Close it, or use it as a context manager."""

    def __init__(self, raw: httpx.Response) -> None:
        self.status = raw.status_code
        self.request_id: str | None = raw.headers.get("x-request-id")
        self.retry_after: str | None = raw.headers.get("retry-after")
        self._raw = raw

    async def read(self) -> bytes:
        """Reads the whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Streams the body. Raises if it is cut off."""
        with _as_ours("cannot read the answer"):
            async for chunk in self._raw.aiter_raw():
                yield chunk

    async def close(self) -> None:
        """Returns the connection for reuse if the body was read to its end; closes it otherwise."""
        await self._raw.aclose()

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Transport:
    """Connections to one base URL, one pool per event loop."""

    def __init__(self, url: str) -> None:
        try:
            import httpx
        except ImportError:
            raise ImportError("the async client needs httpx: pip install 'keiki[async]'") from None
        at = address(url)
        host = f"[{at.host}]" if ":" in at.host else at.host
        self._at = host if at.port is None else f"{host}:{at.port}"
        self._base = f"{'https' if at.tls else 'http'}://{self._at}{at.prefix}"
        self._httpx = httpx
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: Body, timeout: float | None
    ) -> Response:
        """Sends a request and returns when the headers of the answer arrive, whatever the status."""
        try:
            return await self._send(method, path, headers, body, timeout)
        except _Broken:
            # An idle connection may have been closed meanwhile.
            if method not in _REPEATABLE:
                raise
        return await self._send(method, path, headers, body, timeout)

    async def _send(
        self, method: str, path: str, headers: Mapping[str, str], body: Body, timeout: float | None
    ) -> Response:
        client = self._client()
        request = client.build_request(
            method,
            self._base + path,
            headers=headers,
            content=body if body is None or isinstance(body, bytes) else _pieces(body),
            timeout=self._httpx.Timeout(timeout, pool=None),
        )
        with _as_ours("cannot talk to the node", at=self._at, timeout=timeout):
            return Response(await client.send(request, stream=True))

    async def close(self) -> None:
        """Closes idle connections of the running loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE)
            client = self._httpx.AsyncClient(
                limits=limits, trust_env=False, headers={"Accept-Encoding": "identity"}
            )
            self._clients[loop] = client
        return client


async def sleep(seconds: float) -> None:
    """Sleeps."""
    await asyncio.sleep(seconds)


async def settle(answer: Any) -> Any:
    """The result of a callback, awaited if it is a coroutine."""
    return await answer if inspect.isawaitable(answer) else answer


async def aside(work: Callable[..., T], *args: Any) -> T:
    """Runs blocking ``work`` in a thread."""
    return await asyncio.to_thread(work, *args)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    """Reads a file in a thread: it may be slow."""
    while piece := await asyncio.to_thread(file.read, PIECE):
        yield piece


class _Broken(errors.ConnectionError):
    """The connection broke before the answer started."""


@contextlib.contextmanager
def _as_ours(what: str, *, at: str | None = None, timeout: float | None = None) -> Iterator[None]:
    """Converts connection errors to errors of this package. ``at``: the answer has not started yet."""
    import httpx

    try:
        yield
    except httpx.ConnectTimeout as error:
        raise errors.ConnectionError(f"cannot connect to the node at {at}: {error!r}") from error
    except httpx.TimeoutException as error:
        message = f"{what}: the client's timeout expired"
        raise errors.TimeoutError_(
            message if at is None else f"no answer from the node within {timeout} s"
        ) from error
    except httpx.ConnectError as error:
        raise errors.ConnectionError(f"cannot connect to the node at {at}: {error}") from error
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
        if at is None:
            raise errors.ConnectionError(f"{what}: {error!r}") from error
        raise _Broken(f"the node closed the connection without an answer: {error!r}") from error
    except httpx.HTTPError as error:
        raise errors.ConnectionError(f"{what}: {error!r}") from error

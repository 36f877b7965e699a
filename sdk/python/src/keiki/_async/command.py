"""Background commands."""

from __future__ import annotations

import time
from typing import Any, AsyncGenerator, Mapping, Tuple

from .. import errors
from .._exec import exec_event
from .._http_async import sleep
from .._wire import present, segment
from ..models import ExecEvent, number, optional_number, text
from .client import AsyncClient, backoff, sse
from .stream import AsyncStream

#: First and longest interval at which :meth:`AsyncCommand.wait` polls.
SOON, LATER = 0.1, 1.0


class AsyncCommand:
    """A command in a sandbox, running or exited. The guest keeps the last MiB of each of its
    streams. A fork has its own copy of the command, and it survives lost connections and restarts
    of the node.

    Attributes are those of the last answer; :meth:`refresh` updates them.
    """

    def __init__(self, data: Mapping[str, Any], client: AsyncClient, sandbox_id: str) -> None:
        self._client = client
        self.sandbox_id = sandbox_id
        self.id: str = str(data["id"])
        self._path = f"/sandboxes/{segment(sandbox_id)}/execs/{segment(self.id)}"
        self._update(data)

    def _update(self, data: Mapping[str, Any]) -> None:
        #: ``running`` or ``exited``.
        self.status: str = text(data, "status")
        self.argv: Tuple[str, ...] = tuple(str(part) for part in data.get("argv") or [])
        self.pid: int = number(data, "pid")
        self.started_at: str = text(data, "started_at")
        #: A caller is reading its output.
        self.attached: bool = bool(data.get("attached"))
        #: Bytes written so far.
        self.stdout_bytes: int = number(data, "stdout_bytes")
        self.stderr_bytes: int = number(data, "stderr_bytes")
        #: None while it runs.
        self.exit_code: int | None = optional_number(data, "exit_code")
        #: It was killed by its timeout.
        self.timed_out: bool = bool(data.get("timed_out"))
        self.duration_ms: int | None = optional_number(data, "duration_ms")

    async def refresh(self) -> AsyncCommand:
        """Updates the attributes; returns self."""
        self._update(await self._client.call("GET", self._path))
        return self

    def stream(
        self, *, stdout_offset: int | None = None, stderr_offset: int | None = None, tail: int | None = None
    ) -> AsyncStream[ExecEvent]:
        """Streams its output from these offsets (by default from the start), or the last ``tail``
        bytes and all that follows, then its exit. Resumes after a broken connection; closing the
        stream leaves the command running. Only one caller can read at a time: a new one takes over.
        A gap between offsets means that output was overwritten before it was read."""
        place = {"stdout_offset": stdout_offset, "stderr_offset": stderr_offset, "tail": tail}
        return AsyncStream(self._read({name: str(at) for name, at in present(place).items()}))

    async def wait(self, timeout_seconds: float | None = None) -> int:
        """Waits until it exits and returns its exit code. Raises :class:`TimeoutError_` after
        ``timeout_seconds``; the command keeps running."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        nap = SOON
        while True:
            await self.refresh()
            if self.exit_code is not None:
                return self.exit_code
            if deadline is not None and time.monotonic() >= deadline:
                raise errors.TimeoutError_(f"the command is still running after {timeout_seconds} s")
            await sleep(nap)
            nap = min(nap * 1.5, LATER)

    async def write(self, data: str | bytes, *, eof: bool = False) -> int:
        """Writes to its input, and with ``eof`` closes it; returns how many bytes it accepted."""
        body = data.encode() if isinstance(data, str) else data
        return await self._stdin(body, {"eof": "true"} if eof else None)

    async def close_stdin(self) -> None:
        """Closes its input."""
        await self._stdin(b"", {"eof": "true"})

    async def signal(self, signal: str | int) -> None:
        """Sends a signal, by name or number, to all its processes."""
        await self._client.call("POST", self._path + "/signal", json={"signal": signal})

    async def kill(self) -> None:
        """Kills it, if it is still running, and forgets it."""
        await self._client.call("DELETE", self._path)

    async def _stdin(self, body: bytes, query: Mapping[str, str] | None) -> int:
        client = self._client
        headers = {"Content-Type": "application/octet-stream"}
        return number(
            await client.send("POST", self._path + "/stdin", body, query=query, headers=headers), "bytes"
        )

    async def _read(self, query: Mapping[str, str]) -> AsyncGenerator[ExecEvent, None]:
        headers = {"Accept": "text/event-stream"}
        broken = 0
        while True:
            try:
                async with await self._client.open(
                    "GET", self._path + "/stream", query=query, headers=headers
                ) as response:
                    async for event in sse(response):
                        headers["Last-Event-ID"] = event.id or headers.get("Last-Event-ID", "0-0")
                        broken = 0
                        parsed = exec_event(event)
                        if parsed is None:
                            continue
                        yield parsed
                        if parsed.kind == "exit":
                            return
                raise errors.ExecInterrupted("the output ended before the exit code")
            except errors.ConnectionError:
                if broken >= self._client.connection_retries:
                    raise
                broken += 1
            await sleep(backoff(broken))

    def __repr__(self) -> str:
        return f"AsyncCommand(id={self.id!r}, argv={self.argv!r}, status={self.status!r})"

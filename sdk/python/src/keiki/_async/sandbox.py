"""Sandboxes: running, paused or hibernated Linux machines."""

from __future__ import annotations

import builtins
import contextlib
import time
from types import TracebackType
from typing import Any, AsyncGenerator, Callable, Dict, Mapping, Sequence, Type, overload

from .. import errors
from .._exec import Kept, checked, exec_event, exec_request, log_line, patience
from .._http_async import settle
from .._wire import decode, json_body, present, segment
from ..models import (
    ExecEvent,
    ExecResult,
    Lifecycle,
    MemoryUse,
    Port,
    Preview,
    SandboxEvent,
    Secret,
    Timings,
    items,
    labels,
    number,
    optional_text,
    secrets_wire,
    text,
)
from .client import AsyncClient, default_async_client, sse
from .command import AsyncCommand
from .filesystem import AsyncFilesystem
from .snapshot import AsyncSnapshot
from .stream import AsyncStream


class AsyncSandbox:
    """A sandbox. As a context manager it is deleted on exit, unless it is persistent.

    Attributes are those of the last answer; :meth:`refresh` updates them.
    """

    def __init__(self, data: Mapping[str, Any], client: AsyncClient) -> None:
        self._client = client
        self.id: str = str(data["id"])
        self._path = f"/sandboxes/{segment(self.id)}"
        #: Files in the sandbox.
        self.filesystem = AsyncFilesystem(client, self.id)
        self._update(data)

    def _update(self, data: Mapping[str, Any]) -> None:
        self.template: str = text(data, "template")
        self.template_version: str = text(data, "template_version")
        self.cpu: int = number(data, "cpu")
        self.memory_mb: int = number(data, "memory_mb")
        self.disk_mb: int = number(data, "disk_mb")
        #: ``creating``, ``running``, ``paused``, ``hibernated``, ``stopping``, ``deleted`` or
        #: ``failed``.
        self.status: str = text(data, "status")
        self.guest_ip: str = text(data, "guest_ip")
        self.created_at: str = text(data, "created_at")
        self.metadata: Dict[str, str] = labels(data)
        self.from_snapshot: str | None = optional_text(data, "from_snapshot")
        #: From request to release, in ms.
        self.boot_ms: int = number(data, "boot_ms")
        #: ``create``, ``fork``, ``restore`` or ``wake``.
        self.boot_mode: str = text(data, "boot_mode")
        self.persistent: bool = bool(data.get("persistent"))
        self.ttl_seconds: int = number(data, "ttl_seconds")
        self.idle_seconds: int = number(data, "idle_seconds")
        self.parent_sandbox_id: str | None = optional_text(data, "parent_sandbox_id")
        self.parent_snapshot_id: str | None = optional_text(data, "parent_snapshot_id")
        self.generation: int = number(data, "generation")
        self.engine: str = text(data, "engine")
        self.memory: MemoryUse | None = MemoryUse.parse(data.get("memory"))
        #: CPU time of its machine in ms; None unless memory use is shown.
        self.cpu_ms: int | None = None if data.get("cpu_ms") is None else number(data, "cpu_ms")
        self.timings: Timings | None = Timings.parse(data.get("timings"))
        #: Why it failed.
        self.error: str | None = optional_text(data, "error")

    # Create and find

    @classmethod
    async def create(
        cls,
        template: str | None = None,
        *,
        from_snapshot: str | None = None,
        ttl_seconds: int | None = None,
        persistent: bool = False,
        metadata: Mapping[str, str] | None = None,
        secrets: Mapping[str, str | Secret] | None = None,
        client: AsyncClient | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncSandbox:
        """Creates a sandbox from a template (``base`` by default) or a snapshot.

        ``ttl_seconds``: how long it may be idle (3600 by default). ``persistent``: hibernate it
        after that, instead of deleting it. Retries while the node has no capacity and after a
        broken connection; see :class:`AsyncClient`. ``idempotency_key``: names this request;
        sending it again, even from another process, returns the same sandbox. ``secrets``: files in
        ``/run/keiki/secrets``, by name; with ``from_snapshot``, adds to the snapshot's secrets and
        gives new values to those whose ``on_restore`` is ``replace``.
        """
        client = client or default_async_client()
        request: Dict[str, Any] = {
            "template": template,
            "from_snapshot": from_snapshot,
            "ttl_seconds": ttl_seconds,
            "persistent": True if persistent else None,
            "metadata": dict(metadata) if metadata else None,
            "secrets": secrets_wire(secrets),
        }
        made = await client.make("/sandboxes", present(request), idempotency_key=idempotency_key)
        return cls(made, client)

    @classmethod
    async def list(
        cls, *, memory: bool = False, client: AsyncClient | None = None
    ) -> builtins.list[AsyncSandbox]:
        """All sandboxes, newest first. ``memory``: with their memory use, which takes the node some
        time."""
        client = client or default_async_client()
        answer = await client.call("GET", "/sandboxes", query={"memory": "true"} if memory else None)
        return [cls(data, client) for data in items(answer, "items")]

    @classmethod
    async def get(cls, id: str, *, client: AsyncClient | None = None) -> AsyncSandbox:
        """Finds a sandbox by id."""
        client = client or default_async_client()
        return cls(await client.call("GET", f"/sandboxes/{segment(id)}"), client)

    async def refresh(self) -> AsyncSandbox:
        """Updates the attributes; returns self."""
        self._update(await self._client.call("GET", self._path))
        return self

    # Commands

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_seconds: float | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: None | str | bytes = None,
        check: bool = False,
    ) -> ExecResult:
        """Runs a command and waits until it exits.

        A string is a line for ``/bin/sh``; a sequence is a program and its arguments. ``on_stdout``
        and ``on_stderr`` get all output as it arrives; the result still holds the first 16 MiB of
        each stream. A callback that raises kills the command.

        Raises :class:`SandboxTimeout` after ``timeout_seconds``, and kills all processes of the
        command.
        ``check``: raises :class:`CommandFailed` for an exit code other than 0.
        """
        request = exec_request(cmd, timeout_seconds, env, cwd, user, stdin)
        if on_stdout is None and on_stderr is None:
            result = await self._exec_buffered(request, timeout_seconds)
        else:
            result = await self._exec_streamed(request, timeout_seconds, on_stdout, on_stderr)
        return checked(result) if check else result

    def exec_stream(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_seconds: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: None | str | bytes = None,
    ) -> AsyncStream[ExecEvent]:
        """Runs a command and yields its output as it arrives, then its exit. Closing the iterator
        early kills the command."""
        request = exec_request(cmd, timeout_seconds, env, cwd, user, stdin)
        return AsyncStream(self._events(request, timeout_seconds))

    async def start(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_seconds: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: None | str | bytes = None,
        stdin_open: bool = False,
    ) -> AsyncCommand:
        """Starts a command in the background. ``stdin_open``: keep its input open for
        :meth:`AsyncCommand.write`. A background command does not count as activity: the TTL keeps
        running."""
        request = exec_request(cmd, timeout_seconds, env, cwd, user, stdin)
        request.update(present({"stdin_open": stdin_open or None}))
        return AsyncCommand(
            await self._client.call("POST", self._path + "/execs", json=request), self._client, self.id
        )

    async def commands(self) -> builtins.list[AsyncCommand]:
        """Running and recently exited commands, oldest first."""
        answer = await self._client.call("GET", self._path + "/execs")
        return [AsyncCommand(data, self._client, self.id) for data in items(answer, "items")]

    async def command(self, id: str) -> AsyncCommand:
        """Finds a command by id; a fork has its own copies of its parent's commands."""
        data = await self._client.call("GET", f"{self._path}/execs/{segment(id)}")
        return AsyncCommand(data, self._client, self.id)

    async def _exec_buffered(self, request: Mapping[str, Any], limit: float | None) -> ExecResult:
        body, headers = json_body(request)
        async with await self._client.open(
            "POST", self._path + "/exec", headers=headers, body=body, timeout=patience(limit), command=True
        ) as response:
            return ExecResult.parse(decode(await response.read(), response.status, response.request_id) or {})

    async def _exec_streamed(
        self,
        request: Mapping[str, Any],
        limit: float | None,
        on_stdout: Callable[[str], object] | None,
        on_stderr: Callable[[str], object] | None,
    ) -> ExecResult:
        kept = Kept()
        callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        started = time.monotonic()
        end: ExecEvent | None = None
        pieces = self._events(request, limit)
        try:
            async for event in pieces:
                if event.kind == "exit":
                    end = event
                    continue
                kept.add(event)
                callback = callbacks[event.kind]
                if callback is not None:
                    await settle(callback(event.text))
        except (errors.SandboxTimeout, errors.ExecInterrupted) as error:
            error.stdout, error.stderr = kept.stdout.text(), kept.stderr.text()
            raise
        finally:
            await pieces.aclose()
        if end is None:
            raise errors.ExecInterrupted("the output ended before the exit code")
        return kept.result(end, (time.monotonic() - started) * 1000)

    async def _events(
        self, request: Mapping[str, Any], limit: float | None
    ) -> AsyncGenerator[ExecEvent, None]:
        """The events of a streamed command; ``exit`` is last."""
        body, headers = json_body(request)
        headers["Accept"] = "text/event-stream"
        async with await self._client.open(
            "POST",
            self._path + "/exec/stream",
            headers=headers,
            body=body,
            timeout=patience(limit),
            command=True,
        ) as response:
            try:
                async for event in sse(response):
                    parsed = exec_event(event)
                    if parsed is None:
                        continue
                    yield parsed
                    if parsed.kind == "exit":
                        return
            except errors.ConnectionError as error:
                raise errors.ExecInterrupted(f"the output ended before the exit code: {error}") from error
        raise errors.ExecInterrupted("the output ended before the exit code")

    # Copies

    @overload
    async def fork(
        self,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
        secrets: Mapping[str, str | Secret] | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncSandbox: ...

    @overload
    async def fork(
        self,
        count: int,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
        secrets: Mapping[str, str | Secret] | None = None,
        idempotency_key: str | None = None,
    ) -> builtins.list[AsyncSandbox]: ...

    async def fork(
        self,
        count: int | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
        secrets: Mapping[str, str | Secret] | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncSandbox | builtins.list[AsyncSandbox]:
        """Forks this running sandbox, with copy-on-write memory and disk. It keeps running.

        Returns one sandbox, or with ``count`` a list of sandboxes forked at the same instant:
        creates all or none. The children inherit labels and TTL unless given. ``secrets``: adds to
        the parent's secrets and gives new values to those whose ``on_fork`` is ``replace``.
        """
        request = {
            "count": count,
            "metadata": None if metadata is None else dict(metadata),
            "ttl_seconds": ttl_seconds,
            "secrets": secrets_wire(secrets),
        }
        path = self._path + "/fork"
        answer = await self._client.make(path, present(request) or None, idempotency_key=idempotency_key)
        children = [AsyncSandbox(child, self._client) for child in items(answer, "children")]
        if len(children) != (1 if count is None else count):
            raise errors.ServerError(f"the node returned {len(children)} children")
        return children[0] if count is None else children

    async def snapshot(self, *, idempotency_key: str | None = None) -> AsyncSnapshot:
        """Takes a snapshot. The sandbox keeps running."""
        path = self._path + "/snapshots"
        answer = await self._client.make(path, None, idempotency_key=idempotency_key)
        return AsyncSnapshot(answer, self._client)

    # Lifecycle

    async def kill(self) -> None:
        """Deletes the sandbox. Its children and snapshots stay."""
        await self._client.call("DELETE", self._path, making=True)
        self.status = "deleted"

    async def pause(self) -> None:
        """Pauses the sandbox, keeping it in memory."""
        await self._verb("pause")

    async def resume(self) -> None:
        """Resumes a paused sandbox."""
        await self._verb("resume")

    async def hibernate(self) -> None:
        """Saves the sandbox to disk and frees its memory. The next command, or :meth:`wake`, wakes
        it."""
        await self._verb("hibernate")

    async def wake(self) -> None:
        """Wakes a hibernated sandbox, under the same id."""
        await self._verb("wake")

    async def set_ttl(self, seconds: int) -> Lifecycle:
        """Sets how long it may be idle."""
        return await self._set_lifecycle({"ttl_seconds": seconds})

    async def set_persistent(self, persistent: bool) -> Lifecycle:
        """Sets what happens when the TTL expires: hibernate or delete."""
        return await self._set_lifecycle({"persistent": persistent})

    async def lifecycle(self) -> Lifecycle:
        """TTL, persistence and idle time."""
        return Lifecycle.parse(await self._client.call("GET", self._path + "/lifecycle"))

    # Observe

    async def ports(self) -> builtins.list[Port]:
        """Listening TCP ports."""
        answer = await self._client.call("GET", self._path + "/ports")
        return [Port.parse(port) for port in items(answer, "items")]

    async def preview(self, port: int, *, ttl_seconds: int | None = None) -> Preview:
        """Creates a browser link to a port, valid for ``ttl_seconds`` (3600 by default, at most a
        week). Nothing has to listen there yet. Using the link wakes a hibernated sandbox."""
        request = present({"port": port, "ttl_seconds": ttl_seconds})
        return Preview.parse(await self._client.call("POST", self._path + "/previews", json=request))

    async def logs(self) -> str:
        """The last part of the console output."""
        query = {"stream": "both", "follow": "false"}
        client = self._client
        async with await client.open(
            "GET", self._path + "/logs", query=query, timeout=client.timeout
        ) as response:
            return (await response.read()).decode("utf-8", "replace")

    def logs_stream(self) -> AsyncStream[str]:
        """Past lines of the console, then new ones as they arrive."""
        return AsyncStream(self._log_lines())

    async def _log_lines(self) -> AsyncGenerator[str, None]:
        query = {"stream": "both", "follow": "true"}
        headers = {"Accept": "text/event-stream"}
        async with await self._client.open(
            "GET", self._path + "/logs", query=query, headers=headers
        ) as response:
            async for event in sse(response):
                yield log_line(event)

    async def events(
        self, *, since: int | None = None, limit: int | None = None
    ) -> builtins.list[SandboxEvent]:
        """Events of this sandbox, oldest first; see :meth:`AsyncClient.events`."""
        return await self._client.events(sandbox_id=self.id, since=since, limit=limit)

    def events_stream(self, *, since: int | None = None) -> AsyncStream[SandboxEvent]:
        """Past events, then new ones until it is deleted."""
        return self._client.events_stream(sandbox_id=self.id, since=since)

    async def _verb(self, verb: str) -> None:
        answer = await self._client.call("POST", f"{self._path}/{verb}", making=True)
        if isinstance(answer, Mapping) and answer.get("id") == self.id:
            self._update(answer)
        else:
            await self.refresh()

    async def _set_lifecycle(self, change: Mapping[str, Any]) -> Lifecycle:
        state = Lifecycle.parse(await self._client.call("PATCH", self._path + "/lifecycle", json=change))
        self.ttl_seconds, self.persistent = state.ttl_seconds, state.persistent
        return state

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.persistent or self.status == "deleted":
            return
        # It may be gone already.
        with contextlib.suppress(errors.NotFoundError):
            await self.kill()

    def __repr__(self) -> str:
        return f"AsyncSandbox(id={self.id!r}, template={self.template!r}, status={self.status!r})"

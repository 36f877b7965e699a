# Made of _async/sandbox.py by unasync.py: change that, and run it.
"""Sandboxes: running, paused or hibernated Linux machines."""

from __future__ import annotations

import builtins
import contextlib
import time
from types import TracebackType
from typing import Any, Generator, Callable, Dict, Mapping, Sequence, Type, overload

from . import errors
from ._exec import Kept, checked, exec_event, exec_request, log_line, patience
from ._http import settle
from ._wire import decode, json_body, present, segment
from .models import (
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
from .client import Client, default_client, sse
from .command import Command
from .filesystem import Filesystem
from .snapshot import Snapshot
from .stream import Stream


class Sandbox:
    """One machine. As a context manager it is deleted at the end, unless it is persistent.

    Attributes show what the node said last; :meth:`refresh` asks again.
    """

    def __init__(self, data: Mapping[str, Any], client: Client) -> None:
        self._client = client
        self.id: str = str(data["id"])
        self._path = f"/sandboxes/{segment(self.id)}"
        #: Its files.
        self.filesystem = Filesystem(client, self.id)
        self._update(data)

    def _update(self, data: Mapping[str, Any]) -> None:
        self.template: str = text(data, "template")
        self.template_version: str = text(data, "template_version")
        self.cpu: int = number(data, "cpu")
        self.memory_mb: int = number(data, "memory_mb")
        self.disk_mb: int = number(data, "disk_mb")
        #: creating, running, paused, hibernated, stopping, deleted or failed.
        self.status: str = text(data, "status")
        self.guest_ip: str = text(data, "guest_ip")
        self.created_at: str = text(data, "created_at")
        self.metadata: Dict[str, str] = labels(data)
        self.from_snapshot: str | None = optional_text(data, "from_snapshot")
        #: From request to release, in ms.
        self.boot_ms: int = number(data, "boot_ms")
        #: create, fork, restore or wake.
        self.boot_mode: str = text(data, "boot_mode")
        self.persistent: bool = bool(data.get("persistent"))
        self.ttl_seconds: int = number(data, "ttl_seconds")
        self.idle_seconds: int = number(data, "idle_seconds")
        self.parent_sandbox_id: str | None = optional_text(data, "parent_sandbox_id")
        self.parent_snapshot_id: str | None = optional_text(data, "parent_snapshot_id")
        self.generation: int = number(data, "generation")
        self.engine: str = text(data, "engine")
        self.memory: MemoryUse | None = MemoryUse.parse(data.get("memory"))
        #: CPU time of its machine, in ms; only where memory is shown too.
        self.cpu_ms: int | None = None if data.get("cpu_ms") is None else number(data, "cpu_ms")
        self.timings: Timings | None = Timings.parse(data.get("timings"))
        #: Why it failed.
        self.error: str | None = optional_text(data, "error")

    # Making and finding

    @classmethod
    def create(
        cls,
        template: str | None = None,
        *,
        from_snapshot: str | None = None,
        ttl_seconds: int | None = None,
        persistent: bool = False,
        metadata: Mapping[str, str] | None = None,
        secrets: Mapping[str, str | Secret] | None = None,
        client: Client | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """A new sandbox from a template (default: the node's, ``base``) or a snapshot.

        ``ttl_seconds``: idle seconds it may live (default: the node's, 3600). ``persistent``: hibernate
        then, instead of ending. Waits while the node says that it has no capacity yet, and asks again where
        the connection broke, see :class:`Client`. ``idempotency_key``: a name of this request; whoever
        sends it again, also from another process, gets the same sandbox. ``secrets``: files of
        ``/run/keiki/secrets`` by their names; with ``from_snapshot`` further ones, and the values of those
        whose fate is ``replace``.
        """
        client = client or default_client()
        request: Dict[str, Any] = {
            "template": template,
            "from_snapshot": from_snapshot,
            "ttl_seconds": ttl_seconds,
            "persistent": True if persistent else None,
            "metadata": dict(metadata) if metadata else None,
            "secrets": secrets_wire(secrets),
        }
        made = client.make("/sandboxes", present(request), idempotency_key=idempotency_key)
        return cls(made, client)

    @classmethod
    def list(
        cls, *, memory: bool = False, client: Client | None = None
    ) -> builtins.list[Sandbox]:
        """All sandboxes, newest first. ``memory``: with what each takes, which costs the node some time."""
        client = client or default_client()
        answer = client.call("GET", "/sandboxes", query={"memory": "true"} if memory else None)
        return [cls(data, client) for data in items(answer, "items")]

    @classmethod
    def get(cls, id: str, *, client: Client | None = None) -> Sandbox:
        """The sandbox with this id."""
        client = client or default_client()
        return cls(client.call("GET", f"/sandboxes/{segment(id)}"), client)

    def refresh(self) -> Sandbox:
        """Asks the node for the state of now; returns self."""
        self._update(self._client.call("GET", self._path))
        return self

    # Commands

    def exec(
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
        """Runs a command and waits for its end.

        A text is a line for ``/bin/sh``, a sequence is program and arguments. With ``on_stdout`` or
        ``on_stderr`` output is handed over as it comes, without limit; the result still holds the first
        16 MiB of each stream. A callback that raises ends the command.

        Raises :class:`SandboxTimeout` when ``timeout_seconds`` are over: every process of the command is
        killed then. ``check``: raises :class:`CommandFailed` for an exit code other than 0.
        """
        request = exec_request(cmd, timeout_seconds, env, cwd, user, stdin)
        if on_stdout is None and on_stderr is None:
            result = self._exec_buffered(request, timeout_seconds)
        else:
            result = self._exec_streamed(request, timeout_seconds, on_stdout, on_stderr)
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
    ) -> Stream[ExecEvent]:
        """Runs a command and yields its output as it comes, then its exit. Closing the iterator early ends
        the command."""
        request = exec_request(cmd, timeout_seconds, env, cwd, user, stdin)
        return Stream(self._events(request, timeout_seconds))

    def start(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_seconds: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: None | str | bytes = None,
        stdin_open: bool = False,
    ) -> Command:
        """Starts a command that goes on without its caller. ``stdin_open``: more input comes by
        :meth:`Command.write`. A background command is no activity: the TTL goes on."""
        request = exec_request(cmd, timeout_seconds, env, cwd, user, stdin)
        request.update(present({"stdin_open": stdin_open or None}))
        return Command(
            self._client.call("POST", self._path + "/execs", json=request), self._client, self.id
        )

    def commands(self) -> builtins.list[Command]:
        """The commands that the guest knows, running and ended, oldest first."""
        answer = self._client.call("GET", self._path + "/execs")
        return [Command(data, self._client, self.id) for data in items(answer, "items")]

    def command(self, id: str) -> Command:
        """The command with this id: its own copy, if this sandbox was forked while it was known."""
        data = self._client.call("GET", f"{self._path}/execs/{segment(id)}")
        return Command(data, self._client, self.id)

    def _exec_buffered(self, request: Mapping[str, Any], limit: float | None) -> ExecResult:
        body, headers = json_body(request)
        with self._client.open(
            "POST", self._path + "/exec", headers=headers, body=body, timeout=patience(limit), command=True
        ) as response:
            return ExecResult.parse(decode(response.read(), response.status, response.request_id) or {})

    def _exec_streamed(
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
            for event in pieces:
                if event.kind == "exit":
                    end = event
                    continue
                kept.add(event)
                callback = callbacks[event.kind]
                if callback is not None:
                    settle(callback(event.text))
        except (errors.SandboxTimeout, errors.ExecInterrupted) as error:
            error.stdout, error.stderr = kept.stdout.text(), kept.stderr.text()
            raise
        finally:
            pieces.close()
        if end is None:
            raise errors.ExecInterrupted("the output ended before the exit code came")
        return kept.result(end, (time.monotonic() - started) * 1000)

    def _events(
        self, request: Mapping[str, Any], limit: float | None
    ) -> Generator[ExecEvent, None, None]:
        """The events of a streamed exec, ended by ``exit``."""
        body, headers = json_body(request)
        headers["Accept"] = "text/event-stream"
        with self._client.open(
            "POST",
            self._path + "/exec/stream",
            headers=headers,
            body=body,
            timeout=patience(limit),
            command=True,
        ) as response:
            try:
                for event in sse(response):
                    parsed = exec_event(event)
                    if parsed is None:
                        continue
                    yield parsed
                    if parsed.kind == "exit":
                        return
            except errors.ConnectionError as error:
                raise errors.ExecInterrupted(
                    f"the output ended before the exit code came: {error}"
                ) from error
        raise errors.ExecInterrupted("the output ended before the exit code came")

    # Copies

    @overload
    def fork(
        self,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
        secrets: Mapping[str, str | Secret] | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox: ...

    @overload
    def fork(
        self,
        count: int,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
        secrets: Mapping[str, str | Secret] | None = None,
        idempotency_key: str | None = None,
    ) -> builtins.list[Sandbox]: ...

    def fork(
        self,
        count: int | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
        secrets: Mapping[str, str | Secret] | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox | builtins.list[Sandbox]:
        """Branches new sandboxes off this running one, memory and disk copy-on-write; this one goes on.

        Without ``count`` one sandbox, with it a list, all of the same instant: either all or none are
        made. Labels and TTL are inherited unless given. ``secrets``: further ones of the children, and the
        values of those whose fate is ``replace``.
        """
        request = {
            "count": count,
            "metadata": None if metadata is None else dict(metadata),
            "ttl_seconds": ttl_seconds,
            "secrets": secrets_wire(secrets),
        }
        path = self._path + "/fork"
        answer = self._client.make(path, present(request) or None, idempotency_key=idempotency_key)
        children = [Sandbox(child, self._client) for child in items(answer, "children")]
        if len(children) != (1 if count is None else count):
            raise errors.ServerError(f"the node answered with {len(children)} children")
        return children[0] if count is None else children

    def snapshot(self, *, idempotency_key: str | None = None) -> Snapshot:
        """Keeps this instant of the machine; the machine goes on."""
        path = self._path + "/snapshots"
        answer = self._client.make(path, None, idempotency_key=idempotency_key)
        return Snapshot(answer, self._client)

    # Life

    def kill(self) -> None:
        """Deletes the sandbox, with its memory and disk. Children and snapshots stay."""
        self._client.call("DELETE", self._path, making=True)
        self.status = "deleted"

    def pause(self) -> None:
        """Stops its vCPUs; memory stays."""
        self._verb("pause")

    def resume(self) -> None:
        """Lets a paused sandbox run."""
        self._verb("resume")

    def hibernate(self) -> None:
        """Writes the machine to disk and frees its memory. The next exec, or :meth:`wake`, brings it back."""
        self._verb("hibernate")

    def wake(self) -> None:
        """Brings a hibernated sandbox back, under the same id."""
        self._verb("wake")

    def set_ttl(self, seconds: int) -> Lifecycle:
        """Changes how long it may idle."""
        return self._set_lifecycle({"ttl_seconds": seconds})

    def set_persistent(self, persistent: bool) -> Lifecycle:
        """Changes what happens when the TTL runs out: hibernate, or end."""
        return self._set_lifecycle({"persistent": persistent})

    def lifecycle(self) -> Lifecycle:
        """TTL, persistence and idle time of now."""
        return Lifecycle.parse(self._client.call("GET", self._path + "/lifecycle"))

    # Looking in

    def ports(self) -> builtins.list[Port]:
        """TCP ports that something in it listens on."""
        answer = self._client.call("GET", self._path + "/ports")
        return [Port.parse(port) for port in items(answer, "items")]

    def preview(self, port: int, *, ttl_seconds: int | None = None) -> Preview:
        """A link to a port, for a browser, good for ``ttl_seconds`` (default 3600, at most a week). Nothing
        has to listen there yet; using it wakes a hibernated sandbox."""
        request = present({"port": port, "ttl_seconds": ttl_seconds})
        return Preview.parse(self._client.call("POST", self._path + "/previews", json=request))

    def logs(self) -> str:
        """What the machine wrote to its console, the last part of it."""
        query = {"stream": "both", "follow": "false"}
        client = self._client
        with client.open(
            "GET", self._path + "/logs", query=query, timeout=client.timeout
        ) as response:
            return (response.read()).decode("utf-8", "replace")

    def logs_stream(self) -> Stream[str]:
        """The lines of its console: those that are there, then new ones as they come, until it ends."""
        return Stream(self._log_lines())

    def _log_lines(self) -> Generator[str, None, None]:
        query = {"stream": "both", "follow": "true"}
        headers = {"Accept": "text/event-stream"}
        with self._client.open(
            "GET", self._path + "/logs", query=query, headers=headers
        ) as response:
            for event in sse(response):
                yield log_line(event)

    def events(
        self, *, since: int | None = None, limit: int | None = None
    ) -> builtins.list[SandboxEvent]:
        """What happened to it, oldest first, see :meth:`Client.events`."""
        return self._client.events(sandbox_id=self.id, since=since, limit=limit)

    def events_stream(self, *, since: int | None = None) -> Stream[SandboxEvent]:
        """The same, and then what happens to it until it is deleted."""
        return self._client.events_stream(sandbox_id=self.id, since=since)

    def _verb(self, verb: str) -> None:
        answer = self._client.call("POST", f"{self._path}/{verb}", making=True)
        if isinstance(answer, Mapping) and answer.get("id") == self.id:
            self._update(answer)
        else:
            self.refresh()

    def _set_lifecycle(self, change: Mapping[str, Any]) -> Lifecycle:
        state = Lifecycle.parse(self._client.call("PATCH", self._path + "/lifecycle", json=change))
        self.ttl_seconds, self.persistent = state.ttl_seconds, state.persistent
        return state

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.persistent or self.status == "deleted":
            return
        # Its TTL, or somebody else, may have been faster.
        with contextlib.suppress(errors.NotFoundError):
            self.kill()

    def __repr__(self) -> str:
        return f"Sandbox(id={self.id!r}, template={self.template!r}, status={self.status!r})"

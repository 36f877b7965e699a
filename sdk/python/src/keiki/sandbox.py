"""Sandboxes: running, paused or hibernated Linux machines."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from types import TracebackType
from typing import (
    Any,
    Callable,
    Dict,
    Generator,
    Iterator,
    List,
    Mapping,
    Sequence,
    Type,
    overload,
)

from . import _sse, errors
from .client import Client, default_client, segment
from .filesystem import Filesystem
from .models import (
    ExecEvent,
    ExecResult,
    Lifecycle,
    MemoryUse,
    Timings,
    items,
    labels,
    number,
    optional_text,
    text,
    unbase64,
)
from .snapshot import Snapshot

#: What a streamed exec keeps of each stream for its result; callbacks get everything.
KEEP_BYTES = 16 * 1024 * 1024
#: How much longer than a command's own timeout its answer may take.
ANSWER_SLACK = 30.0


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
        client: Client | None = None,
    ) -> Sandbox:
        """A new sandbox from a template (default: the node's, ``base``) or a snapshot.

        ``ttl_seconds``: idle seconds it may live (default: the node's, 3600). ``persistent``: hibernate
        then, instead of ending. Waits while the node says that it has no capacity yet, see :class:`Client`.
        """
        client = client or default_client()
        request: Dict[str, Any] = {
            "template": template,
            "from_snapshot": from_snapshot,
            "ttl_seconds": ttl_seconds,
            "persistent": True if persistent else None,
            "metadata": dict(metadata) if metadata else None,
        }
        return cls(client.make("/sandboxes", _present(request)), client)

    @classmethod
    def list(cls, *, client: Client | None = None) -> List[Sandbox]:
        """All sandboxes, newest first."""
        client = client or default_client()
        return [cls(data, client) for data in items(client.call("GET", "/sandboxes"), "items")]

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
        request = _exec_request(cmd, timeout_seconds, env, cwd, user, stdin)
        if on_stdout is None and on_stderr is None:
            result = self._exec_buffered(request, timeout_seconds)
        else:
            result = self._exec_streamed(request, timeout_seconds, on_stdout, on_stderr)
        if check and result.exit_code != 0:
            tail = result.stderr.strip()[-500:]
            raise errors.CommandFailed(
                f"the command ended with exit code {result.exit_code}" + (f": {tail}" if tail else ""),
                exit_code=result.exit_code,
                stdout=result.stdout,
                stderr=result.stderr,
            )
        return result

    def exec_stream(
        self,
        cmd: str | Sequence[str],
        *,
        timeout_seconds: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: None | str | bytes = None,
    ) -> Iterator[ExecEvent]:
        """Runs a command and yields its output as it comes, then its exit. Closing the iterator early ends
        the command."""
        return self._events(_exec_request(cmd, timeout_seconds, env, cwd, user, stdin), timeout_seconds)

    def _exec_buffered(self, request: Mapping[str, Any], limit: float | None) -> ExecResult:
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        with self._client.open(
            "POST", self._path + "/exec", headers=headers, body=body, timeout=_patience(limit), command=True
        ) as response:
            return ExecResult.parse(json.loads(response.read()))

    def _exec_streamed(
        self,
        request: Mapping[str, Any],
        limit: float | None,
        on_stdout: Callable[[str], object] | None,
        on_stderr: Callable[[str], object] | None,
    ) -> ExecResult:
        kept = {"stdout": _Kept(), "stderr": _Kept()}
        callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        started = time.monotonic()
        end: ExecEvent | None = None
        events = self._events(request, limit)
        try:
            for event in events:
                if event.kind == "exit":
                    end = event
                    continue
                kept[event.kind].add(event)
                callback = callbacks[event.kind]
                if callback is not None:
                    callback(event.text)
        except (errors.SandboxTimeout, errors.ExecInterrupted) as error:
            error.stdout, error.stderr = kept["stdout"].text(), kept["stderr"].text()
            raise
        finally:
            events.close()
        if end is None:
            raise errors.ExecInterrupted("the output ended before the exit code came")
        took = end.duration_ms
        return ExecResult(
            stdout=kept["stdout"].text(),
            stderr=kept["stderr"].text(),
            exit_code=end.exit_code,
            duration_ms=round((time.monotonic() - started) * 1000) if took is None else took,
            truncated=kept["stdout"].truncated or kept["stderr"].truncated,
            stdout_bytes=kept["stdout"].data(),
            stderr_bytes=kept["stderr"].data(),
        )

    def _events(self, request: Mapping[str, Any], limit: float | None) -> Generator[ExecEvent, None, None]:
        """The events of a streamed exec, ended by ``exit``."""
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        with self._client.open(
            "POST",
            self._path + "/exec/stream",
            headers=headers,
            body=body,
            timeout=_patience(limit),
            command=True,
        ) as response:
            try:
                for event in _sse.events(response.chunks()):
                    parsed = _exec_event(event)
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
        self, *, metadata: Mapping[str, str] | None = None, ttl_seconds: int | None = None
    ) -> Sandbox: ...

    @overload
    def fork(
        self, count: int, *, metadata: Mapping[str, str] | None = None, ttl_seconds: int | None = None
    ) -> List[Sandbox]: ...

    def fork(
        self,
        count: int | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
    ) -> Sandbox | List[Sandbox]:
        """Branches new sandboxes off this running one, memory and disk copy-on-write; this one goes on.

        Without ``count`` one sandbox, with it a list, all of the same instant: either all or none are
        made. Labels and TTL are inherited unless given.
        """
        request = {
            "count": count,
            "metadata": None if metadata is None else dict(metadata),
            "ttl_seconds": ttl_seconds,
        }
        answer = self._client.make(self._path + "/fork", _present(request) or None)
        children = [Sandbox(child, self._client) for child in items(answer, "children")]
        if len(children) != (1 if count is None else count):
            raise errors.ServerError(f"the node answered with {len(children)} children")
        return children[0] if count is None else children

    def snapshot(self) -> Snapshot:
        """Keeps this instant of the machine; the machine goes on."""
        return Snapshot(self._client.call("POST", self._path + "/snapshots", making=True), self._client)

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

    def logs(self) -> str:
        """What the machine wrote to its console, the last part of it."""
        query = {"stream": "both", "follow": "false"}
        client = self._client
        with client.open("GET", self._path + "/logs", query=query, timeout=client.timeout) as response:
            return response.read().decode("utf-8", "replace")

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


class _Kept:
    """What a streamed exec keeps of one stream."""

    def __init__(self) -> None:
        self._parts: List[bytes] = []
        self._size = 0
        self.truncated = False

    def add(self, event: ExecEvent) -> None:
        part = event.data[: KEEP_BYTES - self._size]
        self.truncated = self.truncated or len(part) < len(event.data)
        self._size += len(part)
        if part:
            self._parts.append(part)

    def data(self) -> bytes:
        return b"".join(self._parts)

    def text(self) -> str:
        return self.data().decode("utf-8", "replace")


def _present(request: Mapping[str, Any]) -> Dict[str, Any]:
    return {name: value for name, value in request.items() if value is not None}


def _exec_request(
    cmd: str | Sequence[str],
    timeout_seconds: float | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    stdin: None | str | bytes,
) -> Dict[str, Any]:
    return _present(
        {
            "cmd": cmd if isinstance(cmd, str) else None,
            "argv": None if isinstance(cmd, str) else [str(part) for part in cmd],
            "timeout_seconds": timeout_seconds,
            "env": dict(env) if env else None,
            "cwd": cwd,
            "user": user,
            "stdin": stdin if isinstance(stdin, str) else None,
            "stdin_base64": base64.b64encode(stdin).decode() if isinstance(stdin, bytes) else None,
        }
    )


def _patience(limit: float | None) -> float | None:
    """How long to wait for the next sign of a command: a command without a limit may be silent for ever."""
    return None if limit is None else limit + ANSWER_SLACK


def _exec_event(event: _sse.Event) -> ExecEvent | None:
    """An event of ``/exec/stream``; None for kinds of newer nodes."""
    try:
        data = json.loads(event.data)
    except ValueError:
        data = {"chunk": event.data}
    if not isinstance(data, dict):
        return None
    if event.name in ("stdout", "stderr"):
        chunk = text(data, "chunk")
        exact = unbase64(data.get("base64"))
        return ExecEvent(event.name, text=chunk, data=chunk.encode() if exact is None else exact)
    if event.name == "exit":
        took = data.get("duration_ms")
        return ExecEvent(
            "exit", exit_code=number(data, "exit_code"), duration_ms=None if took is None else int(took)
        )
    if event.name == "error":
        message = text(data, "error") or "the command failed without a reason"
        kind = errors.SandboxTimeout if "timeout" in message.lower() else errors.ServerError
        raise kind(message)
    return None

"""Requests and results of commands."""

from __future__ import annotations

import base64
import json
from typing import Any, Dict, List, Mapping, Sequence

from . import _sse, errors
from ._wire import present
from .models import ExecEvent, ExecResult, number, optional_number, text, unbase64

#: Bytes of each stream that a streamed command keeps for its result; callbacks get everything.
KEEP_BYTES = 16 * 1024 * 1024
#: Extra time for an answer, beyond the command's own timeout.
ANSWER_SLACK = 30.0


def exec_request(
    cmd: str | Sequence[str],
    timeout_seconds: float | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    stdin: None | str | bytes,
) -> Dict[str, Any]:
    """The body of an exec."""
    return present(
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


def patience(limit: float | None) -> float | None:
    """How long to wait for the next output: a command without a timeout may be silent forever."""
    return None if limit is None else limit + ANSWER_SLACK


def exec_event(event: _sse.Event) -> ExecEvent | None:
    """Decodes an event of ``/exec/stream``; None for kinds added by newer nodes."""
    try:
        data = json.loads(event.data)
    except ValueError:
        data = {"chunk": event.data}
    if not isinstance(data, dict):
        return None
    if event.name in ("stdout", "stderr"):
        chunk = text(data, "chunk")
        exact = unbase64(data.get("base64"))
        piece = chunk.encode() if exact is None else exact
        return ExecEvent(event.name, text=chunk, data=piece, offset=optional_number(data, "offset"))
    if event.name == "exit":
        took = optional_number(data, "duration_ms")
        return ExecEvent("exit", exit_code=number(data, "exit_code"), duration_ms=took)
    if event.name == "error":
        message = text(data, "error") or "the command failed for an unknown reason"
        kind = errors.SandboxTimeout if "timeout" in message.lower() else errors.ServerError
        raise kind(message)
    return None


def log_line(event: _sse.Event) -> str:
    """A line of a log, from the field ``line`` or the data itself."""
    try:
        data = json.loads(event.data)
    except ValueError:
        return event.data
    return text(data, "line") if isinstance(data, dict) else event.data


def checked(result: ExecResult) -> ExecResult:
    """Returns the result of a command that succeeded; raises otherwise."""
    if result.exit_code == 0:
        return result
    tail = result.stderr.strip()[-500:]
    raise errors.CommandFailed(
        f"the command failed with exit code {result.exit_code}" + (f": {tail}" if tail else ""),
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
    )


class Kept:
    """What a streamed command keeps of its output."""

    def __init__(self) -> None:
        self.stdout = _Stream()
        self.stderr = _Stream()

    def add(self, event: ExecEvent) -> None:
        """Adds a piece of output."""
        (self.stdout if event.kind == "stdout" else self.stderr).add(event.data)

    def result(self, end: ExecEvent, waited_ms: float) -> ExecResult:
        """The result, once the command has exited."""
        return ExecResult(
            stdout=self.stdout.text(),
            stderr=self.stderr.text(),
            exit_code=end.exit_code,
            duration_ms=round(waited_ms) if end.duration_ms is None else end.duration_ms,
            truncated=self.stdout.truncated or self.stderr.truncated,
            stdout_bytes=self.stdout.data(),
            stderr_bytes=self.stderr.data(),
        )


class _Stream:
    def __init__(self) -> None:
        self._parts: List[bytes] = []
        self._size = 0
        self.truncated = False

    def add(self, data: bytes) -> None:
        part = data[: KEEP_BYTES - self._size]
        self.truncated = self.truncated or len(part) < len(data)
        self._size += len(part)
        if part:
            self._parts.append(part)

    def data(self) -> bytes:
        return b"".join(self._parts)

    def text(self) -> str:
        return self.data().decode("utf-8", "replace")

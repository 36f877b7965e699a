"""What the node answers, as plain typed values. Unknown fields of newer nodes are ignored."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Tuple


def text(data: Mapping[str, Any], name: str) -> str:
    """A field as text; empty where it is missing or null."""
    value = data.get(name)
    return "" if value is None else str(value)


def optional_text(data: Mapping[str, Any], name: str) -> str | None:
    """A field as text; None where it is missing, null or empty."""
    return text(data, name) or None


def number(data: Mapping[str, Any], name: str) -> int:
    """A field as an integer; 0 where it is missing or null."""
    return int(data.get(name) or 0)


def optional_number(data: Mapping[str, Any], name: str) -> int | None:
    """A field as an integer; None where it is missing or null."""
    value = data.get(name)
    return None if value is None else int(value)


def labels(data: Mapping[str, Any]) -> Dict[str, str]:
    """The field ``metadata``."""
    return {str(key): str(value) for key, value in (data.get("metadata") or {}).items()}


def unbase64(value: object) -> bytes | None:
    """Bytes of a base64 field; None where it is missing or damaged."""
    if not isinstance(value, str):
        return None
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None


@dataclass(frozen=True)
class Step:
    """One step of an operation."""

    name: str
    ms: float


@dataclass(frozen=True)
class Timings:
    """How long an operation took at the node, in ms. None: has no such part."""

    total_ms: float
    vcpu_pause_ms: float | None
    user_pause_ms: float | None
    thaw_ms: float | None
    release_ms: float | None
    steps: Tuple[Step, ...]

    @classmethod
    def parse(cls, data: Mapping[str, Any] | None) -> Timings | None:
        """From the wire."""
        if not data:
            return None

        def ms(name: str) -> float | None:
            value = data.get(name)
            return None if value is None else float(value)

        steps = tuple(
            Step(text(step, "name"), float(step.get("ms") or 0)) for step in data.get("steps") or []
        )
        return cls(
            total_ms=ms("total_ms") or 0.0,
            vcpu_pause_ms=ms("vcpu_pause_ms"),
            user_pause_ms=ms("user_pause_ms"),
            thaw_ms=ms("thaw_ms"),
            release_ms=ms("release_ms"),
            steps=steps,
        )


@dataclass(frozen=True)
class MemoryUse:
    """Host memory behind a sandbox, in bytes."""

    guest_bytes: int
    rss_bytes: int
    pss_bytes: int
    private_bytes: int
    shared_bytes: int

    @classmethod
    def parse(cls, data: Mapping[str, Any] | None) -> MemoryUse | None:
        """From the wire."""
        if not data:
            return None
        return cls(
            guest_bytes=number(data, "guest_bytes"),
            rss_bytes=number(data, "rss_bytes"),
            pss_bytes=number(data, "pss_bytes"),
            private_bytes=number(data, "private_bytes"),
            shared_bytes=number(data, "shared_bytes"),
        )


@dataclass(frozen=True)
class Lifecycle:
    """How long a sandbox may idle, and what happens then."""

    ttl_seconds: int
    persistent: bool
    idle_seconds: int

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Lifecycle:
        """From the wire."""
        return cls(number(data, "ttl_seconds"), bool(data.get("persistent")), number(data, "idle_seconds"))


@dataclass(frozen=True)
class FileEntry:
    """A file, directory or other entry in a sandbox. A symlink is itself, not what it points to."""

    name: str
    path: str
    is_dir: bool
    size: int
    #: Permission bits as octal text, for example ``0644``.
    mode: str
    #: Seconds since the epoch.
    mtime: int
    #: ``file``, ``dir``, ``symlink``, ``fifo``, ``socket``, ``block`` or ``char``.
    kind: str
    uid: int
    gid: int
    #: Where a symlink points.
    target: str | None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> FileEntry:
        """From the wire."""
        return cls(
            name=text(data, "name"),
            path=text(data, "path"),
            is_dir=bool(data.get("is_dir")),
            size=number(data, "size"),
            mode=text(data, "mode"),
            mtime=number(data, "mtime"),
            kind=text(data, "kind"),
            uid=number(data, "uid"),
            gid=number(data, "gid"),
            target=optional_text(data, "target"),
        )


@dataclass(frozen=True)
class FileEvent:
    """A change at or below a path that is watched."""

    #: ``ready`` first; ``created``, ``modified``, ``closed`` (after writing), ``attributes``, ``removed``,
    #: ``moved``; ``overflow``: some are missing, because they were not read in time.
    kind: str
    path: str
    #: ``moved``: the old path.
    old_path: str | None
    is_dir: bool

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> FileEvent:
        """From the wire."""
        return cls(
            text(data, "kind"), text(data, "path"), optional_text(data, "from"), bool(data.get("is_dir"))
        )


@dataclass(frozen=True)
class Unpacked:
    """What an archive that was unpacked held."""

    path: str
    files: int
    dirs: int
    symlinks: int
    #: Contents of the files.
    bytes: int

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Unpacked:
        """From the wire."""
        counts = (number(data, name) for name in ("files", "dirs", "symlinks", "bytes"))
        return cls(text(data, "path"), *counts)


@dataclass(frozen=True)
class Port:
    """A TCP port that something in a sandbox listens on."""

    port: int
    #: Where it listens, inside: ``0.0.0.0``, ``127.0.0.1``, ``::``.
    address: str
    #: Whose it is, where that was found.
    pid: int | None
    process: str | None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Port:
        """From the wire."""
        owner = optional_number(data, "pid"), optional_text(data, "process")
        return cls(number(data, "port"), text(data, "address"), *owner)


@dataclass(frozen=True)
class Preview:
    """A link to a port of a sandbox, for a browser. Whoever has it may use that port, and nothing else."""

    url: str
    port: int
    #: None where the node asks for no keys: the link needs no time limit then.
    expires_at: str | None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Preview:
        """From the wire."""
        return cls(text(data, "url"), number(data, "port"), optional_text(data, "expires_at"))


@dataclass(frozen=True)
class Secret:
    """A file in memory, ``/run/keiki/secrets/NAME``, that only ``owner`` can read. The node keeps no value.

    What becomes of it in copies, each ``inherit``, ``drop`` or ``replace`` (a fork or restore must bring the
    new value):
    """

    #: At most 64 KiB. Not part of ``repr()``.
    value: str = field(repr=False)
    #: In forks. Default ``inherit``.
    on_fork: str | None = None
    #: In what is restored from a snapshot. Default ``drop``.
    on_restore: str | None = None
    #: A user of the sandbox: a name, ``uid`` or ``uid:gid``. Default root.
    owner: str | None = None

    def wire(self) -> Dict[str, str]:
        """As it is sent."""
        fates = {"on_fork": self.on_fork, "on_restore": self.on_restore, "owner": self.owner}
        return {"value": self.value, **{name: value for name, value in fates.items() if value is not None}}


def secrets_wire(secrets: Mapping[str, str | Secret] | None) -> Dict[str, Dict[str, str]] | None:
    """Secrets as they are sent; a plain text has the default fates."""
    if not secrets:
        return None
    return {
        name: (Secret(value) if isinstance(value, str) else value).wire() for name, value in secrets.items()
    }


@dataclass(frozen=True)
class ExecResult:
    """A command that has ended."""

    #: As text; bytes that are no UTF-8 are replaced. ``stdout_bytes`` is exact.
    stdout: str
    stderr: str
    #: As a shell reports it: 128+n for signal n, 127 not found, 126 not executable.
    exit_code: int
    duration_ms: int
    #: More than 16 MiB came on a stream and the rest is not in here.
    truncated: bool
    stdout_bytes: bytes
    stderr_bytes: bytes

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> ExecResult:
        """From the wire."""
        stdout, stderr = text(data, "stdout"), text(data, "stderr")
        exact_out, exact_err = unbase64(data.get("stdout_base64")), unbase64(data.get("stderr_base64"))
        return cls(
            stdout=stdout,
            stderr=stderr,
            exit_code=number(data, "exit_code"),
            duration_ms=number(data, "duration_ms"),
            truncated=bool(data.get("truncated")),
            stdout_bytes=stdout.encode() if exact_out is None else exact_out,
            stderr_bytes=stderr.encode() if exact_err is None else exact_err,
        )


@dataclass(frozen=True)
class ExecEvent:
    """One piece of a running command's life."""

    #: ``stdout``, ``stderr`` or ``exit``.
    kind: str
    #: The piece as text.
    text: str = ""
    #: The piece, exact.
    data: bytes = b""
    #: Only of ``exit``.
    exit_code: int = 0
    duration_ms: int | None = None
    #: Where in its stream the piece begins; only of :meth:`Command.stream`.
    offset: int | None = None


@dataclass(frozen=True)
class Template:
    """A starting point on the node."""

    name: str
    description: str
    #: ready, building or missing.
    status: str
    #: Content digest of what it was baked from; empty while never built.
    version: str
    cpu: int
    memory_mb: int
    disk_mb: int
    size_bytes: int
    #: When it was baked.
    created_at: str

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Template:
        """From the wire."""
        return cls(
            name=text(data, "name"),
            description=text(data, "description"),
            status=text(data, "status"),
            version=text(data, "version"),
            cpu=number(data, "cpu"),
            memory_mb=number(data, "memory_mb"),
            disk_mb=number(data, "disk_mb"),
            size_bytes=number(data, "size_bytes"),
            created_at=text(data, "created_at"),
        )


@dataclass(frozen=True)
class SandboxEvent:
    """Something that happened to a sandbox."""

    #: Its number on the node: only grows, with gaps.
    seq: int
    at: str
    sandbox_id: str
    #: created, running, paused, resumed, frozen, forked, snapshotted, hibernated, woken, expired, deleted or
    #: failed; newer nodes may have more.
    kind: str
    #: ``failed``: why.
    reason: str | None
    #: How long it took; ``frozen``: how long its vCPUs stood still.
    ms: float | None
    #: ``created``: the sandbox it was forked from.
    parent_sandbox_id: str | None
    #: ``created``: restored from it. ``snapshotted``: the new one.
    snapshot_id: str | None
    #: ``forked``: who.
    children: Tuple[str, ...]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> SandboxEvent:
        """From the wire."""
        ms = data.get("ms")
        return cls(
            seq=number(data, "seq"),
            at=text(data, "at"),
            sandbox_id=text(data, "sandbox_id"),
            kind=text(data, "kind"),
            reason=optional_text(data, "reason"),
            ms=None if ms is None else float(ms),
            parent_sandbox_id=optional_text(data, "parent_sandbox_id"),
            snapshot_id=optional_text(data, "snapshot_id"),
            children=tuple(str(child) for child in data.get("children") or []),
        )


def items(data: object, *names: str) -> List[Mapping[str, Any]]:
    """The list in an answer: bare, or under one of ``names``."""
    if isinstance(data, Mapping):
        data = next((data[name] for name in names if data.get(name) is not None), [])
    return list(data) if isinstance(data, list) else []

"""Typed answers of the node. Unknown fields of newer nodes are ignored."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Tuple


def text(data: Mapping[str, Any], name: str) -> str:
    """A field as text; empty if missing or null."""
    value = data.get(name)
    return "" if value is None else str(value)


def optional_text(data: Mapping[str, Any], name: str) -> str | None:
    """A field as text; None if missing, null or empty."""
    return text(data, name) or None


def number(data: Mapping[str, Any], name: str) -> int:
    """A field as an integer; 0 if missing or null."""
    return int(data.get(name) or 0)


def optional_number(data: Mapping[str, Any], name: str) -> int | None:
    """A field as an integer; None if missing or null."""
    value = data.get(name)
    return None if value is None else int(value)


def labels(data: Mapping[str, Any]) -> Dict[str, str]:
    """The field ``metadata``."""
    return {str(key): str(value) for key, value in (data.get("metadata") or {}).items()}


def unbase64(value: object) -> bytes | None:
    """Bytes of a base64 field; None if missing or invalid."""
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
    """How long an operation took on the node, in ms. None: it has no such part."""

    total_ms: float
    vcpu_pause_ms: float | None
    user_pause_ms: float | None
    thaw_ms: float | None
    release_ms: float | None
    steps: Tuple[Step, ...]

    @classmethod
    def parse(cls, data: Mapping[str, Any] | None) -> Timings | None:
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
    """How long a sandbox may be idle, and what happens then."""

    ttl_seconds: int
    persistent: bool
    idle_seconds: int

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Lifecycle:
        return cls(number(data, "ttl_seconds"), bool(data.get("persistent")), number(data, "idle_seconds"))


@dataclass(frozen=True)
class FileEntry:
    """A file, directory or other entry in a sandbox. Symlinks are not followed."""

    name: str
    path: str
    is_dir: bool
    size: int
    #: Permission bits as four octal digits, e.g. ``0644``.
    mode: str
    #: Modification time, in seconds since the epoch.
    mtime: int
    #: ``file``, ``dir``, ``symlink``, ``fifo``, ``socket``, ``block`` or ``char``.
    kind: str
    uid: int
    gid: int
    #: Target of a symlink.
    target: str | None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> FileEntry:
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
    """A change at or below a watched path."""

    #: ``ready`` comes first, then ``created``, ``modified``, ``closed`` (after writing),
    #: ``attributes``, ``removed`` or ``moved``. ``overflow`` means that events were lost, because
    #: they were not read in time.
    kind: str
    path: str
    #: Old path, if ``moved``.
    old_path: str | None
    is_dir: bool

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> FileEvent:
        return cls(
            text(data, "kind"), text(data, "path"), optional_text(data, "from"), bool(data.get("is_dir"))
        )


@dataclass(frozen=True)
class Unpacked:
    """What was unpacked from an archive."""

    path: str
    files: int
    dirs: int
    symlinks: int
    #: Size of the files' contents.
    bytes: int

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Unpacked:
        counts = (number(data, name) for name in ("files", "dirs", "symlinks", "bytes"))
        return cls(text(data, "path"), *counts)


@dataclass(frozen=True)
class Port:
    """A listening TCP port in a sandbox."""

    port: int
    #: Address it listens on, e.g. ``0.0.0.0``, ``127.0.0.1`` or ``::``.
    address: str
    #: Process that listens, if found.
    pid: int | None
    process: str | None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Port:
        owner = optional_number(data, "pid"), optional_text(data, "process")
        return cls(number(data, "port"), text(data, "address"), *owner)


@dataclass(frozen=True)
class Preview:
    """A browser link to a port in a sandbox. It gives access to that port and nothing else."""

    url: str
    port: int
    #: End of validity; None if the node requires no API key.
    expires_at: str | None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Preview:
        return cls(text(data, "url"), number(data, "port"), optional_text(data, "expires_at"))


@dataclass(frozen=True)
class Secret:
    """A file in memory, ``/run/keiki/secrets/NAME``, that only ``owner`` can read. The node does
    not store it.

    In a copy it follows ``inherit``, ``drop`` or ``replace`` (a fork or restore must give a new
    value).
    """

    #: At most 64 KiB. Not part of ``repr()``.
    value: str = field(repr=False)
    #: What forks get; ``inherit`` by default.
    on_fork: str | None = None
    #: What sandboxes restored from a snapshot get; ``drop`` by default.
    on_restore: str | None = None
    #: A name, ``uid`` or ``uid:gid`` in the sandbox; root by default.
    owner: str | None = None

    def wire(self) -> Dict[str, str]:
        """The secret as it is sent."""
        fates = {"on_fork": self.on_fork, "on_restore": self.on_restore, "owner": self.owner}
        return {"value": self.value, **{name: value for name, value in fates.items() if value is not None}}


def secrets_wire(secrets: Mapping[str, str | Secret] | None) -> Dict[str, Dict[str, str]] | None:
    """Secrets as they are sent; a plain string has the defaults."""
    if not secrets:
        return None
    return {
        name: (Secret(value) if isinstance(value, str) else value).wire() for name, value in secrets.items()
    }


@dataclass(frozen=True)
class ExecResult:
    """The result of a command."""

    #: As text, with U+FFFD for bytes that are not UTF-8. ``stdout_bytes`` is exact.
    stdout: str
    stderr: str
    #: As a shell reports it: 128+n for signal n, 127 not found, 126 not executable.
    exit_code: int
    duration_ms: int
    #: A stream was longer than 16 MiB, and the rest was dropped.
    truncated: bool
    stdout_bytes: bytes
    stderr_bytes: bytes

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> ExecResult:
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
    """Output or exit of a command."""

    #: ``stdout``, ``stderr`` or ``exit``.
    kind: str
    #: Output as text.
    text: str = ""
    #: The exact output.
    data: bytes = b""
    #: Set for ``exit``.
    exit_code: int = 0
    duration_ms: int | None = None
    #: Offset in the stream; set by :meth:`Command.stream`.
    offset: int | None = None


@dataclass(frozen=True)
class Template:
    """A template."""

    name: str
    description: str
    #: ``ready``, ``building`` or ``missing``.
    status: str
    #: Digest of what it was built from; empty until it is built.
    version: str
    cpu: int
    memory_mb: int
    disk_mb: int
    size_bytes: int
    #: When it was built.
    created_at: str

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Template:
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
    """An event in the life of a sandbox."""

    #: Number on this node: increasing, with gaps.
    seq: int
    at: str
    sandbox_id: str
    #: created, running, paused, resumed, frozen, forked, snapshotted, hibernated, woken, expired,
    #: deleted or failed; newer nodes may have more.
    kind: str
    #: For ``failed``: why.
    reason: str | None
    #: How long it took; for ``frozen``, how long its vCPUs were paused.
    ms: float | None
    #: For ``created``: the sandbox it was forked from.
    parent_sandbox_id: str | None
    #: For ``created``: the snapshot it was restored from. For ``snapshotted``: the new snapshot.
    snapshot_id: str | None
    #: For ``forked``: the children.
    children: Tuple[str, ...]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> SandboxEvent:
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
    """The list in an answer, bare or under one of ``names``."""
    if isinstance(data, Mapping):
        data = next((data[name] for name in names if data.get(name) is not None), [])
    return list(data) if isinstance(data, list) else []

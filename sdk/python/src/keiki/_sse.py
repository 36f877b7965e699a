"""Server-sent events, from bytes as they arrive: borders of chunks mean nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Iterator, List


@dataclass(frozen=True)
class Event:
    """One event. ``name`` is ``message`` where the server gave none."""

    name: str
    data: str


def events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """Cuts a byte stream into events.

    Lines end with LF, CRLF or CR only: text may hold other characters that Python's ``splitlines`` would
    split at. An event that the end of the stream cuts off is dropped, as the format demands.
    """
    name, data = "", []  # type: str, List[str]
    for line in _lines(chunks):
        if not line:
            if data:
                yield Event(name or "message", "\n".join(data))
            name, data = "", []
            continue
        field, _, value = line.decode("utf-8", "replace").partition(":")
        if value.startswith(" "):
            value = value[1:]
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    pending: List[bytes] = []
    skip_lf = False
    for chunk in chunks:
        if skip_lf and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        if chunk:
            skip_lf = chunk.endswith(b"\r")
        # bytes.splitlines knows LF, CR and CRLF only.
        for line in chunk.splitlines(keepends=True):
            body = line.rstrip(b"\r\n")
            pending.append(body)
            if len(body) != len(line):
                yield b"".join(pending)
                pending = []

"""Server-sent events, from bytes in pieces of any size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, List


@dataclass(frozen=True)
class Event:
    """One event. ``name`` is ``message`` if the server sent none."""

    name: str
    data: str
    #: Sent back to resume a broken stream; that of the last event counts.
    id: str = ""


class Decoder:
    """Splits a byte stream into events.

    Lines end with LF, CRLF or CR only: text may hold other characters at which Python's
    ``splitlines`` splits. An event cut off by the end of the stream is dropped, as the standard
    requires.
    """

    def __init__(self) -> None:
        self._name = self._id = ""
        self._data: List[str] = []
        self._pending: List[bytes] = []
        self._skip_lf = False

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yields the events that this chunk completes."""
        for line in self._lines(chunk):
            if not line:
                if self._data:
                    yield Event(self._name or "message", "\n".join(self._data), self._id)
                self._name, self._data = "", []
                continue
            field, _, value = line.decode("utf-8", "replace").partition(":")
            if value.startswith(" "):
                value = value[1:]
            if field == "event":
                self._name = value
            elif field == "id":
                self._id = value
            elif field == "data":
                self._data.append(value)

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        if self._skip_lf and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._skip_lf = False
        if chunk:
            self._skip_lf = chunk.endswith(b"\r")
        # bytes.splitlines splits at LF, CR and CRLF only.
        for line in chunk.splitlines(keepends=True):
            body = line.rstrip(b"\r\n")
            self._pending.append(body)
            if len(body) != len(line):
                yield b"".join(self._pending)
                self._pending = []

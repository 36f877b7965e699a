# Made of _async/filesystem.py by unasync.py: change that, and run it.
"""Files in a sandbox."""

from __future__ import annotations

import builtins
from typing import Any, Generator, BinaryIO, Mapping, Union

from ._wire import present, segment
from .errors import NotFoundError
from .models import FileEntry, items
from .client import Client
from .stream import Stream

Mode = Union[int, str]


class Filesystem:
    """Files in one sandbox. Paths are absolute; errors are those of :mod:`keiki.errors`."""

    def __init__(self, client: Client, sandbox_id: str) -> None:
        self._client = client
        self._base = f"/sandboxes/{segment(sandbox_id)}/fs"

    def read(self, path: str) -> bytes:
        """Contents of a file."""
        return b"".join([chunk for chunk in self.read_stream(path)])

    def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """Contents of a text file."""
        return (self.read(path)).decode(encoding)

    def read_stream(self, path: str) -> Stream[bytes]:
        """Contents of a file of any size, as they arrive. Raises if the file is cut off on its way."""
        return Stream(self._chunks(path))

    def _chunks(self, path: str) -> Generator[bytes, None, None]:
        client = self._client
        headers = {"Accept": "application/octet-stream"}
        with client.open(
            "GET", self._base, query={"path": path}, headers=headers, timeout=client.timeout
        ) as response:
            for chunk in response.chunks():
                yield chunk

    def write(self, path: str, data: bytes | str | BinaryIO, *, mode: Mode | None = None) -> int:
        """Writes a whole file and returns its size; missing parents are made.

        Text is written as UTF-8. A binary file object is streamed, whatever its size. The old file stays
        until the new one is whole. ``mode``: permission bits; default those of the old file, or 0644.
        """
        query = present({"path": path, "mode": None if mode is None else _octal(mode)})
        body = data.encode() if isinstance(data, str) else data
        headers = {"Content-Type": "application/octet-stream"}
        answer = self._client.send("PUT", self._base, body, query=query, headers=headers)
        return int(answer.get("bytes") or 0) if isinstance(answer, Mapping) else 0

    def list(self, path: str = "/") -> builtins.list[FileEntry]:
        """Entries of a directory, by name."""
        answer = self._client.call("GET", self._base + "/dir", query={"path": path})
        return [FileEntry.parse(entry) for entry in items(answer, "entries")]

    def stat(self, path: str) -> FileEntry:
        """One entry. Symlinks are not followed."""
        return FileEntry.parse(self._client.call("GET", self._base + "/stat", query={"path": path}))

    def exists(self, path: str) -> bool:
        """Is there such an entry?"""
        try:
            self.stat(path)
        except NotFoundError:
            return False
        return True

    def mkdir(self, path: str, *, parents: bool = False, mode: Mode | None = None) -> None:
        """Makes a directory. ``parents``: also the missing ones above it, and no error if it exists."""
        self._change("mkdir", path=path, recursive=parents, mode=None if mode is None else _octal(mode))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes an entry. ``recursive``: also what is inside a directory."""
        self._change("remove", path=path, recursive=recursive)

    def rename(self, old: str, new: str) -> None:
        """Renames an entry; replaces what ``new`` was."""
        self._change("rename", path=new, **{"from": old})

    def chmod(self, path: str, mode: Mode) -> None:
        """Sets permission bits: ``0o755`` or ``"0755"``."""
        self._change("chmod", path=path, mode=_octal(mode))

    def symlink(self, target: str, path: str) -> None:
        """Makes ``path`` a symlink to ``target``."""
        self._change("symlink", path=path, target=target)

    def _change(self, verb: str, **change: Any) -> None:
        self._client.call("POST", f"{self._base}/{verb}", json=present(change))


def _octal(mode: Mode) -> str:
    bits = int(mode, 8) if isinstance(mode, str) else mode
    if not 0 <= bits <= 0o7777:
        raise ValueError(f"not permission bits: {mode!r}")
    return f"{bits:04o}"

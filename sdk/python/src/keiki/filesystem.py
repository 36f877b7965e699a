# Made of _async/filesystem.py by unasync.py: change that, and run it.
"""Files in a sandbox."""

from __future__ import annotations

import builtins
import os
import tempfile
from pathlib import Path
from typing import Any, Generator, BinaryIO, Mapping, Union, cast

from ._archive import Packed, unpack
from ._http import aside
from ._wire import decode, present, segment
from .errors import NotFoundError, ServerError
from .models import FileEntry, FileEvent, Unpacked, items, text
from .client import Client, sse
from .stream import Stream

Mode = Union[int, str]


class Filesystem:
    """Files in one sandbox. Paths are absolute; errors are those of :mod:`keiki.errors`."""

    def __init__(self, client: Client, sandbox_id: str) -> None:
        self._client = client
        self._base = f"/sandboxes/{segment(sandbox_id)}/fs"
        self._archive = f"/sandboxes/{segment(sandbox_id)}/archive"

    def read(self, path: str) -> bytes:
        """Contents of a file."""
        return b"".join([chunk for chunk in self.read_stream(path)])

    def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """Contents of a text file."""
        return (self.read(path)).decode(encoding)

    def read_stream(self, path: str) -> Stream[bytes]:
        """Contents of a file of any size, as they arrive. Raises if the file is cut off on its way."""
        return Stream(self._chunks(self._base, path, "application/octet-stream"))

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

    # Trees

    def upload(self, local: str | os.PathLike[str], path: str, *, owners: bool = False) -> Unpacked:
        """Makes ``path`` a copy of a file or directory of this machine, sent while it is read: modes, times,
        links. Directories are joined, files of the same name replaced. ``owners``: take them over by their
        numbers; else all is root's. Sockets, pipes and devices are left out. ``local`` itself may be a
        symlink to what is meant."""
        source = Path(local).resolve(strict=True)
        if source.is_dir():
            self.mkdir(path, parents=True)
            return self.write_archive(
                path, cast(BinaryIO, Packed(source)), owners=owners, strip_top=True
            )
        parent, _, name = path.rstrip("/").rpartition("/")
        self.mkdir(parent or "/", parents=True)
        return self.write_archive(parent or "/", cast(BinaryIO, Packed(source, name)), owners=owners)

    def download(self, path: str, local: str | os.PathLike[str]) -> None:
        """Makes ``local``, which must not exist, a copy of a file or directory of the sandbox. It appears
        when it is whole. Modes of files stay but for set-user-ID and who else may write; symlinks keep their
        targets, which may be anywhere on this machine: mind what follows them."""
        with tempfile.TemporaryFile() as archive:
            for chunk in self.read_archive(path):
                archive.write(chunk)
            archive.seek(0)
            aside(unpack, archive, Path(local))

    def read_archive(self, path: str) -> Stream[bytes]:
        """A file or directory as a tar stream, its last name on top. Raises if it is cut off on its way."""
        return Stream(self._chunks(self._archive, path, "application/x-tar"))

    def write_archive(
        self, path: str, data: bytes | BinaryIO, *, owners: bool = False, strip_top: bool = False
    ) -> Unpacked:
        """Unpacks a tar stream into the directory ``path``: a binary file object is streamed. An archive that
        leads out of it, holds devices or does not fit is refused, and nothing of it is left.
        ``strip_top``: the archive's top directory becomes ``path`` itself. ``owners``: as for ``upload``."""
        flags = {"owners": owners, "strip_top": strip_top}
        query = {"path": path, **{name: "true" for name, given in flags.items() if given}}
        headers = {"Content-Type": "application/x-tar"}
        return Unpacked.parse(
            self._client.send("PUT", self._archive, data, query=query, headers=headers)
        )

    def watch(self, path: str, *, recursive: bool = False) -> Stream[FileEvent]:
        """What changes at or in ``path``, with ``recursive`` also below. The first event is ``ready``: what
        happens from then on is told. Ends when what is watched is gone. A connection that breaks raises: what
        happened meanwhile is not known to anybody."""
        return Stream(self._changes(present({"path": path, "recursive": "true" if recursive else None})))

    def _changes(self, query: Mapping[str, str]) -> Generator[FileEvent, None, None]:
        headers = {"Accept": "text/event-stream"}
        with self._client.open(
            "GET", self._base + "/watch", query=query, headers=headers
        ) as response:
            for event in sse(response):
                data = decode(event.data.encode(), response.status, response.request_id)
                if event.name == "error":
                    raise ServerError(text(data, "error"), request_id=response.request_id)
                yield FileEvent.parse(data)

    def _chunks(self, where: str, path: str, kind: str) -> Generator[bytes, None, None]:
        client = self._client
        with client.open(
            "GET", where, query={"path": path}, headers={"Accept": kind}, timeout=client.timeout
        ) as response:
            for chunk in response.chunks():
                yield chunk

    def _change(self, verb: str, **change: Any) -> None:
        self._client.call("POST", f"{self._base}/{verb}", json=present(change))


def _octal(mode: Mode) -> str:
    bits = int(mode, 8) if isinstance(mode, str) else mode
    if not 0 <= bits <= 0o7777:
        raise ValueError(f"not permission bits: {mode!r}")
    return f"{bits:04o}"

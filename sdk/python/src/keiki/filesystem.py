# Generated from _async/filesystem.py by unasync.py. Do not edit.
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
    """Files in one sandbox. Paths are absolute; errors come from :mod:`keiki.errors`."""

    def __init__(self, client: Client, sandbox_id: str) -> None:
        self._client = client
        self._base = f"/sandboxes/{segment(sandbox_id)}/fs"
        self._archive = f"/sandboxes/{segment(sandbox_id)}/archive"

    def read(self, path: str) -> bytes:
        """Reads a file."""
        return b"".join([chunk for chunk in self.read_stream(path)])

    def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """Reads a text file."""
        return (self.read(path)).decode(encoding)

    def read_stream(self, path: str) -> Stream[bytes]:
        """Streams a file of any size. Raises if the connection breaks."""
        return Stream(self._chunks(self._base, path, "application/octet-stream"))

    def write(self, path: str, data: bytes | str | BinaryIO, *, mode: Mode | None = None) -> int:
        """Writes a file, atomically, and returns its size. Creates missing parents.

        Text is written as UTF-8. A binary file object of any size is streamed. ``mode``: permission
        bits; by default those of the old file, or 0644.
        """
        query = present({"path": path, "mode": None if mode is None else _octal(mode)})
        body = data.encode() if isinstance(data, str) else data
        headers = {"Content-Type": "application/octet-stream"}
        answer = self._client.send("PUT", self._base, body, query=query, headers=headers)
        return int(answer.get("bytes") or 0) if isinstance(answer, Mapping) else 0

    def list(self, path: str = "/") -> builtins.list[FileEntry]:
        """Lists a directory, sorted by name."""
        answer = self._client.call("GET", self._base + "/dir", query={"path": path})
        return [FileEntry.parse(entry) for entry in items(answer, "entries")]

    def stat(self, path: str) -> FileEntry:
        """Describes one entry, without following symlinks."""
        return FileEntry.parse(self._client.call("GET", self._base + "/stat", query={"path": path}))

    def exists(self, path: str) -> bool:
        """Does the entry exist?"""
        try:
            self.stat(path)
        except NotFoundError:
            return False
        return True

    def mkdir(self, path: str, *, parents: bool = False, mode: Mode | None = None) -> None:
        """Creates a directory. ``parents``: also create missing parents, and accept an existing
        directory."""
        self._change("mkdir", path=path, recursive=parents, mode=None if mode is None else _octal(mode))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes an entry. ``recursive``: also remove the contents of a directory."""
        self._change("remove", path=path, recursive=recursive)

    def rename(self, old: str, new: str) -> None:
        """Renames an entry, replacing ``new``."""
        self._change("rename", path=new, **{"from": old})

    def chmod(self, path: str, mode: Mode) -> None:
        """Sets permission bits: ``0o755`` or ``"0755"``."""
        self._change("chmod", path=path, mode=_octal(mode))

    def symlink(self, target: str, path: str) -> None:
        """Creates a symlink at ``path`` to ``target``."""
        self._change("symlink", path=path, target=target)

    # Trees

    def upload(self, local: str | os.PathLike[str], path: str, *, owners: bool = False) -> Unpacked:
        """Copies a local file or directory to ``path``, with modes, times and links. Merges
        directories and replaces files of the same name. ``owners``: keep owners, by number;
        otherwise root owns everything. Skips sockets, pipes and devices. Follows ``local`` itself
        if it is a symlink."""
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
        """Copies a file or directory to ``local``, which must not exist. It appears only when it is
        complete. Keeps the modes of files, without set-user-ID and write permission for others.
        Keeps the targets of symlinks, which may be anywhere on this machine: take care when you
        follow them."""
        with tempfile.TemporaryFile() as archive:
            for chunk in self.read_archive(path):
                archive.write(chunk)
            archive.seek(0)
            aside(unpack, archive, Path(local))

    def read_archive(self, path: str) -> Stream[bytes]:
        """Streams a file or directory as a tar archive. Raises if the connection breaks."""
        return Stream(self._chunks(self._archive, path, "application/x-tar"))

    def write_archive(
        self, path: str, data: bytes | BinaryIO, *, owners: bool = False, strip_top: bool = False
    ) -> Unpacked:
        """Unpacks a tar archive into the directory ``path``; a binary file object is streamed. An
        archive that leads outside, holds devices or does not fit is refused and leaves nothing
        behind. ``strip_top``: unpack the contents of the archive's top directory. ``owners``: as
        for ``upload``."""
        flags = {"owners": owners, "strip_top": strip_top}
        query = {"path": path, **{name: "true" for name, given in flags.items() if given}}
        headers = {"Content-Type": "application/x-tar"}
        return Unpacked.parse(
            self._client.send("PUT", self._archive, data, query=query, headers=headers)
        )

    def watch(self, path: str, *, recursive: bool = False) -> Stream[FileEvent]:
        """Watches a file or directory, and everything below it if ``recursive``. The first event is
        ``ready``: all later changes are reported. Ends when ``path`` is removed. Raises if the
        connection breaks, because changes may have been missed."""
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

"""Files in a sandbox."""

from __future__ import annotations

import builtins
import os
import tempfile
from pathlib import Path
from typing import Any, AsyncGenerator, BinaryIO, Mapping, Union, cast

from .._archive import Packed, unpack
from .._http_async import aside
from .._wire import decode, present, segment
from ..errors import NotFoundError, ServerError
from ..models import FileEntry, FileEvent, Unpacked, items, text
from .client import AsyncClient, sse
from .stream import AsyncStream

Mode = Union[int, str]


class AsyncFilesystem:
    """Files in one sandbox. Paths are absolute; errors come from :mod:`keiki.errors`."""

    def __init__(self, client: AsyncClient, sandbox_id: str) -> None:
        self._client = client
        self._base = f"/sandboxes/{segment(sandbox_id)}/fs"
        self._archive = f"/sandboxes/{segment(sandbox_id)}/archive"

    async def read(self, path: str) -> bytes:
        """Reads a file."""
        return b"".join([chunk async for chunk in self.read_stream(path)])

    async def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """Reads a text file."""
        return (await self.read(path)).decode(encoding)

    def read_stream(self, path: str) -> AsyncStream[bytes]:
        """Streams a file of any size. Raises if the connection breaks."""
        return AsyncStream(self._chunks(self._base, path, "application/octet-stream"))

    async def write(self, path: str, data: bytes | str | BinaryIO, *, mode: Mode | None = None) -> int:
        """Writes a file, atomically, and returns its size. Creates missing parents.

        Text is written as UTF-8. A binary file object of any size is streamed. ``mode``: permission
        bits; by default those of the old file, or 0644.
        """
        query = present({"path": path, "mode": None if mode is None else _octal(mode)})
        body = data.encode() if isinstance(data, str) else data
        headers = {"Content-Type": "application/octet-stream"}
        answer = await self._client.send("PUT", self._base, body, query=query, headers=headers)
        return int(answer.get("bytes") or 0) if isinstance(answer, Mapping) else 0

    async def list(self, path: str = "/") -> builtins.list[FileEntry]:
        """Lists a directory, sorted by name."""
        answer = await self._client.call("GET", self._base + "/dir", query={"path": path})
        return [FileEntry.parse(entry) for entry in items(answer, "entries")]

    async def stat(self, path: str) -> FileEntry:
        """Describes one entry, without following symlinks."""
        return FileEntry.parse(await self._client.call("GET", self._base + "/stat", query={"path": path}))

    async def exists(self, path: str) -> bool:
        """Does the entry exist?"""
        try:
            await self.stat(path)
        except NotFoundError:
            return False
        return True

    async def mkdir(self, path: str, *, parents: bool = False, mode: Mode | None = None) -> None:
        """Creates a directory. ``parents``: also create missing parents, and accept an existing
        directory."""
        await self._change("mkdir", path=path, recursive=parents, mode=None if mode is None else _octal(mode))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes an entry. ``recursive``: also remove the contents of a directory."""
        await self._change("remove", path=path, recursive=recursive)

    async def rename(self, old: str, new: str) -> None:
        """Renames an entry, replacing ``new``."""
        await self._change("rename", path=new, **{"from": old})

    async def chmod(self, path: str, mode: Mode) -> None:
        """Sets permission bits: ``0o755`` or ``"0755"``."""
        await self._change("chmod", path=path, mode=_octal(mode))

    async def symlink(self, target: str, path: str) -> None:
        """Creates a symlink at ``path`` to ``target``."""
        await self._change("symlink", path=path, target=target)

    # Trees

    async def upload(self, local: str | os.PathLike[str], path: str, *, owners: bool = False) -> Unpacked:
        """Copies a local file or directory to ``path``, with modes, times and links. Merges
        directories and replaces files of the same name. ``owners``: keep owners, by number;
        otherwise root owns everything. Skips sockets, pipes and devices. Follows ``local`` itself
        if it is a symlink."""
        source = Path(local).resolve(strict=True)
        if source.is_dir():
            await self.mkdir(path, parents=True)
            return await self.write_archive(
                path, cast(BinaryIO, Packed(source)), owners=owners, strip_top=True
            )
        parent, _, name = path.rstrip("/").rpartition("/")
        await self.mkdir(parent or "/", parents=True)
        return await self.write_archive(parent or "/", cast(BinaryIO, Packed(source, name)), owners=owners)

    async def download(self, path: str, local: str | os.PathLike[str]) -> None:
        """Copies a file or directory to ``local``, which must not exist. It appears only when it is
        complete. Keeps the modes of files, without set-user-ID and write permission for others.
        Keeps the targets of symlinks, which may be anywhere on this machine: take care when you
        follow them."""
        with tempfile.TemporaryFile() as archive:
            async for chunk in self.read_archive(path):
                archive.write(chunk)
            archive.seek(0)
            await aside(unpack, archive, Path(local))

    def read_archive(self, path: str) -> AsyncStream[bytes]:
        """Streams a file or directory as a tar archive. Raises if the connection breaks."""
        return AsyncStream(self._chunks(self._archive, path, "application/x-tar"))

    async def write_archive(
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
            await self._client.send("PUT", self._archive, data, query=query, headers=headers)
        )

    def watch(self, path: str, *, recursive: bool = False) -> AsyncStream[FileEvent]:
        """Watches a file or directory, and everything below it if ``recursive``. The first event is
        ``ready``: all later changes are reported. Ends when ``path`` is removed. Raises if the
        connection breaks, because changes may have been missed."""
        return AsyncStream(self._changes(present({"path": path, "recursive": "true" if recursive else None})))

    async def _changes(self, query: Mapping[str, str]) -> AsyncGenerator[FileEvent, None]:
        headers = {"Accept": "text/event-stream"}
        async with await self._client.open(
            "GET", self._base + "/watch", query=query, headers=headers
        ) as response:
            async for event in sse(response):
                data = decode(event.data.encode(), response.status, response.request_id)
                if event.name == "error":
                    raise ServerError(text(data, "error"), request_id=response.request_id)
                yield FileEvent.parse(data)

    async def _chunks(self, where: str, path: str, kind: str) -> AsyncGenerator[bytes, None]:
        client = self._client
        async with await client.open(
            "GET", where, query={"path": path}, headers={"Accept": kind}, timeout=client.timeout
        ) as response:
            async for chunk in response.chunks():
                yield chunk

    async def _change(self, verb: str, **change: Any) -> None:
        await self._client.call("POST", f"{self._base}/{verb}", json=present(change))


def _octal(mode: Mode) -> str:
    bits = int(mode, 8) if isinstance(mode, str) else mode
    if not 0 <= bits <= 0o7777:
        raise ValueError(f"not permission bits: {mode!r}")
    return f"{bits:04o}"

"""Files in a sandbox."""

from __future__ import annotations

import builtins
from typing import Any, AsyncGenerator, BinaryIO, Mapping, Union

from .._wire import present, segment
from ..errors import NotFoundError
from ..models import FileEntry, items
from .client import AsyncClient
from .stream import AsyncStream

Mode = Union[int, str]


class AsyncFilesystem:
    """Files in one sandbox. Paths are absolute; errors are those of :mod:`keiki.errors`."""

    def __init__(self, client: AsyncClient, sandbox_id: str) -> None:
        self._client = client
        self._base = f"/sandboxes/{segment(sandbox_id)}/fs"

    async def read(self, path: str) -> bytes:
        """Contents of a file."""
        return b"".join([chunk async for chunk in self.read_stream(path)])

    async def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """Contents of a text file."""
        return (await self.read(path)).decode(encoding)

    def read_stream(self, path: str) -> AsyncStream[bytes]:
        """Contents of a file of any size, as they arrive. Raises if the file is cut off on its way."""
        return AsyncStream(self._chunks(path))

    async def _chunks(self, path: str) -> AsyncGenerator[bytes, None]:
        client = self._client
        headers = {"Accept": "application/octet-stream"}
        async with await client.open(
            "GET", self._base, query={"path": path}, headers=headers, timeout=client.timeout
        ) as response:
            async for chunk in response.chunks():
                yield chunk

    async def write(self, path: str, data: bytes | str | BinaryIO, *, mode: Mode | None = None) -> int:
        """Writes a whole file and returns its size; missing parents are made.

        Text is written as UTF-8. A binary file object is streamed, whatever its size. The old file stays
        until the new one is whole. ``mode``: permission bits; default those of the old file, or 0644.
        """
        query = present({"path": path, "mode": None if mode is None else _octal(mode)})
        body = data.encode() if isinstance(data, str) else data
        headers = {"Content-Type": "application/octet-stream"}
        answer = await self._client.send("PUT", self._base, body, query=query, headers=headers)
        return int(answer.get("bytes") or 0) if isinstance(answer, Mapping) else 0

    async def list(self, path: str = "/") -> builtins.list[FileEntry]:
        """Entries of a directory, by name."""
        answer = await self._client.call("GET", self._base + "/dir", query={"path": path})
        return [FileEntry.parse(entry) for entry in items(answer, "entries")]

    async def stat(self, path: str) -> FileEntry:
        """One entry. Symlinks are not followed."""
        return FileEntry.parse(await self._client.call("GET", self._base + "/stat", query={"path": path}))

    async def exists(self, path: str) -> bool:
        """Is there such an entry?"""
        try:
            await self.stat(path)
        except NotFoundError:
            return False
        return True

    async def mkdir(self, path: str, *, parents: bool = False, mode: Mode | None = None) -> None:
        """Makes a directory. ``parents``: also the missing ones above it, and no error if it exists."""
        await self._change("mkdir", path=path, recursive=parents, mode=None if mode is None else _octal(mode))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes an entry. ``recursive``: also what is inside a directory."""
        await self._change("remove", path=path, recursive=recursive)

    async def rename(self, old: str, new: str) -> None:
        """Renames an entry; replaces what ``new`` was."""
        await self._change("rename", path=new, **{"from": old})

    async def chmod(self, path: str, mode: Mode) -> None:
        """Sets permission bits: ``0o755`` or ``"0755"``."""
        await self._change("chmod", path=path, mode=_octal(mode))

    async def symlink(self, target: str, path: str) -> None:
        """Makes ``path`` a symlink to ``target``."""
        await self._change("symlink", path=path, target=target)

    async def _change(self, verb: str, **change: Any) -> None:
        await self._client.call("POST", f"{self._base}/{verb}", json=present(change))


def _octal(mode: Mode) -> str:
    bits = int(mode, 8) if isinstance(mode, str) else mode
    if not 0 <= bits <= 0o7777:
        raise ValueError(f"not permission bits: {mode!r}")
    return f"{bits:04o}"

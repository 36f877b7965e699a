"""Local file trees as tar streams: packed while they are sent, unpacked without trust."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import BinaryIO, Iterator, List

from .errors import ArchiveError

#: Bytes per read of a file.
PIECE = 65536


class Packed:
    """A file or directory as a tar stream with ``name`` at the top: a binary file that can be read
    once."""

    def __init__(self, root: str | os.PathLike[str], name: str = "top") -> None:
        # An empty piece would look like the end.
        self._pieces = filter(None, _pack(Path(root), name))
        self._left = b""

    def read(self, size: int = -1) -> bytes:
        """Reads between one byte and ``size``; none at the end."""
        try:
            self._left = self._left or next(self._pieces, b"")
        except OSError as error:
            # Must not look like a connection error.
            raise ArchiveError(f"cannot pack: {error}") from error
        size = len(self._left) if size < 0 else size
        piece, self._left = self._left[:size], self._left[size:]
        return piece


def _pack(root: Path, name: str) -> Iterator[bytes]:
    # Never written to: it only makes headers and detects hard links.
    with tarfile.open(fileobj=tempfile.SpooledTemporaryFile(), mode="w") as names:
        for path in _walk(root):
            info = names.gettarinfo(path, arcname=str(Path(name) / path.relative_to(root)))
            if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                continue  # a socket, a pipe, a device
            yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            if info.isreg():
                yield from _contents(path, info.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _walk(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        for inner in sorted(path.iterdir()):
            yield from _walk(inner)


def _contents(path: Path, size: int) -> Iterator[bytes]:
    """The number of bytes in the header, and padding for the last block."""
    left = size
    with path.open("rb") as file:
        while left:
            piece = file.read(min(PIECE, left))
            if not piece:
                raise OSError(f"{path} shrank while it was read")
            left -= len(piece)
            yield piece
    yield bytes(-size % tarfile.BLOCKSIZE)


def unpack(archive: BinaryIO, to: Path) -> None:
    """Unpacks the one file or directory at the top of an archive as ``to``, which must not exist.

    The archive comes from a sandbox and is not trusted. Everything but symlinks is unpacked into an
    empty directory with tarfile's data filter: no devices, owners, set-user-ID bits or links that
    lead elsewhere. Symlinks are made last, with any target, so nothing is written through them.
    ``to`` appears when all of it is there.
    """
    if not hasattr(tarfile, "data_filter"):
        raise RuntimeError("unpacking needs a Python with tarfile filters: 3.9.17, 3.10.12, 3.11.4 or later")
    if os.path.lexists(to):
        raise FileExistsError(f"{to} already exists")
    scratch = Path(tempfile.mkdtemp(prefix=".keiki-", dir=to.absolute().parent))
    try:
        links: List[tarfile.TarInfo] = []

        def plain(info: tarfile.TarInfo, where: str) -> tarfile.TarInfo | None:
            if info.issym():
                links.append(info)
                return None
            return tarfile.data_filter(info, where)

        with tarfile.open(fileobj=archive, mode="r:") as tar:
            tar.extractall(scratch, filter=plain)
        for link in links:
            _make_link(scratch, link)
        tops = list(scratch.iterdir())
        if len(tops) != 1:
            raise ArchiveError(f"the archive has {len(tops)} entries at the top, not one")
        tops[0].rename(to)
    except (tarfile.TarError, KeyError) as error:
        raise ArchiveError(f"archive refused: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _make_link(scratch: Path, link: tarfile.TarInfo) -> None:
    parts = Path(link.name).parts
    parent = scratch.joinpath(*parts[:-1])
    if (
        ".." in parts
        or Path(link.name).is_absolute()
        or parent.resolve() != scratch.resolve().joinpath(*parts[:-1])
    ):
        raise tarfile.OutsideDestinationError(link, str(parent))
    try:
        os.symlink(link.linkname, scratch.joinpath(*parts))
    except FileExistsError:
        raise ArchiveError(f"archive refused: it has {link.name!r} twice") from None

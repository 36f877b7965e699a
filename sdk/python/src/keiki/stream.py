# Generated from _async/stream.py by unasync.py. Do not edit.
"""Streams."""

from __future__ import annotations

from types import TracebackType
from typing import Generator, Generic, Type, TypeVar

T = TypeVar("T")


class Stream(Generic[T]):
    """An iterator over a stream from the node. Closing it early, with :meth:`close` or as a context
    manager, ends its source: a command is killed. The request is sent when the first item is
    requested."""

    def __init__(self, source: Generator[T, None, None]) -> None:
        self._source = source

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        return self._source.__next__()

    def close(self) -> None:
        """Closes the stream. Can be called more than once."""
        self._source.close()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

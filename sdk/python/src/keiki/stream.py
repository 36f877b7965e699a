# Made of _async/stream.py by unasync.py: change that, and run it.
"""Things that come one after the other."""

from __future__ import annotations

from types import TracebackType
from typing import Generator, Generic, Type, TypeVar

T = TypeVar("T")


class Stream(Generic[T]):
    """An iterator over what a node sends. Closing it early, by :meth:`close` or as a context manager, ends
    what sends it: a command is killed. The request is sent when the first thing is asked for."""

    def __init__(self, source: Generator[T, None, None]) -> None:
        self._source = source

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        return self._source.__next__()

    def close(self) -> None:
        """Ends it. Closing it again does nothing."""
        self._source.close()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""Things that come one after the other."""

from __future__ import annotations

from types import TracebackType
from typing import AsyncGenerator, Generic, Type, TypeVar

T = TypeVar("T")


class AsyncStream(Generic[T]):
    """An iterator over what a node sends. Closing it early, by :meth:`close` or as a context manager, ends
    what sends it: a command is killed. The request is sent when the first thing is asked for."""

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self._source = source

    def __aiter__(self) -> AsyncStream[T]:
        return self

    async def __anext__(self) -> T:
        return await self._source.__anext__()

    async def close(self) -> None:
        """Ends it. Closing it again does nothing."""
        await self._source.aclose()

    async def __aenter__(self) -> AsyncStream[T]:
        return self

    async def __aexit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

"""Streams."""

from __future__ import annotations

from types import TracebackType
from typing import AsyncGenerator, Generic, Type, TypeVar

T = TypeVar("T")


class AsyncStream(Generic[T]):
    """An iterator over a stream from the node. Closing it early, with :meth:`close` or as a context
    manager, ends its source: a command is killed. The request is sent when the first item is
    requested."""

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self._source = source

    def __aiter__(self) -> AsyncStream[T]:
        return self

    async def __anext__(self) -> T:
        return await self._source.__anext__()

    async def close(self) -> None:
        """Closes the stream. Can be called more than once."""
        await self._source.aclose()

    async def __aenter__(self) -> AsyncStream[T]:
        return self

    async def __aexit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

"""Both clients under the same tests: the blocking one, and the async one called as if it were blocking."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Type

import keiki

NAMES = ("Client", "Command", "Filesystem", "Sandbox", "Snapshot", "Stream")
ASYNC = tuple(getattr(keiki, "Async" + name) for name in NAMES)

_loop = asyncio.new_event_loop()


class Blocked:
    """An async class or object of the package whose calls wait for their end."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return _outer(getattr(self._inner, name))

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _outer(_call(self._inner, args, named))

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                yield _outer(_loop.run_until_complete(self._inner.__anext__()))
            except StopAsyncIteration:
                return

    def __enter__(self) -> Blocked:
        _loop.run_until_complete(self._inner.__aenter__())
        return self

    def __exit__(self, *how: Any) -> None:
        _loop.run_until_complete(self._inner.__aexit__(*how))

    def __repr__(self) -> str:
        return repr(self._inner)


def _call(function: Any, args: Any, named: Any) -> Any:
    answer = function(*map(_inner, args), **{name: _inner(value) for name, value in named.items()})
    return _loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer


def _inner(value: Any) -> Any:
    return value._inner if isinstance(value, Blocked) else value


def _outer(value: Any) -> Any:
    if isinstance(value, list):
        return [_outer(item) for item in value]
    of_ours = isinstance(value, ASYNC) or (isinstance(value, type) and value in ASYNC)
    if of_ours or inspect.ismethod(value):
        return Blocked(value)
    return value


BLOCKING = SimpleNamespace(**{name: getattr(keiki, name) for name in NAMES}, package="keiki", blocking=True)
AS_BLOCKING = SimpleNamespace(
    **{name: Blocked(getattr(keiki, "Async" + name)) for name in NAMES},
    package="keiki._async",
    blocking=False,
)


def both(tests: Type[Any]) -> Type[Any]:
    """A class of tests that say ``self.api.Sandbox``: run with both clients."""
    tests.api = BLOCKING
    name = "Async" + tests.__name__
    twin = type(name, (tests,), {"api": AS_BLOCKING, "__module__": tests.__module__})
    setattr(sys.modules[tests.__module__], name, twin)
    return tests

# Generated from _async/client.py by unasync.py. Do not edit.
"""The client: address, key and retries."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from types import TracebackType
from typing import Any, Generator, Dict, List, Mapping, Tuple, Type

from . import _sse, _wire, errors
from ._http import Body, Response, Transport, sleep
from .models import SandboxEvent, Template, items
from .stream import Stream


class Client:
    """A connection to one node. Safe to share between threads.

    ``timeout``: seconds to wait for an answer; None waits forever. Commands wait as long as they
    may run.
    ``capacity_retry_seconds``: how long to retry create, restore, fork and snapshot while the node
    answers 429 or 503 with ``Retry-After``, which means that it created nothing; 0 never retries.
    ``connection_retries``: how often to resend them after the connection broke and the outcome is
    unknown. They carry an ``Idempotency-Key``, so the node executes them once.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        *,
        capacity_retry_seconds: float = 60.0,
        connection_retries: int = 2,
    ) -> None:
        if not 0 <= capacity_retry_seconds < float("inf"):
            raise ValueError("capacity_retry_seconds must be a finite number of at least 0")
        if connection_retries < 0:
            raise ValueError("connection_retries must be at least 0")
        self.url = _wire.node_url(url)
        self.timeout = timeout
        self.capacity_retry_seconds = capacity_retry_seconds
        self.connection_retries = connection_retries
        self._key = _wire.api_key(api_key)
        self._transport = Transport(self.url)

    def close(self) -> None:
        """Closes the kept-alive connections."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: Type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def version(self) -> Dict[str, Any]:
        """Version and engine of the node."""
        answer = self.call("GET", "/version")
        return dict(answer) if isinstance(answer, Mapping) else {}

    def templates(self) -> List[Template]:
        """All templates."""
        return [Template.parse(one) for one in items(self.call("GET", "/templates"), "items")]

    def build_template(
        self, name: str, *, rebake: bool = False, force: bool = False, timeout_seconds: float | None = None
    ) -> Template:
        """Builds a template, or joins a running build, and waits for it to finish. That takes
        minutes if packages have to be downloaded, and no time if the template is current.
        ``rebake``: build again even if nothing changed. ``force``: also fetch the latest packages.
        Raises :class:`TimeoutError_` after ``timeout_seconds``; the build continues."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        request = {"name": name, "rebake": rebake, "force": force}
        build = self.call("POST", "/templates/build", json=request)
        while not build["ended_at"]:
            if deadline is not None and time.monotonic() >= deadline:
                raise errors.TimeoutError_(f"template {name} is still being built after {timeout_seconds} s")
            sleep(0.5)
            build = self.call("GET", f"/templates/builds/{_wire.segment(build['id'])}")
        if build["status"] != "done":
            raise errors.ServerError(f"failed to build template {name}: {build['error']}")
        return Template.parse(self.call("GET", f"/templates/{_wire.segment(name)}"))

    def events(
        self, *, sandbox_id: str | None = None, since: int | None = None, limit: int | None = None
    ) -> List[SandboxEvent]:
        """Events of the node or of one sandbox, oldest first: the latest, or those after event
        number ``since``; at most ``limit`` (default 200)."""
        query = _wire.present({"since": _word(since), "limit": _word(limit)})
        answer = self.call("GET", _events_path(sandbox_id), query=query)
        return [SandboxEvent.parse(event) for event in items(answer, "items")]

    def events_stream(
        self, *, sandbox_id: str | None = None, since: int | None = None
    ) -> Stream[SandboxEvent]:
        """Past events, then new ones as they happen. Resumes after a broken connection. The events
        of one sandbox end when it is deleted."""
        return Stream(self._follow(_events_path(sandbox_id), since))

    def _follow(self, path: str, since: int | None) -> Generator[SandboxEvent, None, None]:
        broken = 0
        while True:
            query = _wire.present({"since": _word(since), "follow": "true"})
            headers = {"Accept": "text/event-stream"}
            try:
                with self.open("GET", path, query=query, headers=headers) as response:
                    for event in sse(response):
                        data = _wire.decode(event.data.encode(), response.status, response.request_id)
                        if isinstance(data, Mapping):
                            happened = SandboxEvent.parse(data)
                            broken, since = 0, happened.seq
                            yield happened
                return
            except errors.ConnectionError:
                if broken >= self.connection_retries:
                    raise
                broken += 1
            sleep(backoff(broken))

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        json: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        making: bool = False,
    ) -> Any:
        """Sends a JSON request to ``/v1`` and returns the decoded answer, None if it is empty.

        ``making``: the request creates or moves machines, and gets more time. Sent once; see
        :meth:`make`.
        """
        body, type_headers = _wire.json_body(json)
        timeout = self._making_timeout() if making else self.timeout
        every = {**type_headers, **(headers or {})}
        with self.open(
            method, path, query=query, headers=every, body=body, timeout=timeout
        ) as response:
            return _wire.decode(response.read(), response.status, response.request_id)

    def send(
        self,
        method: str,
        path: str,
        body: Body,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Sends a request with this body and returns the decoded answer, None if it is empty."""
        with self.open(
            method, path, query=query, headers=headers, body=body, timeout=self.timeout
        ) as response:
            return _wire.decode(response.read(), response.status, response.request_id)

    def make(
        self, path: str, json: Mapping[str, Any] | None, *, idempotency_key: str | None = None
    ) -> Any:
        """POSTs a request that creates something. Retries it while the node has no capacity and
        created nothing, and after a broken connection. All attempts share one ``idempotency_key``,
        by default a new one, so the node executes the request once."""
        headers = {"Idempotency-Key": uuid.uuid4().hex if idempotency_key is None else idempotency_key}
        deadline = time.monotonic() + self.capacity_retry_seconds
        refused = broken = 0
        while True:
            try:
                return self.call("POST", path, json=json, headers=headers, making=True)
            except errors.CapacityError as error:
                if error.status not in (429, 503) or error.retry_after is None:
                    raise
                left = deadline - time.monotonic()
                if error.retry_after > left or left <= 0:
                    raise
                # Spread out clients that were refused together.
                wait = min(error.retry_after + random.uniform(0, min(2.0**refused, 15.0)), left)
                refused += 1
            except errors.ConnectionError:
                if broken >= self.connection_retries:
                    raise
                broken += 1
                wait = backoff(broken)
            sleep(wait)

    def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body = None,
        timeout: float | None = None,
        command: bool = False,
    ) -> Response:
        """Sends a request and returns the answer with its body unread. Raises for any status but
        2xx.

        ``command``: a 504 means that the command, not the node, timed out.
        """
        every = {**_wire.common_headers(self._key), **(headers or {})}
        response = self._transport.send(method, _wire.with_query(path, query), every, body, timeout)
        if 200 <= response.status < 300:
            return response
        with response:
            answer = response.read()
        raise _wire.refusal(response.status, response.request_id, response.retry_after, answer, command)

    def _making_timeout(self) -> float | None:
        return None if self.timeout is None else max(self.timeout, _wire.MAKING_TIMEOUT)


def sse(response: Response) -> Generator[_sse.Event, None, None]:
    """The server-sent events of an answer."""
    decoder = _sse.Decoder()
    for chunk in response.chunks():
        for event in decoder.feed(chunk):
            yield event


def backoff(failures: int) -> float:
    """How long to wait after this many failures in a row."""
    return random.uniform(0.5, 1.0) * min(2.0 ** (failures - 1), 8.0)


def _word(value: int | None) -> str | None:
    return None if value is None else str(value)


def _events_path(sandbox_id: str | None) -> str:
    return "/events" if sandbox_id is None else f"/sandboxes/{_wire.segment(sandbox_id)}/events"


def default_client() -> Client:
    """The client used when none is passed, from ``KEIKI_URL`` and ``KEIKI_API_KEY``."""
    key = (os.environ.get("KEIKI_URL", ""), os.environ.get("KEIKI_API_KEY", ""))
    with _defaults_lock:
        client = _defaults.get(key)
        if client is None:
            client = _defaults[key] = Client()
        return client


_defaults: Dict[Tuple[str, str], Client] = {}
_defaults_lock = threading.Lock()

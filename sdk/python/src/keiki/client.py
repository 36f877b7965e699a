"""The client: where the node is, with which key, and how its refusals become exceptions."""

from __future__ import annotations

import email.utils
import json
import os
import random
import threading
import time
import urllib.parse
from typing import Any, Dict, Mapping, Tuple

from . import errors
from ._http import Body, Response, Transport, json_body

DEFAULT_URL = "http://127.0.0.1:7777"
#: Makers of machines may take long on a busy node.
MAKING_TIMEOUT = 180.0


class Client:
    """A node and the key to it. Safe to share between threads.

    ``timeout``: seconds to wait for an answer (None: for ever). Commands wait as long as they may run.
    ``capacity_retry_seconds``: how long create, restore and fork try again while the node answers
    429 or 503 with ``Retry-After``, which promises that nothing was made; 0: never.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        *,
        capacity_retry_seconds: float = 60.0,
    ) -> None:
        if not 0 <= capacity_retry_seconds < float("inf"):
            raise ValueError("capacity_retry_seconds must be a finite number of at least 0")
        self.url = (url or os.environ.get("KEIKI_URL") or DEFAULT_URL).rstrip("/")
        self.timeout = timeout
        self.capacity_retry_seconds = capacity_retry_seconds
        self._key = os.environ.get("KEIKI_API_KEY", "") if api_key is None else api_key
        if not self._key.isascii() or any(char in self._key for char in "\r\n"):
            raise ValueError("the API key must be one line of ASCII")
        self._transport = Transport(self.url)

    def close(self) -> None:
        """Ends the kept-alive connections."""
        self._transport.close()

    def version(self) -> Dict[str, Any]:
        """Version and engine of the node."""
        answer = self.call("GET", "/version")
        return dict(answer) if isinstance(answer, Mapping) else {}

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        json: Mapping[str, Any] | None = None,
        making: bool = False,
    ) -> Any:
        """One JSON request to ``/v1``; returns the decoded answer, None for an empty one.

        ``making``: the request makes machines; gets more time. No capacity retry, see :meth:`make`.
        """
        body, headers = json_body(json)
        timeout = self._making_timeout() if making else self.timeout
        with self.open(method, path, query=query, headers=headers, body=body, timeout=timeout) as response:
            return _decode(response)

    def make(self, path: str, json: Mapping[str, Any] | None) -> Any:
        """POST that makes sandboxes, tried again while the node says "later, and nothing was made"."""
        deadline = time.monotonic() + self.capacity_retry_seconds
        attempt = 0
        while True:
            try:
                return self.call("POST", path, json=json, making=True)
            except errors.CapacityError as error:
                if error.status not in (429, 503) or error.retry_after is None:
                    raise
                left = deadline - time.monotonic()
                if error.retry_after > left or left <= 0:
                    raise
                # Spread the crowd that was refused together.
                wait = error.retry_after + random.uniform(0, min(2.0**attempt, 15.0))
                time.sleep(min(wait, left))
                attempt += 1

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
        """One request; returns the answer with its body unread. Raises for any status but 2xx.

        ``command``: a 504 means that the command, not the node, took too long.
        """
        if query:
            path += "?" + urllib.parse.urlencode(query)
        every = {"Accept": "application/json", "User-Agent": "keiki-python/0.1.0"}
        if self._key:
            every["Authorization"] = f"Bearer {self._key}"
        every.update(headers or {})
        response = self._transport.send(method, path, every, body, timeout)
        if 200 <= response.status < 300:
            return response
        with response:
            raise _refusal(response, command)

    def _making_timeout(self) -> float | None:
        return None if self.timeout is None else max(self.timeout, MAKING_TIMEOUT)


def default_client() -> Client:
    """The client that calls use which are given none: made of ``KEIKI_URL`` and ``KEIKI_API_KEY``."""
    key = (os.environ.get("KEIKI_URL", ""), os.environ.get("KEIKI_API_KEY", ""))
    with _defaults_lock:
        client = _defaults.get(key)
        if client is None:
            client = _defaults[key] = Client()
        return client


_defaults: Dict[Tuple[str, str], Client] = {}
_defaults_lock = threading.Lock()


def segment(text: str) -> str:
    """An id as part of a path."""
    if not text or text in (".", ".."):
        raise ValueError(f"not an id: {text!r}")
    return urllib.parse.quote(text, safe="")


def _decode(response: Response) -> Any:
    body = response.read()
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError as error:
        raise errors.ServerError(
            "the answer is not JSON", status=response.status, request_id=response.request_id
        ) from error


def _refusal(response: Response, command: bool) -> errors.KeikiError:
    """The exception for a status that is no success."""
    status, request_id = response.status, response.request_id
    text = response.read().decode("utf-8", "replace")
    sentence = _sentence(text)
    message = sentence or text.strip()[:2000] or f"the node answered HTTP {status}"
    if status in (429, 503, 507):
        # Only the node's own words promise that nothing was made; a proxy's 503 does not.
        hint = _seconds(response.retry_after) if sentence else None
        return errors.CapacityError(message, retry_after=hint, status=status, request_id=request_id)
    kind = errors.BadRequestError if status < 500 else errors.ServerError  # type: type[errors.KeikiError]
    if status in (401, 403):
        kind = errors.AuthError
    elif status == 404:
        kind = errors.NotFoundError
    elif status == 409:
        kind = errors.ConflictError
    elif status == 504:
        kind = errors.SandboxTimeout if command else errors.TimeoutError_
    return kind(message, status=status, request_id=request_id)


def _sentence(body: str) -> str:
    try:
        data = json.loads(body)
    except ValueError:
        return ""
    error = data.get("error") if isinstance(data, dict) else None
    return error.strip() if isinstance(error, str) else ""


def _seconds(retry_after: str | None) -> float | None:
    """``Retry-After``: a number of seconds or a date."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (TypeError, ValueError, IndexError, OverflowError):
            return None
    return max(seconds, 0.0) if seconds < float("inf") else None

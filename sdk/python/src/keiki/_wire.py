"""Requests, and exceptions from refused ones; no I/O."""

from __future__ import annotations

import email.utils
import json
import os
import time
import urllib.parse
from typing import Any, Dict, Mapping, NamedTuple, Tuple

from . import errors
from ._version import __version__

DEFAULT_URL = "http://127.0.0.1:7777"
#: Creating machines may take long on a busy node.
MAKING_TIMEOUT = 180.0


class Address(NamedTuple):
    """The parts of a base URL."""

    tls: bool
    host: str
    port: int | None
    #: Path up to and including ``/v1``.
    prefix: str


def address(url: str) -> Address:
    """Parses a base URL, which may have a path and may end with ``/v1``."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http or https URL: {url!r} (use one like http://127.0.0.1:7777)")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"not a valid port in {url!r}") from None
    prefix = parts.path.rstrip("/")
    prefix = prefix if prefix.endswith("/v1") else prefix + "/v1"
    return Address(parts.scheme == "https", parts.hostname, port, prefix)


def node_url(url: str | None) -> str:
    """The given URL, or the one in the environment."""
    return (url or os.environ.get("KEIKI_URL") or DEFAULT_URL).rstrip("/")


def api_key(key: str | None) -> str:
    """The given key, or the one in the environment; empty for none."""
    key = os.environ.get("KEIKI_API_KEY", "") if key is None else key
    if not key.isascii() or any(char in key for char in "\r\n"):
        raise ValueError("the API key must be one line of ASCII")
    return key


def common_headers(key: str) -> Dict[str, str]:
    """Headers of every request."""
    headers = {"Accept": "application/json", "User-Agent": f"keiki-python/{__version__}"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def with_query(path: str, query: Mapping[str, str] | None) -> str:
    """A path with its query."""
    return f"{path}?{urllib.parse.urlencode(query)}" if query else path


def segment(text: str) -> str:
    """Encodes an id as a path segment."""
    if not text or text in (".", ".."):
        raise ValueError(f"not an id: {text!r}")
    return urllib.parse.quote(text, safe="")


def present(request: Mapping[str, Any]) -> Dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in request.items() if value is not None}


def json_body(value: Mapping[str, Any] | None) -> Tuple[bytes | None, Dict[str, str]]:
    """Body and headers of a JSON request; None has no body."""
    if value is None:
        return None, {}
    return json.dumps(value).encode(), {"Content-Type": "application/json"}


def decode(body: bytes, status: int, request_id: str | None) -> Any:
    """Decodes a JSON answer; None if it is empty."""
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError as error:
        raise errors.ServerError("the answer is not JSON", status=status, request_id=request_id) from error


def refusal(
    status: int, request_id: str | None, retry_after: str | None, body: bytes, command: bool
) -> errors.KeikiError:
    """The exception for an error status. ``command``: a 504 means that the command timed out."""
    text = body.decode("utf-8", "replace")
    sentence = _sentence(text)
    message = sentence or text.strip()[:2000] or f"the node answered HTTP {status}"
    if status in (429, 503, 507):
        # Only an answer of the node itself promises that nothing was created, not a proxy's 503.
        hint = _seconds(retry_after) if sentence else None
        return errors.CapacityError(message, retry_after=hint, status=status, request_id=request_id)
    kind = errors.BadRequestError if status < 500 else errors.ServerError  # type: type[errors.KeikiError]
    if status in (401, 403):
        kind = errors.AuthError
    elif status == 404:
        kind = errors.NotFoundError
    elif status == 409:
        kind = errors.ConflictError
    elif status == 422:
        kind = errors.IdempotencyError
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

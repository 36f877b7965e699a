"""Exceptions, all under :class:`KeikiError`."""

from __future__ import annotations

import builtins


class KeikiError(Exception):
    """Base of all errors of this package. ``str()`` is the node's message."""

    def __init__(self, message: str, *, status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        #: HTTP status of the answer; None if there was none.
        self.status = status
        #: ``X-Request-Id`` of the answer, to find the operation in the node's log.
        self.request_id = request_id


class AuthError(KeikiError):
    """The key is missing, wrong, or not allowed to do this (401, 403)."""


class NotFoundError(KeikiError):
    """No such sandbox, snapshot, template or file (404)."""


class BadRequestError(KeikiError):
    """The request is invalid; the message names the field (other 4xx)."""


class IdempotencyError(BadRequestError):
    """The ``idempotency_key`` was used for another request (422)."""


class ConflictError(KeikiError):
    """The state of the sandbox does not allow it, for example exec in a paused one (409)."""


class CapacityError(KeikiError):
    """The node is busy (429, 503) or out of space (507). Nothing was created."""

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        status: int | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, status=status, request_id=request_id)
        #: Seconds to wait before a retry; None if the node did not say.
        self.retry_after = retry_after


class ServerError(KeikiError):
    """The node failed (other 5xx)."""


class ConnectionError(KeikiError, builtins.ConnectionError):
    """The node did not answer. Whether the request was executed is unknown."""


class TimeoutError_(KeikiError, builtins.TimeoutError):
    """No answer within the client's timeout, or the node answered 504."""


class SandboxTimeout(TimeoutError_):
    """The command exceeded its ``timeout_seconds``; all its processes were killed."""

    def __init__(
        self,
        message: str,
        *,
        stdout: str = "",
        stderr: str = "",
        status: int | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, status=status, request_id=request_id)
        #: Output of a streamed command up to then; empty for a buffered one.
        self.stdout = stdout
        self.stderr = stderr


class ExecInterrupted(ConnectionError):
    """The output of a command ended before its exit code."""

    def __init__(self, message: str, *, stdout: str = "", stderr: str = "") -> None:
        super().__init__(message)
        #: Output up to then.
        self.stdout = stdout
        self.stderr = stderr


class ArchiveError(KeikiError):
    """A tree cannot be packed, or an archive is unsafe to unpack. Nothing was unpacked."""


class CommandFailed(KeikiError):
    """A command run with ``check=True`` had an exit code other than 0."""

    def __init__(self, message: str, *, exit_code: int = 1, stdout: str = "", stderr: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr

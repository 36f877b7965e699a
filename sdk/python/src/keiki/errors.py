"""Everything that can go wrong, as one tree of exceptions under :class:`KeikiError`."""

from __future__ import annotations

import builtins


class KeikiError(Exception):
    """Base of all errors of this package. ``str()`` is the node's sentence."""

    def __init__(self, message: str, *, status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        #: HTTP status of the answer; None where there was no answer.
        self.status = status
        #: ``X-Request-Id`` of the answer: finds the operation in the node's log.
        self.request_id = request_id


class AuthError(KeikiError):
    """The key is missing, wrong, or not allowed to do this (401, 403)."""


class NotFoundError(KeikiError):
    """No such sandbox, snapshot, template or file (404)."""


class BadRequestError(KeikiError):
    """The request is wrong; the message names the field (other 4xx)."""


class IdempotencyError(BadRequestError):
    """The ``idempotency_key`` was used for another request (422)."""


class ConflictError(KeikiError):
    """The state of the sandbox does not allow it, for example exec in a paused one (409)."""


class CapacityError(KeikiError):
    """The node cannot do it now (429, 503) or has no room for it (507). Nothing was made."""

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        status: int | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, status=status, request_id=request_id)
        #: Seconds after which trying again makes sense; None where the node did not say.
        self.retry_after = retry_after


class ServerError(KeikiError):
    """The node failed (other 5xx)."""


class ConnectionError(KeikiError, builtins.ConnectionError):
    """No answer came from the node. Whether the request was carried out is unknown."""


class TimeoutError_(KeikiError, builtins.TimeoutError):
    """Something took too long: no answer within the client's timeout, or the node answered 504."""


class SandboxTimeout(TimeoutError_):
    """The command ran out of its ``timeout_seconds``; all its processes were killed."""

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
        #: What a streamed command had written by then; empty for a buffered one.
        self.stdout = stdout
        self.stderr = stderr


class ExecInterrupted(ConnectionError):
    """The stream of a command ended before its exit code arrived."""

    def __init__(self, message: str, *, stdout: str = "", stderr: str = "") -> None:
        super().__init__(message)
        #: What had arrived by then.
        self.stdout = stdout
        self.stderr = stderr


class ArchiveError(KeikiError):
    """A file tree cannot be packed, or what came is not what may be unpacked. Nothing of it was unpacked."""


class CommandFailed(KeikiError):
    """A command run with ``check=True`` had an exit code other than 0."""

    def __init__(self, message: str, *, exit_code: int = 1, stdout: str = "", stderr: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr

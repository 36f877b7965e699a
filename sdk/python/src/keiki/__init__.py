"""Client of a Keiki node: ``fork()`` for whole machines.

    from keiki import Sandbox

    with Sandbox.create(template="base", ttl_seconds=600) as parent:
        parent.exec("python3 -c 'build_something_expensive()'")
        children = parent.fork(count=4)

``KEIKI_URL`` (default ``http://127.0.0.1:7777``) names the node and ``KEIKI_API_KEY`` the key; a
:class:`Client` of one's own overrides both. Nothing but the standard library is needed.
"""

from .client import Client, default_client
from .errors import (
    AuthError,
    BadRequestError,
    CapacityError,
    CommandFailed,
    ConflictError,
    ConnectionError,
    ExecInterrupted,
    KeikiError,
    NotFoundError,
    SandboxTimeout,
    ServerError,
    TimeoutError_,
)
from .filesystem import Filesystem
from .models import ExecEvent, ExecResult, FileEntry, Lifecycle, MemoryUse, Step, Timings
from .sandbox import Sandbox
from .snapshot import Snapshot

__version__ = "0.1.0"

__all__ = [
    "AuthError",
    "BadRequestError",
    "CapacityError",
    "Client",
    "CommandFailed",
    "ConflictError",
    "ConnectionError",
    "ExecEvent",
    "ExecInterrupted",
    "ExecResult",
    "FileEntry",
    "Filesystem",
    "KeikiError",
    "Lifecycle",
    "MemoryUse",
    "NotFoundError",
    "Sandbox",
    "SandboxTimeout",
    "ServerError",
    "Snapshot",
    "Step",
    "TimeoutError_",
    "Timings",
    "default_client",
]

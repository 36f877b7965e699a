"""Client of a Keiki node: ``fork()`` for whole machines.

    from keiki import Sandbox

    with Sandbox.create(template="base", ttl_seconds=600) as parent:
        parent.exec("python3 -c 'build_something_expensive()'")
        children = parent.fork(count=4)

:class:`AsyncSandbox` is the same for asyncio, and needs the extra ``keiki[async]``.

``KEIKI_URL`` (default ``http://127.0.0.1:7777``) and ``KEIKI_API_KEY`` select the node and the key;
pass a :class:`Client` to override them. The blocking client needs only the standard library.
"""

from ._async.client import AsyncClient, default_async_client
from ._async.command import AsyncCommand
from ._async.filesystem import AsyncFilesystem
from ._async.sandbox import AsyncSandbox
from ._async.snapshot import AsyncSnapshot
from ._async.stream import AsyncStream
from ._version import __version__
from .client import Client, default_client
from .command import Command
from .errors import (
    ArchiveError,
    AuthError,
    BadRequestError,
    CapacityError,
    CommandFailed,
    ConflictError,
    ConnectionError,
    ExecInterrupted,
    IdempotencyError,
    KeikiError,
    NotFoundError,
    SandboxTimeout,
    ServerError,
    TimeoutError_,
)
from .filesystem import Filesystem
from .models import (
    ExecEvent,
    ExecResult,
    FileEntry,
    FileEvent,
    Lifecycle,
    MemoryUse,
    Port,
    Preview,
    SandboxEvent,
    Secret,
    Step,
    Template,
    Timings,
    Unpacked,
)
from .sandbox import Sandbox
from .snapshot import Snapshot
from .stream import Stream

__all__ = [
    "ArchiveError",
    "AsyncClient",
    "AsyncCommand",
    "AsyncFilesystem",
    "AsyncSandbox",
    "AsyncSnapshot",
    "AsyncStream",
    "AuthError",
    "BadRequestError",
    "CapacityError",
    "Client",
    "Command",
    "CommandFailed",
    "ConflictError",
    "ConnectionError",
    "ExecEvent",
    "ExecInterrupted",
    "ExecResult",
    "FileEntry",
    "FileEvent",
    "Filesystem",
    "IdempotencyError",
    "KeikiError",
    "Lifecycle",
    "MemoryUse",
    "NotFoundError",
    "Port",
    "Preview",
    "Sandbox",
    "SandboxEvent",
    "SandboxTimeout",
    "Secret",
    "ServerError",
    "Snapshot",
    "Step",
    "Stream",
    "Template",
    "TimeoutError_",
    "Timings",
    "Unpacked",
    "__version__",
    "default_async_client",
    "default_client",
]

# Generated from _async/snapshot.py by unasync.py. Do not edit.
"""Snapshots: machines saved at one instant."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any, Dict, List, Mapping

from ._wire import segment
from .models import Secret, Timings, items, labels, number, optional_text, text
from .client import Client, default_client

if TYPE_CHECKING:
    from .sandbox import Sandbox


class Snapshot:
    """Memory, device state and disk of a machine at one instant, stored on the node.

    It is self-contained: its sandbox, and that sandbox's ancestors, may be deleted.
    """

    def __init__(self, data: Mapping[str, Any], client: Client) -> None:
        self._client = client
        self.id: str = str(data["id"])
        #: Sandbox it was taken from.
        self.sandbox_id: str = text(data, "sandbox_id")
        self.template: str = text(data, "template")
        self.template_version: str = text(data, "template_version")
        self.size_bytes: int = number(data, "size_bytes")
        self.created_at: str = text(data, "created_at")
        self.parent_snapshot_id: str | None = optional_text(data, "parent_snapshot_id")
        self.engine: str = text(data, "engine")
        self.metadata: Dict[str, str] = labels(data)
        #: Seconds since it was taken, as of the last answer.
        self.age_seconds: int = number(data, "age_seconds")
        #: Kernel release in it; empty if unknown.
        self.kernel: str = text(data, "kernel")
        #: Reasons to take it again: ``template_rebuilt``, ``old``, ``refused`` (too old to
        #: restore).
        self.stale: List[str] = [str(why) for why in data.get("stale") or []]
        #: Times of the freeze; only on the object that :meth:`Sandbox.snapshot` returned.
        self.timings: Timings | None = Timings.parse(data.get("timings"))

    @classmethod
    def list(
        cls, *, sandbox_id: str | None = None, client: Client | None = None
    ) -> builtins.list[Snapshot]:
        """All snapshots, or those of one sandbox, newest first."""
        client = client or default_client()
        query = None if sandbox_id is None else {"sandbox_id": sandbox_id}
        answer = client.call("GET", "/snapshots", query=query)
        return [cls(data, client) for data in items(answer, "snapshots", "items")]

    @classmethod
    def get(cls, id: str, *, client: Client | None = None) -> Snapshot:
        """Finds a snapshot by id."""
        client = client or default_client()
        return cls(client.call("GET", f"/snapshots/{segment(id)}"), client)

    def restore(
        self,
        *,
        ttl_seconds: int | None = None,
        persistent: bool = False,
        metadata: Mapping[str, str] | None = None,
        secrets: Mapping[str, str | Secret] | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Creates a sandbox that continues from the snapshot. The snapshot stays.

        ``secrets``: adds secrets, and gives new values to those declared ``replace``. Secrets
        of the snapshot follow their ``on_restore``, by default ``drop``.
        """
        from .sandbox import Sandbox

        return Sandbox.create(
            from_snapshot=self.id,
            ttl_seconds=ttl_seconds,
            persistent=persistent,
            metadata=metadata,
            secrets=secrets,
            client=self._client,
            idempotency_key=idempotency_key,
        )

    def fork(
        self,
        *,
        ttl_seconds: int | None = None,
        persistent: bool = False,
        metadata: Mapping[str, str] | None = None,
        secrets: Mapping[str, str | Secret] | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Same as :meth:`restore`: a snapshot does not run, so there is nothing else to fork."""
        return self.restore(
            ttl_seconds=ttl_seconds,
            persistent=persistent,
            metadata=metadata,
            secrets=secrets,
            idempotency_key=idempotency_key,
        )

    def delete(self) -> None:
        """Deletes it. Sandboxes restored from it, and later snapshots, stay."""
        self._client.call("DELETE", f"/snapshots/{segment(self.id)}")

    def __repr__(self) -> str:
        return f"Snapshot(id={self.id!r}, sandbox_id={self.sandbox_id!r})"

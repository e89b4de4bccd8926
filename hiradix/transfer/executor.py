"""The border between the planner (`hiradix.cache`), which orders storage jobs, and what executes them.

There are two executors: `HiCacheController`, with worker threads of this process, and `StepExecutor`, with
worker processes, whose outcomes come back a step later. Both hand out tickets and answer each with one
`Result`, oldest first of a kind; `InFlightJobs.apply` books it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from hiradix.transfer.jobs import Chain, DeletePayload, PageIds, Ticket, TrailingPages, TrailingWindow
from hiradix.transfer.runtime import TransferLimits
from hiradix.tree.hashing import PageRows


class StorageExecutor(Protocol):
    """Lookups, reads, writes and deletions of storage. page_bytes: of a host page, per component."""

    @property
    def limits(self) -> TransferLimits: ...

    @property
    def page_bytes(self) -> Sequence[int]: ...

    @property
    def storage_attached(self) -> bool: ...

    def query(
        self,
        rows: PageRows,
        num_pages: int | None = None,
        windows: Sequence[TrailingWindow] = (),
        known: int = 0,
    ) -> Ticket:
        """Ask which of the last `num_pages` pages of `rows` storage has. See `HiCacheController.query`."""

    def read(
        self,
        hashes: Sequence[bytes],
        host_pages: PageIds,
        chain: Chain = None,
        others: Iterable[TrailingPages] = (),
        extra_key: str | None = None,
        tenant: str = "",
        after: bytes = b"",
    ) -> Ticket:
        """Bring the named pages into host pages. See `HiCacheController.read`."""

    def write_storage(
        self, rows: PageRows, host_pages: PageIds, others: Iterable[TrailingPages] = (), store: str = ""
    ) -> Ticket:
        """Put host pages, the last ones of `rows`, into storage. See `HiCacheController.write_storage`."""

    def delete(self, payload: DeletePayload) -> Ticket:
        """Have storage forget pages. See `HiCacheController.delete`."""

    def cancel(self, ticket: Ticket) -> None:
        """Have a job end early; its Result comes all the same."""

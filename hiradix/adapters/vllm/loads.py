"""Host to device, the scheduler's half: what was promised is locked until every worker has loaded it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hiradix.adapters.vllm.index import HostIndex
from hiradix.adapters.vllm.orders import GroupCopy, LoadOrder, Ticket
from hiradix.adapters.vllm.requests import Tracked
from hiradix.adapters.vllm.saves import NULL_BLOCK, BlockTable
from hiradix.errors import Misuse
from hiradix.transfer.jobs import NO_PAGES
from hiradix.tree import Lock, Pages


@dataclass(eq=False)
class InFlightLoad:
    """A load that some worker may still be doing."""

    owner: Tracked
    lock: Lock | None  # None: what was promised has gone, and every worker says so
    num_pages: int


class LoadTracker:
    """All loads ordered or under way.

    groups: the KV cache group of each of the index's components. is_async: loads run beside other requests'
    steps. in_flight: by ticket. orders: since `take`.
    """

    def __init__(
        self, index: HostIndex, groups: tuple[int, ...], is_async: bool, ticket: Callable[[], Ticket]
    ) -> None:
        self._index = index
        self._groups = groups
        self._is_async = is_async
        self._ticket = ticket
        self.in_flight: dict[Ticket, InFlightLoad] = {}
        self.orders: list[LoadOrder] = []

    def order(self, tracked: Tracked, table: BlockTable, num_tokens: int) -> bool:
        """Load `num_tokens` behind what vLLM has itself into the request's blocks.

        False: what was promised has gone since, as nothing pins it before vLLM takes it up. Then the load
        that is ordered is one that fails, and vLLM computes the request again.
        """
        size = self._index.page_size
        start, end = tracked.local_tokens // size, (tracked.local_tokens + num_tokens) // size
        is_whole = (tracked.local_tokens + num_tokens) % size == 0 and not tracked.is_stale
        lock = self._index.lock(tracked.key(end, size)) if is_whole else None
        copies = None if lock is None else self._copies(lock, table, start, end)
        if copies is None and lock is not None:
            self._index.unlock(lock)
            lock = None
        ticket, request_id, in_step = self._ticket(), tracked.request.request_id, not self._is_async
        self.in_flight[ticket] = InFlightLoad(tracked, lock, end - start)
        tracked.loads.add(ticket)
        if copies is not None:
            self.orders.append(LoadOrder(ticket, request_id, copies, in_step))
            return True
        gone = (GroupCopy(group, _filled(table[group][start:]), NO_PAGES) for group in self._groups)
        self.orders.append(
            LoadOrder(ticket, request_id, tuple(gone), in_step, "its pages have left the host")
        )
        return False

    def _copies(self, lock: Lock, table: BlockTable, start: int, end: int) -> tuple[GroupCopy, ...] | None:
        """What is copied into the blocks from page `start` on; None where some of it may not be read."""
        copies = []
        for component, group in enumerate(self._groups):
            first, pages = self._index.loadable(lock, component, start)
            blocks: Pages = np.array(table[group][first:end], np.int32)
            if len(blocks) != len(pages):
                raise Misuse(f"{len(blocks)} blocks for {len(pages)} pages of group {group}")
            if not self._index.are_ready(component, pages):
                return None
            there = blocks != NULL_BLOCK
            if there.any():
                copies.append(GroupCopy(group, blocks[there], pages[there]))
        return tuple(copies)

    def take(self) -> tuple[LoadOrder, ...]:
        """Loads ordered since the last call."""
        orders, self.orders = tuple(self.orders), []
        return orders

    def ended(self, ticket: Ticket, ok: bool) -> InFlightLoad:
        """Every worker has loaded it, or it failed: what it was then is no longer found."""
        job = self.in_flight.pop(ticket)
        job.owner.loads.discard(ticket)
        if not ok:
            job.owner.num_saved = 0
        if job.lock is not None:
            if not ok:
                self._index.lose_path(job.lock)
            self._index.unlock(job.lock)
        return job


def _filled(table: Sequence[int]) -> Pages:
    """The blocks of a table, without those that a window has gone past."""
    return np.array([block for block in table if block != NULL_BLOCK], np.int32)

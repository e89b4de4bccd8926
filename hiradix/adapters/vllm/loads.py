"""Host to device, the scheduler's half: what was promised is locked until every worker has loaded it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hiradix.adapters.vllm.index import HostIndex
from hiradix.adapters.vllm.orders import Load, Move, Ticket
from hiradix.adapters.vllm.requests import Tracked
from hiradix.adapters.vllm.saves import NULL_BLOCK, BlockTable
from hiradix.errors import Misuse
from hiradix.tree import Lock, Pages


@dataclass(eq=False)
class LoadFlight:
    """A load that some worker may still be doing."""

    owner: Tracked
    lock: Lock
    num_pages: int


class LoadBook:
    """All loads ordered or under way.

    groups: the KV cache group of each of the index's components. is_async: loads run beside other requests'
    steps. flights: by ticket. orders: since `take`.
    """

    def __init__(
        self, index: HostIndex, groups: tuple[int, ...], is_async: bool, ticket: Callable[[], Ticket]
    ) -> None:
        self._index = index
        self._groups = groups
        self._is_async = is_async
        self._ticket = ticket
        self.flights: dict[Ticket, LoadFlight] = {}
        self.orders: list[Load] = []

    def order(self, tracked: Tracked, table: BlockTable, num_tokens: int) -> None:
        """Load `num_tokens` behind what vLLM has itself into the request's blocks."""
        size = self._index.page_size
        start, end = tracked.local_tokens // size, (tracked.local_tokens + num_tokens) // size
        lock = self._index.lock(tracked.key(end, size))
        moves = tuple(
            move
            for component, group in enumerate(self._groups)
            if len((move := self._move(lock, component, group, table[group][:end], start)).host)
        )
        ticket = self._ticket()
        self.flights[ticket] = LoadFlight(tracked, lock, end - start)
        tracked.loads.add(ticket)
        self.orders.append(Load(ticket, tracked.request.request_id, moves, not self._is_async))

    def _move(self, lock: Lock, component: int, group: int, table: Sequence[int], start: int) -> Move:
        """What of one component is copied into the blocks from page `start` on; not where there is none."""
        first, pages = self._index.loadable(lock, component, start)
        blocks: Pages = np.array(table[first:], np.int32)
        if len(blocks) != len(pages):
            raise Misuse(f"{len(blocks)} blocks for {len(pages)} pages of group {group}")
        there = blocks != NULL_BLOCK
        return Move(group, blocks[there], pages[there])

    def take(self) -> tuple[Load, ...]:
        """Loads ordered since the last call."""
        orders, self.orders = tuple(self.orders), []
        return orders

    def ended(self, ticket: Ticket, ok: bool) -> LoadFlight:
        """Every worker has loaded it, or it failed: what it was then is no longer found."""
        flight = self.flights.pop(ticket)
        flight.owner.loads.discard(ticket)
        if not ok:
            flight.owner.num_saved = 0
            self._index.lose_path(flight.lock)
        self._index.unlock(flight.lock)
        return flight

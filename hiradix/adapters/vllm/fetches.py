"""Storage to host, the scheduler's half: asked when a request arrives, read while it waits in vLLM's queue.

    query (each worker hashes and asks) -> the least any worker found -> host pages -> read -> the tree

How long a request is told to ask again is the prefetch policy's decision; what arrives later still enters
the tree. Host pages are taken only when the hit length is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hiradix.adapters.vllm.index import READY, HostIndex
from hiradix.adapters.vllm.orders import Outcome, Query, Read, Ticket
from hiradix.adapters.vllm.requests import Tracked
from hiradix.policy.prefetch import PrefetchPolicy
from hiradix.tree import Lock, Pages, RadixKey, Tier


@dataclass(eq=False)
class Fetch:
    """One request's prefetch: pages [start, start + num_pages) of `key`, behind the locked `anchor`."""

    key: RadixKey
    start: int
    num_pages: int
    anchor: Lock
    started_s: float
    owner: Tracked | None
    hashes: tuple[bytes, ...] = ()
    host: Pages | None = None
    first_hash: int = 0
    is_orphan: bool = False  # the index was cleared since


@dataclass
class FetchFigures:
    """Pages since start."""

    asked: int = 0
    found: int = 0
    read: int = 0
    late: int = 0  # came after their request had gone on


class FetchBook:
    """All prefetches under way. One thread."""

    def __init__(
        self,
        index: HostIndex,
        policy: PrefetchPolicy,
        clock: Callable[[], float],
        ticket: Callable[[], Ticket],
    ) -> None:
        self.index = index
        self.policy = policy
        self.figures = FetchFigures()
        self.flights: dict[Ticket, Fetch] = {}
        self.queries: list[Query] = []
        self.reads: list[Read] = []
        self.cancels: list[Ticket] = []
        self._clock = clock
        self._ticket = ticket

    @property
    def pages_in_flight(self) -> int:
        return sum(fetch.num_pages for fetch in self.flights.values())

    def start(self, tracked: Tracked, num_pages: int) -> None:
        """Ask storage for what the host lacks of a request's first `num_pages` pages, if that is worth it."""
        key = tracked.key(num_pages, self.index.page_size)
        node = self.index.resident_end(key)
        asked = num_pages - node.end
        if asked <= 0 or not self.policy.worth_asking(asked):
            return
        if not self.policy.has_capacity(self.pages_in_flight, asked, self.index.num_pages):
            return
        anchor = self.index.tree.lock(node, Tier.HOST)
        rows = self.index.tree.rows(key, node, node.end, num_pages)
        ticket = self._ticket()
        fetch = Fetch(key, node.end, asked, anchor, self._clock(), tracked, first_hash=rows.start)
        self.flights[ticket] = fetch
        tracked.fetch = ticket
        self.queries.append(Query(ticket, rows, asked))
        self.figures.asked += asked

    def is_awaited(self, tracked: Tracked) -> bool:
        """Whether a request should ask again: its prefetch runs and may still hold it."""
        if tracked.fetch is None:
            return False
        fetch = self.flights[tracked.fetch]
        if not self.policy.should_stop(self._clock() - fetch.started_s, fetch.num_pages):
            return True
        self.abandon(tracked)
        return False

    def abandon(self, tracked: Tracked) -> None:
        """Nobody waits any more. What is being read may still arrive."""
        if tracked.fetch is None:
            return
        fetch = self.flights[tracked.fetch]
        fetch.owner = None
        if fetch.host is None:
            self.cancels.append(tracked.fetch)
        tracked.fetch = None

    def take(self) -> tuple[tuple[Query, ...], tuple[Read, ...], tuple[Ticket, ...]]:
        """Queries, reads and cancels ordered since the last call."""
        if not (self.queries or self.reads or self.cancels):
            return (), (), ()
        orders = tuple(self.queries), tuple(self.reads), tuple(self.cancels)
        self.queries, self.reads, self.cancels = [], [], []
        return orders

    # -- outcomes, the least of all workers' --------------------------------------------------

    def found(self, outcome: Outcome) -> None:
        """Storage has the first `num_pages` of what was asked for."""
        fetch = self.flights[outcome.ticket]
        self.figures.found += outcome.num_pages
        if fetch.is_orphan or fetch.owner is None or not self.policy.worth_reading(outcome.num_pages):
            self._finish(outcome.ticket)
            return
        host = self.index.alloc(outcome.num_pages)
        if not len(host):
            self._finish(outcome.ticket)
            return
        fetch.hashes, fetch.host, fetch.num_pages = outcome.hashes, host, len(host)
        begin = fetch.start - fetch.first_hash
        self.reads.append(Read(outcome.ticket, outcome.hashes[begin : begin + len(host)], host))

    def arrived(self, outcome: Outcome) -> Pages:
        """The first `num_pages` of the read are on the host of every worker. Those the tree took."""
        fetch = self.flights[outcome.ticket]
        assert fetch.host is not None, f"a read of ticket {outcome.ticket}, which asked only"
        count = 0 if fetch.is_orphan else outcome.num_pages
        self.index.free(fetch.host[count:])
        taken = fetch.host[:0]
        if count:
            end = fetch.start + count
            size = self.index.page_size
            lock, (taken,) = self.index.insert(fetch.key.head(end, size), [fetch.host[:count]], READY)
            self.index.tree.set_hashes(lock.node, fetch.first_hash, fetch.hashes[: end - fetch.first_hash])
            self.figures.read += count
            if fetch.owner is None:
                self.figures.late += count
                self.index.unlock(lock)
            else:
                fetch.owner.hold = lock
        self._finish(outcome.ticket)
        return taken if len(taken) == count else fetch.host[:0]

    def _finish(self, ticket: Ticket) -> None:
        fetch = self.flights.pop(ticket)
        if fetch.owner is not None:
            fetch.owner.fetch = None
        self.index.unlock(fetch.anchor)

    def forget_all(self) -> None:
        """The index was cleared: nothing under way may enter it, and gives its pages back when it ends."""
        for fetch in self.flights.values():
            fetch.is_orphan = True
            if fetch.owner is not None:
                self.abandon(fetch.owner)

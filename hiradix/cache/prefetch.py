"""Storage to host, while a request waits in the queue.

    query (worker hashes and asks the backend) -> host pages for what is there -> reads of a batch each,
    each adopted into the tree as it arrives -> done

The request is told when to go on by the prefetch policy; what arrives after that still enters the tree.
Host pages are allocated only when the hit length is known. Every path ends in `_finish`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum

from hiradix.cache.flights import Flight, Flights
from hiradix.cache.pages import BACKBONE, Pages, PageSupply
from hiradix.policy.no_regret import Move, NoRegret
from hiradix.policy.prefetch import PrefetchPolicy
from hiradix.transfer import JobKind, Result, Ticket, TransferController
from hiradix.transfer.jobs import Chain
from hiradix.tree import Lock, Node, RadixKey, RadixTree, Tier


class Phase(Enum):
    QUERY = "query"
    READ = "read"
    JOINED = "joined"  # waits for another prefetch of the same pages
    DONE = "done"


@dataclass(slots=True, eq=False)
class Prefetch:
    """One request's prefetch. `lock` pins `anchor`, the deepest host node reached so far."""

    key: RadixKey
    asked_pages: int
    start_page: int
    started_s: float
    anchor: Node
    lock: Lock | None
    phase: Phase = Phase.QUERY
    tickets: set[Ticket] = field(default_factory=set)
    unread_pages: int = 0  # pages of reads that are not back yet
    end_page: int = sys.maxsize  # the first page that did not come: what lies behind cannot be used
    nothing_there: bool = False  # storage said so of its first page
    is_wanted: bool = True  # its own request waits for it
    stopped: bool = False  # nobody waits for it any more
    loaded_pages: int = 0
    loaded_end: int = 0  # the page behind the last of those
    primary: Prefetch | None = None


class Prefetcher:
    """All prefetches under way, by request handle."""

    def __init__(
        self,
        supply: PageSupply,
        controller: TransferController,
        flights: Flights,
        policy: PrefetchPolicy,
        clock: Callable[[], float],
    ):
        self.policy = policy
        self._tree: RadixTree = supply.tree
        self._supply = supply
        self._controller = controller
        self._flights = flights
        self._clock = clock
        self.no_regret = NoRegret(False)
        self._active: dict[Hashable, Prefetch] = {}
        self._running: list[Prefetch] = []  # not DONE; outlives the handle of an aborted request
        self._loaded: dict[Hashable, tuple[int, int]] = {}  # first page, pages

    def __len__(self) -> int:
        return len(self._running)

    def clear(self) -> None:
        """Forget everything (after a reset; the flights are orphans now)."""
        for p in self._running:
            p.phase, p.lock = Phase.DONE, None
        self._active.clear()
        self._running.clear()
        self._loaded.clear()

    # -- the request's side -------------------------------------------------------------

    def start(self, handle: Hashable, key: RadixKey, node: Node) -> bool:
        """Ask storage for what follows `node` (the deepest loadable node of `key`). False: not worth it."""
        self.abort(handle)
        asked = key.num_pages(self._tree.page_size) - node.end
        if asked <= 0 or not self._controller.storage_attached or not self.policy.worth_asking(asked):
            return False
        if not self.policy.has_capacity(self.pages_in_flight(), asked, self._host_pages()):
            self._supply.counters.miss("host_capacity", asked)
            return False
        p = Prefetch(key, asked, node.end, self._clock(), node, None)
        self._active[handle] = p
        self._running.append(p)
        primary = self._same_pages(p)
        if primary is not None:
            p.phase, p.primary = Phase.JOINED, primary
        else:
            self._query(p)
        return True

    def progress(self, handle: Hashable) -> bool:
        """True when the request should go on to be scheduled, with whatever is in the tree by now."""
        p = self._active.get(handle)
        if p is None:
            return True
        done = p.phase is Phase.DONE
        if not done and not self.policy.should_stop(self._clock() - p.started_s, p.asked_pages):
            return False
        if not done:
            self._supply.counters.miss("deadline", p.unread_pages)
        self._release(handle)
        return True

    def pop_loaded_pages(self, handle: Hashable) -> int:
        """Pages that `handle`'s prefetch brought to the host. Reading resets it."""
        return self.pop_loaded_span(handle)[1]

    def pop_loaded_span(self, handle: Hashable) -> tuple[int, int]:
        """Where those pages begin in the request's prompt, and how many they are. Reading resets it.

        What others had put into the tree in the meantime lies before them.
        """
        return self._loaded.pop(handle, (0, 0))

    def stop(self, handle: Hashable) -> None:
        """Stop waiting for `handle`'s prefetch; what arrives later still enters the tree."""
        if handle in self._active:
            self._release(handle)

    def abort(self, handle: Hashable) -> None:
        """Stop for a request that ended. Its pages come back when the running read does."""
        self.stop(handle)
        self._loaded.pop(handle, None)

    def stop_all(self) -> None:
        """Stop every prefetch (before a detach)."""
        for handle in list(self._active):
            self._release(handle)

    def pages_in_flight(self) -> int:
        return sum(p.asked_pages for p in self._running)

    def _host_pages(self) -> int:
        return 0 if self._supply.host is None else self._supply.host.num_pages

    def _release(self, handle: Hashable) -> None:
        p = self._active.pop(handle)
        self._loaded[handle] = p.loaded_end - p.loaded_pages, p.loaded_pages
        p.is_wanted = False
        primary = p.primary
        if p.phase is Phase.JOINED:
            self._finish(p)
        for left in (p, primary):
            if left is not None and left.phase is not Phase.DONE and not self._is_wanted(left):
                left.stopped = True
                for ticket in left.tickets:
                    self._controller.cancel(ticket)

    def _is_wanted(self, p: Prefetch) -> bool:
        """Whether a request waits for `p`, its own or one that joined it."""
        return p.is_wanted or any(q.primary is p for q in self._running)

    # -- the transfer's side ------------------------------------------------------------

    def _same_pages(self, new: Prefetch) -> Prefetch | None:
        """A running prefetch that will bring the first page `new` wants."""
        row = new.key.row(new.anchor.end, self._tree.page_size)
        for p in self._running:
            is_open = p.phase in (Phase.QUERY, Phase.READ) and not p.stopped
            if is_open and p is not new and p.anchor is new.anchor:
                if p.key.row(p.anchor.end, self._tree.page_size) == row:
                    return p
        return None

    def _query(self, p: Prefetch) -> None:
        p.phase, p.primary = Phase.QUERY, None
        p.lock = self._tree.lock(p.anchor, Tier.HOST)
        start = p.anchor.end
        end = start + p.asked_pages
        rows = self._tree.rows(p.key, p.anchor, start, end)
        skip = start - rows.start  # pages the rows reach back because their hashes are not known yet

        def answered(result: Result) -> None:
            p.tickets.discard(ticket)
            if skip and result.hashes:
                self._tree.set_hashes(p.anchor, rows.start, result.hashes[:skip])
            if result.error is not None and not p.stopped:
                self._supply.counters.miss("storage_transfer", p.asked_pages)
            p.nothing_there = result.error is None and result.num_pages == 0
            chain = None if rows.start else result.hashes
            self._read(p, start, result.hashes[skip : skip + result.num_pages], chain)

        ticket = self._controller.query(rows, p.asked_pages)
        p.tickets.add(ticket)
        self._flights.add(ticket, Flight(JobKind.QUERY, answered))

    def _read(self, p: Prefetch, start: int, hashes: tuple[bytes, ...], chain: Chain) -> None:
        """Allocate host pages for the hits and submit their reads; as many as the host can take."""
        if p.stopped or not self.policy.worth_reading(len(hashes)):
            self._supply.counters.miss("dropped" if p.stopped else "below_threshold", len(hashes))
            return self._finish(p)
        if not self.no_regret.takes(Move.FETCH, len(hashes)):
            self._supply.counters.miss("slower_than_compute", len(hashes))
            return self._finish(p)
        p.phase = Phase.READ
        batch_pages = self._controller.runtime.limits.batch_pages
        at = 0
        while at < len(hashes):
            num_pages = min(batch_pages, len(hashes) - at, self._supply.host_room())
            host_pages = self._supply.alloc_host(num_pages) if num_pages else None
            if host_pages is None:
                self._supply.counters.miss("host_capacity", len(hashes) - at)
                break
            self._submit_read(p, start + at, hashes[at : at + num_pages], host_pages, chain)
            at += num_pages
        if not at:
            self._finish(p)

    def _submit_read(
        self,
        p: Prefetch,
        start: int,
        hashes: tuple[bytes, ...],
        host_pages: Pages,
        chain: Chain,
    ) -> None:
        def arrived(result: Result) -> None:
            p.tickets.discard(ticket)
            p.unread_pages -= len(host_pages)
            self.no_regret.moved(Move.FETCH, result.num_pages, result.duration_s)
            usable = result.num_pages if start < p.end_page else 0
            if usable:
                self._adopt(p, start, host_pages[:usable], hashes[:usable])
            if usable < len(host_pages):
                self._supply.free_host(host_pages[usable:])
                if start < p.end_page and result.error is not None:
                    self._supply.counters.miss("storage_transfer", len(host_pages) - usable)
                p.end_page = min(p.end_page, start + usable)
            if not p.tickets:
                self._finish(p)

        p.unread_pages += len(host_pages)
        ticket = self._controller.read(hashes, host_pages, chain)
        p.tickets.add(ticket)
        self._flights.add(ticket, Flight(JobKind.READ, arrived, owns={BACKBONE: host_pages}))

    def _adopt(self, p: Prefetch, start: int, host_pages: Pages, hashes: tuple[bytes, ...]) -> None:
        """Put pages [start, start + n) of the key into the host tier and move the anchor behind them."""
        end = start + len(host_pages)
        done = self._tree.insert(p.key.head(end, self._tree.page_size), Tier.HOST, [host_pages], at=p.lock)
        duplicates = done.duplicates[BACKBONE]
        self._supply.free_host(duplicates)
        self._tree.set_hashes(done.lock.node, start, hashes)
        for node in self._tree.path(done.lock.node, start):
            node.stored = True
        if self._tree.watch is not None:
            self._tree.watch.backed_up(done.lock.node, start, end)
        if p.lock is not None:
            self._tree.unlock(p.lock)
        p.anchor, p.lock = done.lock.node, done.lock
        p.loaded_pages += len(host_pages) - len(duplicates)
        p.loaded_end = end
        self._supply.counters.prefetched += len(host_pages) - len(duplicates)

    def _finish(self, p: Prefetch) -> None:
        """The one end of every prefetch: unlock, and let those who joined it look again."""
        assert not p.tickets and p.unread_pages == 0, (p.tickets, p.unread_pages)
        p.phase = Phase.DONE
        self._running.remove(p)
        if p.lock is not None:
            self._tree.unlock(p.lock)
            p.lock = None
        for joined in [q for q in self._running if q.primary is p]:
            self._retry(joined, p)

    def _retry(self, p: Prefetch, primary: Prefetch) -> None:
        """A joined prefetch goes on alone for what the primary did not bring."""
        p.primary = None
        node = self._tree.match(p.key).loadable_node
        gained = max(0, node.end - p.start_page)
        p.loaded_pages += gained
        p.loaded_end = node.end
        p.asked_pages -= gained
        p.start_page += gained
        p.anchor = node
        if (
            (gained or not primary.nothing_there)
            and p.asked_pages > 0
            and self.policy.worth_asking(p.asked_pages)
            and self._controller.storage_attached
        ):
            self._query(p)
        else:
            self._finish(p)

"""The reads of a prefetch: from storage into host pages, and from there into the tree.

With full attention alone each batch is adopted as it arrives, and a match may end in any of its pages. With
further components a match ends only where all of them have what it needs, so what storage has of such a
boundary arrives in one job and enters the tree whole, or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hiradix.cache.flights import Flight, Flights
from hiradix.cache.pages import BACKBONE, Pages, PagesOf, PageSupply
from hiradix.policy.no_regret import Move, NoRegret
from hiradix.transfer import JobKind, Result, Tail, Ticket, Trail, TransferController
from hiradix.transfer.jobs import Chain
from hiradix.tree import HOST, Lock, Node, RadixKey, RadixTree

MAX_TRIES = 3  # boundaries of one prompt that are read for, when what storage said it had did not arrive


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
    tries: int = 0  # boundaries that were found and did not arrive


@dataclass(frozen=True)
class Found:
    """What storage has of a prefetch: pages [start, start + len(hashes)) of its key, by their names.

    chain: the key's hashes from its first page on, where they are known.
    """

    start: int
    hashes: tuple[bytes, ...]
    chain: Chain

    def part(self, first: int, num_pages: int) -> Found:
        """Pages from the `first` of these on."""
        return Found(self.start + first, self.hashes[first : first + num_pages], self.chain)


class Reads:
    """Submits reads and adopts what they bring.

    finish(p): nothing more will arrive for `p`. again(p, num_pages): what had been found for it was gone,
    and so are all boundaries behind `num_pages`. no_regret: which reads are worth their time.
    """

    def __init__(
        self,
        supply: PageSupply,
        controller: TransferController,
        flights: Flights,
        finish: Callable[[Prefetch], None],
        again: Callable[[Prefetch, int], None],
    ):
        self.no_regret = NoRegret(False)
        self._tree: RadixTree = supply.tree
        self._supply = supply
        self._controller = controller
        self._flights = flights
        self._finish = finish
        self._again = again
        self._others = list(enumerate(supply.tree.components))[1:]

    def trails(self) -> list[Trail]:
        """What storage must have of further components where hits end."""
        return [Trail(component, kind.reach) for component, kind in self._others]

    def most(self, num_pages: int) -> int:
        """How many of so many pages can be read: a boundary that the host has no room for is no use."""
        return min(num_pages, self._supply.host_room()) if self._others else num_pages

    def submit(self, p: Prefetch, found: Found) -> bool:
        """Submit reads for what was found, as far as the host can take it; False if there are none: it can
        take nothing, or they are not worth their time."""
        if not self.no_regret.takes(Move.FETCH, len(found.hashes)):
            self._supply.counters.miss("slower_than_compute", len(found.hashes))
            return False
        return self._submit_whole(p, found) if self._others else self._submit_batches(p, found)

    # -- full attention alone -------------------------------------------------------------

    def _submit_batches(self, p: Prefetch, found: Found) -> bool:
        batch_pages, count = self._controller.runtime.limits.batch_pages, len(found.hashes)
        at = 0
        while at < count:
            num_pages = min(batch_pages, count - at, self._supply.host_room())
            host_pages = self._supply.alloc_host(num_pages) if num_pages else None
            if host_pages is None:
                self._supply.counters.miss("host_capacity", count - at)
                break
            self._submit_batch(p, found.part(at, num_pages), host_pages)
            at += num_pages
        return at > 0

    def _submit_batch(self, p: Prefetch, batch: Found, host_pages: Pages) -> None:
        start, hashes = batch.start, batch.hashes

        def arrived(result: Result) -> None:
            p.tickets.discard(ticket)
            p.unread_pages -= len(host_pages)
            self.no_regret.moved(Move.FETCH, result.num_pages, result.duration_s)
            usable = result.num_pages if start < p.end_page else 0
            if usable:
                self._adopt(p, batch.part(0, usable), {BACKBONE: host_pages[:usable]})
            if usable < len(host_pages):
                self._supply.free_host(host_pages[usable:])
                if start < p.end_page and result.error is not None:
                    self._supply.counters.miss("storage_transfer", len(host_pages) - usable)
                p.end_page = min(p.end_page, start + usable)
            if not p.tickets:
                self._finish(p)

        p.unread_pages += len(host_pages)
        ticket = self._controller.read(hashes, host_pages, batch.chain)
        p.tickets.add(ticket)
        self._flights.add(ticket, Flight(JobKind.READ, arrived, owns={BACKBONE: host_pages}))

    # -- several components ---------------------------------------------------------------

    def _submit_whole(self, p: Prefetch, found: Found) -> bool:
        count = len(found.hashes)
        wanted = {c: min(count, kind.reach) if kind.per_page else 1 for c, kind in self._others}
        pages = self._supply.alloc_all_host({BACKBONE: count, **wanted})
        if pages is None:
            self._supply.counters.miss("host_capacity", count)
            return False
        self._submit_boundary(p, found, pages)
        return True

    def _submit_boundary(self, p: Prefetch, found: Found, pages: PagesOf) -> None:
        num_pages = sum(map(len, pages.values()))
        count = len(found.hashes)

        def arrived(result: Result) -> None:
            p.tickets.discard(ticket)
            p.unread_pages -= count
            self.no_regret.moved(Move.FETCH, min(count, result.num_pages), result.duration_s)
            if result.num_pages == num_pages:
                self._adopt(p, found, pages)
                return self._finish(p)
            self._supply.free_all_host(pages)
            if result.error is not None:
                self._supply.counters.miss("storage_transfer", count)
            p.tries += 1
            if result.error is None and p.tries < MAX_TRIES and not p.stopped:
                return self._again(p, _before_gap([len(own) for own in pages.values()], result.num_pages))
            self._finish(p)

        p.unread_pages += count
        tails = [Tail(own, c) for c, own in pages.items() if c != BACKBONE]
        ticket = self._controller.read(found.hashes, pages[BACKBONE], found.chain, tails)
        p.tickets.add(ticket)
        self._flights.add(ticket, Flight(JobKind.READ, arrived, owns=pages))

    # -- adoption -------------------------------------------------------------------------

    def _adopt(self, p: Prefetch, found: Found, pages: PagesOf) -> None:
        """Put what was found into the host tier, with the further components its end needs, and move the
        anchor there."""
        start, count = found.start, len(found.hashes)
        key = p.key.head(start + count, self._tree.page_size)
        done = self._tree.insert(key, HOST, list(pages.values()), at=p.lock)
        for component, duplicates in enumerate(done.duplicates):
            self._supply.free_host(duplicates, component)
        self._tree.set_hashes(done.lock.node, start, found.hashes)
        for node in self._tree.path(done.lock.node, start):
            node.stored = True
        if self._tree.watch is not None:
            self._tree.watch.backed_up(done.lock.node, start, start + count)
        if p.lock is not None:
            self._tree.unlock(p.lock)
        before, p.anchor, p.lock = p.anchor, done.lock.node, done.lock
        gained = count - len(done.duplicates[BACKBONE])
        if self._others:
            is_all_new = not start or all(kind.reach <= count for _, kind in self._others)
            p.anchor.boundary_stored = is_all_new or before.boundary_stored
            gained = count  # what the tree had of these pages ended in no match without the rest
        p.loaded_pages += gained
        p.loaded_end = start + count
        self._supply.counters.prefetched += gained


def _before_gap(counts: Sequence[int], done: int) -> int:
    """The page that was missing, of `counts` pages per component that all end at one page, `done` came.

    No boundary behind it can be had: each needs that page.
    """
    for count in counts:
        if done < count:
            return counts[0] - count + done
        done -= count
    raise AssertionError(f"all of {counts} came")

"""Copies upwards from host to device: all promised pages or none.

The one documented exception to "nothing is visible before its copy is done": device pages of a load back
enter the tree at once, because the layer gate orders every reader behind the copy. Until the result is
applied both ends stay locked. If the copy fails, the pages leave the tree as soon as nobody locks them,
and no match may reach them in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hiradix.cache.flights import Flight, Flights
from hiradix.cache.pages import Counters, Pages, PageSupply, Share
from hiradix.transfer import JobKind, Result, Ticket, TransferController
from hiradix.tree import Lock, Match, Node, RadixKey, RadixTree, Segment, Tier


class LoadBack:
    """Brings host-only nodes back to the device. make_room(n): evict until n device pages are free.

    share: turns a number of this rank into the ranks' common one (see `hiradix.cache.agreement`).
    """

    def __init__(
        self,
        supply: PageSupply,
        controller: TransferController,
        flights: Flights,
        make_room: Callable[[int], int],
        share: Share,
    ):
        self._tree: RadixTree = supply.tree
        self._supply = supply
        self._counters: Counters = supply.counters
        self._controller = controller
        self._flights = flights
        self._make_room = make_room
        self._failed: list[tuple[Lock, int]] = []  # (lock on the last, first page) of copies that failed
        self._queued: list[Ticket] = []  # loads that wait for `start_loading`
        self._started: dict[int, tuple[Ticket, ...]] = {}  # by gate slot, while it matters to readers
        self._lost: set[Ticket] = set()  # tickets in `_started` whose results were failures
        self._first_failed_slot = share(self._find_failed_slot)

    def clear(self) -> None:
        self._failed.clear()
        self._queued.clear()
        self._started.clear()
        self._lost.clear()

    def running(self) -> list[Ticket]:
        """Loads that were started and whose results are not applied yet."""
        return [ticket for ticket in self._flights.tickets(JobKind.LOAD) if ticket not in self._queued]

    def load(self, node: Node, quota_pages: int | None = None) -> int | None:
        """Queue the copies that make `node` usable on the device; returns their number of pages.

        None: the device cannot hold all of them (or more than `quota_pages`), and nothing changed. The
        copies start with the next `start_loading`; until they are done the path stays locked.
        """
        segments = self._tree.missing(node, Tier.HOST, Tier.DEVICE)
        num_pages = sum(len(s.pages) for s in segments)
        if num_pages == 0:
            return 0
        is_full = len(self._queued) >= self._controller.runtime.limits.queued_jobs
        if is_full or (quota_pages is not None and num_pages > quota_pages):
            self._counters.load_refused += num_pages
            return None
        locks = (self._tree.lock(node, Tier.HOST), self._tree.lock(node, Tier.DEVICE))
        device_pages = None
        if num_pages <= self._supply.device_room():
            self._make_room(num_pages)
            device_pages = self._supply.device.alloc(num_pages)
        if device_pages is None:
            self._counters.load_refused += num_pages
            self._unlock(locks)
        else:  # making room may have applied results, which may have split nodes
            self._submit(node, self._tree.missing(node, Tier.HOST, Tier.DEVICE), device_pages, locks)
        return None if device_pages is None else num_pages

    def _submit(self, node: Node, segments: list[Segment], pages: Pages, locks: tuple[Lock, Lock]) -> None:
        """Queue one copy for all segments; the tree has their device pages at once."""
        host_pages = np.concatenate([s.pages for s in segments])
        at, start = 0, segments[0].start
        for s in segments:
            duplicates = self._tree.adopt(s.node, s.component, Tier.DEVICE, pages[at : at + len(s.pages)])
            assert not len(duplicates), f"load back of resident pages {duplicates}"
            at += len(s.pages)

        def done(result: Result) -> None:
            if result.num_pages == len(pages):
                self._counters.loaded += len(pages)
                self._unlock(locks)
            else:
                self._counters.load_failed += len(pages)
                self._failed.append((locks[1], start))
                self._tree.unlock(locks[0])
                if ticket not in self._queued:
                    self._lost.add(ticket)

        ticket = self._controller.load(host_pages, pages)
        self._queued.append(ticket)
        self._flights.add(ticket, Flight(JobKind.LOAD, done, reads=host_pages))

    def _unlock(self, locks: tuple[Lock, Lock]) -> None:
        for lock in reversed(locks):
            self._tree.unlock(lock)

    def start_loading(self) -> int:
        """Launch the queued loads. Returns the gate slot the next forward waits on, -1 if nothing loads.

        Loads run first in, first out, so waiting on the newest covers all under way. But as long as a
        request may still read what a failed one promised, the failed one's slot is returned: it raises.
        """
        self.drop_failed()
        slot = self._controller.start_loading()
        if slot >= 0:
            self._started[slot], self._queued = tuple(self._queued), []
        elif not self._started:
            return -1
        first = self._first_failed_slot()
        failed = [s for s, loads in self._started.items() if s == first or not self._lost.isdisjoint(loads)]
        for s, tickets in list(self._started.items()):
            if not (self._failed and s in failed) and not any(t in self._flights for t in tickets):
                del self._started[s]
                self._lost.difference_update(tickets)
        return next((s for s in failed if s in self._started), max(self._started, default=-1))

    def _find_failed_slot(self) -> float:
        """The oldest started slot that failed, known as soon as its worker says so; inf if none has."""
        error = self._controller.layer_done_counter.error
        return next((s for s in self._started if error(s) is not None), math.inf)

    # -- failure ------------------------------------------------------------------------

    def _garbage(self) -> set[Node]:
        """Nodes that a failed load filled (a split may have added upper halves since)."""
        return {n for lock, start in self._failed for n in self._tree.path(lock.node, start)}

    def usable(self, match: Match) -> Match:
        """`match`, cut above any load that failed and has not left the tree yet."""
        if not self._failed:
            return match
        garbage, cut = self._garbage(), None
        for node in self._tree.path(match.device_node):
            if node in garbage:
                cut = node.parent
        return match if cut is None else Match(cut, cut)

    def blocks(self, key: RadixKey) -> bool:
        """Whether the path of `key` leads over pages of a failed load that somebody still locks."""
        self.drop_failed()
        if not self._failed:
            return False
        match = self._tree.match(key)
        return self.usable(match) is not match

    def drop_failed(self) -> int:
        """Take failed loads off the device as far as nobody else locks them. Returns the pages freed.

        Until then our own lock keeps them from leaving by another way, bit by bit, and out of sight.
        """
        if not self._failed:
            return 0
        failed, self._failed = self._failed, []
        num_freed = 0
        for lock, start in failed:
            self._tree.unlock(lock)
            for n in list(self._tree.path(lock.node, start)):
                freed = self._tree.drop_device(n)
                if freed is None:  # and so are all above it
                    self._failed.append((self._tree.lock(n, Tier.DEVICE), start))
                    break
                num_freed += self._supply.release(freed)
        return num_freed

"""Copies upwards from host to device: all promised pages or none.

The one documented exception to "nothing is visible before its copy is done": device pages of a load back
enter the tree at once, because the layer gate orders every reader behind the copy. Until the result is
applied both ends stay locked. If the copy fails, the pages leave the tree as soon as nobody locks them,
and no match may reach them in between.
"""

from __future__ import annotations

import numpy as np

from hiradix.cache.flights import Flight, Flights
from hiradix.cache.pages import Counters, Pages, PageSupply
from hiradix.transfer import JobKind, Result, TransferController
from hiradix.tree import Lock, Match, Node, RadixTree, Segment, Tier


class LoadBack:
    """Brings host-only nodes back to the device."""

    def __init__(self, supply: PageSupply, controller: TransferController, flights: Flights):
        self._tree: RadixTree = supply.tree
        self._supply = supply
        self._counters: Counters = supply.counters
        self._controller = controller
        self._flights = flights
        self._failed: list[tuple[Node, int]] = []  # (node, first page) filled by a copy that failed
        self._last_slot = -1

    def clear(self) -> None:
        self._failed.clear()

    def load(self, node: Node, quota_pages: int | None = None) -> int | None:
        """Queue the copies that make `node` usable on the device; returns their number of pages.

        None: the device cannot hold all of them (or more than `quota_pages`), and nothing changed. The
        copies start with the next `start_loading`; until they are done the path stays locked.
        """
        segments = self._tree.missing(node, Tier.HOST, Tier.DEVICE)
        num_pages = sum(len(s.pages) for s in segments)
        if num_pages == 0:
            return 0
        if quota_pages is not None and num_pages > quota_pages:
            self._counters.load_refused += num_pages
            return None
        locks = (self._tree.lock(node, Tier.HOST), self._tree.lock(node, Tier.DEVICE))
        device_pages = self._supply.alloc_device(num_pages)
        if device_pages is None:
            self._counters.load_refused += num_pages
            self._unlock(locks)
        else:
            self._submit(node, segments, device_pages, locks)
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
            else:
                self._counters.load_failed += len(pages)
                self._failed.append((node, start))
            self._unlock(locks)

        ticket = self._controller.load(host_pages, pages)
        self._flights.add(ticket, Flight(JobKind.LOAD, done, reads=host_pages))

    def _unlock(self, locks: tuple[Lock, Lock]) -> None:
        for lock in reversed(locks):
            self._tree.unlock(lock)

    def start_loading(self) -> int:
        """Launch the queued loads. Returns the gate slot the next forward waits on, -1 if nothing loads."""
        slot = self._controller.start_loading()
        if slot >= 0:
            self._last_slot = slot
        elif not self._flights.tickets(JobKind.LOAD):
            self._last_slot = -1
        return (
            self._last_slot
        )  # earlier loads may still be under way: first in, first out, so waiting on the last covers all

    # -- failure ------------------------------------------------------------------------

    def _garbage(self) -> set[Node]:
        """Nodes that a failed load filled (a split may have added upper halves since)."""
        return {n for node, start in self._failed for n in self._tree.path(node, start)}

    def usable(self, match: Match) -> Match:
        """`match`, cut above any load that failed and has not left the tree yet."""
        if not self._failed:
            return match
        garbage, cut = self._garbage(), None
        for node in self._tree.path(match.device_node):
            if node in garbage:
                cut = node.parent
        return match if cut is None else Match(cut, cut)

    def drop_failed(self) -> None:
        """Take failed loads off the device as soon as nothing locks them. Called once per tick."""
        failed, self._failed = self._failed, []
        for node, start in failed:
            filled = list(self._tree.path(node, start))
            if not filled:
                continue  # it has left the tree by another way
            freed = self._tree.drop_device(filled[-1])
            if freed is None:
                self._failed.append((node, start))
            else:
                self._supply.release(freed)

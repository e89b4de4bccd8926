"""One prefix on its way into a tier, for a wish: from storage, from the host, or down from the device."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from hiradix.cache.intents.planner import Planner
from hiradix.cache.reserved_room import on_device_only
from hiradix.transfer import JobKind, Ticket
from hiradix.tree import DEVICE, HOST, Node, RadixKey, Tier

MAX_ORDERS: Final = 3  # of copies for one prefix, as one may fail or find less room than there was


class Arrival:
    """Brings the leading pages of `key` into `tier`, step by step.

    handle: names its fetch among those of requests that wait, behind whom it comes. reason: why there is not
    more.
    """

    def __init__(self, planner: Planner, handle: Hashable, key: RadixKey, tier: Tier):
        self.key = key
        self.num_pages = key.num_pages(planner.tree.page_size)
        self.is_ended = False
        self.reason = ""
        self._planner = planner
        self._handle = ("wish", handle)
        self._tier = tier
        self._was_fetched = self._is_fetching = False
        self._awaited: set[Ticket] = set()
        self._num_orders = 0

    def usable(self, most_pages: int) -> Node:
        """The deepest node at which the pages in the tier end, `most_pages` at most. Splits the node it ends
        in."""
        tree = self._planner.tree
        match = self._planner.match(self.key.head(max(0, most_pages), tree.page_size))
        if self._tier is DEVICE:
            return match.device_node
        node = match.loadable_node
        while node.parent is not None and on_device_only(tree, node):
            node = tree.boundaries(node.parent).loadable_node
        return node

    def advance(self, most_pages: int) -> None:
        """One step more, to have `most_pages` of it at most."""
        if self.is_ended or self._is_under_way():
            return
        wanted = min(self.num_pages, most_pages)
        head = self.key.head(wanted, self._planner.tree.page_size)
        match = self._planner.match(head)
        there, known = self.usable(wanted).end, match.loadable_node.end
        if not wanted or there >= wanted:
            self.is_ended = True
        elif known < wanted and not self._was_fetched:
            self._fetch(head, match.loadable_node)
        elif there < known and self._num_orders < MAX_ORDERS and self._order(match.loadable_node):
            self._num_orders += 1
        else:
            self.is_ended = True

    def _is_under_way(self) -> bool:
        prefetcher, in_flight = self._planner.prefetcher, self._planner.in_flight
        if self._is_fetching and prefetcher is not None:
            if not prefetcher.is_done(self._handle):
                return True
            self._is_fetching = False
        kinds = (in_flight.of_kind(JobKind.WRITE), in_flight.of_kind(JobKind.LOAD))
        self._awaited = {ticket for ticket in self._awaited if any(ticket in kind for kind in kinds)}
        return bool(self._awaited)

    def _fetch(self, head: RadixKey, node: Node) -> None:
        """Ask storage for what the tree has not got; what comes is held until `stop`."""
        self._was_fetched = True
        prefetcher = self._planner.prefetcher
        if prefetcher is None or not self._planner.has_storage:
            self.reason = "the rest is nowhere in the cache, and no storage is attached"
        elif self._planner.removals.cover(head):
            self.reason = "it is being forgotten"
        else:
            self._is_fetching = prefetcher.start(self._handle, head, node)
            if not self._is_fetching:
                self.reason = "storage is not asked for so little, or is slower than computing it"

    def _order(self, node: Node) -> bool:
        """Have what the tier lacks of the path to `node` copied. False: there is nothing, or it cannot be."""
        planner, kind = self._planner, JobKind.LOAD if self._tier is DEVICE else JobKind.WRITE
        if self._tier is DEVICE and not planner.load(node):
            self.reason = "the device has no room for all of it, or computing it is faster"
        elif self._tier is HOST and not planner.copy_down(node):
            self.reason = "the host has no room for all of it"
        self._awaited = set(planner.in_flight.tickets(kind))
        return bool(self._awaited)

    def stop(self) -> None:
        """Stop fetching, and keep nothing for it any more."""
        prefetcher = self._planner.prefetcher
        if prefetcher is not None and self._was_fetched:
            prefetcher.abort(self._handle)
        self._is_fetching, self.is_ended = False, True

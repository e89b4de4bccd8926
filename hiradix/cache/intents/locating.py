"""Locate: how far something is there, in every tier, without counting a use."""

from __future__ import annotations

from hiradix.cache.in_flight import InFlightJob
from hiradix.cache.intents.extents import found_of_nodes, found_of_prefix
from hiradix.cache.intents.job import IntentJob
from hiradix.cache.intents.planner import Planner
from hiradix.cache.intents.selection import nodes_of, session_ends
from hiradix.cache.intents.sessions import Sessions
from hiradix.intents import Found, Intent, IntentState, SelectorKind
from hiradix.intents.limits import IntentLimits
from hiradix.transfer import JobKind, Result, Ticket
from hiradix.tree import RadixKey


class Lookup(InFlightJob):
    """A lookup of how much storage has of a prefix, under way."""

    __slots__ = ("wish",)

    def __init__(self, wish: Locating):
        super().__init__(JobKind.QUERY)
        self.wish = wish

    def book(self, result: Result) -> None:
        self.wish.answered(result)


class Locating(IntentJob):
    """One locate. The tree is looked at when it is made, storage is asked when it is applied."""

    def __init__(
        self, number: int, intent: Intent, planner: Planner, limits: IntentLimits, sessions: Sessions
    ):
        super().__init__(number, intent, planner, limits)
        self._ticket: Ticket | None = None
        key, size = intent.selector.key, planner.tree.page_size
        self._key = key.page_aligned(size) if key is not None and key.num_pages(size) else None
        found = self._in_tree(sessions)
        self.found = {tier: found[tier] for tier in intent.tiers or planner.tiers if tier in found}
        if "storage" not in intent.tiers:
            self.state = IntentState.DONE
        else:
            self.found["storage"] = Found(is_known=False)

    def _in_tree(self, sessions: Sessions) -> dict[str, Found]:
        planner, selector = self._planner, self.intent.selector
        if self._key is not None:
            return found_of_prefix(planner, self._key)
        if selector.kind is SelectorKind.SESSION:
            paths = (planner.tree.path(end) for end in session_ends(selector, sessions))
            return found_of_nodes(planner, {node for path in paths for node in path})
        if selector.kind is SelectorKind.PREFIX and len(selector.key or ()):
            return found_of_nodes(planner, ())
        return found_of_nodes(planner, nodes_of(planner, selector))

    def begin(self) -> None:
        self.state = IntentState.RUNNING
        planner, prefetcher = self._planner, self._planner.prefetcher
        if planner.executor is None or prefetcher is None or not planner.has_storage:
            self.end(IntentState.REFUSED, "no storage is attached")
        elif self._key is None:
            self.end(IntentState.REFUSED, "storage is asked by a prefix's tokens: name one of whole pages")
        else:
            key: RadixKey = self._key
            num_pages = key.num_pages(planner.tree.page_size)
            rows = planner.tree.rows_behind(key, key.space.seed, 0, num_pages)
            self._ticket = planner.executor.query(rows, num_pages, prefetcher.reads.windows())
            planner.in_flight.add(self._ticket, Lookup(self))

    def answered(self, result: Result) -> None:
        """Storage has said how many leading pages it has."""
        self._ticket = None
        if not self.is_open:
            return
        if result.error is not None:
            self.end(IntentState.FAILED, f"storage: {result.error}")
            return
        names = [kind.name for kind in self._planner.tree.components]
        self.found["storage"] = Found(
            result.num_pages * self._planner.tree.page_size, {names[0]: result.num_pages}
        )
        self.end(IntentState.DONE)

    def advance(self) -> None:
        if self.is_over:
            self.end(IntentState.EXPIRED, "storage has not answered in time")

    def let_go(self) -> None:
        if self._ticket is not None and self._planner.executor is not None:
            self._planner.executor.cancel(self._ticket)

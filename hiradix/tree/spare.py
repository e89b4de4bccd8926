"""Spare data first: what no boundary known so far needs leaves before anything the policy would choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from hiradix.errors import Misuse
from hiradix.tree.node import Node, Residency
from hiradix.tree.order import EvictionOrder, LruOrder, OrderContext, OrderFactory


class SpareFirst:
    """The order of a further component: spare entries, oldest first, then the policy's order of the rest.

    Most of a long prompt's window pages are behind no boundary: only its end, and where other prompts part
    from it, can be matched. What is locked once is no longer spare.
    """

    def __init__(self, context: OrderContext, make_order: OrderFactory):
        self._rest: EvictionOrder = make_order(context)
        self._spare = LruOrder(context)
        self._spare_ids: set[int] = set()
        self.num_pages = 0

    def __iter__(self) -> Iterator[Residency]:
        return chain(self._spare, self._rest)

    def is_spare(self, entry: Residency) -> bool:
        return id(entry) in self._spare_ids

    def coldest(self) -> Residency | None:
        return self._spare.coldest() or self._rest.coldest()

    def victims(self, num_pages: int) -> list[Residency]:
        found = self._spare.victims(num_pages)
        left = num_pages - sum(len(entry.pages) for entry in found if entry.pages is not None)
        return found + self._rest.victims(left) if left > 0 else found

    def push(self, entries: Iterable[Residency]) -> None:
        self._rest.push(entries)
        self._count()

    def push_spare(self, entries: Iterable[Residency]) -> None:
        """Entries have become evictable that no boundary needs."""
        for entry in entries:
            self._spare_ids.add(id(entry))
            self._spare.push((entry,))
        self._count()

    def remove(self, entries: Iterable[Residency]) -> None:
        for entry in entries:
            if self._forget(entry):
                self._spare.remove((entry,))
            else:
                self._rest.remove((entry,))
        self._count()

    def touched(self, entries: Iterable[Residency]) -> None:
        for entry in entries:
            (self._spare if self.is_spare(entry) else self._rest).touched((entry,))

    def dropped(self, entry: Residency) -> None:
        if self._forget(entry):
            self._spare.dropped(entry)
        else:
            self._rest.dropped(entry)
        self._count()

    def split(self, entry: Residency, upper: Residency) -> None:
        if self.is_spare(entry):
            self._spare_ids.add(id(upper))
            self._spare.split(entry, upper)
        else:
            self._rest.split(entry, upper)

    def expose(self, entry: Residency) -> None:
        pass  # a window may go from anywhere on a path

    def _count(self) -> None:
        self.num_pages = self._spare.num_pages + self._rest.num_pages

    def _forget(self, entry: Residency) -> bool:
        known = id(entry) in self._spare_ids
        self._spare_ids.discard(id(entry))
        return known


def is_needed(node: Node | None, reach: int) -> bool:
    """Whether a boundary is near enough below the end of `node` to need it: a leaf, or where prompts part."""
    if node is None:
        raise Misuse("an entry of no node")
    below, at = 0, node
    while len(at.children) == 1 and below < reach:
        (at,) = at.children.values()
        below += at.num_pages
    return below < reach

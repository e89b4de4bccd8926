"""Eviction orders: which unlocked data leaves next.

Being in the order means being evictable, so `num_pages` is the evictable total and nothing locked is ever
looked at. The tree pushes what becomes evictable, removes what is locked, and takes `coldest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Protocol

from hiradix.errors import Misuse
from hiradix.tree.node import Component, Node, Residency, Tier


@dataclass(frozen=True)
class OrderContext:
    """The component and tier that an order is made for. backbone: entries may only be evicted leaf first."""

    component: Component
    tier: Tier
    page_size: int
    backbone: bool


class EvictionOrder(Protocol):
    """The protocol of an eviction policy: the order in which the unlocked entries of one component and tier
    are evicted. Deterministic, as all ranks must evict alike: equal calls give equal victims.

    Optional attributes:
    path_moves_once: True if `touched` of the upper part of a path changes nothing right after `touched` of the
        whole path; the tree then leaves the second call out.
    waste: a victim with more than `waste` times the pages that are wanted is cut, and the rest stays (see
        `Granularity`).
    peek(): for a policy that learns from `coldest`: the same answer without learning, for checks.
    """

    num_pages: int

    def push(self, entries: Iterable[Residency]) -> None:
        """Entries have become evictable; the last is the hottest. In a backbone they come deepest first."""

    def remove(self, entries: Iterable[Residency]) -> None:
        """Entries were locked or merged away. Each is in the order."""

    def touched(self, entries: Iterable[Residency]) -> None:
        """Entries of a path, all in the order, were used: as if removed and pushed again."""

    def dropped(self, entry: Residency) -> None:
        """`entry`, which is in the order, is dropped from its tier. `entry.pages` are still set."""

    def coldest(self) -> Residency | None:
        """The next victim, in a backbone a leaf of its tier. None: nothing is evictable."""

    def victims(self, num_pages: int) -> list[Residency]:
        """The entries that evicting `num_pages` would take, first victim first, if nothing changes in
        between."""

    def split(self, entry: Residency, upper: Residency) -> None:
        """`upper` was cut off the front of `entry`, which is in the order; from here on both are."""

    def expose(self, entry: Residency) -> None:
        """`entry`, which is in the order, may be evicted from here on: its node became a leaf of its tier, or
        (host) its pages got a copy on the device."""

    def __iter__(self) -> Iterator[Residency]:
        """All entries, in any order."""


OrderFactory = Callable[[OrderContext], EvictionOrder]


class LruOrder:
    """Least recently unlocked first: an intrusive ring, O(1) for everything.

    A backbone path is pushed deepest first, so an ancestor is always hotter than its descendants and the
    coldest is always a leaf (invariant 5). `_end` closes the ring: `_end.hotter` is the coldest entry,
    `_end.colder` the hottest. Pages are counted by the nodes' bounds, as reading their arrays would miss the
    CPU's caches.
    """

    path_moves_once: ClassVar[bool] = True
    __slots__ = ("num_pages", "_end", "_per_page", "_upper_is_hotter")

    def __init__(self, context: OrderContext):
        self.num_pages = 0
        self._upper_is_hotter = context.backbone
        self._per_page = context.component.per_page
        self._end = end = Residency(None)
        end.hotter = end.colder = end

    def __iter__(self) -> Iterator[Residency]:
        """All entries, coldest first."""
        entry = self._end.hotter
        while entry is not self._end:
            assert entry is not None
            yield entry
            entry = entry.hotter

    def coldest(self) -> Residency | None:
        entry = self._end.hotter
        return None if entry is self._end else entry

    def victims(self, num_pages: int) -> list[Residency]:
        found: list[Residency] = []
        for entry in self:
            if num_pages <= 0:
                break
            assert entry.pages is not None
            num_pages -= len(entry.pages)
            found.append(entry)
        return found

    def push(self, entries: Iterable[Residency]) -> None:
        end = self._end
        hottest: Residency = end.colder  # type: ignore[assignment]
        count, per_page = 0, self._per_page
        for entry in entries if isinstance(entries, list) else list(entries):
            entry.colder = hottest
            hottest.hotter = entry
            hottest = entry
            node: Node = entry.node  # type: ignore[assignment]
            count += node.end - node.start if per_page else 1
        hottest.hotter = end
        end.colder = hottest
        self.num_pages += count

    def remove(self, entries: Iterable[Residency]) -> None:
        count, per_page = 0, self._per_page
        for entry in entries if isinstance(entries, list) else list(entries):
            hotter: Residency = entry.hotter  # type: ignore[assignment]
            colder: Residency = entry.colder  # type: ignore[assignment]
            hotter.colder, colder.hotter = colder, hotter
            entry.hotter = entry.colder = None
            node: Node = entry.node  # type: ignore[assignment]
            count += node.end - node.start if per_page else 1
        self.num_pages -= count

    def touched(self, entries: Iterable[Residency]) -> None:
        end = self._end
        for entry in entries if isinstance(entries, list) else list(entries):
            hotter: Residency = entry.hotter  # type: ignore[assignment]
            colder: Residency = entry.colder  # type: ignore[assignment]
            hotter.colder, colder.hotter = colder, hotter
            hottest: Residency = end.colder  # type: ignore[assignment]
            entry.colder, entry.hotter = hottest, end
            hottest.hotter = end.colder = entry

    def dropped(self, entry: Residency) -> None:
        hotter: Residency = entry.hotter  # type: ignore[assignment]
        colder: Residency = entry.colder  # type: ignore[assignment]
        hotter.colder, colder.hotter = colder, hotter
        entry.hotter = entry.colder = None
        node: Node = entry.node  # type: ignore[assignment]
        self.num_pages -= node.end - node.start if self._per_page else 1

    def split(self, entry: Residency, upper: Residency) -> None:
        colder = entry if self._upper_is_hotter else entry.colder
        assert colder is not None and colder.hotter is not None
        upper.colder, upper.hotter = colder, colder.hotter
        colder.hotter.colder = upper
        colder.hotter = upper

    def expose(self, entry: Residency) -> None:
        pass  # nothing to do: descendants are always colder


class UnneededFirst:
    """The order of a further component: unneeded entries, oldest first, then the policy's order of the rest.

    Most window pages of a long prompt are needed by no match: a prefix can end only at the prompt's end and
    where other prompts branch off. An entry that was locked once counts as needed from then on.
    """

    def __init__(self, context: OrderContext, make_order: OrderFactory):
        self._rest: EvictionOrder = make_order(context)
        self._unneeded = LruOrder(context)
        self._unneeded_ids: set[int] = set()
        self.num_pages = 0

    def __iter__(self) -> Iterator[Residency]:
        return chain(self._unneeded, self._rest)

    def is_unneeded(self, entry: Residency) -> bool:
        return id(entry) in self._unneeded_ids

    def coldest(self) -> Residency | None:
        return self._unneeded.coldest() or self._rest.coldest()

    def victims(self, num_pages: int) -> list[Residency]:
        found = self._unneeded.victims(num_pages)
        remaining = num_pages - sum(len(entry.pages) for entry in found if entry.pages is not None)
        return found + self._rest.victims(remaining) if remaining > 0 else found

    def push(self, entries: Iterable[Residency]) -> None:
        self._rest.push(entries)
        self._count()

    def push_unneeded(self, entries: Iterable[Residency]) -> None:
        """Entries that no boundary needs have become evictable."""
        for entry in entries:
            self._unneeded_ids.add(id(entry))
            self._unneeded.push((entry,))
        self._count()

    def remove(self, entries: Iterable[Residency]) -> None:
        for entry in entries:
            if self._forget(entry):
                self._unneeded.remove((entry,))
            else:
                self._rest.remove((entry,))
        self._count()

    def touched(self, entries: Iterable[Residency]) -> None:
        for entry in entries:
            (self._unneeded if self.is_unneeded(entry) else self._rest).touched((entry,))

    def dropped(self, entry: Residency) -> None:
        if self._forget(entry):
            self._unneeded.dropped(entry)
        else:
            self._rest.dropped(entry)
        self._count()

    def split(self, entry: Residency, upper: Residency) -> None:
        if self.is_unneeded(entry):
            self._unneeded_ids.add(id(upper))
            self._unneeded.split(entry, upper)
        else:
            self._rest.split(entry, upper)

    def expose(self, entry: Residency) -> None:
        pass  # a window may go from anywhere on a path

    def _count(self) -> None:
        self.num_pages = self._unneeded.num_pages + self._rest.num_pages

    def _forget(self, entry: Residency) -> bool:
        known = id(entry) in self._unneeded_ids
        self._unneeded_ids.discard(id(entry))
        return known


def is_needed(node: Node | None, reach: int) -> bool:
    """Whether some boundary at or below the end of `node`, a leaf or a branch, is within `reach` pages of it."""
    if node is None:
        raise Misuse("an entry of no node")
    below, at = 0, node
    while len(at.children) == 1 and below < reach:
        (at,) = at.children.values()
        below += at.num_pages
    return below < reach

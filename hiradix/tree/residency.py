"""Residency: the one place that gives pages to a node or takes them from it.

Updates what depends on that along with it: the eviction orders, the page counts, the holds (see `locks`) and
which nodes exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hiradix.errors import Misuse
from hiradix.tree import ids
from hiradix.tree.locks import Pinning, held
from hiradix.tree.node import (
    BACKBONE,
    DEVICE,
    HOST,
    NO_CHILDREN,
    TIERS,
    WASTE,
    Component,
    DeadLeaf,
    Freed,
    Granularity,
    Ids,
    Node,
    Pages,
    Residency,
    Rules,
    Tier,
)
from hiradix.tree.order import EvictionOrder, OrderContext, OrderFactory, UnneededFirst, is_needed

FIRST_PLACES: Final = 1024
MOST_PLACES: Final = 1 << 31  # page ids are int32


class Watch(Protocol):
    """An observer of the backbone's pages, such as an event stream: called as soon as the tree has them, or has
    them no more. On the scheduler's thread; must not raise.

    Splits and merges move no page and are not reported. `Node.chain` belongs to the observer; both halves of a
    split have it.
    """

    def stored(self, node: Node, tier: int) -> None:
        """`node` has its pages in `tier`."""

    def removed(self, node: Node, tier: int) -> None:
        """`node` has no pages in `tier` any more; what it has in the other tier is still there."""

    def cleared(self) -> None:
        """The tree is empty."""

    def backed_up(self, node: Node, start: int, end: int) -> None:
        """Storage has pages [start, end) of the path of `node`."""

    def storage_changed(self) -> None:
        """Storage was attached, detached or cleared: earlier `backed_up` calls hold no more."""


class Watches:
    """Several watches as one: each is told, in the order in which they came."""

    def __init__(self, *watches: Watch):
        self.watches = watches

    def stored(self, node: Node, tier: int) -> None:
        for watch in self.watches:
            watch.stored(node, tier)

    def removed(self, node: Node, tier: int) -> None:
        for watch in self.watches:
            watch.removed(node, tier)

    def cleared(self) -> None:
        for watch in self.watches:
            watch.cleared()

    def backed_up(self, node: Node, start: int, end: int) -> None:
        for watch in self.watches:
            watch.backed_up(node, start, end)

    def storage_changed(self) -> None:
        for watch in self.watches:
            watch.storage_changed()


class Places:
    """The page ids of one component and tier that are in the tree: each at one place at most (invariant 10).

    One byte per id, up to the largest id seen, or up to the pool's size once `limit` has set it.
    """

    def __init__(self, component: str, tier: Tier):
        self._of = f"{tier.name} component {component}"
        self._marks: npt.NDArray[np.bool_] = np.zeros(FIRST_PLACES, np.bool_)
        self._is_whole = False

    def limit(self, end: int) -> None:
        """Accept ids below `end` only. Call it while none is taken."""
        self._marks, self._is_whole = np.zeros(end, np.bool_), True

    def claim(self, pages: Ids) -> None:
        """Mark ids that a node is about to get. Raises Misuse, with nothing changed, if one is taken already, is
        named twice or is not in the pool. O(pages)."""
        if not ids.claim(self._marks, pages):
            self._grow(pages)
            if not ids.claim(self._marks, pages):
                self._refuse(pages)

    def leave(self, pages: Ids) -> None:
        """Unmark ids that no node has any more."""
        ids.mark(self._marks, pages, False)

    def clear(self) -> None:
        """Unmark all."""
        self._marks = np.zeros(len(self._marks), np.bool_)

    def taken(self) -> Pages:
        """All marked ids, ascending. O(pool); for checks."""
        return np.flatnonzero(self._marks).astype(np.int32)

    def _grow(self, pages: Ids) -> None:
        end = int(pages.max()) + 1 if len(pages) else 0
        if not self._is_whole and len(self._marks) < end <= MOST_PLACES:
            grown = np.zeros(min(max(end, 2 * len(self._marks)), MOST_PLACES), np.bool_)
            grown[: len(self._marks)] = self._marks
            self._marks = grown

    def _refuse(self, pages: Ids) -> None:
        end = len(self._marks) if self._is_whole else MOST_PLACES
        wrong = pages[(pages < 0) | (pages >= end)]
        if len(wrong):
            raise Misuse(f"{self._of}: {wrong[:16]} are no page ids, which are 0..{end - 1}")
        taken = pages[self._marks[pages]]
        if len(taken):
            raise Misuse(f"{self._of}: pages {taken[:16]} are in the tree already, under another prefix")
        raise Misuse(f"{self._of}: a page is named twice among {pages[:16]}")


class Dropped:
    """Pages taken from nodes, gathered by 2 * component + tier."""

    def __init__(self, places: Sequence[Sequence[Places]]) -> None:
        self._pages: dict[int, list[Pages]] = {}
        self._places = places

    def add(self, component: int, tier: int, pages: Pages) -> None:
        place = 2 * component + tier
        parts = self._pages.get(place)
        if parts is None:
            self._pages[place] = [pages]
        else:
            parts.append(pages)

    def freed(self) -> list[Freed]:
        """One record per component and tier, the backbone last, as an engine's windows are freed by way of its
        pages. Call it once: it unmarks the pages, which may then be inserted again."""
        found = []
        places = list(self._pages)
        if len(places) > 1:
            places.sort(reverse=True)
        for place in places:
            parts = self._pages[place]
            pages = parts[0] if len(parts) == 1 else ids.joined(parts)
            self._places[place >> 1][place & 1].leave(pages)
            found.append(Freed(place >> 1, TIERS[place & 1], pages))
        return found


class Residencies:
    """The pages that nodes have in each tier, and everything that changes when they get or lose some.

    orders[component][tier]: the evictable entries, in eviction order.
    waste[component][tier]: how many times the pages wanted a victim may have and still leave as a whole.
    num_resident[component][tier]: pages in the tree.
    places[component][tier]: the page ids in the tree.
    pins: lock counts and holds. watch: the observer, or None.
    """

    def __init__(
        self, components: Sequence[Component], page_size: int, make_order: OrderFactory, rules: Rules
    ):
        self.components = tuple(components)
        self.page_size = page_size
        self.granularity = rules.granularity
        self.dead_leaf = rules.dead_leaf if len(components) > 1 else DeadLeaf.KEEP  # all are usable
        self._make_order = make_order
        self.orders: list[list[EvictionOrder]] = []
        self.pins = Pinning(self.orders)
        self.watch: Watch | None = None
        self.places = [[Places(component.name, tier) for tier in TIERS] for component in components]
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.orders[:] = [[self._order_of(c, tier) for tier in TIERS] for c in range(len(self.components))]
        self.waste = [[self._waste_of(order) for order in orders] for orders in self.orders]
        self.num_resident = [[0] * len(Tier) for _ in self.components]
        for tiers in self.places:
            for places in tiers:
                places.clear()
        self.host_moves_once = bool(getattr(self.orders[BACKBONE][HOST], "path_moves_once", False))

    def use(self, granularity: Granularity) -> None:
        """Cut victims and paths by `granularity` from here on."""
        self.granularity = granularity
        self.waste = [[self._waste_of(order) for order in orders] for orders in self.orders]

    def _waste_of(self, order: EvictionOrder) -> int:
        """The `waste` that holds for an order: see `Granularity`. Raises Misuse if it is below 1."""
        own = self.granularity.waste
        waste = int(getattr(order, "waste", WASTE)) if own is None else own
        if waste < 1:
            raise Misuse(f"waste: a victim leaves at least as many pages as are wanted, got {waste} times")
        return waste

    def _order_of(self, component: int, tier: Tier) -> EvictionOrder:
        context = OrderContext(self.components[component], tier, self.page_size, component == BACKBONE)
        return self._make_order(context) if context.backbone else UnneededFirst(context, self._make_order)

    # -- giving -----------------------------------------------------------------------------

    def take(self, node: Node, component: int, tier: int, pages: Pages) -> bool:
        """Give a node claimed pages where it has none; the array belongs to it from here on.

        True: the entry is evictable, and the caller must `push_taken` it.
        """
        entry = node.residency(component, tier) if component else node.host if tier else node.device
        entry.pages = pages
        self.num_resident[component][tier] += len(pages)
        if component == BACKBONE:
            if tier == DEVICE:
                self._came_to_device(node)
            if self.watch is not None:
                self.watch.stored(node, tier)
        if entry.lock_ref == 0:
            return True
        twin = node.residency(component, 1 - tier) if component else node.device if tier else node.host
        if twin.pages is not None:
            self.pins.release(node, component, 1 - tier)
        elif held(node, component, tier):
            self.pins.hold(node, component, tier)
        return False

    def _came_to_device(self, node: Node) -> None:
        parent, host = node.parent, node.host
        assert parent is not None
        parent.num_device_children += 1
        if host.pages is not None and host.lock_ref == 0:
            self.orders[BACKBONE][HOST].expose(host)  # a mirror may go at any time

    def push_taken(self, entries: Sequence[Residency], component: int, tier: int) -> None:
        """Push the entries for which `take` returned True, deepest first along one path, to their order.

        In a backbone their unlocked ancestors are pushed behind them, so that these stay hotter (invariant 5).
        Of other components deep pages are worth more, so ancestors become the colder ones; pages that no
        boundary needs are the coldest.
        """
        order = self.orders[component][tier]
        if component == BACKBONE:
            path = _evictable_path(entries[0].node, tier)
            if len(path) > len(entries):
                fresh = set(map(id, entries))
                order.remove([entry for entry in path if id(entry) not in fresh])
            order.push(path)
            return
        assert isinstance(order, UnneededFirst)
        if self.granularity.by_need:
            reach = self.components[component].reach
            order.push_unneeded(entry for entry in reversed(entries) if not is_needed(entry.node, reach))
        order.push([entry for entry in reversed(entries) if not order.is_unneeded(entry)])
        for entry in entries:
            assert entry.node is not None
            if held(entry.node, component, tier):
                self.pins.hold(entry.node, component, tier)

    def is_unneeded(self, entry: Residency, component: int, tier: int) -> bool:
        """Whether an evictable entry is evicted before those that the policy chooses."""
        order = self.orders[component][tier]
        return isinstance(order, UnneededFirst) and order.is_unneeded(entry)

    def split(self, node: Node, upper: Node, at: int) -> None:
        """Hand the first `at` pages of each residency of `node` to `upper`. Both get arrays of their own."""
        for c, component in enumerate(self.components):
            for tier in TIERS:
                low = node.residency(c, tier)
                if low.pages is not None and component.per_page:
                    upper.residency(c, tier).pages = ids.copied(low.pages, 0, at)
                    low.pages = ids.copied(low.pages, at, len(low.pages))

    def link_split(self, node: Node, upper: Node) -> None:
        """Put the entries of `upper`, whose lock_refs are set, into the orders beside those of `node`."""
        for c in range(len(self.components)):
            for tier in TIERS:
                up, low = upper.residency(c, tier), node.residency(c, tier)
                if up.pages is not None and low.lock_ref == 0:
                    self.orders[c][tier].split(low, up)

    # -- taking -----------------------------------------------------------------------------

    def drop(self, node: Node, component: int, tier: int, out: Dropped, child_went: bool = False) -> None:
        """Take a node's unlocked pages; with the backbone's, those of its other components in that tier.

        A node without a backbone in any tier leaves the tree, and its descendants, which are on the host only,
        with it. child_went: the previous call dropped a child of `node`, and nothing has happened since.
        """
        if component != BACKBONE:
            self._drop_entry(node.residency(component, tier), component, tier, out)
            return
        if node.others:
            for c in range(1, len(self.components)):
                entry = node.residency(c, tier)
                if entry.pages is not None:
                    self._drop_entry(entry, c, tier, out)
        self._drop_entry(node.host if tier else node.device, BACKBONE, tier, out)
        if tier == DEVICE:
            self._device_child_left(node)
            is_moved = child_went and self.host_moves_once  # with its child: again would change nothing
            if node.host.pages is not None and node.host.lock_ref == 0 and not is_moved:
                self._moved_down(node)
        if node.device.pages is None and node.host.pages is None:
            self.unlink(node, out)

    def drop_dead(self, node: Node | None, out: Dropped) -> None:
        """Take `node` out of the tree if it is an unlocked dead leaf, then its parent likewise, and so on."""
        while node is not None and (parent := node.parent) is not None and not node.children:
            entries = (node.device, node.host, *node.others)
            if any(entry.lock_ref for entry in entries) or not self._is_dead(node):
                return
            self.unlink(node, out)
            node = parent

    def _is_dead(self, node: Node) -> bool:
        """Whether a leaf is dead, by the rule `dead_leaf`. O(reach)."""
        for c in range(1, len(self.components)):
            reach = self.components[c].reach if self.dead_leaf is DeadLeaf.UNUSABLE else 1
            run, at = 0, node
            while run < reach and at.parent is not None:
                if not at.resident(DEVICE, c) and not at.resident(HOST, c):
                    return True
                run, at = run + at.num_pages, at.parent
        return False

    def _moved_down(self, node: Node) -> None:
        """`node` is on the host alone from here on. Uses on the device count: it and its ancestors, which were
        used at least as recently, become the hottest on the host."""
        self.orders[BACKBONE][HOST].touched(_evictable_path(node, HOST))

    def unlink(self, node: Node, out: Dropped) -> None:
        """Take `node` and its descendants out of the tree, with all their pages. None of them may be locked."""
        parent = node.parent
        if parent is None:
            raise Misuse(f"{node} has left the tree before")
        if node.device.pages is not None:
            self._device_child_left(node)
        parent.disown_child(node)
        node.successor = parent
        self._empty(node, out)
        host = parent.host
        if host.pages is not None and not parent.children and parent.device.pages is None:
            if host.lock_ref == 0 and parent.parent is not None:
                self.orders[BACKBONE][HOST].expose(host)

    def _empty(self, node: Node, out: Dropped) -> None:
        """Take all pages of a subtree that was cut off."""
        stack = [node]
        while stack:
            gone = stack.pop()
            for child in gone.children.values():
                child.parent, child.successor = None, gone
                stack.append(child)
            gone.children = NO_CHILDREN
            for number, entry in enumerate((gone.device, gone.host, *gone.others)):
                if entry.lock_ref != 0:
                    raise Misuse(f"{gone} is locked and would be orphaned")
                if entry.pages is not None:
                    self._drop_entry(entry, number >> 1, number & 1, out)
                entry.node = None  # no cycle: memory comes back without the garbage collector

    def _drop_entry(self, entry: Residency, component: int, tier: int, out: Dropped) -> None:
        pages = entry.pages
        if pages is None or entry.lock_ref:
            raise Misuse(f"{entry.node} component {component} tier {tier}")
        self.orders[component][tier].dropped(entry)
        entry.pages = None
        self.num_resident[component][tier] -= len(pages)
        out.add(component, tier, pages)
        if self.watch is not None and component == BACKBONE and entry.node is not None:
            self.watch.removed(entry.node, tier)

    def _device_child_left(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        parent.num_device_children -= 1
        if parent.num_device_children == 0 and parent.device.lock_ref == 0 and parent.parent is not None:
            self.orders[BACKBONE][DEVICE].expose(parent.device)


def _evictable_path(node: Node | None, tier: int) -> list[Residency]:
    """Backbone entries of `tier` from `node` up to the first locked one, deepest first."""
    assert node is not None
    found = []
    while (parent := node.parent) is not None:
        entry = node.host if tier else node.device
        if entry.lock_ref:
            break
        if entry.pages is not None:
            found.append(entry)
        node = parent
    return found

"""Records that cross the tree's boundary. Page arrays in them may be views: never write into one."""

from __future__ import annotations

from typing import NamedTuple

from hiradix.tree.node import Node, Pages, Tier


class Match(NamedTuple):
    """Where a key's usable data ends. device_node is loadable_node or an ancestor of it.

    device_node: the deepest boundary usable on the device as it is. loadable_node: the deepest usable
    after a load back. `Node.end` is their length in pages. Both may be the root.
    """

    device_node: Node
    loadable_node: Node


class Lock:
    """A receipt: component c is pinned on every node of `node`'s path that starts at floors[c] or later.

    Give it back exactly once. Splits between lock and unlock do not matter: floors are depths. One that was
    given back has none.
    """

    __slots__ = ("node", "tier", "floors")

    def __init__(self, node: Node, tier: Tier, floors: tuple[int, ...]):
        self.node = node
        self.tier = tier
        self.floors = floors

    def __repr__(self) -> str:
        return f"Lock({self.node}, {self.tier}, {self.floors})"


class Segment(NamedTuple):
    """One node's pages of a component that are to be copied: [start, end) in pages from the root.

    pages: source page ids int32 (one record if the component is not per page).
    """

    node: Node
    component: int
    start: int
    end: int
    pages: Pages


class Insertion:
    """What an insert did.

    lock: on the whole key, in the tier of the insert; the caller's to give back.
    duplicates: per component, the page ids the tree did not take: the caller's to free.
    """

    __slots__ = ("duplicates", "lock")

    def __init__(self, lock: Lock, duplicates: list[Pages]):
        self.lock = lock
        self.duplicates = duplicates


class Freed:
    """Page ids the tree gave up; the caller's to free in `tier`, exactly once, in the records' order."""

    __slots__ = ("component", "pages", "tier")

    def __init__(self, component: int, tier: Tier, pages: Pages):
        self.component = component
        self.tier = tier
        self.pages = pages

    def __repr__(self) -> str:
        return f"Freed(component {self.component}, {self.tier.name}, {self.pages})"

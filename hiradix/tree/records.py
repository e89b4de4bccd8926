"""Records that cross the tree's boundary. Page arrays in them may be views: never write into one."""

from __future__ import annotations

from dataclasses import dataclass

from hiradix.tree.node import Node, Pages, Tier


@dataclass(frozen=True, slots=True)
class Match:
    """Where a key's usable data ends. device_node is loadable_node or an ancestor of it.

    device_node: the deepest boundary usable on the device as it is. loadable_node: the deepest usable
    after a load back. `Node.end` is their length in pages. Both may be the root.
    """

    device_node: Node
    loadable_node: Node


@dataclass(frozen=True, slots=True)
class Lock:
    """A receipt: component c is pinned on every node of `node`'s path that starts at floors[c] or later.

    Give it back exactly once. Splits between lock and unlock do not matter: floors are depths.
    """

    node: Node
    tier: Tier
    floors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One node's pages of a component that are to be copied: [start, end) in pages from the root.

    pages: source page ids int32 (one record if the component is not per page).
    """

    node: Node
    component: int
    start: int
    end: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Insertion:
    """What an insert did.

    lock: on the whole key, in the tier of the insert; the caller's to give back.
    duplicates: per component, the page ids the tree did not take: the caller's to free.
    """

    lock: Lock
    duplicates: list[Pages]


@dataclass(frozen=True, slots=True)
class Freed:
    """Page ids the tree gave up; the caller's to free in `tier`, exactly once."""

    component: int
    tier: Tier
    pages: Pages

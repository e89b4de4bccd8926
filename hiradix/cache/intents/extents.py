"""Looks up how far something is there, in each tier and component, without counting a use or splitting a
node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hiradix.cache.intents.planner import Planner
from hiradix.intents import Found
from hiradix.tree import BACKBONE, UNBOUNDED, Node, RadixKey, RadixTree
from hiradix.tree.node import TIERS

NAMES: Final = ("device", "host")


def found_of_prefix(planner: Planner, key: RadixKey) -> dict[str, Found]:
    """The part of `key` that can be used in each tier of the tree. O(path)."""
    tree = planner.tree
    node, child, matched = tree.follow(key)
    steps = [(n, n.num_pages) for n in tree.path(node)]
    steps.reverse()
    if child is not None:
        steps.append((child, matched))
    kinds = tree.components
    runs = [[UNBOUNDED] * len(kinds) for _ in TIERS]  # unbroken pages, on the device, and on device or host
    ends, counts = [0, 0], [[0] * len(kinds) for _ in TIERS]
    for n, num_pages in steps:
        if not planner.is_good(n):
            break
        for c, kind in enumerate(kinds):
            there = [n.resident(tier, c) and (kind.per_page or num_pages == n.num_pages) for tier in TIERS]
            for tier in TIERS:
                counts[tier][c] += (num_pages if kind.per_page else 1) if there[tier] else 0
                is_usable = there[0] or (there[1] and bool(tier))
                runs[tier][c] = min(runs[tier][c] + num_pages, UNBOUNDED) if is_usable else 0
        for tier in TIERS:
            if all(run >= kind.reach for run, kind in zip(runs[tier], kinds, strict=True)):
                ends[tier] = n.start + num_pages
    return {
        NAMES[tier]: Found(ends[tier] * tree.page_size, _by_component(planner, counts[tier]))
        for tier in TIERS
    }


def found_of_nodes(planner: Planner, nodes: Iterable[Node]) -> dict[str, Found]:
    """The pages that some nodes have in each tier of the tree."""
    counts = [[0] * len(planner.tree.components) for _ in TIERS]
    for node in nodes:
        for tier in TIERS:
            for c, more in enumerate(planner.pages_of(node, tier)):
                counts[tier][c] += more
    size = planner.tree.page_size
    return {
        NAMES[tier]: Found(counts[tier][BACKBONE] * size, _by_component(planner, counts[tier]))
        for tier in TIERS
    }


def _by_component(planner: Planner, counts: list[int]) -> dict[str, int]:
    return {kind.name: count for kind, count in zip(planner.tree.components, counts, strict=True)}


def common_end(tree: RadixTree, one: Node, other: Node) -> int:
    """Up to which page two paths are one; 0 where one of them has left the tree. O(path)."""
    a, b = tree.current(one), tree.current(other)
    while a is not b and a is not None and b is not None:
        if a.end >= b.end:
            a = a.parent
        else:
            b = b.parent
    return a.end if a is b and a is not None else 0

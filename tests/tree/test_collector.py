"""The garbage collector need not look at nodes: that they left, or that nobody has their tree, frees them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hiradix.policy.eviction import make_order
from hiradix.tree import DEVICE, FULL, HOST, Component, Granularity, Lock, Node, RadixKey, RadixTree, ids

WINDOW = (FULL, Component("window", 2))
POLICIES = ["lru", "lfu", "slru", "ghd"]


class Mark:
    """Something that a node has, and that says when it is gone."""


@pytest.fixture(autouse=True)
def paused() -> Iterator[None]:
    """Nothing is freed by a collection that a test does not ask for."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def grown(policy: str, components: tuple[Component, ...] = (FULL,)) -> tuple[RadixTree, list[Lock]]:
    """A tree with branches, merged and split nodes, both tiers, evicted ones; locks that are out."""
    tree = RadixTree(1, components, order=make_order(policy), granularity=Granularity(long_path=2))
    held = []
    for first in (0, 1000, 2000):
        tree.evict(0, DEVICE, first // 60)
        tree.evict(0, HOST, first // 50)
        lock = tree.lock(tree.root, DEVICE)
        for turn in range(1, 13):
            at = first + 3 * turn - 3
            pages = [np.arange(at, at + 3, dtype=np.int32) for _ in components]
            done = tree.insert(RadixKey(np.arange(3 * turn) + first), DEVICE, pages, lock)
            tree.unlock(lock)
            lock = done.lock
            for component in range(len(components)):
                tree.adopt(lock.node, component, HOST, pages[0])
        tree.unlock(lock)
        split = tree.match(RadixKey(np.arange(20) + first)).device_node
        held.append(tree.lock(split, DEVICE))
    tree.unlock(held.pop(0))
    return tree, held


def nodes_of(tree: RadixTree) -> list[Node]:
    return [tree.root, *tree.nodes()]


def parts_of(tree: RadixTree) -> list[Any]:
    """All objects that a node is made of."""
    found: list[Any] = []
    for node in nodes_of(tree):
        found += [node, node.device, node.host, *node.others]
        found += [part for part in (node.others, node.children) if part]
    return found


def marked(nodes: list[Node]) -> list[weakref.ref[Mark]]:
    """Something of each node's own that can be watched."""
    found = []
    for node in nodes:
        node.chain = mark = Mark()
        found.append(weakref.ref(mark))
    return found


def num_alive(marks: list[weakref.ref[Mark]]) -> int:
    return sum(mark() is not None for mark in marks)


@pytest.mark.skipif(not ids.IS_BUILT, reason="Python has no call for it")
@pytest.mark.parametrize("components", [(FULL,), WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_of_a_tree_is_looked_at(policy: str, components: tuple[Component, ...]) -> None:
    tree, _ = grown(policy, components)
    parts = parts_of(tree)
    assert len(parts) > 20 and [part for part in parts if gc.is_tracked(part)] == []
    tree.clear()
    assert [part for part in parts_of(tree) if gc.is_tracked(part)] == []


@pytest.mark.parametrize("components", [(FULL,), WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_nodes_of_a_tree_that_nobody_has_are_freed(
    policy: str, components: tuple[Component, ...]
) -> None:
    tree, held = grown(policy, components)
    marks = marked(nodes_of(tree))
    assert len(marks) > 5
    del tree
    assert num_alive(marks) == len(held), "those in receipts"
    held.clear()
    assert num_alive(marks) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_nodes_of_a_cleared_tree_are_freed(policy: str) -> None:
    tree, held = grown(policy)
    marks = marked(nodes_of(tree))
    held.clear()
    tree.clear()
    assert num_alive(marks) == 0


def test_what_leaves_a_tree_is_freed_at_once() -> None:
    tree, held = grown("lru")
    for lock in held:
        tree.unlock(lock)
    held.clear()
    del lock
    marks = marked(list(tree.nodes()))
    tree.evict(0, DEVICE, 1000)
    tree.evict(0, HOST, 1000)
    assert not list(tree.nodes()) and num_alive(marks) == 0


@pytest.mark.parametrize("does_clear", [False, True], ids=["dropped", "cleared"])
@pytest.mark.parametrize("policy", POLICIES)
def test_trees_leave_nothing_behind(policy: str, does_clear: bool) -> None:
    def once() -> None:
        for _ in range(10):
            tree, held = grown(policy)
            held.clear()
            if does_clear:
                tree.clear()
        del tree
        gc.collect()

    def left() -> int:
        before = sys.getallocatedblocks()
        once()
        return sys.getallocatedblocks() - before

    once()
    once()
    left_each = [left() for _ in range(3)]  # what other threads of this process make meanwhile counts, too
    assert min(left_each) < 30, f"{left_each} objects of 10 trees"

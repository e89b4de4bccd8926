"""Leaves in which no match can end any more: what each rule makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from hiradix.tree import AS_INSERTED, Component, DeadLeaf, Node, RadixKey, RadixTree, Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST
WINDOW = 1


def ids(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def grown(rule: DeadLeaf, reach: int = 3) -> tuple[RadixTree, list[Node]]:
    """Three nodes of two pages each below one another, with windows of `reach` pages; then another prompt."""
    tree = RadixTree(
        1, (Component("full"), Component("window", reach=reach)), granularity=AS_INSERTED, dead_leaf=rule
    )
    nodes = []
    for end, first in ((2, 0), (4, 0), (6, 0), (2, 100)):
        tokens = RadixKey(np.arange(first, first + end))
        done = tree.insert(tokens, DEVICE, [ids(first, end), ids(first, end)])
        tree.unlock(done.lock)
        nodes.append(done.lock.node)
    return tree, nodes


def gone(freed, component: int, tier: Tier = DEVICE) -> list[int]:
    return sorted(p for f in freed if (f.component, f.tier) == (component, tier) for p in f.pages.tolist())


@pytest.mark.parametrize(
    ("rule", "full"),
    [(DeadLeaf.KEEP, [4, 5]), (DeadLeaf.BARE, [4, 5]), (DeadLeaf.UNUSABLE, [0, 1, 2, 3, 4, 5])],
)
def test_a_leaf_whose_window_is_broken_further_up(rule: DeadLeaf, full: list[int]) -> None:
    tree, _ = grown(rule)
    assert gone(tree.evict(WINDOW, DEVICE, 2), WINDOW) == [0, 1], "the first node's window goes first"
    freed = tree.evict(0, DEVICE, 2)
    assert gone(freed, 0) == full
    tree.check([])


@pytest.mark.parametrize(
    ("rule", "full"),
    [(DeadLeaf.KEEP, []), (DeadLeaf.BARE, [0, 1, 2, 3, 4, 5]), (DeadLeaf.UNUSABLE, [0, 1, 2, 3, 4, 5])],
)
def test_a_leaf_that_lost_its_own_window_leaves_with_what_is_bare_above(
    rule: DeadLeaf, full: list[int]
) -> None:
    tree, _ = grown(rule, reach=1)
    assert gone(tree.evict(WINDOW, DEVICE, 4), WINDOW) == [0, 1, 2, 3]
    freed = tree.evict(WINDOW, DEVICE, 2)
    assert gone(freed, WINDOW) == [4, 5] and gone(freed, 0) == full
    tree.check([])


def test_what_leaves_along_counts_as_evicted() -> None:
    tree, nodes = grown(DeadLeaf.UNUSABLE)
    tree.evict(WINDOW, DEVICE, 2)
    assert gone(tree.evict(0, DEVICE, 5), 0) == [0, 1, 2, 3, 4, 5], "two were evicted, four left along"
    assert nodes[3].parent is tree.root, "so the other prompt stays"


def test_a_locked_leaf_stays() -> None:
    tree, nodes = grown(DeadLeaf.UNUSABLE, reach=1)
    tree.evict(WINDOW, DEVICE, 4)
    held = tree.lock(nodes[0], DEVICE)
    assert gone(tree.evict(WINDOW, DEVICE, 2), 0) == [2, 3, 4, 5]
    assert tree.current(nodes[0]) is nodes[0] and tree.pages(nodes[0], DEVICE).tolist() == [0, 1]
    tree.check([held])
    tree.unlock(held)


@pytest.mark.parametrize("rule", list(DeadLeaf))
def test_a_leaf_that_goes_down_without_its_window(rule: DeadLeaf) -> None:
    tree, nodes = grown(rule)
    leaf = nodes[2]
    tree.adopt(leaf, 0, HOST, ids(50, 2))
    freed = tree.demote(leaf)
    assert gone(freed, 0) == gone(freed, WINDOW) == [4, 5]
    stays = rule is DeadLeaf.KEEP
    assert gone(freed, 0, HOST) == ([] if stays else [50, 51])
    assert (leaf.parent is nodes[1]) == stays
    tree.check([])


def test_what_lies_beside_the_backbone_is_given_back_before_it() -> None:
    """An allocator that finds window slots through full slots must not lose the full ones first."""
    by_backbone, _ = grown(DeadLeaf.KEEP)
    by_window, _ = grown(DeadLeaf.BARE, reach=1)
    by_window.evict(WINDOW, DEVICE, 4)
    whole, _ = grown(DeadLeaf.KEEP)
    for freed in (by_backbone.evict(0, DEVICE, 2), by_window.evict(WINDOW, DEVICE, 2), whole.clear()):
        assert [drop.component for drop in freed] == [WINDOW, 0]

"""Long paths become few nodes, and nobody who held a node notices."""

from __future__ import annotations

import numpy as np
import pytest

from hiradix.policy.eviction import make_order
from hiradix.tree import (
    AS_INSERTED,
    Component,
    Granularity,
    Lock,
    Node,
    RadixKey,
    RadixTree,
    Tier,
    hash_pages,
)

DEVICE, HOST = Tier.DEVICE, Tier.HOST
EAGER = Granularity(long_path=0)


def ids(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def converse(tree: RadixTree, turns: int, pages: int = 1, first: int = 0) -> list[Node]:
    """`turns` nodes of `pages` pages, each continuing from the last, unlocked at the end."""
    lock = tree.lock(tree.root, DEVICE)
    nodes = []
    for turn in range(1, turns + 1):
        tokens = RadixKey(np.arange(turn * pages) + first)
        at = first + (turn - 1) * pages
        given = [ids(at, pages if component.per_page else 1) for component in tree.components]
        done = tree.insert(tokens, DEVICE, given, lock)
        tree.unlock(lock)
        lock = done.lock
        nodes.append(lock.node)
    tree.unlock(lock)
    tree.check([])
    return nodes


def sizes(tree: RadixTree, node: Node) -> list[int]:
    """Pages of the nodes on the path, root side first."""
    return [n.num_pages for n in tree.path(node)][::-1]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_thousand_turns_are_a_path_of_a_few_nodes(policy: str) -> None:
    tree = RadixTree(1, order=make_order(policy))
    last = converse(tree, 1000)[-1]
    found = sizes(tree, last)
    assert sum(found) == 1000 and len(found) <= 12, found
    assert tree.pages(last, DEVICE).tolist() == list(range(1000))
    assert tree.evictable_pages(DEVICE) == 1000
    lock = tree.lock(last, DEVICE)
    assert tree.evictable_pages(DEVICE) == 0
    tree.unlock(lock)


def test_turn_by_turn_the_path_stays_short_and_little_is_copied() -> None:
    tree, moved, turns = RadixTree(1), 0, 2000
    spans: set[tuple[int, int]] = set()
    for turn in range(1, turns + 1):
        node = tree.match(RadixKey(np.arange(turn))).device_node
        assert node.end == turn - 1
        lock = tree.lock(node, DEVICE)
        done = tree.insert(RadixKey(np.arange(turn)), DEVICE, [ids(turn, 1)], lock)
        for held in (lock, done.lock):
            tree.unlock(held)
            before, spans = spans, {(n.start, n.end) for n in tree.path(done.lock.node)}
            moved += sum(end - start for start, end in spans - before if end - start > 1)  # merged just now
        assert len(spans) <= 16 + 12
    assert 0 < moved < turns * 12, f"{moved / turns:.1f} pages moved per page"
    tree.check([])


def test_sizes_double_towards_the_root() -> None:
    tree = RadixTree(1)
    found = sizes(tree, converse(tree, 600)[-1])
    assert all(up > 2 * low for up, low in zip(found, found[1:])), found


def test_what_differs_stays_apart() -> None:
    tree = RadixTree(1, granularity=EAGER)
    nodes = converse(tree, 1, pages=4)
    branch = converse(tree, 1, pages=4, first=100)[0]
    assert nodes[0].parent is tree.root and branch.parent is tree.root
    tree.adopt(nodes[0], 0, HOST, ids(0, 4))
    lock = tree.lock(nodes[0], DEVICE)
    done = tree.insert(RadixKey(np.arange(8)), DEVICE, [ids(4, 4)], lock)
    tree.unlock(lock)
    tree.unlock(done.lock)
    assert sizes(tree, done.lock.node) == [4, 4], "one is on the host too"
    tree.adopt(done.lock.node, 0, HOST, ids(4, 4))
    held = tree.lock(nodes[0], HOST)
    tree.unlock(tree.lock(done.lock.node, DEVICE))
    assert sizes(tree, done.lock.node) == [4, 4], "a job holds one"
    tree.unlock(held)
    done.lock.node.stored = True
    tree.unlock(tree.lock(done.lock.node, DEVICE))
    assert sizes(tree, done.lock.node) == [4, 4], "one is in storage"
    nodes[0].stored = True
    tree.unlock(tree.lock(done.lock.node, DEVICE))
    assert sizes(tree, done.lock.node) == [8]
    assert tree.pages(done.lock.node, HOST).tolist() == list(range(8))
    tree.check([])


def test_a_state_record_keeps_its_place() -> None:
    tree = RadixTree(1, (Component("full"), Component("state", reach=1, per_page=False)), granularity=EAGER)
    last = converse(tree, 1, pages=2)[0]
    lock = tree.lock(last, DEVICE)
    done = tree.insert(RadixKey(np.arange(4)), DEVICE, [ids(2, 2), ids(9, 1)], lock)
    tree.unlock(lock)
    tree.unlock(done.lock)
    assert tree.match(RadixKey(np.arange(3))).device_node.end == 2
    assert tree.match(RadixKey(np.arange(4))).device_node.end == 4
    tree.check([])


def test_a_node_that_was_merged_away_can_be_used_as_before() -> None:
    tree = RadixTree(1)
    nodes = converse(tree, 100)
    hint = nodes[30]
    assert hint.parent is None and hint.end == 31
    lock = tree.lock(hint, DEVICE)
    assert lock.node.end == 31 and tree.protected_pages(DEVICE) == 31
    assert tree.pages(hint, DEVICE).tolist() == list(range(31)), "the old object still names the place"
    assert len(tree.path_key(nodes[70])) == 71
    assert tree.missing(nodes[70], DEVICE, HOST)[-1].end == 71
    tree.check([lock])
    tree.unlock(lock)
    tree.evict(0, DEVICE, 60)
    assert tree.current(nodes[70]) is None and tree.current(hint) is not None
    with pytest.raises(AssertionError, match="has left the tree"):
        tree.lock(nodes[70], DEVICE)
    tree.check([])


def test_a_failed_load_is_found_after_a_merge() -> None:
    """A cache notes a failed load as (node, first page) and drops it once unlocked."""
    tree = RadixTree(1, granularity=EAGER)
    last = converse(tree, 3, pages=2)[-1]
    assert sizes(tree, last) == [6], "its pages 2 .. 4 are one node with others now"
    garbage = list(tree.path(last, 2))
    assert [(n.start, n.end) for n in garbage] == [(2, 6)]
    freed = tree.drop_device(garbage[-1])
    assert freed is not None and freed[0].pages.tolist() == [2, 3, 4, 5]
    assert tree.match(RadixKey(np.arange(6))).device_node.end == 2
    tree.check([])


def test_hashes_and_extras_survive_a_merge() -> None:
    tree = RadixTree(2, granularity=EAGER)
    tokens = np.arange(24)
    extras = [None, b"cat", None, None, b"dog"]
    lock, chain = tree.lock(tree.root, DEVICE), []
    for end in range(4, 26, 4):
        key = RadixKey(tokens[:end], "lora", page_extras=extras)
        done = tree.insert(key, DEVICE, [ids(end, 2)], lock)
        chain = hash_pages(tree.page_rows(done.lock.node, 0))
        if end <= 12:
            tree.set_hashes(done.lock.node, 0, chain)
        tree.unlock(lock)
        lock = done.lock
    tree.unlock(lock)
    assert sizes(tree, lock.node) == [12]
    rows = tree.page_rows(lock.node, 10)
    assert rows.start == 6 and rows.prior == chain[5], "known up to page 6, no further"
    assert hash_pages(rows) == chain[6:]
    tree.set_hashes(lock.node, 6, hash_pages(rows))
    assert tree.hashes(lock.node) == chain
    other = RadixKey(tokens, "lora", page_extras=[None, b"cat", None, None, b"cow"])
    assert tree.match(other).device_node.end == 4
    tree.check([])


def test_hashes_known_only_below_a_gap_are_not_moved_over_it() -> None:
    tree = RadixTree(1, granularity=EAGER)
    lock = tree.lock(tree.root, DEVICE)
    for end in (2, 4):
        done = tree.insert(RadixKey(np.arange(end)), DEVICE, [ids(end, 2)], lock)
        tree.unlock(lock)
        lock = done.lock
    chain = hash_pages(tree.page_rows(lock.node, 0))
    tree.set_hashes(lock.node, 2, chain[2:])
    tree.unlock(lock)
    assert sizes(tree, lock.node) == [4] and tree.hashes(lock.node) is None
    rows = tree.page_rows(lock.node, 3)
    assert rows.start == 0 and hash_pages(rows) == chain
    tree.check([])


def test_bigram_runs_merge_without_their_overlap() -> None:
    tree = RadixTree(2, granularity=EAGER)
    lock = tree.lock(tree.root, DEVICE)
    for end in (2, 4, 6):
        key = RadixKey(np.arange(20), is_bigram=True)[:end]
        done = tree.insert(key, DEVICE, [ids(end, 1)], lock)
        tree.unlock(lock)
        lock = done.lock
    tree.unlock(lock)
    assert sizes(tree, lock.node) == [3] and lock.node.tokens.tolist() == list(range(7))
    assert tree.match(RadixKey(np.arange(7), is_bigram=True)).device_node.end == 3
    tree.check([])


def test_a_void_lock_of_before_a_clear_merges_nothing() -> None:
    tree = RadixTree(1, granularity=EAGER)
    nodes = converse(tree, 2)
    lock = tree.lock(nodes[-1], DEVICE)
    tree.clear()
    tree.unlock(lock)
    assert tree.current(nodes[-1]) is None and not tree.root.children
    assert isinstance(lock, Lock)
    tree.check([])


def test_nodes_can_be_kept_as_they_were_inserted() -> None:
    tree = RadixTree(1, granularity=AS_INSERTED)
    last = converse(tree, 100, pages=9)[-1]
    assert sizes(tree, last) == [9] * 100
    assert tree.coldest(0, DEVICE, 1) == [last]
    assert len(tree.evict(0, DEVICE, 1)[0].pages) == 9, "a leaf leaves whole"


def test_a_merged_node_has_the_most_uses_the_highest_priority_and_the_first_age() -> None:
    tree = RadixTree(1, granularity=EAGER)
    first = tree.insert(RadixKey([1, 2]), DEVICE, [ids(0, 2)], priority=3).lock
    second = tree.insert(RadixKey([1, 2, 3, 4]), DEVICE, [ids(2, 2)], at=first, priority=5).lock
    tree.hit(first.node)
    before = [(n.hit_count, n.priority, n.created) for n in tree.path(second.node)]
    assert before == [(1, 5, 2), (2, 3, 1)]
    tree.unlock(first)
    tree.unlock(second)
    (node,) = tree.nodes()
    assert (node.hit_count, node.priority, node.created) == (2, 5, 1)

"""Defects measured in other caches, each as a test that keeps ours free of it.

h.. and s.. are rows of a survey of prefix caches for full and sliding-window attention; the name says what
goes wrong there. Costs are counted in steps, not in seconds, so that a slow machine changes nothing.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hiradix.policy.eviction import make_order
from hiradix.tree import IS_COMPILED, Component, Lock, Node, RadixKey, RadixTree, Tier, hash_pages
from tests.tree.steps import num_steps

DEVICE, HOST = Tier.DEVICE, Tier.HOST
WINDOWED = (Component("full"), Component("swa", reach=2))


def key(*tokens: int) -> RadixKey:
    return RadixKey(list(tokens))


def ids(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def put(tree: RadixTree, tokens: RadixKey, first: int, tier: Tier = DEVICE) -> Node:
    """Insert without keeping the lock; every component gets ids from `first` on."""
    count = tokens.num_pages(tree.page_size)
    done = tree.insert(tokens, tier, [ids(first, count) for _ in tree.components])
    tree.unlock(done.lock)
    return done.lock.node


def freed_pages(freed, tier: Tier, component: int = 0) -> list[int]:
    return sorted(p for f in freed if (f.tier, f.component) == (tier, component) for p in f.pages.tolist())


def test_steps_show_a_loop_and_a_search_of_a_list() -> None:
    """Positive control of the measure."""
    nodes = [Node(None, 0, 1, 0) for _ in range(200)]
    if not IS_COMPILED:
        assert num_steps(lambda: nodes[-1] in nodes) > 200
    assert num_steps(lambda: [node for node in nodes if node.end > 1]) > 200


# -- full attention ---------------------------------------------------------------------


def test_h1_a_node_split_while_its_backup_runs_is_backed_up_whole() -> None:
    tree = RadixTree(1)
    node = put(tree, key(*range(10)), 0)
    lock = tree.lock(node, DEVICE)
    (segment,) = tree.missing(node, DEVICE, HOST)
    put(tree, key(0, 1, 2, 3, 4, 99), 50)  # the second request of the step shares half of it
    assert node.start == 5
    assert len(tree.adopt(segment.node, 0, HOST, ids(70, 10))) == 0
    tree.unlock(lock)
    assert tree.pages(node, HOST).tolist() == list(range(70, 80))
    assert tree.missing(node, DEVICE, HOST) == []
    rows = tree.page_rows(node, 5)
    assert rows.start == 0 and len(rows.rows) == 10, "no hole at the front of the chain"
    tree.check([])


def test_h2_eviction_without_host_room_is_plain_eviction() -> None:
    tree = RadixTree(1)
    put(tree, key(1, 2, 3), 0)
    (victim,) = tree.coldest(0, DEVICE, 1)
    assert not victim.resident(HOST) and tree.demote(victim) == []
    assert freed_pages(tree.evict(0, DEVICE, 1), DEVICE) == [0, 1, 2]
    assert not tree.root.children


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_h8_evicting_does_not_scan_demoted_siblings(policy: str) -> None:
    def cost(num_siblings: int) -> float:
        tree = RadixTree(1, order=make_order(policy))
        put(tree, key(7, 7), 0)
        for i in range(num_siblings):
            node = put(tree, key(7, 7, i), 10 + 3 * i)
            tree.adopt(node, 0, HOST, ids(i, 1))
        steps = num_steps(lambda: tree.evict(0, DEVICE, num_siblings // 2))
        deepest = tree.coldest(0, DEVICE, 1)[0]
        again = min(num_steps(lambda: tree.unlock(tree.lock(deepest, DEVICE))) for _ in range(3))
        assert again < 1000, f"{again} steps to lock and unlock below {num_siblings} demoted siblings"
        return steps / (num_siblings // 2)

    assert cost(4000) < 1.3 * cost(400)


def test_h9b_no_array_of_the_tree_is_a_view_of_a_caller() -> None:
    tree = RadixTree(1)
    free_list = np.arange(100_000, dtype=np.int32)
    done = tree.insert(key(*range(10)), DEVICE, [free_list[:10]])
    refused = tree.adopt(done.lock.node, 0, HOST, free_list[10:20])
    tree.unlock(done.lock)
    tree.match(key(0, 1, 2, 50))
    for node in tree.nodes():
        for tier in Tier:
            assert node.residency(0, tier).pages.base is None, "keeps the allocator's free list alive"
    assert len(refused) == 0
    held = [node.device.pages.nbytes for node in tree.nodes()]
    assert sum(held) == 40, "the halves of a split share no memory"
    freed = tree.evict(0, HOST, 1)
    assert all(f.pages.base is None for f in freed)


@pytest.mark.parametrize("num_pages", [1, 3, 40])
def test_h11_what_a_match_promises_can_be_loaded_whatever_its_size(num_pages: int) -> None:
    tree = RadixTree(1)
    node = put(tree, key(*range(num_pages)), 0, HOST)
    match = tree.match(key(*range(num_pages)))
    assert (match.device_node, match.loadable_node) == (tree.root, node)
    segments = tree.missing(match.loadable_node, HOST, DEVICE)
    assert sum(len(s.pages) for s in segments) == match.loadable_node.end - match.device_node.end == num_pages
    for s in segments:
        tree.adopt(s.node, s.component, DEVICE, ids(50, len(s.pages)))
    assert tree.match(key(*range(num_pages))).device_node is node


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_h12_write_back_looks_at_each_victim_once(policy: str) -> None:
    def cost(num_leaves: int) -> float:
        tree = RadixTree(1, order=make_order(policy))
        for i in range(num_leaves):
            put(tree, key(i), i)

        def write_back() -> None:
            for i, node in enumerate(tree.coldest(0, DEVICE, num_leaves)):
                tree.adopt(node, 0, HOST, ids(i, 1))
                assert tree.demote(node)

        return num_steps(write_back) / num_leaves

    assert cost(2000) < 1.5 * cost(200)


def test_h13_giving_a_lock_back_twice_is_seen() -> None:
    tree = RadixTree(1)
    node = put(tree, key(1, 2), 0)
    lock, other = tree.lock(node, DEVICE), tree.lock(node, DEVICE)
    tree.unlock(lock)
    with pytest.raises(AssertionError, match="given back twice"):
        tree.unlock(lock)
    assert tree.evict(0, DEVICE, 2) == [], "the other one, such as a copy's, still holds it"
    tree.unlock(other)
    with pytest.raises(AssertionError, match="once too often"):
        tree.unlock(Lock(node, DEVICE, (0,)))


def test_h13_pages_come_back_once_and_own_pages_never() -> None:
    tree = RadixTree(1)
    put(tree, key(1, 2, 3), 0)
    done = tree.insert(key(1, 2, 3, 4), DEVICE, [np.array([0, 11, 2, 3], np.int32)])
    assert done.duplicates[0].tolist() == [11], "0 and 2 are its own, 3 is new"
    tree.unlock(done.lock)
    assert freed_pages(tree.evict(0, DEVICE, 10), DEVICE) == [0, 1, 2, 3]
    assert tree.evict(0, DEVICE, 10) == []


def test_h14_a_host_only_child_leaves_with_its_unbacked_parent() -> None:
    tree = RadixTree(1)
    parent = put(tree, key(1, 2), 0)
    child = tree.insert(key(1, 2, 3), HOST, [ids(40, 1)], tree.lock(parent, HOST)).lock
    tree.unlock(Lock(parent, HOST, (0,)))
    tree.unlock(child)
    freed = tree.evict(0, DEVICE, 1)
    assert freed_pages(freed, DEVICE) == [0, 1] and freed_pages(freed, HOST) == [40], (
        "nothing unreachable stays"
    )
    assert not tree.root.children and tree.resident_pages(HOST) == 0
    tree.check([])


def test_h14_a_locked_host_only_child_keeps_its_unbacked_ancestors() -> None:
    tree = RadixTree(1)
    parent = put(tree, key(1, 2), 0)
    anchor = tree.lock(parent, HOST)
    child = tree.insert(key(1, 2, 3), HOST, [ids(40, 1)], anchor).lock
    tree.unlock(anchor)
    assert tree.evictable_pages(DEVICE) == 0 and tree.evict(0, DEVICE, 9) == []
    tree.adopt(parent, 0, HOST, ids(50, 2))  # backed up: its device copy may go now
    tree.check([child])
    assert freed_pages(tree.evict(0, DEVICE, 9), DEVICE) == [0, 1]
    assert tree.match(key(1, 2, 3)).loadable_node is child.node
    tree.unlock(child)


def test_h17_the_suffix_of_an_unhashed_prefix_is_not_a_chain_of_its_own() -> None:
    tree = RadixTree(1)
    put(tree, key(1, 2), 0)  # before storage was attached
    both = put(tree, key(1, 2, 3, 4), 10)
    alone = put(tree, key(3, 4), 20)
    rows = tree.page_rows(both, both.start)
    assert both.start == 2 and rows.start == 0, "hashing reaches back to the root"
    assert hash_pages(rows)[2:] != hash_pages(tree.page_rows(alone, 0))


def test_h19_a_thousand_turns_deep_nothing_recurses() -> None:
    tree, depth = RadixTree(1), 3000
    lock = tree.lock(tree.root, DEVICE)
    for turn in range(depth):
        done = tree.insert(RadixKey(np.arange(turn + 1)), DEVICE, [ids(turn, 1)], lock)
        tree.unlock(lock)
        lock = done.lock
    node = lock.node
    assert tree.match(RadixKey(np.arange(depth))).device_node is node
    assert len(tree.pages(node, DEVICE)) == len(tree.path_key(node)) == len(tree.all_pages(DEVICE)) == depth
    assert len(tree.page_rows(node, depth).rows) == depth
    assert "device" in tree.render()
    tree.check([lock])
    tree.unlock(lock)
    tree.check([])
    assert len(freed_pages(tree.evict(0, DEVICE, depth), DEVICE)) == depth
    assert not tree.root.children


# -- sliding window ---------------------------------------------------------------------


def test_s1_pages_a_running_request_reads_are_not_freed_by_a_reinsert() -> None:
    tree = RadixTree(1, WINDOWED)
    node = put(tree, key(1, 2, 3, 4), 0)
    lock = tree.lock(node, DEVICE)
    tree.unlock(lock)
    tree.evict(1, DEVICE, 4)  # the window leaves; full pages stay
    running = tree.lock(node, DEVICE)
    done = tree.insert(key(1, 2, 3, 4), DEVICE, [ids(50, 4), ids(60, 4)])
    assert sorted(done.duplicates[0].tolist()) == [50, 51, 52, 53], "only the caller's pages come back"
    assert done.duplicates[1].tolist() == [], "the window is revived with the new ones"
    assert tree.pages(node, DEVICE).tolist() == [0, 1, 2, 3]
    assert tree.pages(node, DEVICE, component=1).tolist() == [60, 61, 62, 63]
    (freed,) = tree.evict(1, DEVICE, 9)
    found = freed.component, freed.tier, freed.pages.tolist()
    assert found == (1, DEVICE, [60, 61]), "the lock covers the window that came"
    for held in (running, done.lock):
        tree.unlock(held)
    tree.check([])


def test_s2_evicting_windows_along_a_chain_costs_what_it_evicts() -> None:
    def cost(length: int) -> float:
        tree = RadixTree(1, WINDOWED)
        lock = tree.lock(tree.root, DEVICE)
        for turn in range(length):
            pages = [ids(turn, 1), ids(turn, 1)]
            done = tree.insert(RadixKey(np.arange(turn + 1)), DEVICE, pages, lock)
            tree.unlock(lock)
            lock = done.lock
        steps = num_steps(lambda: tree.evict(1, DEVICE, length - 10))
        tree.check([lock])
        return steps / length

    assert cost(1500) < 1.3 * cost(150)


def test_s3_everything_that_leaves_is_reported_once() -> None:
    tree = RadixTree(1, WINDOWED)
    put(tree, key(1, 2, 3, 4), 0)
    put(tree, key(1, 2, 5), 10)
    held = {(t, c): tree.resident_pages(t, c) for t in Tier for c in (0, 1)}
    freed = tree.evict(1, DEVICE, 2) + tree.evict(0, DEVICE, 1)
    for (tier, c), before in held.items():
        assert before - len(freed_pages(freed, tier, c)) == tree.resident_pages(tier, c)
    pages = [(f.tier, f.component, p) for f in freed for p in f.pages.tolist()]
    assert len(pages) == len(set(pages))


def test_window_length_need_not_be_a_multiple_of_the_page() -> None:
    for page_size, window in ((16, 4), (16, 16), (16, 20), (1, 3)):
        reach = -(-window // page_size)
        tree = RadixTree(page_size, (Component("full"), Component("swa", reach=reach)))
        tokens = RadixKey(np.arange(8 * page_size))
        lock = tree.insert(tokens, DEVICE, [ids(0, 8), ids(0, reach)]).lock
        tree.unlock(lock)
        assert tree.match(tokens).device_node.end == 8, "the window covers the end"
        shorter = tree.match(tokens[: 7 * page_size]).device_node.end
        assert shorter == 0, "its window would begin before what is there"
        tree.check([])


# -- known bugs of systems like this ------------------------------------------------------


def test_a_lock_taken_before_splits_is_given_back_after_them() -> None:
    tree = RadixTree(1, WINDOWED)
    node = put(tree, key(*range(20)), 0)
    locks = [tree.lock(node, tier) for tier in Tier for _ in range(3)]
    for cut in (19, 18, 7, 1, 12):
        tree.match(RadixKey([*range(cut), 99]))
        tree.check(locks)
    tree.evict(1, DEVICE, 5)
    for lock in locks:
        tree.unlock(lock)
    tree.check([])
    assert tree.protected_pages(DEVICE) == tree.protected_pages(DEVICE, 1) == 0


def test_a_failed_load_takes_its_device_data_back_out() -> None:
    tree = RadixTree(1)
    node = put(tree, key(1, 2, 3), 0, HOST)
    locks = [tree.lock(node, HOST), tree.lock(node, DEVICE)]
    tree.adopt(node, 0, DEVICE, ids(10, 3))
    later = tree.insert(key(1, 2, 3, 4), DEVICE, [ids(13, 1)], locks[1]).lock  # computed on top of it
    assert tree.drop_device(node) is None, "still locked: pages are freed on the last unlock"
    tree.unlock(later)
    for lock in locks:
        tree.unlock(lock)
    freed = tree.drop_device(node)
    assert freed is not None and freed_pages(freed, DEVICE) == [10, 11, 12, 13]
    assert tree.match(key(1, 2, 3, 4)).loadable_node is node and not node.resident(DEVICE)
    tree.check([])


def test_chunked_inserts_count_hits_of_every_chunk() -> None:
    tree = RadixTree(1)
    lock = tree.lock(tree.root, DEVICE)
    for end in (4, 8, 12):
        done = tree.insert(key(*range(end)), DEVICE, [ids(end, 4)], lock)
        tree.unlock(lock)
        lock = done.lock
    assert [n.hit_count for n in tree.path(lock.node)] == [1, 1, 1]
    tree.hit(lock.node)
    assert [n.hit_count for n in tree.path(lock.node)] == [2, 2, 2]
    tree.unlock(lock)


def test_a_demoted_prefix_is_found_again_after_a_flood() -> None:
    tree = RadixTree(1)
    sentinel = put(tree, key(1, 2, 3), 0)
    tree.adopt(sentinel, 0, HOST, ids(0, 3))
    for i in range(50):
        put(tree, key(100 + i, 5), 10 + 2 * i)
        tree.evict(0, DEVICE, 2)
    match = tree.match(key(1, 2, 3))
    assert match.device_node is tree.root and match.loadable_node is sentinel


def test_copies_of_device_pages_make_room_on_a_small_host() -> None:
    tree = RadixTree(1)
    node = put(tree, key(1, 2, 3), 0)
    tree.adopt(node, 0, HOST, ids(0, 3))
    running = tree.lock(node, DEVICE)
    assert tree.evictable_pages(HOST) == 3, "a running request's mirror may be reclaimed"
    assert freed_pages(tree.evict(0, HOST, 1), HOST) == [0, 1, 2]
    assert tree.match(key(1, 2, 3)).device_node is node
    tree.unlock(running)
    tree.check([])


def test_write_back_keeps_the_tiers_exclusive() -> None:
    tree = RadixTree(1)
    for i in range(4):
        put(tree, key(1, 2, 10 + i), 10 * i)
    while victims := tree.coldest(0, DEVICE, 1):
        (victim,) = victims
        tree.adopt(victim, 0, HOST, ids(100 + 10 * victim.end + len(tree.all_pages(HOST)), victim.num_pages))
        assert tree.demote(victim)
        tree.check([])
    assert tree.resident_pages(DEVICE) == 0 and tree.resident_pages(HOST) == 6
    assert tree.match(key(1, 2, 12)).loadable_node.end == 3


def test_dropped_nodes_are_freed_without_the_garbage_collector() -> None:
    tree = RadixTree(1, WINDOWED)
    put(tree, key(1, 2, 3), 0)
    node = put(tree, key(1, 2, 4), 10)
    tree.evict(0, DEVICE, 9)
    assert node.parent is None and sys.getrefcount(node) == 2, "only this test holds it"


def test_a_window_is_not_adopted_where_the_backbone_is_not() -> None:
    tree = RadixTree(1, WINDOWED)
    node = put(tree, key(1, 2, 3), 0)
    assert tree.adopt(node, 1, HOST, ids(50, 2)).tolist() == [50, 51], "its full pages are on the device only"
    assert not node.resident(HOST, 1) and tree.resident_pages(HOST, 1) == 0
    tree.check([])

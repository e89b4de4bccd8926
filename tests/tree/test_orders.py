"""Each eviction policy against a brute-force choice among all evictable leaves."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from hiradix.errors import ConfigError
from hiradix.policy.eviction import eviction_policies, make_order, register_eviction_policy
from hiradix.tree import Component, LruOrder, Node, RadixKey, RadixTree, Tier
from tests.seeds import seeded, seeds

DEVICE, HOST = Tier.DEVICE, Tier.HOST
THRESHOLD, ESTIMATE = 6, 2


class Shadow:
    """What a policy may know of a node: noted by the test when the node is unlocked."""

    def __init__(self, node: Node, push: int, deepest: int):
        self.push, self.deepest, self.start = push, deepest, node.start
        self.hits, self.priority, self.created = node.hit_count, node.priority, node.created


KEYS: dict[str, Callable[[Node, Shadow], tuple]] = {
    "lru": lambda n, s: (s.push,),
    "mru": lambda n, s: (-s.push,),
    "fifo": lambda n, s: (s.created, s.push),
    "filo": lambda n, s: (-s.created, s.push),
    "lfu": lambda n, s: (s.hits, s.push),
    "priority": lambda n, s: (s.priority, s.push),
    "slru": lambda n, s: (s.hits >= 2, s.push),
    "tlru": lambda n, s: (s.deepest - s.start + ESTIMATE > THRESHOLD, s.push),
}
CONFIG = {"tlru": {"threshold": THRESHOLD, "next_prompt_estimate": ESTIMATE}}


class Player:
    """One random life with turns and evictions only; `shadows` follows the nodes."""

    def __init__(self, policy: str, seed: int):
        self.tree = RadixTree(1, order=make_order(policy, CONFIG.get(policy)))
        self.key_of = KEYS[policy]
        self.rng = random.Random(seed)
        self.shadows: dict[Node, Shadow] = {}
        self.pushes = self.pages = 0

    def turn(self) -> None:
        key = RadixKey([self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 9))])
        node = self.tree.match(key).device_node
        self.follow_splits()
        lock = self.tree.lock(node, DEVICE)
        self.tree.hit(node)
        fresh = np.arange(self.pages, self.pages + len(key) - node.end)
        self.pages += len(fresh)
        done = self.tree.insert(key, DEVICE, [fresh], lock, priority=self.rng.randint(0, 2))
        self.tree.unlock(lock)
        self.tree.unlock(done.lock)
        for n in self.tree.path(done.lock.node):
            self.pushes += 1
            self.shadows[n] = Shadow(n, self.pushes, done.lock.node.end)

    def follow_splits(self) -> None:
        for node in self.tree.nodes():
            if node not in self.shadows:
                (child,) = node.children.values()
                self.shadows[node] = self.shadows[child]  # the halves share what is known

    def evict(self) -> None:
        nodes = list(self.tree.nodes())
        leaves = [n for n in nodes if not any(c.resident(DEVICE) for c in n.children.values())]
        if not leaves:
            return
        victim = min(leaves, key=lambda n: self.key_of(n, self.shadows[n]))
        pages = victim.device.pages.tolist()
        assert self.tree.coldest(0, DEVICE, len(pages)) == [victim]
        (freed,) = self.tree.evict(0, DEVICE, len(pages))
        assert freed.pages.tolist() == pages, f"{victim} should have gone"
        del self.shadows[victim]


@seeded
@pytest.mark.parametrize("policy", KEYS)
def test_evicts_what_a_search_of_all_leaves_would(policy: str) -> None:
    for seed in seeds(40):
        player = Player(policy, seed)
        for _ in range(60):
            player.turn() if player.rng.random() < 0.6 else player.evict()
        while player.tree.root.children:
            player.evict()
        player.tree.check([])


@seeded
@pytest.mark.parametrize("policy", KEYS)
def test_coldest_foretells_a_long_eviction(policy: str) -> None:
    for seed in seeds(20):
        player = Player(policy, seed)
        for _ in range(25):
            player.turn()
        before = sorted(player.tree.all_pages(DEVICE).tolist())
        foretold = player.tree.coldest(0, DEVICE, 20)
        pages = [page for node in foretold for page in node.device.pages.tolist()]
        assert sorted(player.tree.all_pages(DEVICE).tolist()) == before
        assert foretold == player.tree.coldest(0, DEVICE, 20)
        (freed,) = player.tree.evict(0, DEVICE, 20)
        assert freed.pages.tolist() == pages


def used(policy: str, *prompts: list[int]) -> RadixTree:
    """A tree of pages of one token that these prompts have used, one after the other."""
    tree, first = RadixTree(1, order=make_order(policy)), 0
    for tokens in prompts:
        node = tree.match(RadixKey(tokens)).device_node
        lock = tree.lock(node, DEVICE)
        tree.hit(node)
        pages = np.arange(first, first := first + len(tokens) - node.end)
        done = tree.insert(RadixKey(tokens), DEVICE, [pages], lock)
        tree.unlock(lock)
        tree.unlock(done.lock)
    return tree


def coldest(tree: RadixTree) -> list[list[int]]:
    return [node.tokens.tolist() for node in tree.coldest(0, DEVICE, 99)]


def test_fifo_and_filo_go_by_age_whatever_was_used_since() -> None:
    turns = [1], [2], [3], [1], [2, 4], [3, 5], [2]
    assert coldest(used("fifo", *turns)) == [[1], [4], [2], [5], [3]]
    assert coldest(used("filo", *turns)) == [[5], [4], [3], [2], [1]]


def test_both_halves_of_a_split_have_the_uses_of_the_whole() -> None:
    turns = [1, 2, 3], [1, 2, 3], [1, 2, 3], [4], [4], [1, 2, 5]
    assert coldest(used("lfu", *turns)) == [[5], [4], [3], [1, 2]]
    assert coldest(used("slru", *turns)) == [[5], [3], [4], [1, 2]]
    assert coldest(used("filo", [4], [1, 2, 3], [1, 2, 5])) == [[5], [3], [1, 2], [4]], "and its age"


def test_the_highest_priority_that_passed_through_counts() -> None:
    tree = RadixTree(1, order=make_order("priority"))
    for first, tokens, priority in (
        (0, [1, 2], 1),
        (10, [3], 0),
        (20, [1, 2, 4], 2),
        (30, [5], 1),
        (40, [3], 0),
    ):
        pages = np.arange(first, first + len(tokens))
        tree.unlock(tree.insert(RadixKey(tokens), DEVICE, [pages], priority=priority).lock)
    assert [node.tokens.tolist() for node in tree.coldest(0, DEVICE, 9)] == [[3], [5], [4], [1, 2]]
    assert [node.priority for node in tree.coldest(0, DEVICE, 9)] == [0, 1, 2, 2]


@pytest.mark.parametrize("policy", KEYS)
def test_two_ranks_evict_the_same(policy: str) -> None:
    one, two = Player(policy, 5), Player(policy, 5)
    for player in (one, two):
        for _ in range(30):
            player.turn()
    garbage = [object() for _ in range(1000)]  # other addresses, same decisions
    while one.tree.root.children:
        assert (
            one.tree.evict(0, DEVICE, 3)[0].pages.tolist() == two.tree.evict(0, DEVICE, 3)[0].pages.tolist()
        )
    del garbage


@pytest.mark.parametrize("policy", KEYS)
def test_a_window_may_go_anywhere_on_the_path(policy: str) -> None:
    components = (Component("full"), Component("window", reach=2))
    tree = RadixTree(1, components, order=make_order(policy, CONFIG.get(policy)))
    for number in range(12):
        tokens = [0] * (number % 4 + 1) + [number]
        pages = np.arange(number * 10, number * 10 + len(tokens))
        tree.unlock(tree.insert(RadixKey(tokens), DEVICE, [pages, pages]).lock)
    held = tree.resident_pages(DEVICE, 1)
    freed = sum(len(drop.pages) for drop in tree.evict(1, DEVICE, 10**6))
    assert freed == held and tree.resident_pages(DEVICE, 1) == 0 and tree.resident_pages(DEVICE) > 0
    tree.check([])


@pytest.mark.parametrize("policy", KEYS)
@pytest.mark.parametrize("component", [0, 1])
def test_of_a_big_node_little_more_than_wanted_goes(policy: str, component: int) -> None:
    components = (Component("full"), Component("window", reach=1000))
    tree = RadixTree(1, components, order=make_order(policy, CONFIG.get(policy)))
    pages = np.arange(1000)
    tree.unlock(tree.insert(RadixKey(pages), DEVICE, [pages, pages]).lock)
    left = list(range(1000))
    for want in (1, 3, 50, 1, 1, 1, 200, 1):
        foretold = tree.coldest(component, DEVICE, want)
        told = [page for node in foretold for page in node.residency(component, DEVICE).pages.tolist()]
        freed = [f for f in tree.evict(component, DEVICE, want) if f.component == component]
        got = sorted(freed[0].pages.tolist())
        assert want <= len(got) <= 4 * want and got == sorted(told)
        assert got == (left[: len(got)] if component else left[-len(got) :]), (
            "the end of a prompt, the front of a window"
        )
        left = left[len(got) :] if component else left[: -len(got)]
        tree.check([])


def test_a_heap_does_not_grow_with_use() -> None:
    tree = RadixTree(1, order=make_order("lfu"))
    lock = tree.insert(RadixKey([1, 2, 3]), DEVICE, [np.arange(3)]).lock
    tree.unlock(lock)
    for _ in range(5000):
        tree.unlock(tree.lock(lock.node, DEVICE))
    assert len(tree._residencies.orders[0][DEVICE]._heap) < 200
    tree.check([])


# -- names ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("lri", {}, "'lri' is not one of lru"),
        ("lru", {"threshold": 3}, "lru does not know threshold"),
        ("slru", {"protected_threshold": "2"}, "slru protected_threshold must be a whole number"),
        ("slru", {"protected_threshold": True}, "must be a whole number"),
        ("tlru", {"threshold": 5, "next_prompt_estimate": 5}, "threshold 5 must be > next_prompt_estimate 5"),
        ("tlru", {"slack": 5}, "tlru does not know slack"),
    ],
)
def test_a_bad_name_or_value_is_named(name: str, config: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_order(name, config)


def test_a_policy_of_ones_own() -> None:
    name = "lru-of-tests"
    assert name not in eviction_policies()
    register_eviction_policy(name, lambda config: LruOrder)
    assert name in eviction_policies() and make_order(name) is LruOrder
    with pytest.raises(ConfigError, match="exists already"):
        register_eviction_policy("lru", lambda config: LruOrder)

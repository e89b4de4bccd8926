"""Each lock is given back once: by its receipt, or by its node where nobody keeps that."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hiradix.config import HiCacheConfig
from hiradix.errors import Misuse
from hiradix.memory import ReqToTokenPool, SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    LockReceipt,
    MatchPrefixParams,
    PrefixCache,
    RadixCache,
    RadixKey,
)
from hiradix.tree import BACKBONE, DEVICE, Granularity, Node
from tests.prefix_cache.bench_engine import Bench, Request, prompt
from tests.prefix_cache.swa_bench import SwaBench

Make = Callable[[], Bench]
EVERYTHING = EvictParams(10_000, 10_000)


@pytest.fixture(params=["full", "windows"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "full":
        made = Bench(HiCacheConfig(page_size=4), 64, disable=False)
    else:
        made = SwaBench(64, 64, 4, 8)
    yield made
    made.close()


def known(bench: Bench, num_tokens: int = 64) -> Node:
    """The node of a prompt that the cache has."""
    key = RadixKey(prompt(num_tokens))
    bench.cache.insert(InsertParams(key, bench.allocator.alloc(num_tokens)))
    node: Node = bench.cache.match_prefix(MatchPrefixParams(key)).last_device_node
    return node


def test_whoever_gives_a_node_back_twice_is_refused_and_the_other_stays_protected(bench: Bench) -> None:
    cache, node = bench.cache, known(bench)
    cache.inc_lock_ref(node)  # one holder keeps the node, the other its receipt
    innocent = cache.inc_lock_ref(node)
    assert cache.dec_lock_ref(node) == 0
    with pytest.raises(Misuse, match="without a receipt"):
        cache.dec_lock_ref(node)
    assert cache.evict(EVERYTHING).num_tokens_evicted == 0 and cache.full_protected_size() == 64
    assert cache.dec_lock_ref(innocent) == 64
    bench.check()


def test_a_node_does_not_stand_for_a_receipt_that_is_kept(bench: Bench) -> None:
    cache, node = bench.cache, known(bench)
    one, other = cache.inc_lock_ref(node), cache.inc_lock_ref(node)
    with pytest.raises(Misuse, match="without a receipt"):
        cache.dec_lock_ref(node)
    assert (cache.dec_lock_ref(one), cache.full_protected_size()) == (0, 64)
    with pytest.raises(Misuse, match="given back twice"):
        cache.dec_lock_ref(one)
    assert cache.dec_lock_ref(other) == 64


def test_a_node_is_given_back_as_often_as_it_was_locked_without_a_receipt(bench: Bench) -> None:
    cache, node = bench.cache, known(bench)
    for _ in range(3):
        cache.inc_lock_ref(node)
    assert [cache.dec_lock_ref(node) for _ in range(3)] == [0, 0, 64]
    with pytest.raises(Misuse, match="without a receipt"):
        cache.dec_lock_ref(node)


def test_a_split_does_not_confuse_who_is_out(bench: Bench) -> None:
    cache, node = bench.cache, known(bench)
    cache.inc_lock_ref(node)
    upper = cache.match_prefix(MatchPrefixParams(RadixKey(prompt(32) + [7] * 8))).last_device_node
    assert upper is not node and upper.end == 8
    with pytest.raises(Misuse, match="without a receipt"):
        cache.dec_lock_ref(upper)
    assert cache.full_protected_size() == 64
    assert cache.dec_lock_ref(node) == 64


def test_the_root_needs_no_receipt(bench: Bench) -> None:
    cache = bench.cache
    assert cache.dec_lock_ref(cache.root_node) == 0 == cache.dec_lock_ref(cache.root_node)
    receipt = cache.inc_lock_ref(cache.root_node)
    assert cache.dec_lock_ref(cache.root_node, receipt) == 0
    with pytest.raises(Misuse, match="given back twice"):
        cache.dec_lock_ref(receipt)


def test_locks_of_nodes_from_before_a_reset_are_void(bench: Bench) -> None:
    cache, node = bench.cache, known(bench)
    kept = cache.inc_lock_ref(node)
    cache.inc_lock_ref(node)
    cache.reset()
    known(bench)
    assert cache.dec_lock_ref(node) == 0 == cache.dec_lock_ref(kept)
    with pytest.raises(Misuse, match="without a receipt"):
        cache.dec_lock_ref(node)
    assert cache.full_protected_size() == 0


def test_a_receipt_of_another_cache_is_refused(bench: Bench) -> None:
    other = Bench(HiCacheConfig(page_size=4), 64, disable=False)
    receipt: Any = other.cache.inc_lock_ref(known(other))
    for given, why in ((receipt, "another cache"), (None, "neither a receipt"), ("node", "nor a node")):
        with pytest.raises(Misuse, match=why):
            bench.cache.dec_lock_ref(given)
    assert other.cache.dec_lock_ref(receipt) == 64
    other.close()


@pytest.mark.parametrize("keeps", [True, False], ids=["receipt", "node"])
def test_a_request_holds_its_lock_in_the_way_it_was_taken(bench: Bench, keeps: bool) -> None:
    """By its receipt, or by its node; and holds no lock that others took."""
    cache = bench.cache
    tokens = prompt(70)
    req = Request("r", tokens, fill_ids=tokens, req_pool_idx=bench.rows.alloc(1)[0], committed=70)
    bench._match(req)
    receipt = cache.inc_lock_ref(req.last_node)
    if keeps:
        req.swa_uuid_for_lock = receipt
    del receipt
    bench.rows.write((req.req_pool_idx, slice(0, 72)), bench.allocator.alloc(72).to(torch.int32))
    bench._write(req, 0, 70)
    bench.running.append(req)
    cache.cache_unfinished_req(req)
    assert isinstance(req.swa_uuid_for_lock, LockReceipt) == keeps and cache.full_protected_size() == 68
    others = cache.inc_lock_ref(req.last_node)
    if keeps:
        with pytest.raises(Misuse, match="without a receipt"):
            cache.dec_lock_ref(req.last_node)
    cache.cache_finished_req(req)
    assert cache.full_protected_size() == 68
    assert cache.dec_lock_ref(others) == 68


def test_a_request_without_a_lock_is_refused(bench: Bench) -> None:
    cache, node = bench.cache, known(bench)
    tokens = prompt(70)
    req = Request("r", tokens, fill_ids=tokens, req_pool_idx=bench.rows.alloc(1)[0], committed=70)
    bench._match(req)
    assert req.last_node is node
    row = torch.cat([req.prefix_indices, bench.allocator.alloc(8)])
    bench.rows.write((req.req_pool_idx, slice(0, 72)), row.to(torch.int32))
    held = cache.inc_lock_ref(node)  # somebody else's
    with pytest.raises(Misuse, match="no lock is out"):
        cache.cache_unfinished_req(req)
    assert cache.total_size() in (64, (64, 64)) and cache.dec_lock_ref(held) == 64


@pytest.mark.parametrize("keeps", [True, False], ids=["receipt", "node"])
def test_a_request_that_ends_twice_frees_nothing_of_others(bench: Bench, keeps: bool) -> None:
    """Found: it was refused for its lock, but after its pages, which were others' by then, had been freed."""
    req = bench.start(prompt(70))
    assert req is not None
    if not keeps:
        node = req.last_node
        bench.cache.dec_lock_ref(req.swa_uuid_for_lock)
        bench.cache.inc_lock_ref(node)
        req.swa_uuid_for_lock = None
    bench.cache.cache_finished_req(req, is_insert=False)
    taken = bench.allocator.alloc(bench.allocator.available_size())
    with pytest.raises(Misuse):
        bench.cache.cache_finished_req(req, is_insert=False)
    assert bench.allocator.available_size() == 0
    bench.allocator.free(taken)
    bench.running.remove(req)
    bench.check()


CHOICES = st.integers(0, 60)


class Holders(RuleBasedStateMachine):
    """Locks by node and by receipt among inserts that split, merges and evictions.

    out: per depth of a path, how often it is locked without a receipt, and the receipts that are kept.
    """

    has_windows = False

    @initialize()
    def begin(self) -> None:
        rows: Any = ReqToTokenPool(1, 8)
        if self.has_windows:
            self.cache: PrefixCache = SwaBench(400, 400, 1, 3).cache
        else:
            self.cache = RadixCache(CacheInitParams(False, rows, SlotAllocator(400, 1), 1))
        self.cache.tree._residencies.use(Granularity(long_path=2))
        self.by_node: dict[tuple[int, ...], int] = {}
        self.nodes: dict[tuple[int, ...], Node] = {}
        self.receipts: list[tuple[tuple[int, ...], LockReceipt]] = []

    def _tokens(self, choice: int) -> list[int]:
        """Of a chain, whose nodes are merged when nobody locks them, or of one with branches."""
        if choice % 2:
            return [2] * (choice // 2 % 12 + 1)
        rng = random.Random(choice)
        return [0] * rng.randint(1, 12) + [rng.randint(0, 1) for _ in range(rng.randint(0, 3))]

    def _locked(self) -> set[tuple[int, ...]]:
        ends = [path for path, count in self.by_node.items() if count] + [path for path, _ in self.receipts]
        return {path[:n] for path in ends for n in range(1, len(path) + 1)}

    @rule(choice=CHOICES)
    def insert(self, choice: int) -> None:
        tokens, allocator = self._tokens(choice), self.cache.token_to_kv_pool_allocator
        slots = allocator.alloc(len(tokens))
        if slots is None:
            self.cache.evict(EVERYTHING)
            return
        known = self.cache.insert(InsertParams(RadixKey(tokens), slots)).prefix_len
        if known and not self.has_windows:
            allocator.free(slots[:known])

    def _found(self, choice: int) -> tuple[Node, tuple[int, ...]]:
        tokens = self._tokens(choice)
        found = self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))
        return found.last_device_node, tuple(tokens[: len(found.device_indices)])

    @rule(choice=CHOICES, keeps=st.booleans())
    def lock(self, choice: int, keeps: bool) -> None:
        self.insert(choice)
        node, path = self._found(choice)
        receipt = self.cache.inc_lock_ref(node)
        self.nodes[path] = node
        if keeps:
            self.receipts.append((path, receipt))
        elif path:
            self.by_node[path] = self.by_node.get(path, 0) + 1

    @rule(choice=CHOICES)
    def lock_what_was_found_before(self, choice: int) -> None:
        """Which may have been merged away since."""
        there = [path for path in sorted(self.nodes) if path and self.cache.tree.current(self.nodes[path])]
        if there:
            path = there[choice % len(there)]
            if self._is_usable(path):
                self.cache.inc_lock_ref(self.nodes[path])
                self.by_node[path] = self.by_node.get(path, 0) + 1

    def _is_usable(self, path: tuple[int, ...]) -> bool:
        found = self.cache.match_prefix(MatchPrefixParams(RadixKey(list(path))))
        return len(found.device_indices) == len(path)

    @rule(choice=CHOICES, again=st.booleans())
    def unlock_by_receipt(self, choice: int, again: bool) -> None:
        if self.receipts:
            _, receipt = self.receipts.pop(choice % len(self.receipts))
            self.cache.dec_lock_ref(receipt)
            if again:
                with pytest.raises(Misuse, match="given back twice"):
                    self.cache.dec_lock_ref(receipt)

    @rule(choice=CHOICES, fresh=st.booleans())
    def unlock_by_node(self, choice: int, fresh: bool) -> None:
        if fresh or not self.nodes:
            node, path = self._found(choice)
        else:  # what was given to whoever locked it, which may have been merged away or evicted since
            path = sorted(self.nodes)[choice % len(self.nodes)]
            node = self.nodes[path]
        if not path or self.by_node.get(path, 0):
            self.cache.dec_lock_ref(node)
            if path:
                self.by_node[path] -= 1
        else:
            with pytest.raises(Misuse, match="no lock is out"):
                self.cache.dec_lock_ref(node)

    @rule(num_tokens=st.integers(1, 20))
    def evict(self, num_tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens, num_tokens))

    @invariant()
    def what_is_out_is_protected(self) -> None:
        """No more and no less."""
        tree = self.cache.tree
        assert tree.protected_pages(DEVICE) == len(self._locked())
        locks = [receipt.lock for _, receipt in self.receipts]
        kept = self.cache._by_node
        locks += kept.let_go + [lock for locks_of in kept._of.values() for lock in locks_of]
        tree.check([lock for lock in locks if lock.node.end])
        assert tree.evictable_pages(DEVICE, BACKBONE) == tree.resident_pages(DEVICE) - len(self._locked())


class HoldersOfWindows(Holders):
    has_windows = True


SETTINGS = settings(
    max_examples=40, stateful_step_count=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
TestHolders = Holders.TestCase
TestHolders.settings = SETTINGS
TestHoldersOfWindows = HoldersOfWindows.TestCase
TestHoldersOfWindows.settings = SETTINGS

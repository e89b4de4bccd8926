"""StateRadixCache by itself: pages and records of recurrent state, in and out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hiradix.errors import ConfigError
from hiradix.memory import PageAllocator, ReqToTokenPool, SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    StateRadixCache,
)
from hiradix.prefix_cache.slots import pages_of
from hiradix.tree import Tier

PAGE = 4


class Bench:
    def __init__(self) -> None:
        self.slots = SlotAllocator(40 * PAGE, PAGE)
        self.records = PageAllocator(10, first_page=1)
        self.cache = StateRadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=ReqToTokenPool(2, 64), page_size=PAGE,
                token_to_kv_pool_allocator=self.slots, state_records=self.records,
            )
        )  # fmt: skip

    def insert(self, tokens: list[int], shared: int = 0) -> int:
        """Insert with slots of its own behind the first `shared` tokens, and a record; returns the record."""
        own = self.slots.alloc(len(tokens) - shared)
        found = self.match(tokens[:shared])
        record = self.records.alloc(1)
        assert own is not None and record is not None and len(found) == shared
        params = InsertParams(
            RadixKey(tokens), torch.cat([found, own]), shared, mamba_value=int(record[0])
        )  # fmt: skip
        self.cache.insert(params)
        self.check()
        return int(record[0])

    def match(self, tokens: list[int]) -> torch.Tensor:
        return self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens))).device_indices

    def check(self) -> None:
        self.cache.check()
        tokens, records = self.cache.total_size()
        assert tokens + self.slots.available_size() == self.slots.size
        assert records + self.records.available == self.records.num_pages


def test_a_match_ends_where_a_record_is() -> None:
    bench = Bench()
    first, second = bench.insert(list(range(12))), bench.insert(list(range(24)), shared=12)
    for length, matched in ((11, 0), (12, 12), (23, 12), (24, 24), (30, 24)):
        assert len(bench.match(list(range(length)))) == matched
    found = bench.cache.match_prefix(MatchPrefixParams(RadixKey([*range(20), 99, 99, 99, 99])))
    assert len(found.device_indices) == 12 and found.mamba_branching_seqlen == 20
    assert bench.cache.record(found.last_device_node) == first != second
    assert bench.cache.record(bench.cache.root_node) == 0
    whole = bench.cache.match_prefix(MatchPrefixParams(RadixKey(list(range(24)))))
    assert whole.mamba_branching_seqlen is None


def test_another_namespace_learns_nothing_of_what_is_there() -> None:
    bench = Bench()
    bench.insert(list(range(12)))
    tokens = [*range(8), 99, 99, 99, 99]
    assert bench.cache.match_prefix(MatchPrefixParams(RadixKey(tokens))).mamba_branching_seqlen == 8
    for key in (RadixKey(tokens, "adapter"), RadixKey(tokens, cache_salt="tenant")):
        found = bench.cache.match_prefix(MatchPrefixParams(key))
        assert len(found.device_indices) == 0 and found.mamba_branching_seqlen is None


def test_what_the_tree_has_already_is_freed() -> None:
    bench = Bench()
    first = bench.insert(list(range(12)))
    bench.insert(list(range(12)))
    assert bench.cache.total_size() == (12, 1)
    found = bench.cache.match_prefix(MatchPrefixParams(RadixKey(list(range(12)))))
    assert bench.cache.record(found.last_device_node) == first


def test_records_and_pages_leave_by_themselves() -> None:
    bench = Bench()
    bench.insert(list(range(12)))
    bench.insert(list(range(24)), shared=12)
    assert bench.cache.evict(EvictParams(0, mamba_num=1)) == EvictResult(0, mamba_num_evicted=1)
    bench.check()
    assert bench.cache.total_size() == (24, 1) and len(bench.match(list(range(24)))) == 24
    found = bench.cache.match_prefix(MatchPrefixParams(RadixKey(list(range(24)))))
    receipt = bench.cache.inc_lock_ref(found.last_device_node)
    assert (bench.cache.mamba_protected_size(), bench.cache.mamba_evictable_size()) == (1, 0)
    assert bench.cache.evict(EvictParams(100, mamba_num=5)) == EvictResult()
    bench.cache.dec_lock_ref(receipt)
    done = bench.cache.evict(EvictParams(1))
    assert done == EvictResult(24, mamba_num_evicted=1), "no match could end in what is above the leaf"
    bench.check()
    assert bench.cache.total_size() == (0, 0)


def test_records_that_leave_with_their_pages_count_as_evicted() -> None:
    bench = Bench()
    for first in (0, 100, 200):
        bench.insert(list(range(first, first + 12)))
    assert bench.cache.evict(EvictParams(12, mamba_num=1)) == EvictResult(12, mamba_num_evicted=1)
    assert bench.cache.total_size() == (24, 2)
    bench.check()


def test_pages_without_a_record_are_found_by_nobody() -> None:
    bench = Bench()
    own = bench.slots.alloc(12)
    assert own is not None
    bench.cache.insert(InsertParams(RadixKey(list(range(12))), own))
    bench.check()
    assert len(bench.match(list(range(12)))) == 0
    bench.insert(list(range(12)))
    assert len(bench.match(list(range(12)))) == 12 and bench.cache.total_size() == (12, 1)


def test_where_nothing_may_be_inserted_the_record_stays_the_requests() -> None:
    """A failed load is on the way: pages and record are the request's, which goes on with both."""
    bench, taken = Bench(), []
    root, tree = bench.cache.root_node, bench.cache.tree
    req = SimpleNamespace(rid="r", swa_uuid_for_lock=bench.cache.inc_lock_ref(root))
    req.take_record = taken.append
    blocked = SimpleNamespace(
        is_blocked=lambda key: True, insert=lambda key, pages, at: tree.lock(at.node, Tier.DEVICE)
    )
    cache = SimpleNamespace(page_size=PAGE, cache=blocked, _held=bench.cache._held)
    lock = StateRadixCache.insert_row(cache, RadixKey(list(range(12))), torch.arange(PAGE, PAGE + 12), req)
    assert lock.node is root and taken == []
    assert bench.cache.total_size() == (0, 0)


def test_pages_that_may_not_be_inserted_are_freed_with_their_record() -> None:
    bench = Bench()
    own, record = bench.slots.alloc(12), bench.records.alloc(1)
    assert own is not None and record is not None
    params = InsertParams(RadixKey(list(range(12))), own, mamba_value=int(record[0]))
    bench.cache._free_refused(pages_of(own, PAGE), params)
    bench.check()


def test_it_needs_records() -> None:
    params = CacheInitParams(False, ReqToTokenPool(2, 64), SlotAllocator(8, 4), 4)
    with pytest.raises(ConfigError, match="state_records: needed by StateRadixCache"):
        StateRadixCache(params)

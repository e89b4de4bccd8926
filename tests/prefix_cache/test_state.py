"""StateRadixCache by itself: pages and records of recurrent state, in and out."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hiradix.config import HiCacheConfig
from hiradix.errors import ConfigError
from hiradix.memory import (
    DevicePool,
    HybridPools,
    KVShape,
    PageAllocator,
    ReqToTokenPool,
    SlotAllocator,
    StateShape,
)
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    LockReceipt,
    MatchPrefixParams,
    ModelIdentity,
    PrefixCache,
    RadixKey,
    StateHiRadixCache,
    StateRadixCache,
    build_hybrid_cache,
)
from tests.prefix_cache.bench_engine import PATIENCE_S, failing_copies

PAGE = 4


class Bench:
    held: LockReceipt

    def __init__(self, has_host: bool = False) -> None:
        pool = DevicePool(KVShape(1, 1, 4, 4, torch.float32), 40, PAGE)
        self.slots = SlotAllocator(40 * PAGE, PAGE, kvcache=pool)
        self.records = PageAllocator(10, first_page=1)
        params = CacheInitParams(
            disable=False, req_to_token_pool=ReqToTokenPool(2, 64), page_size=PAGE,
            token_to_kv_pool_allocator=self.slots, state_records=self.records,
        )  # fmt: skip
        self.cache: PrefixCache = StateRadixCache(params)
        if has_host:
            config = HiCacheConfig(page_size=PAGE, enable_hierarchical_cache=True)
            pools = HybridPools(pool, DevicePool(StateShape(1, 2, 2), 10, 1), [0], [1])
            self.cache = build_hybrid_cache(config, params, pools, ModelIdentity("bench"))
            assert type(self.cache) is StateHiRadixCache

    def insert(self, tokens: list[int], shared: int = 0) -> int:
        """Insert with slots of its own behind the first `shared` tokens, and a record; returns the record."""
        own = self.slots.alloc(len(tokens) - shared)
        found = self.match(tokens[:shared])
        record = self.records.alloc(1)
        assert own is not None and record is not None and len(found) == shared
        params = InsertParams(
            RadixKey(tokens), torch.cat([found, own]), int(record[0]), prev_prefix_len=shared
        )
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


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A cache over all tiers that has 12 tokens, whose load back has failed while `held` locks them."""
    failing = failing_copies(monkeypatch)
    bench = Bench(has_host=True)
    bench.insert(list(range(12)))
    assert bench.cache.drain(PATIENCE_S) and bench.cache.evict(EvictParams(12)).num_tokens_evicted == 12
    found = bench.cache.match_prefix(MatchPrefixParams(RadixKey(list(range(12)))))
    assert len(bench.cache.init_load_back(found.last_host_node, 12)[0]) == 12
    bench.held = bench.cache.inc_lock_ref(found.last_host_node)
    failing[0] = True
    bench.cache.ready_to_load_host_cache()
    assert bench.cache.drain(PATIENCE_S) and bench.cache.stats().load_failed == 12
    yield bench
    bench.cache.dec_lock_ref(bench.held)
    bench.cache.check_hicache_events()
    assert bench.cache.total_size() == (0, 0)
    bench.check()
    bench.cache.close()


def test_where_nothing_may_be_inserted_the_record_stays_the_requests(blocked: Bench) -> None:
    """A failed load is on the way: pages and record are the request's, which goes on with both."""
    cache, taken = blocked.cache, []
    req: Any = SimpleNamespace(rid="r", swa_uuid_for_lock=cache.inc_lock_ref(cache.root_node))
    req.take_record = taken.append
    own = blocked.slots.alloc(16)
    assert own is not None
    lock = cache.insert_row(RadixKey(list(range(16))), own, req)
    assert lock.node is cache.root_node and taken == []
    assert cache.total_size() == (12, 1), "what failed"
    blocked.slots.free(own)


def test_pages_that_may_not_be_inserted_are_freed_with_their_record(blocked: Bench) -> None:
    own, record = blocked.slots.alloc(16), blocked.records.alloc(1)
    assert own is not None and record is not None
    params = InsertParams(RadixKey(list(range(16))), own, mamba_value=int(record[0]))
    assert blocked.cache.insert(params).prefix_len == 16
    blocked.check()


def test_it_needs_records() -> None:
    params = CacheInitParams(False, ReqToTokenPool(2, 64), SlotAllocator(8, 4), 4)
    with pytest.raises(ConfigError, match="state_records: needed by StateRadixCache"):
        StateRadixCache(params)

"""Defects measured in SGLang's caches (rows h.. and s.. of a survey), as an engine would meet them."""

from __future__ import annotations

import sys

import torch

from hiradix.memory import SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
)
from hiradix.tree import AS_INSERTED
from tests.prefix_cache.swa_bench import SwaBench
from tests.tree.steps import num_steps


def chain(cache: RadixCache, length: int) -> None:
    """A node per token, each below the one before."""
    cache.tree._residencies.use(AS_INSERTED)
    allocator = cache.token_to_kv_pool_allocator
    slots = torch.cat([allocator.alloc(1) for _ in range(length)])
    for end in range(1, length + 1):
        key = RadixKey(list(range(end)))
        cache.insert(InsertParams(key=key, value=slots[:end], prev_prefix_len=end - 1))


def test_h19_a_thousand_turns_deep_nothing_recurses() -> None:
    depth = sys.getrecursionlimit() + 200
    allocator = SlotAllocator(depth, 1)
    cache = RadixCache(CacheInitParams(False, None, allocator, 1))  # type: ignore[arg-type]
    chain(cache, depth)
    assert sum(1 for _ in cache.tree.nodes()) == depth
    assert sorted(cache.all_values_flatten().tolist()) == list(range(1, depth + 1))
    found = cache.match_prefix(MatchPrefixParams(RadixKey(list(range(depth)))))
    assert len(found.device_indices) == depth
    cache.dec_lock_ref(cache.inc_lock_ref(found.last_device_node))
    assert cache.tree.render().count("\n") >= depth
    assert cache.evict(EvictParams(depth)).num_tokens_evicted == depth == allocator.available_size()


def test_s2_evicting_windows_along_a_chain_costs_what_it_evicts() -> None:
    def cost(length: int) -> float:
        bench = SwaBench(length, length, 1, 4)
        chain(bench.cache, length)
        steps = num_steps(lambda: bench.cache.evict(EvictParams(0, length - 10)))
        assert bench.cache.swa_evictable_size() == 10 and bench.cache.full_evictable_size() == length
        return steps / length

    cost(20)  # torch prepares itself at its first call
    assert cost(800) < 1.3 * cost(100)

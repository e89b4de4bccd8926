"""One tenant who holds all that he may, or says of everything that it will be used again, costs the others at
most two points of their hits."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from hiradix.intents import Selector
from hiradix.memory import ReqToTokenPool, SlotAllocator
from hiradix.policy.hint_shares import HintShares
from hiradix.prefix_cache import CacheInitParams, EvictParams, InsertParams, MatchPrefixParams, RadixCache
from hiradix.tree import RadixKey

TENANTS = ("a", "b", "c", "d")
PAGE, PROMPT, PROMPTS = 4, 32, 90  # tokens of a page and of a prompt, prompts of a tenant
CAPACITY = 4800  # tokens: of 4 * 90 * 32
REQUESTS = 8000
MOST_POINTS = 0.02


def hits(order: str, greedy: str, seed: int) -> float:
    """What share of the tokens of tenants b, c and d was found, beside a tenant a who behaves so."""
    rng = random.Random(seed)
    slots = SlotAllocator(num_tokens=CAPACITY, page_size=PAGE, device="cpu", kvcache=None)  # type: ignore[arg-type]
    params = CacheInitParams(False, ReqToTokenPool(1, PROMPT), slots, page_size=PAGE, eviction_policy=order)
    cache, found = RadixCache(params), Counter[str]()
    weights = [1.0 / (rank + 1) ** 0.8 for rank in range(PROMPTS)]
    for _ in range(REQUESTS):
        tenant, (number,) = rng.choice(TENANTS), rng.choices(range(PROMPTS), weights)
        key = RadixKey([number * PROMPT + at for at in range(PROMPT)], cache_salt=tenant)
        cache.check_hicache_events()
        match = cache.match_prefix(MatchPrefixParams(key))
        found[tenant] += len(match.device_indices)
        lock = cache.inc_lock_ref(match.last_device_node)
        lacking = PROMPT - len(match.device_indices)
        if slots.available_size() < lacking:
            cache.evict(EvictParams(lacking - slots.available_size()))
        new = slots.alloc(lacking)
        assert new is not None
        cache.insert(InsertParams(key, torch.cat([match.device_indices, new])))
        cache.dec_lock_ref(match.last_device_node, lock)
        if tenant == "a" and greedy == "holds":
            cache.hold(Selector.prefix(key), ttl_s=86400.0, tier="device", asked_by="salt:a")
        elif tenant == "a" and greedy == "hints":
            cache.hint(key, "keep_alive")
    cache.check()
    others = sum(found[tenant] for tenant in TENANTS[1:])
    return others / (REQUESTS * PROMPT * 3 / 4)


@pytest.mark.parametrize("order", ["lru", "ghd"])
@pytest.mark.parametrize("greedy", ["holds", "hints"])
def test_a_greedy_tenant_costs_others_little(order: str, greedy: str) -> None:
    fair, beside = hits(order, "", 1), hits(order, greedy, 1)
    assert 0.2 < fair < 0.8, "the cache is neither too large nor too small to tell"
    assert fair - beside <= MOST_POINTS, (fair, beside)


def test_a_tenant_alone_is_heard_whatever_he_says_and_beside_others_in_part() -> None:
    shares = HintShares()
    for _ in range(20):
        shares.ended("a")
        assert shares.hears("a", "keep_alive")
    shares.ended("b")
    heard = 0
    for _ in range(200):
        shares.ended("a")
        heard += shares.hears("a", "keep_alive")
        assert shares.hears("a", "end_of_session")
    assert 40 <= heard <= 100
    assert shares.hears("b", "keep_alive"), "a first one is always heard"

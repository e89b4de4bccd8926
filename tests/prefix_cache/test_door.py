"""What engines hand to the constructors: SGLang's records by what they have, refused by the field's name."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hiradix.errors import ConfigError, Misuse
from hiradix.events import BlockRemoved, BlockStored
from hiradix.memory import (
    DevicePool,
    HybridSlotAllocator,
    KVShape,
    PageAllocator,
    ReqToTokenPool,
    SlotAllocator,
)
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    HiRadixCache,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
    StateRadixCache,
    SWARadixCache,
)

SIZE = 4
SHAPE = KVShape(1, 1, 2, 2, torch.float32)


def params(**more: Any) -> Any:
    """As SGLang's record: attributes, and none of ours."""
    pool = DevicePool(SHAPE, 8, SIZE)
    given: dict[str, Any] = {
        "disable": False,
        "req_to_token_pool": ReqToTokenPool(2, 32),
        "token_to_kv_pool_allocator": SlotAllocator(32, SIZE, "cpu", pool),
        "page_size": SIZE,
        "is_eagle": False,
        "eviction_policy": "lru",
        "tp_cache_group": None,
    }
    return SimpleNamespace(**given | more)


def flags(**more: Any) -> Any:
    given = {"served_model_name": "m", "hicache_ratio": 2.0, "hicache_size": 0}
    return SimpleNamespace(**given | more)


def pure(**more: Any) -> Any:
    """Parameters whose slots hold nothing."""
    return params(token_to_kv_pool_allocator=SlotAllocator(32, SIZE), **more)


def found(cache: Any, tokens: list[int]) -> Any:
    return cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))


# -- construction ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_ttl_seconds", 3.0),
        ("enable_session_radix_cache", True),
        ("swa_gates_prefix_match", False),
        ("mtp_draft_device_pools", (object(),)),
        ("component_registry_override", {1: int}),
    ],
)
def test_what_a_field_asks_for_and_is_not_served_is_refused_by_its_name(field: str, value: Any) -> None:
    for build in (RadixCache, SWARadixCache, lambda given: HiRadixCache(given, flags())):
        with pytest.raises(ConfigError, match=f"^{field} "):
            build(params(**{field: value}))


def test_a_host_tier_needs_its_flags_and_a_pool() -> None:
    with pytest.raises(ConfigError, match="^server_args: "):
        HiRadixCache(params())
    with pytest.raises(ConfigError, match="^token_to_kv_pool_allocator: "):
        HiRadixCache(pure(), flags())
    with pytest.raises(ConfigError, match="^pp_size 2 "):
        HiRadixCache(params(pp_size=2), flags())
    with pytest.raises(ConfigError, match="^state_records: "):
        StateRadixCache(params())


def test_the_flags_say_what_the_host_tier_is() -> None:
    cache = HiRadixCache(
        params=params(),
        server_args=flags(
            hicache_ratio=3.0,
            hicache_write_policy="write_back",
            hicache_io_backend="direct",
            hicache_mem_layout="page_first",
        ),
    )
    try:
        assert cache.stats().host_total == 3 * 32
        assert cache.cache.write_through is not None and cache.cache.write_through.policy.writes_on_evict
        assert cache.cache_controller is cache.controller
        key = RadixKey(list(range(8)))
        cache.insert(InsertParams(key, cache.token_to_kv_pool_allocator.alloc(8)))
        assert cache.evict(EvictParams(8)).num_tokens_evicted == 8
        assert cache.drain(10) and found(cache, list(range(8))).host_hit_length == 8
    finally:
        cache.shutdown()
        cache.shutdown()


def test_an_attach_under_another_name_is_refused(tmp_path: Any) -> None:
    extra = f'{{"file_storage_path": "{tmp_path}"}}'
    cache = HiRadixCache(params(), flags(served_model_name="m"))
    try:
        ok, text = cache.attach_storage_backend("file", extra, served_model_name="other")
        assert not ok and text.startswith("served_model_name: 'other'") and not cache.enable_storage
        assert cache.attach_storage_backend("file", extra, served_model_name="m")[0] and cache.enable_storage
    finally:
        cache.close()
    with pytest.raises(ConfigError, match="^served_model_name: "):
        HiRadixCache(params(), flags(served_model_name=None, hicache_storage_backend="file"))


def test_another_served_name_finds_none_of_the_pages(tmp_path: Any) -> None:
    hits = []
    for name in ("m", "n", "m"):
        given = flags(
            served_model_name=name,
            hicache_storage_backend="file",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=(
                f'{{"file_storage_path": "{tmp_path}", "prefetch_threshold": 1,'
                ' "hicache_storage_identity": "one"}'
            ),
            hicache_no_regret=False,
        )
        cache = HiRadixCache(params(), given)
        try:
            tokens = list(range(8))
            cache.prefetch_from_storage("r", cache.root_node, tokens)
            while not cache.check_prefetch_progress("r"):
                assert cache.drain(10)
            hits.append(cache.pop_prefetch_loaded_tokens("r"))
            cache.insert(InsertParams(RadixKey(tokens), cache.token_to_kv_pool_allocator.alloc(8)))
            assert cache.drain(10)
        finally:
            cache.close()
    assert hits == [0, 0, 8]


# -- without pools -----------------------------------------------------------------------


def test_a_simulated_tree_needs_no_values_and_takes_any() -> None:
    """SGLang's scheduler keeps one to see which waiting requests share a prefix, and puts in booleans."""
    tree = RadixCache.create_simulated()
    for tokens in ([1, 2, 3], [1, 2, 3, 4], [9]):
        done = tree.insert(InsertParams(RadixKey(tokens, "lora"), torch.empty(len(tokens), dtype=torch.bool)))
        assert done.total_len == len(tokens)
    match = tree.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4, 5], "lora")))
    assert (
        len(match.device_indices)
        == match.device_prefix_len
        == 4
        == tree.get_height(match.last_device_node) + 2
    )
    assert found(tree, [1, 2, 3]).device_prefix_len == 0, "another namespace"
    assert (
        tree.evict(EvictParams(10)).num_tokens_evicted
        == 5
        == tree.token_to_kv_pool_allocator.alloc(5).numel()
    )
    tree.sanity_check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_own_numbers_are_used_again_and_never_twice(page_size: int) -> None:
    tree, seen = RadixCache.create_simulated(page_size=page_size), []
    for first in range(0, 400, 8):
        tree.insert(InsertParams(RadixKey(list(range(first, first + 8)))))
        if first % 40 == 0:
            tree.evict(EvictParams(24))
        slots = tree.all_values_flatten().tolist()
        assert len(slots) == len(set(slots)) == tree.total_size()
        seen += slots
    assert max(seen) < 400, "those that were evicted are used again"
    tree.check()


def test_an_insert_without_a_value_takes_slots_of_the_allocator_and_evicts_for_them() -> None:
    cache = RadixCache(pure())
    for first in (0, 100, 200):
        cache.insert(InsertParams(RadixKey(list(range(first, first + 16)))))
        cache.check_conservation(0)
    assert found(cache, list(range(16))).device_prefix_len == 0
    assert found(cache, list(range(200, 216))).device_prefix_len == 16
    held = cache.inc_lock_ref(found(cache, list(range(200, 216))).last_device_node)
    with pytest.raises(Misuse, match="^value: 8 pages are needed"):
        cache.insert(InsertParams(RadixKey(list(range(300, 332)))))
    cache.dec_lock_ref(held)
    cache.check()


def test_where_slots_hold_data_a_value_is_needed() -> None:
    cache = RadixCache(params())
    with pytest.raises(Misuse, match="^value: "):
        cache.insert(InsertParams(RadixKey(list(range(8)))))
    assert cache.total_size() == 0


# -- what an insert says ------------------------------------------------------------------


def test_an_insert_gives_the_node_that_it_ended_in() -> None:
    cache = RadixCache(pure())
    slots = cache.token_to_kv_pool_allocator
    first = cache.insert(InsertParams(RadixKey(list(range(8))), slots.alloc(8)))
    done = cache.insert(InsertParams(RadixKey(list(range(13))), slots.alloc(16)[:13]))
    assert (first.prefix_len, first.total_len) == (0, 8) and (done.prefix_len, done.total_len) == (8, 12)
    held = cache.inc_lock_ref(done.last_device_node)
    assert cache.protected_size() == 12 and cache.get_height(done.last_device_node) in (1, 2)
    assert len(cache.path_device_indices(done.last_device_node)) == 12
    cache.dec_lock_ref(held)


def window_cache() -> Any:
    slots = HybridSlotAllocator(64, 32, SIZE)
    return SWARadixCache(CacheInitParams(False, ReqToTokenPool(2, 64), slots, SIZE, sliding_window_size=8))


def test_windows_that_the_request_has_freed_are_not_the_trees() -> None:
    cache = window_cache()
    slots = cache.token_to_kv_pool_allocator
    given = slots.alloc(16)
    stale = slots.full_to_swa_index_mapping.clone()
    slots.free_swa(given[:8])
    slots.full_to_swa_index_mapping.copy_(stale)  # an engine's map that still has them
    done = cache.insert(InsertParams(RadixKey(list(range(16))), given, swa_evicted_seqlen=8))
    assert (done.total_len, done.window_len) == (16, 8)
    assert cache.evictable_size() == cache.total_size() == (16, 8) and cache.protected_size() == (0, 0)
    cache.evict(EvictParams(100, 100))
    assert slots.swa_available_size() == 32, "freed once"


def test_sizes_of_states_are_pairs_too() -> None:
    records = PageAllocator(4, first_page=1)
    cache = StateRadixCache(
        CacheInitParams(False, ReqToTokenPool(2, 64), SlotAllocator(32, SIZE), SIZE, state_records=records)
    )
    slots = cache.token_to_kv_pool_allocator
    for is_there in (False, True):
        record = int(records.alloc(1)[0])
        done = cache.insert(InsertParams(RadixKey(list(range(8))), slots.alloc(8), mamba_value=record))
        assert done.mamba_exist == is_there
    assert cache.evictable_size() == (8, 1) and len(cache.all_mamba_values_flatten()) == 1
    assert records.available == 3 and slots.available_size() == 24


# -- events ------------------------------------------------------------------------------


def test_events_are_taken_where_they_were_asked_for() -> None:
    quiet, cache = RadixCache(pure()), RadixCache(pure(enable_kv_cache_events=True))
    for each in (quiet, cache):
        each.insert(InsertParams(RadixKey(list(range(8)))))
        each.evict(EvictParams(8))
    assert quiet.take_events() == []
    events = cache.take_events()
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [token for event in stored for token in event.token_ids] == list(range(8))
    assert isinstance(events[-1], BlockRemoved) and cache.take_events() == []


# -- keys --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens", [[3, 1, 2], array("q", [3, 1, 2]), np.array([3, 1, 2]), torch.tensor([3, 1, 2])]
)
def test_a_key_is_a_sequence(tokens: Any) -> None:
    key = RadixKey(tokens, "a")
    assert list(key) == key.token_ids == [3, 1, 2] and key == [3, 1, 2] and key != [3, 1]
    assert key[1:] == [1, 2] and key[-1] == [2] == key[2] and key[:0] == [] and key[1].extra_key == "a"
    assert key == RadixKey([3, 1, 2], "a") != RadixKey([3, 1, 2]) and hash(key) == hash(
        RadixKey([3, 1, 2], "a")
    )
    assert key != (3, 1, 2) and len({key, RadixKey([3, 1, 2], "a")}) == 1
    for index in (3, -4):
        with pytest.raises(IndexError):
            key[index]
    assert RadixKey(tokens, limit=2) == [3, 1] and RadixKey(tokens, limit=9) == [3, 1, 2]


def test_bigrams_are_pairs_and_may_be_given_as_such() -> None:
    key = RadixKey([1, 2, 3, 4]).bigrams()
    assert list(key) == [(1, 2), (2, 3), (3, 4)] and key[1:] == [(2, 3), (3, 4)] and key[0] == [(1, 2)]
    assert RadixKey([(1, 2), (2, 3), (3, 4)], is_bigram=True) == key
    with pytest.raises(TypeError, match="^token_ids: "):
        RadixKey([(1, 2), (3, 4)], is_bigram=True)


def test_a_foreign_key_and_foreign_records_are_read_by_their_attributes() -> None:
    cache = RadixCache(pure())
    key = SimpleNamespace(
        token_ids=array("q", range(8)), extra_key="x", is_bigram=False, limit=6, cache_salt="s"
    )
    done = cache.insert(SimpleNamespace(key=key, value=cache.token_to_kv_pool_allocator.alloc(8), priority=0))
    assert done.total_len == 4
    own = RadixKey(list(range(8)), "x", cache_salt="s")
    assert cache.match_prefix(SimpleNamespace(key=own)).device_prefix_len == 4
    asked = SimpleNamespace(num_tokens=4, swa_num_tokens=0, mamba_num=0)
    assert cache.evict(asked).num_tokens_evicted == 4

"""SWARadixCache as an engine uses it, on our hybrid allocator and on a stand-in with SGLang's surface."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hiradix.config import parse_extra_config
from hiradix.errors import ConfigError
from hiradix.memory import ReqToTokenPool, SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    SWAHiRadixCache,
    SWARadixCache,
)
from hiradix.tree import AS_INSERTED
from tests.prefix_cache.bench_engine import PATIENCE_S, Request, closed_after, failing_copies, prompt
from tests.prefix_cache.swa_bench import SwaBench

Make = Callable[..., SwaBench]


@pytest.fixture(params=[False, True], ids=["own-pools", "foreign-pools"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    def build(
        num_pages: int = 40, num_window_pages: int = 40, page_size: int = 1, window: int = 4, **switches: Any
    ) -> SwaBench:
        return SwaBench(num_pages, num_window_pages, page_size, window, foreign=request.param, **switches)

    yield from closed_after(build)


def insert(bench: SwaBench, tokens: list[int], shared: int = 0) -> int:
    """Insert computed tokens, the first `shared` of which the tree has; the length it had on the device."""
    device = matched(bench, tokens[:shared])
    assert len(device) == shared
    slots = torch.cat([device, bench.allocator.alloc(len(tokens) - shared)])
    return bench.cache.insert(InsertParams(RadixKey(tokens), slots, prev_prefix_len=shared)).prefix_len


def in_policy_order(bench: SwaBench) -> None:
    """Evict windows strictly by last use, spare ones too."""
    bench.cache.tree._residencies.use(AS_INSERTED)


def matched(bench: SwaBench, tokens: list[int]) -> torch.Tensor:
    return bench.cache.match_prefix(MatchPrefixParams(RadixKey(tokens))).device_indices


def test_a_prefix_that_lost_its_window_is_matched_only_where_a_window_is_whole(make: Make) -> None:
    """Upstream's test_swa_radix_cache_1 in our words: evict the window of the front, keep the full data."""
    bench = make(window=4)
    in_policy_order(bench)
    insert(bench, prompt(5))
    insert(bench, prompt(12), shared=5)
    done = bench.cache.evict(EvictParams(0, 5))
    assert done == EvictResult(0, 5), "window tokens alone"
    assert bench.cache.total_size() == (12, 7)
    assert len(matched(bench, prompt(5))) == 0
    assert len(matched(bench, prompt(8))) == 0, "three window tokens behind it"
    assert len(matched(bench, prompt(9))) == 9
    assert len(matched(bench, prompt(12))) == 12
    bench.check()


def test_window_pages_that_no_boundary_needs_go_first(make: Make) -> None:
    bench = make(window=4, num_pages=60, num_window_pages=60)
    insert(bench, prompt(10))
    insert(bench, prompt(30, 100))
    insert(bench, prompt(10) + prompt(8, 500), shared=10)
    spare = 6 + 26 + 4
    assert bench.cache.evict(EvictParams(0, spare)) == EvictResult(0, spare)
    ends = (prompt(10), prompt(30, 100), prompt(10) + prompt(8, 500))
    assert [len(matched(bench, tokens)) for tokens in ends] == [10, 30, 18], "every end can still be matched"
    bench.cache.evict(EvictParams(0, 4))
    assert [len(matched(bench, tokens)) for tokens in ends] == [0, 30, 18], "then the least recently used"
    bench.check()


def test_where_prompts_part_the_window_is_no_spare(make: Make) -> None:
    bench = make(window=4, num_pages=80, num_window_pages=80)
    system = prompt(12)
    insert(bench, system + prompt(10, 100))
    bench.cache.evict(EvictParams(0, 18))
    assert len(matched(bench, system + [7])) == 0, "nobody knew that prompts part here"
    insert(bench, system + prompt(10, 200))  # computes the system prompt again, and parts
    bench.cache.evict(EvictParams(0, 6))
    assert len(matched(bench, system + [7])) == 12
    bench.check()


def test_a_recomputed_prefix_gives_its_window_to_the_full_pages_that_are_there(make: Make) -> None:
    bench = make()
    insert(bench, prompt(8))
    insert(bench, prompt(12), shared=8)
    kept = matched(bench, prompt(12))[:8].clone()
    bench.cache.evict(EvictParams(0, 8))
    assert len(matched(bench, prompt(8))) == 0
    free = bench.allocator.full_available_size()
    insert(bench, prompt(8))
    assert bench.allocator.full_available_size() == free, "their full half is free again"
    assert torch.equal(matched(bench, prompt(8)), kept), "the full pages stayed"
    bench.check()


def test_s1_full_pages_that_a_request_reads_are_kept_when_their_window_is_recomputed(make: Make) -> None:
    bench = make(num_pages=200, num_window_pages=200, window=16)
    in_policy_order(bench)
    insert(bench, prompt(32))
    insert(bench, prompt(32) + prompt(32, 100), shared=32)
    reading = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(32) + prompt(32, 100))))
    receipt = bench.cache.inc_lock_ref(reading.last_device_node)
    assert bench.cache.swa_protected_size() < 64 == bench.cache.full_protected_size()
    bench.cache.evict(EvictParams(0, 32))
    assert bench.cache.total_size() == (64, 32)
    insert(bench, prompt(32))
    assert bench.cache.total_size() == (64, 64)
    assert torch.equal(matched(bench, prompt(32) + prompt(32, 100)), reading.device_indices)
    bench.cache.dec_lock_ref(reading.last_device_node, receipt)
    bench.check()
    assert bench.cache.full_protected_size() == bench.cache.swa_protected_size() == 0


def test_s3_what_goes_along_is_reported(make: Make) -> None:
    bench = make(num_pages=100, num_window_pages=100, window=8)
    insert(bench, prompt(32))
    insert(bench, prompt(32) + prompt(32, 100), shared=32)
    bench.cache.evict(EvictParams(0, 32))
    before = bench.allocator.full_available_size(), bench.allocator.swa_available_size()
    done = bench.cache.evict(EvictParams(0, 32))
    after = bench.allocator.full_available_size(), bench.allocator.swa_available_size()
    assert done == EvictResult(after[0] - before[0], after[1] - before[1])
    assert done.num_tokens_evicted == 64, "no match can end there any more"


def test_a_receipt_counts_the_window_it_locked(make: Make) -> None:
    bench = make(window=4)
    insert(bench, prompt(3))
    insert(bench, prompt(6), shared=3)
    insert(bench, prompt(20), shared=6)
    node = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(6)))).last_device_node
    receipt = bench.cache.inc_lock_ref(node)
    assert (bench.cache.full_protected_size(), bench.cache.swa_protected_size()) == (6, 4)
    done = bench.cache.evict(EvictParams(100, 100))
    assert done == EvictResult(14, 16), "a lock covers the window, to the token"
    matched(bench, prompt(4))  # splits what is locked
    bench.cache.dec_lock_ref(node, receipt)
    assert (bench.cache.full_evictable_size(), bench.cache.swa_evictable_size()) == (6, 4)
    other = bench.cache.inc_lock_ref(node)
    with pytest.raises(AssertionError, match="given back twice"):
        bench.cache.dec_lock_ref(node, receipt)
    assert (bench.cache.full_protected_size(), bench.cache.swa_protected_size()) == (6, 4), "of the other one"
    bench.cache.dec_lock_ref(node, other)
    with pytest.raises(AssertionError, match="without a receipt"):
        bench.cache.dec_lock_ref(node)


def test_windows_before_a_gap_that_nobody_holds_are_freed(make: Make) -> None:
    bench = make(window=4)
    slots = bench.allocator.alloc(12)
    bench.allocator.free_swa(slots[4:8])
    bench.cache.insert(InsertParams(RadixKey(prompt(12)), slots))
    assert bench.cache.total_size() == (12, 4) and len(matched(bench, prompt(12))) == 12
    bench.check()


def test_what_may_not_be_inserted_over_a_failed_load_is_freed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = failing_copies(monkeypatch)
    bench = make(config=host_tier("write_through"), window=4)
    cache, allocator = bench.cache, bench.allocator
    insert(bench, prompt(12))
    bench.settle()
    cache.evict(EvictParams(100, 100))
    found = cache.match_prefix(MatchPrefixParams(RadixKey(prompt(12))))
    assert len(cache.init_load_back(found.last_host_node, found.host_hit_length)[0]) == 12
    receipt = cache.inc_lock_ref(found.last_host_node)
    failing[0] = True
    cache.ready_to_load_host_cache()
    bench.settle()
    assert cache.stats().load_failed == 12
    before = allocator.full_available_size(), allocator.swa_available_size()
    done = cache.insert(InsertParams(RadixKey(prompt(16)), allocator.alloc(16)))
    assert done.prefix_len == 16 and len(matched(bench, prompt(16))) == 0
    assert (allocator.full_available_size(), allocator.swa_available_size()) == before
    cache.dec_lock_ref(receipt)
    cache.check_hicache_events()
    assert cache.total_size() == (0, 0)
    bench.check()


def test_the_window_a_request_gave_up_is_a_gap_in_what_it_inserts(make: Make) -> None:
    bench = make(page_size=2, window=4)
    req = bench.start(prompt(5))
    for token in range(900, 916):
        assert bench.decode(req, token)
    bench.check()
    bench.finish(req)
    bench.check()
    full, window = bench.cache.total_size()
    assert full == 20 and window < full
    assert len(matched(bench, prompt(5) + list(range(900, 916)))) == 20


def test_texts_and_sizes_speak_of_both_pools(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    bench = make(window=4)
    in_policy_order(bench)
    insert(bench, prompt(5))
    insert(bench, prompt(12), shared=5)
    bench.cache.evict(EvictParams(0, 5))
    cache = bench.cache
    assert cache.supports_swa() and cache.is_tree_cache() and not cache.is_chunk_cache()
    text = cache.available_and_evictable_str()
    assert "Available full tokens: 40 (full_available_size=28 + full_evictable=12)" in text
    assert "Available swa tokens: 40 (swa_available_size=33 + swa_evictable=7)" in text
    assert sorted(cache.all_values_flatten().tolist()) == sorted(matched(bench, prompt(12)).tolist())
    cache.pretty_print()
    shown = capsys.readouterr().out
    assert "window: tombstone" in shown and "window: device" in shown and "hits" in shown
    cache.sanity_check()


def test_what_cannot_work_is_refused_by_name() -> None:
    plain = SlotAllocator(16, 1)
    rows = ReqToTokenPool(1, 16)
    with pytest.raises(ConfigError, match="sliding_window_size"):
        SWARadixCache(CacheInitParams(False, rows, plain, 1))
    with pytest.raises(ConfigError, match="full_to_swa_index_mapping"):
        SWARadixCache(CacheInitParams(False, rows, plain, 1, sliding_window_size=4))


# -- with a host tier, and at random --------------------------------------------------------


def host_tier(policy: str | None) -> dict[str, Any] | None:
    if policy is None:
        return None
    return {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_write_policy": policy}


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_was_evicted_comes_back_with_its_window(make: Make, policy: str) -> None:
    bench = make(config=host_tier(policy), page_size=2, window=6)
    bench.finish(bench.start(prompt(21)))
    bench.settle()
    bench.cache.evict(EvictParams(1000))
    assert bench.cache.total_size() == (0, 0)
    req = bench.start(prompt(21))  # verifies both pools
    assert (req.device_tokens, req.host_tokens) == (0, 20)
    assert bench.cache.total_size() == (20, 6), "full pages all, window pages as many as it takes"
    bench.check()
    bench.finish(req)
    bench.settle()
    bench.check()


def test_a_window_that_left_alone_is_a_host_hit_behind_full_pages_that_stay(make: Make) -> None:
    bench = make(config=host_tier("write_through"), page_size=2, window=6)
    bench.finish(bench.start(prompt(21)))
    bench.settle()
    assert bench.cache.evict(EvictParams(0, 1000)).num_tokens_evicted == 0
    match = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(20))))
    assert (len(match.device_indices), match.host_hit_length) == (0, 20)
    kept = bench.cache.all_values_flatten().sort().values
    req = bench.start(prompt(21))
    assert req.host_tokens == 20 and torch.equal(req.prefix_indices[:20].sort().values, kept)
    bench.check()


def test_load_back_needs_room_in_both_pools_or_does_nothing(make: Make) -> None:
    bench = make(config=host_tier("write_through"), num_window_pages=12, window=8)
    bench.finish(bench.start(prompt(12)))
    bench.settle()
    bench.cache.evict(EvictParams(1000))
    blocker = bench.start(prompt(6, start=500))
    match = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(12))))
    assert match.host_hit_length == 12
    before = bench.allocator.full_available_size(), bench.allocator.swa_available_size()
    indices, node = bench.cache.init_load_back(match.last_host_node, match.host_hit_length)
    assert len(indices) == 0 and node is bench.cache.root_node
    assert before == (bench.allocator.full_available_size(), bench.allocator.swa_available_size())
    bench.finish(blocker, insert=False)
    bench.settle()
    assert len(bench.cache.init_load_back(match.last_host_node, 12)[0]) == 12
    bench.settle()
    bench.check()


def test_what_may_not_be_inserted_behind_a_failed_load_is_freed(make: Make) -> None:
    """Found: `insert` said that the tree had it all, and neither its caller nor a pool got the slots."""
    bench = make(config=host_tier("write_through"), page_size=2, window=6)
    bench.finish(bench.start(prompt(20)))
    bench.settle()
    bench.cache.evict(EvictParams(1000))
    match = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(20))))
    loaded, node = bench.cache.init_load_back(match.last_host_node, match.host_hit_length)
    receipt = bench.cache.inc_lock_ref(node)
    for ticket in list(bench.cache.ongoing_load_back):
        bench.cache.controller.cancel(ticket)
    bench.cache.check_hicache_events()
    assert bench.cache.stats().load_failed and len(matched(bench, prompt(20))) == 0
    tokens = prompt(20) + prompt(8, 500)
    given = torch.cat([loaded[:6], bench.allocator.alloc(len(tokens) - 6)])
    done = bench.cache.insert(InsertParams(RadixKey(tokens), given, prev_prefix_len=4))
    assert done.prefix_len == len(tokens), "nothing of it is to be freed by the caller"
    bench.check()
    assert bench.cache.total_size()[0] == 20
    bench.cache.dec_lock_ref(receipt)
    bench.cache.check_hicache_events()
    bench.cache.evict(EvictParams(1))
    assert insert(bench, tokens) == 0
    bench.check()


def test_what_leaves_for_an_inserts_copy_down_is_no_part_of_its_answer(make: Make) -> None:
    """Found: device pages that leave as their window leaves the host were counted as found by the insert."""
    bench = make(config=host_tier("write_through"), page_size=2, window=6)
    insert(bench, prompt(20))
    bench.settle()
    bench.cache.evict(EvictParams(0, 1000))
    assert bench.cache.total_size() == (20, 0)
    supply = bench.cache.cache.supply
    room = supply.host_pools[1].available
    kept = supply.host_pools[1].alloc(room)
    assert insert(bench, prompt(8, 500)) == 0 and bench.cache.total_size() == (8, 8), "a dead leaf has left"
    bench.settle()
    supply.free_host(kept, 1)
    bench.check()


def stored(path: object, backend: str = "file", policy: str = "write_through") -> dict[str, Any]:
    extra: dict[str, object] = {f"{backend}_storage_path": str(path), "max_size": "4MiB"}
    extra |= {"prefetch_threshold": 4, "min_free_space": 0, "deadline_s": PATIENCE_S}
    return {
        **(host_tier(policy) or {}), "hicache_storage_backend": backend,
        "hicache_storage_prefetch_policy": "wait_complete", "hicache_no_regret": False,
        "hicache_storage_backend_extra_config": parse_extra_config(json.dumps(extra)),
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["file", "disk"])
def test_storage_brings_the_window_along_after_a_flush_and_in_another_cache(
    make: Make, tmp_path: object, backend: str
) -> None:
    bench = make(config=stored(tmp_path, backend), page_size=2, window=6)
    bench.finish(bench.start(prompt(33)))
    bench.settle()
    bench.cache.reset()
    assert bench.cache.total_size() == (0, 0)
    req = bench.start(prompt(33))  # verifies both pools
    assert req.host_tokens == 32 and bench.cache.pop_prefetch_loaded_tokens(req.rid) == 32
    bench.check()
    again = make(config=stored(tmp_path, backend), page_size=2, window=6)
    req = again.start(prompt(33))
    assert req.host_tokens == 0, "it has computed nothing yet that could be compared"
    again.finish(req)
    again.settle()
    again.cache.reset()
    before = again.cache.stats().storage["get_pages"]
    assert again.start(prompt(33)).host_tokens == 32
    window, full = (part.stats()["get_pages"] for part in reversed(again.cache.attached.storage.parts))
    assert (window - before, full - before) == (16 + 3, 16 + 3), "figures of calls are of both"


def test_another_window_length_finds_nothing(make: Make, tmp_path: object) -> None:
    bench = make(config=stored(tmp_path), window=6)
    bench.finish(bench.start(prompt(20)))
    bench.settle()
    other = make(config=stored(tmp_path), window=7)
    assert other.start(prompt(20)).host_tokens == 0


def test_storage_attached_cleared_and_detached_while_serving(make: Make, tmp_path: object) -> None:
    bench = make(config=host_tier("write_through"), window=6)
    cache = bench.cache
    extra = f'{{"file_storage_path": "{tmp_path}", "prefetch_threshold": 4, "deadline_s": {PATIENCE_S}}}'
    bench.finish(bench.start(prompt(20)))  # inserted before storage
    bench.settle()
    assert cache.attach_storage_backend("file", extra, hicache_storage_prefetch_policy="wait_complete")[0]
    bench.finish(bench.start(prompt(20)))
    bench.settle()
    cache.reset()
    assert bench.start(prompt(20)).host_tokens == 19
    assert cache.stats().storage["backend_window-6_evicted"] == 0
    bench.finish(bench.running[0])
    bench.settle()
    assert cache.clear_storage_backend()
    assert [part.exists(["0" * 64]) for part in cache.attached.storage.parts] == [0, 0]
    bench.finish(bench.start(prompt(20)))  # what is in use is offered again
    bench.settle()
    cache.reset()
    assert bench.start(prompt(20)).host_tokens == 19
    bench.settle()
    assert cache.detach_storage_backend()[0] and cache.attached.storage is None
    assert cache.attach_storage_backend("file", extra)[0] and len(cache.attached.storage.parts) == 2
    ok, message = cache.attach_storage_backend("file", extra)
    assert ok and "already enabled" in message


def test_storage_for_full_attention_only_is_refused_by_its_key(
    make: Make, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(config=host_tier("write_through"), window=6)
    extra = f'{{"file_storage_path": "{tmp_path}", "naming": "sglang"}}'
    ok, message = bench.cache.attach_storage_backend("file", extra)
    assert not ok and "naming: SGLang's files are full attention only, not window-6" in message
    closed, close = [], SWAHiRadixCache.close
    monkeypatch.setattr(SWAHiRadixCache, "close", lambda cache, *by: (closed.append(1), close(cache, *by)))
    with pytest.raises(ConfigError, match="naming"):
        make(config={**stored(tmp_path), "hicache_storage_backend_extra_config": parse_extra_config(extra)})
    assert len(closed) == 1, "a cache that nobody gets leaves no threads"


@pytest.mark.parametrize("page_size, window", [(1, 3), (4, 3), (4, 10), (16, 24)])
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_random_serving_with_storage_is_exact_in_both_pools(
    make: Make, tmp_path: object, page_size: int, window: int, policy: str
) -> None:
    num_pages = 64 // page_size + 6
    config = stored(tmp_path, "disk", policy)
    bench = make(num_pages, num_pages * 3 // 4, page_size, window, config=config)
    rng = random.Random(page_size * window)
    loaded, asked = 0, [prompt(3 * page_size)]

    def begin() -> Request | None:
        nonlocal loaded
        if not bench.running and rng.random() < 0.2:
            bench.cache.evict(EvictParams(10_000))
            bench.settle()
            bench.cache.reset()
        base = prompt(rng.randint(1, 3) * max(4, page_size), start=100 * rng.randint(0, 2))
        tail = [rng.randint(900, 901) for _ in range(rng.randint(1, 6))]
        asked.append(rng.choice([base + tail, rng.choice(asked)]))
        req = bench.start(asked[-1], share=rng.random() < 0.8)
        loaded += 0 if req is None else bench.cache.pop_prefetch_loaded_tokens(req.rid)
        return req

    bench.live(rng, 200, begin)
    assert bench.cache.full_protected_size() == bench.cache.swa_protected_size() == 0
    assert loaded > 0


@pytest.mark.parametrize("page_size, window", [(1, 3), (1, 8), (4, 3), (4, 4), (4, 10), (16, 24)])
@pytest.mark.parametrize("policy", [None, "write_through", "write_through_selective", "write_back"])
def test_random_serving_is_exact_in_both_pools(
    make: Make, page_size: int, window: int, policy: str | None
) -> None:
    num_pages = 64 // page_size + 6
    bench = make(num_pages, num_pages * 3 // 4, page_size, window, config=host_tier(policy))
    rng = random.Random(page_size * window)

    def begin() -> Request | None:
        base = prompt(rng.randint(1, 3) * max(4, page_size), start=100 * rng.randint(0, 2))
        tail = [rng.randint(900, 901) for _ in range(rng.randint(1, 6))]
        return bench.start(base + tail, share=rng.random() < 0.8)

    device_hits, host_hits = bench.live(rng, 200, begin)
    assert bench.cache.full_protected_size() == bench.cache.swa_protected_size() == 0
    assert device_hits + host_hits > 30 and (host_hits > 0 or policy is None)
    bench.cache.evict(EvictParams(10_000))
    assert bench.cache.total_size() == (0, 0)

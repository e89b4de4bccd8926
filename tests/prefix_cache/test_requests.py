"""What a request carries through the classes, and what a cache says of itself in tokens and not in pages."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.explain import Reason
from hiradix.prefix_cache import EvictParams, InsertParams, MatchPrefixParams, RadixKey
from hiradix.prefix_cache.records import WINDOW
from hiradix.tree import Tier
from tests.prefix_cache.bench_engine import PATIENCE_S, Bench, Request, closed_after, prompt
from tests.prefix_cache.swa_bench import SwaBench

Make = Callable[..., Bench]
HOST: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}
CAT, DOG = [None, b"cat" * 8], [None, b"dog" * 8]


@pytest.fixture
def make() -> Iterator[Make]:
    def build(num_pages: int = 16, is_windowed: bool = False, **config: Any) -> Bench:
        names = ("disable", "disable_finished_insert", "is_eagle")
        switches = {name: config.pop(name, False) for name in names}
        if is_windowed:
            switches["eviction_policy"] = config.get("radix_eviction_policy", "lru")
            return SwaBench(num_pages, num_pages, 4, 8, config=HOST | config, **switches)
        return Bench(HiCacheConfig(page_size=4, **(HOST | config)), num_pages, **switches)

    yield from closed_after(build)


def storage(path: object) -> dict[str, Any]:
    given = {"file_storage_path": str(path), "prefetch_threshold": 4, "deadline_s": PATIENCE_S}
    text = json.dumps(given)
    return {
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": parse_extra_config(text),
    }


def served(bench: Bench, tokens: list[int], **carried: Any) -> tuple[int, int]:
    """A request from start to end: what it found on the device and below."""
    req = bench.start(tokens, **carried)
    assert req is not None
    bench.finish(req)
    bench.settle()
    return req.device_tokens, req.host_tokens


@pytest.mark.parametrize("is_windowed", [False, True], ids=["full", "windows"])
def test_two_images_behind_equal_placeholders_share_nothing_in_any_tier(
    make: Make, tmp_path: object, is_windowed: bool
) -> None:
    """The bench stamps pages with the extras up to them, so a wrong page is seen where it is read."""
    bench = make(64, is_windowed, **storage(tmp_path))
    assert served(bench, prompt(20), page_extras=CAT) == (0, 0)
    assert sum(served(bench, prompt(20), page_extras=DOG)) <= 4, "device: what lies before the image"
    assert served(bench, prompt(20), page_extras=CAT) == served(bench, prompt(20), page_extras=DOG) == (16, 0)
    bench.cache.evict(EvictParams(1000, 1000))
    assert sum(served(bench, prompt(20))) <= 4, "host: none but what lies before them"
    assert sum(served(bench, prompt(20), page_extras=CAT)) == 16
    bench.cache.reset()
    assert sum(served(bench, prompt(20), page_extras=[None, b"cow" * 8])) <= 4, "storage"
    bench.cache.reset()
    assert served(bench, prompt(20), page_extras=DOG) == (0, 16)
    bench.check()


def test_pages_behind_an_image_are_fetched_though_no_request_says_which(make: Make, tmp_path: object) -> None:
    """The node that they follow knows its namespace and its images."""
    bench = make(64, **storage(tmp_path))
    carried = {"page_extras": [b"cat" * 8], "extra_key": "adapter", "cache_salt": "tenant"}
    served(bench, prompt(20), **carried)
    bench.cache.reset()
    served(bench, prompt(9), **carried)
    bench.settle()
    key = RadixKey(prompt(20), "adapter", cache_salt="tenant", page_extras=carried["page_extras"])
    found = bench.cache.match_prefix(MatchPrefixParams(key))
    assert found.last_host_node.end == 2
    assert bench.cache.prefetch_from_storage("r", found.last_host_node, prompt(12, start=8))
    while not bench.cache.check_prefetch_progress("r"):
        assert bench.cache.controller.wait_any(PATIENCE_S)
        bench.cache.check_hicache_events()
    assert bench.cache.pop_prefetch_loaded_tokens("r") >= 8
    assert bench.cache.match_prefix(MatchPrefixParams(key)).last_host_node.end >= 4
    bench.check()


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("form", [partial(array, "q"), np.array, torch.tensor], ids=["q", "numpy", "torch"])
def test_a_prefetch_keeps_the_tokens_it_was_asked_for(
    make: Make, tmp_path: object, form: Callable[[list[int]], Any], is_eagle: bool
) -> None:
    """It may outlive its request, whose buffer the engine uses again."""
    bench = make(64, is_eagle=is_eagle, **storage(tmp_path))
    served(bench, prompt(21))
    bench.cache.reset()
    root, tokens = bench.cache.root_node, form(prompt(21))
    req = Request("r", prompt(21), fill_ids=tokens)
    assert bench.cache.prefetch_from_storage("r", root, tokens[:-1], req=req)
    tokens[:] = form(prompt(21, start=500))
    if isinstance(tokens, array):
        tokens.append(7)  # nobody may have a view of it
    while not bench.cache.check_prefetch_progress("r"):
        assert bench.cache.controller.wait_any(PATIENCE_S)
        bench.cache.check_hicache_events()
    assert sum(served(bench, prompt(21, start=500))) == 0, "what was read lies under other tokens"
    assert sum(served(bench, prompt(21))) == (16 if is_eagle else 20)
    bench.check()


def test_who_inserts_nothing_at_the_end_keeps_what_it_shared_before(make: Make) -> None:
    bench = make(disable_finished_insert=True)
    free = bench.allocator.available_size()
    req = bench.start(prompt(6))
    for token in range(900, 909):
        assert bench.decode(req, token)
    bench.finish(req)
    bench.settle()
    assert bench.cache.total_size() == 4 and bench.allocator.available_size() == free - 4
    bench.check()


@pytest.mark.parametrize("quota", [0, 8, 19])
def test_a_load_that_the_quota_does_not_cover_is_none(make: Make, quota: int) -> None:
    bench = make()
    served(bench, prompt(21))
    bench.cache.evict(EvictParams(1000))
    found = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(20))))
    assert found.host_hit_length == 20
    assert not len(bench.cache.init_load_back(found.last_host_node, 20, mem_quota=quota)[0])
    assert bench.cache.stats().load_refused == 20 and bench.cache.full_protected_size() == 0
    assert bench.cache.cache.load_refusal is Reason.NO_ROOM
    bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(20))))
    assert bench.cache.cache.load_refusal is None, "no reason of the next request's, which asks for no load"
    assert len(bench.cache.init_load_back(found.last_host_node, 20, mem_quota=20)[0]) == 20
    bench.settle()
    bench.check()


def test_a_load_that_gets_pages_of_one_pool_alone_gives_them_back(make: Make) -> None:
    bench = make(40, is_windowed=True)
    served(bench, prompt(21))
    bench.cache.evict(EvictParams(1000, 1000))
    found = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(20))))
    allocator = bench.allocator.swa_attn_allocator
    free = bench.allocator.full_available_size(), bench.allocator.swa_available_size()
    bench.cache._beside.pages._allocator = Refusing(bench.allocator)
    assert not len(bench.cache.init_load_back(found.last_host_node, found.host_hit_length)[0])
    bench.cache._beside.pages._allocator = bench.allocator
    assert bench.allocator.swa_attn_allocator is allocator
    assert free == (bench.allocator.full_available_size(), bench.allocator.swa_available_size())
    assert bench.cache.full_protected_size() == bench.cache.swa_protected_size() == 0
    assert bench.cache.stats().load_refused == 20
    assert len(bench.cache.init_load_back(found.last_host_node, found.host_hit_length)[0]) == 20
    bench.settle()
    bench.check()


class Refusing:
    """A hybrid allocator whose window half has pages and gives none."""

    def __init__(self, inner: Any):
        self._inner = inner
        self.swa_attn_allocator = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        return None


def test_counts_are_of_tokens(make: Make, tmp_path: object) -> None:
    bench = make(8, **storage(tmp_path))
    served(bench, prompt(21))
    stats = bench.cache.stats()
    assert (stats.written, stats.backed_up, stats.evicted_device, stats.loaded) == (20, 20, 0, 0)
    assert (stats.host_total, stats.host_used) == (64, 20)
    bench.cache.evict(EvictParams(1000))
    assert bench.cache.stats().evicted_device == 20 and bench.cache.stats().evicted_host == 0
    served(bench, prompt(21))
    assert bench.cache.stats().loaded == 20
    bench.cache.reset()
    served(bench, prompt(21))
    assert bench.cache.stats().prefetched == 20
    for number in range(6):
        served(bench, prompt(21, start=1000 * number))
    stats = bench.cache.stats()
    assert stats.evicted_host > 0 and stats.evicted_host % 4 == 0
    assert stats.host_used == bench.cache.tree.resident_pages(Tier.HOST) * 4


def test_windows_that_leave_are_no_evicted_tokens(make: Make) -> None:
    """Tokens are counted once, by their full pages."""
    bench = make(40, is_windowed=True)
    served(bench, prompt(21))
    bench.cache.cache.supply.evict(Tier.HOST, 100, WINDOW)
    assert bench.cache.tree.resident_pages(Tier.HOST, WINDOW) == bench.cache.stats().evicted_host == 0
    bench.cache.evict(EvictParams(0, 4))
    assert bench.cache.stats().evicted_device == 0
    done = bench.cache.evict(EvictParams(1000))
    assert bench.cache.stats().evicted_device == done.num_tokens_evicted == 20


def test_an_insert_counts_as_a_use_of_what_it_found(make: Make) -> None:
    bench = make(hicache_write_policy="write_through_selective")
    for number in range(2):
        slots = bench.allocator.alloc(8)
        done = bench.cache.insert(InsertParams(RadixKey(prompt(8)), slots))
        if done.prefix_len:
            bench.allocator.free(slots[: done.prefix_len])
        bench.settle()
        assert (done.prefix_len, bench.cache.stats().written) == ((0, 0), (8, 8))[number]
    assert bench.cache.full_protected_size() == 0
    bench.check()


@pytest.mark.parametrize("is_windowed", [False, True], ids=["full", "windows"])
@pytest.mark.parametrize("direct", [False, True], ids=["requests", "inserts"])
def test_priority_decides_what_stays(make: Make, is_windowed: bool, direct: bool) -> None:
    """Also of what a request found, and below the default; the larger of several counts."""
    bench = make(64, is_windowed, radix_eviction_policy="priority", enable_hierarchical_cache=False)

    def use(tokens: list[int], priority: int | None) -> None:
        if not direct:
            served(bench, tokens, priority=priority)
            return
        slots = bench.allocator.alloc(len(tokens))
        params = InsertParams(RadixKey(tokens), slots, priority=priority)
        found = bench.cache.insert(params).prefix_len
        if not is_windowed:
            bench.allocator.free(slots[:found])

    first = [100, 300, 500, 700, 900]
    for start, priority in zip(first, (5, None, 7, -2, -3)):
        use(prompt(16, start), priority)
    use(prompt(16, 900), -1)
    use(prompt(16, 100), None)
    for gone in (700, 900, 300, 100):
        bench.cache.evict(EvictParams(16))
        first.remove(gone)
        keys = [RadixKey(prompt(16, start)) for start in (100, 300, 500, 700, 900)]
        there = [len(bench.cache.match_prefix(MatchPrefixParams(key)).device_indices) > 0 for key in keys]
        assert there == [start in first for start in (100, 300, 500, 700, 900)], gone
    bench.check()

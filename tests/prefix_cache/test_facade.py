"""The drop-in classes as an engine uses them, on our pools and on a stand-in with SGLang's surface."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.errors import StorageError
from hiradix.memory import HybridSlotAllocator, ReqToTokenPool, SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
    SWARadixCache,
)
from hiradix.prefix_cache.slots import MANY_SLOTS, RowCopies, SlotTable, pages_of, slots_of
from tests.prefix_cache.bench_engine import PATIENCE_S, Bench, Request, closed_after, prompt
from tests.prefix_cache.swa_bench import SwaBench

Make = Callable[..., Bench]


@pytest.fixture(params=[False, True], ids=["own-pools", "foreign-pools"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    def build(num_pages: int = 16, page_size: int = 4, **config: object) -> Bench:
        defaults = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "page_size": page_size}
        switches = {name: bool(config.pop(name, False)) for name in ("disable", "is_eagle")}
        return Bench(HiCacheConfig(**{**defaults, **config}), num_pages, foreign=request.param, **switches)  # type: ignore[arg-type]

    yield from closed_after(build)


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_no_hit_crosses_a_namespace_in_any_tier(make: Make, tmp_path: object, field: str) -> None:
    bench = make(**storage(tmp_path))
    bench.finish(bench.start(prompt(20), **{field: "a"}))
    bench.settle()
    other = bench.start(prompt(20), **{field: "b"})
    assert other.device_tokens == other.host_tokens == 0
    bench.finish(other)
    bench.cache.evict(EvictParams(1000))
    assert bench.start(prompt(20), **{field: "c"}).host_tokens == 0
    bench.finish(bench.running[0])
    bench.settle()
    bench.cache.reset()
    fetched = bench.start(prompt(20), **{field: "d"})
    assert fetched.host_tokens == 0, "storage crossed the namespace"
    same = bench.start(prompt(20), **{field: "a"})
    assert same.host_tokens == 16, "the positive half: the same namespace does hit in storage"


def test_storage_quotas_are_of_the_requests_tenant(make: Make, tmp_path: object) -> None:
    limits = {"quotas": {"salt:none": 0, "key:none": 0}, "quota": "1MiB"}
    bench = make(num_pages=64, **storage(tmp_path, **limits, quota_path=f"{tmp_path}/accounts"))
    tenants = [{"cache_salt": "none"}, {"extra_key": "none"}, {"extra_key": "none", "cache_salt": "some"}, {}]
    for tenant in tenants:
        bench.finish(bench.start(prompt(20), **tenant))
        bench.settle()
    bench.cache.reset()
    assert [bench.start(prompt(20), **tenant).host_tokens for tenant in tenants] == [0, 0, 16, 16]


def extra_of(path: object, **keys: object) -> str:
    given = {"file_storage_path": str(path), "prefetch_threshold": 4, "deadline_s": PATIENCE_S}
    return json.dumps(given | keys)


def storage(path: object, **keys: object) -> dict[str, object]:
    text = extra_of(path, **keys)
    return {
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": parse_extra_config(text),
    }


def test_load_back_is_all_or_nothing(make: Make) -> None:
    bench = make(num_pages=8)
    bench.finish(bench.start(prompt(24)))
    bench.settle()
    bench.cache.evict(EvictParams(1000))
    blocker = bench.start(prompt(16, start=500))
    match = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(24))))
    assert match.host_hit_length == 24
    before = bench.allocator.available_size()
    indices, node = bench.cache.init_load_back(match.last_host_node, match.host_hit_length)
    assert len(indices) == 0 and node is bench.cache.root_node
    assert bench.allocator.available_size() == before
    indices, node = bench.cache.init_load_back(match.last_host_node, 24, mem_quota=8)
    assert len(indices) == 0
    bench.finish(blocker)
    bench.settle()
    indices, node = bench.cache.init_load_back(match.last_host_node, 24)
    assert len(indices) == 24 and node is match.last_host_node
    bench.settle()
    bench.check()


def test_storage_hit_after_flush_and_in_a_new_process_image(make: Make, tmp_path: object) -> None:
    bench = make(**storage(tmp_path))
    bench.finish(bench.start(prompt(33)))
    bench.settle()
    bench.cache.reset()
    assert bench.cache.total_size() == 0
    req = bench.start(prompt(33))
    assert req.host_tokens == 32 and bench.cache.pop_prefetch_loaded_tokens(req.rid) == 32
    again = make(**storage(tmp_path))
    req = again.start(prompt(33))
    assert req.host_tokens == 0, "it has computed nothing yet that could be compared"
    again.finish(req)
    again.settle()
    again.cache.reset()
    assert again.start(prompt(33)).host_tokens == 32
    assert again.cache.stats().storage["canary_adopted"] == 1


def test_insert_and_evict_as_upstream_counts_them(make: Make) -> None:
    bench = make()
    slots = bench.allocator.alloc(8)
    assert bench.cache.insert(InsertParams(RadixKey(prompt(8)), slots)).prefix_len == 0
    mine = bench.allocator.alloc(12)
    assert bench.cache.insert(InsertParams(RadixKey(prompt(12)), mine)).prefix_len == 8
    bench.allocator.free(mine[:8])
    bench.check()
    bench.settle()
    assert bench.cache.evict(EvictParams(1)).num_tokens_evicted >= 1
    assert bench.cache.full_evictable_size() + bench.cache.full_protected_size() == bench.cache.total_size()


def test_lock_pins_and_unlock_releases(make: Make) -> None:
    bench = make()
    slots = bench.allocator.alloc(8)
    bench.cache.insert(InsertParams(RadixKey(prompt(8)), slots))
    bench.settle()
    node = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(8)))).last_device_node
    receipt = bench.cache.inc_lock_ref(node)
    assert receipt.delta == -8
    assert bench.cache.evict(EvictParams(100)).num_tokens_evicted == 0
    assert bench.cache.dec_lock_ref(receipt) == 8
    assert bench.cache.evict(EvictParams(100)).num_tokens_evicted == 8


def test_a_node_that_was_merged_away_since_its_match_is_a_lock_of_its_own(make: Make) -> None:
    """As engines do that keep no receipt; while a request waits, a long path of others may become free."""
    bench = make(64)
    cache, held = bench.cache, []
    for end in range(4, 164, 4):
        shared = cache.match_prefix(MatchPrefixParams(RadixKey(prompt(end)))).device_indices
        slots = torch.cat([shared, bench.allocator.alloc(4)])
        cache.insert(InsertParams(RadixKey(prompt(end)), slots))
        held.append(cache.match_prefix(MatchPrefixParams(RadixKey(prompt(end)))).last_device_node)
        cache.inc_lock_ref(held[-1])
    bench.settle()
    tokens = [*prompt(48), 900]
    req = Request("r", tokens, fill_ids=tokens, req_pool_idx=bench.rows.alloc(1)[0], committed=len(tokens))
    bench._match(req)
    for node in held:
        cache.dec_lock_ref(node)
    assert req.last_node.parent is None and cache.full_protected_size() == 0, "it was not merged away"
    assert cache.inc_lock_ref(req.last_node).delta == -48
    assert cache.inc_lock_ref(req.last_node).delta == 0
    assert cache.dec_lock_ref(req.last_node) == 0 and cache.full_protected_size() == 48
    assert cache.dec_lock_ref(req.last_node) == 48, "the other one was not given back"
    cache.inc_lock_ref(req.last_node)
    row = torch.cat([req.prefix_indices, bench.allocator.alloc(4)])
    bench.rows.write((req.req_pool_idx, slice(0, len(row))), row.to(torch.int32))
    bench.running.append(req)
    bench._write(req, 48, 49)
    for token in (901, 902, 903, 904):
        assert bench.decode(req, token)
    cache.cache_unfinished_req(req)
    bench.check()
    cache.cache_finished_req(req)
    bench.running.clear()
    bench.settle()
    assert cache.full_protected_size() == 0 and cache.total_size() == 164
    bench.check()


def test_a_receipt_given_back_twice_is_refused_at_once(make: Make) -> None:
    """Not when the last holder gives its own back: that one has done nothing wrong."""
    bench = make()
    bench.cache.insert(InsertParams(RadixKey(prompt(8)), bench.allocator.alloc(8)))
    bench.settle()
    node = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(8)))).last_device_node
    receipt, other = bench.cache.inc_lock_ref(node), bench.cache.inc_lock_ref(node)
    assert bench.cache.dec_lock_ref(receipt) == 0
    with pytest.raises(AssertionError, match="given back twice"):
        bench.cache.dec_lock_ref(receipt)
    assert bench.cache.evict(EvictParams(100)).num_tokens_evicted == 0
    assert bench.cache.dec_lock_ref(other) == 8


def test_attach_detach_messages_and_effect(make: Make, tmp_path: object) -> None:
    bench = make()
    extra = extra_of(tmp_path)
    cache = bench.cache
    assert cache.detach_storage_backend() == (True, "Detached HiCache storage backend successfully.")
    ok, message = cache.attach_storage_backend("file", extra, hicache_storage_prefetch_policy="nonsense")
    assert not ok and message.startswith("Invalid hicache_storage_prefetch_policy: 'nonsense'")
    ok, message = cache.attach_storage_backend("file", "{broken")
    assert not ok and message.startswith("Failed to parse storage_backend_extra_config_json")
    ok, message = cache.attach_storage_backend("no-such-backend", extra)
    assert not ok and message.startswith("Failed to attach storage backend 'no-such-backend'")
    assert not cache.enable_storage
    bench.finish(bench.start(prompt(16)))  # inserted before storage: its hashes come later
    bench.settle()
    ok, message = cache.attach_storage_backend("file", extra, hicache_storage_prefetch_policy="wait_complete")
    assert (ok, message) == (True, "Attached HiCache storage backend successfully.")
    ok, message = cache.attach_storage_backend("file", extra)
    assert ok and "policies updated" in message
    ok, message = cache.attach_storage_backend("other", extra)
    assert not ok and "Cannot attach different backend 'other'" in message
    bench.finish(bench.start(prompt(30)))
    bench.settle()
    cache.reset()
    req = bench.start(prompt(30))
    assert req.host_tokens == 28, "pages inserted before the attach are stored under whole-prefix keys"
    bench.finish(req)
    bench.settle()
    assert cache.clear_storage_backend()
    cache.reset()
    assert bench.start(prompt(30)).host_tokens == 0
    assert cache.detach_storage_backend()[0] and not cache.enable_storage


def test_a_backend_that_may_not_be_attached_is_closed_again(make: Make, tmp_path: object) -> None:
    cache, extra = make(**storage(tmp_path)).cache, extra_of(tmp_path)
    opened = cache.attached.open("file", extra)
    ok, message = cache.attached.attach_opened(opened)
    assert not ok and "storage is attached already" in message
    made, opens = [], cache.attached.factory
    cache.attached.factory = lambda *given: made.append(opens(*given)) or made[-1]
    with pytest.raises(StorageError, match="attached already"):
        cache.attached.attach("file", parse_extra_config(extra))
    assert not opened.storage.ping() and [store.ping() for store in made] == [False]
    assert cache.attached.storage.ping() and cache.storage_name == "file"


def test_a_request_that_waits_no_longer_goes_on_with_what_is_there(make: Make, tmp_path: object) -> None:
    bench = make(**storage(tmp_path))
    bench.finish(bench.start(prompt(20)))
    bench.settle()
    bench.cache.reset()
    req, root = Request("r", prompt(20), fill_ids=prompt(20)), bench.cache.tree.root
    assert bench.cache.prefetch_from_storage("r", root, prompt(20)[:-1], req=req)
    assert not bench.cache.check_prefetch_progress("r"), "it waits for all of it, and no step has been made"
    bench.cache.terminate_prefetch("r")
    assert bench.cache.check_prefetch_progress("r") and bench.cache.pop_prefetch_loaded_tokens("r") == 0
    bench.settle()
    assert bench.cache.num_in_flight == 0


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_serving_is_exact_and_conserves_pages(
    make: Make, tmp_path: object, policy: str, page_size: int
) -> None:
    bench = make(
        num_pages=48 // page_size, page_size=page_size, hicache_write_policy=policy, **storage(tmp_path)
    )
    rng = random.Random(7)

    def begin() -> Request | None:
        base = prompt(rng.randint(1, 3) * 4, start=100 * rng.randint(0, 3))
        return bench.start(base + [rng.randint(900, 902) for _ in range(rng.randint(1, 6))])

    hits = sum(bench.live(rng, 250, begin))
    assert bench.cache.full_protected_size() == 0 and hits > 100


def test_a_prompt_repeated_word_for_word_is_counted_and_written(make: Make) -> None:
    """Row 28: the second use is due under write_through_selective though it adds nothing to the tree."""
    bench = make(hicache_write_policy="write_through_selective")
    bench.finish(bench.start(prompt(10)))
    bench.settle()
    assert bench.cache.stats().written == 0
    bench.finish(bench.start(prompt(10)))
    bench.settle()
    assert bench.cache.stats().written == 8


@pytest.mark.parametrize("policy", ["lru", "ghd", "2q"])
def test_storage_gets_what_is_worth_no_room_on_the_host(make: Make, tmp_path: object, policy: str) -> None:
    """Asked in turns, more than both tiers hold: who learns keeps some of it, and refused the rest."""
    bench = make(radix_eviction_policy=policy, hicache_ratio=1.0, **storage(tmp_path))
    asked = [[100 * number + i for i in range(18)] for number in range(12)]
    for _ in range(5):
        for tokens in asked:
            bench.finish(bench.start(tokens))
            bench.settle()
    bench.cache.reset()
    for tokens in asked:
        req = bench.start(tokens)
        assert req.device_tokens + req.host_tokens == 16
        bench.finish(req)


@pytest.mark.parametrize("policy", ["lru", "ghd", "2q"])
def test_what_a_request_shared_is_written_though_its_answer_adds_no_page(make: Make, policy: str) -> None:
    """A policy that learns has pages of a running request wait for its end: they were never written where
    the answer was shorter than a page."""
    bench = make(radix_eviction_policy=policy)
    bench.finish(bench.start(prompt(10)))
    bench.settle()
    assert bench.cache.stats().written == 8


def test_a_request_may_finish_without_having_shared_anything_before(make: Make) -> None:
    bench = make(hicache_write_policy="write_through_selective")
    bench.finish(bench.start(prompt(10)))
    req = bench.start(prompt(14), share=False)
    bench.finish(req)
    bench.settle()
    bench.check()
    assert bench.cache.stats().written == 8, "its prefix was used a second time"
    assert bench.start(prompt(14)).device_tokens == 12


@pytest.mark.parametrize("anchored", [False, True])
def test_bigram_keys_reach_storage_from_any_node_with_or_without_the_request(
    make: Make, tmp_path: object, anchored: bool
) -> None:
    bench = make(is_eagle=True, **storage(tmp_path))
    bench.finish(bench.start(prompt(22)))
    bench.settle()
    bench.cache.reset()
    cache, tokens = bench.cache, prompt(22)
    if anchored:
        bench.cache.detach_storage_backend()
        bench.finish(bench.start(tokens[:10]))
        bench.settle()
        assert cache.attach_storage_backend("file", extra_of(tmp_path))[0]
        bench.finish(bench.start(tokens[:10]))  # what it has computed is put, and compared
        bench.settle()
    node = cache.match_prefix(MatchPrefixParams(RadixKey(tokens))).last_host_node
    assert node.end == (2 if anchored else 0)
    assert cache.prefetch_from_storage("r", node, tokens[node.end * 4 :])
    while not cache.check_prefetch_progress("r"):
        assert cache.controller.wait_any(PATIENCE_S)
        cache.check_hicache_events()
    match = cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))
    assert match.last_host_node.end == 5


def test_a_growing_request_keeps_its_row_and_what_was_given_out_before() -> None:
    copies, table = RowCopies(), torch.arange(500, dtype=torch.int32)
    last, given = None, []
    for length in range(20, 500, 24):
        kept = max(0, length - 30)
        table[kept:length] += 1000  # slots beyond what is kept may have been exchanged
        last = copies.copy("r", table[:length], last, kept)
        assert last.dtype == torch.int64 and torch.equal(last, table[:length].to(torch.int64))
        given.append((last, kept, table[:kept].to(torch.int64)))
    assert all(torch.equal(copy[:kept], want) for copy, kept, want in given)
    assert len({copy.data_ptr() for copy, *_ in given}) < len(given) / 2, "copied anew for every chunk"


@pytest.mark.parametrize("forget", [False, True])
def test_a_row_that_is_not_the_one_copied_last_is_copied_whole(forget: bool) -> None:
    copies = RowCopies()
    copies.copy("r", torch.arange(8, dtype=torch.int32), None, 0)
    other = torch.arange(100, 112, dtype=torch.int32)  # the same request came back with other slots
    last = other[:8].to(torch.int64)
    if forget:
        copies.forget("r")
    assert torch.equal(copies.copy("r", other, last, 8), other.to(torch.int64))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_slots_of_many_pages_are_those_of_few(page_size: int) -> None:
    pages = np.random.default_rng(5).permutation(20_000)[: 2 * MANY_SLOTS // page_size].astype(np.int32)
    parts = [slots_of(part, page_size) for part in np.array_split(pages, 64)]
    slots = slots_of(pages, page_size)
    assert slots.dtype == torch.int64 and torch.equal(slots, torch.cat(parts))
    assert np.array_equal(pages_of(slots, page_size), pages)
    for num_pages in (20_000, 10):  # all of them, or fewer than the allocator has
        assert torch.equal(SlotTable(num_pages, page_size).of(pages), slots)


class ElsewhereTensor(torch.Tensor):
    """A tensor that says it is on another device, and must be brought to the CPU to be read."""

    is_cpu = False

    def numpy(self, *, force: bool = False) -> np.ndarray:
        raise TypeError("this tensor is on another device")

    def cpu(self, *args: object) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_of_slots_on_another_device_are_those_on_the_cpu(page_size: int) -> None:
    pages = np.array([7, 3, 9, 1, 4, 8], np.int32)
    slots = slots_of(pages, page_size).as_subclass(ElsewhereTensor)
    assert np.array_equal(pages_of(slots, page_size), pages)
    found = pages_of(slots, page_size, page_size, 5 * page_size)
    assert np.array_equal(found, pages[1:5]) and found.dtype == np.int32


def test_nothing_is_kept_of_a_request_that_has_ended(make: Make) -> None:
    """A server sees new ids for ever."""
    bench = make(page_size=4)
    for is_insert in (True, False, True):
        bench.finish(bench.start(prompt(20)), insert=is_insert)
        bench.settle()
        assert not bench.cache._counted and not bench.cache._copies._grown
    bench.check()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_counts_may_be_numpys(make: Make, kind: type) -> None:
    """Found: the compiled form raised TypeError after a part was done, and the pages were nobody's."""
    bench = make(64, enable_hierarchical_cache=True, hicache_ratio=2.0)
    request = bench.start(prompt(20), priority=kind(3))
    request.cache_protected_len = kind(request.cache_protected_len)
    bench.decode(request, 5)
    bench.cache.cache_unfinished_req(request)
    request.cache_protected_len, request.committed = kind(request.cache_protected_len), kind(21)
    bench.finish(request)
    bench.check()
    bench.settle()
    assert bench.cache.evict(EvictParams(kind(1000))).num_tokens_evicted == 20
    match = bench.cache.match_prefix(MatchPrefixParams(RadixKey(prompt(20))))
    loaded, _ = bench.cache.init_load_back(match.last_host_node, kind(match.host_hit_length), kind(100))
    assert len(loaded) == 20
    slots = bench.allocator.alloc(kind(8))
    bench.cache.insert(InsertParams(RadixKey(prompt(8, 50)), slots, priority=kind(1)))
    bench.cache.note_prefill(kind(100), np.float32(0.1))
    assert bench.cache.drain(np.float64(5))
    bench.check()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_sizes_may_be_numpys(kind: type) -> None:
    """Found: the compiled form raised TypeError for each of the classes."""
    page_size, rows = kind(4), ReqToTokenPool(8, 64)
    plain, hybrid = SlotAllocator(64, 4), HybridSlotAllocator(64, 32, page_size=4)
    for cache in (
        RadixCache(CacheInitParams(False, rows, plain, page_size)),
        SWARadixCache(CacheInitParams(False, rows, hybrid, page_size, sliding_window_size=kind(8))),
    ):
        slots = cache.token_to_kv_pool_allocator.alloc(16)
        cache.insert(InsertParams(RadixKey(prompt(16)), slots))
        assert cache.full_evictable_size() == 16 and type(cache.page_size) is int
        assert cache.sliding_window_size in (None, 8)
        cache.check()


@pytest.mark.parametrize("num_tokens", [8.0, "8", None])
def test_what_is_no_count_changes_nothing(make: Make, num_tokens: object) -> None:
    bench = make(64)
    bench.finish(bench.start(prompt(20)))
    with pytest.raises(TypeError):
        bench.cache.evict(EvictParams(num_tokens))  # type: ignore[arg-type]
    bench.check()
    windows = SwaBench(64, 64, 4, 8)
    windows.finish(windows.start(prompt(20)))
    with pytest.raises(TypeError):
        windows.cache.evict(EvictParams(20, num_tokens))  # type: ignore[arg-type]
    assert windows.cache.total_size() == (20, 20)
    windows.close()


def test_an_attach_under_another_name_is_refused_by_name(make: Make, tmp_path: object) -> None:
    bench = make(enable_hierarchical_cache=True, hicache_ratio=2.0)
    extra, own = json.dumps({"file_storage_path": str(tmp_path)}), bench.cache.attached.served_model_name
    ok, message = bench.cache.attach_storage_backend("file", extra, served_model_name="another")
    assert not ok and message.startswith("served_model_name: 'another'") and not bench.cache.enable_storage
    ok, message = bench.cache.attach_storage_backend("file", extra, served_model_name=own)
    assert ok and bench.cache.enable_storage, message


@pytest.mark.parametrize("is_windowed", [False, True], ids=["full", "windows"])
def test_what_is_no_priority_changes_nothing(is_windowed: bool) -> None:
    """Found: what had been inserted by then stayed locked, and was the caller's and the tree's."""
    bench = SwaBench(64, 64, 4, 8) if is_windowed else Bench(HiCacheConfig(page_size=4), 64, disable=False)
    slots = bench.allocator.alloc(8)
    with pytest.raises(TypeError):
        bench.cache.insert(InsertParams(RadixKey(prompt(8, 50)), slots, priority=1.5))  # type: ignore[arg-type]
    bench.allocator.free(slots)
    request = bench.start(prompt(20))
    bench.decode(request, 5)
    request.priority = 1.5
    before = bench.cache.total_size(), bench.cache.full_protected_size()
    with pytest.raises(TypeError):
        bench.cache.cache_unfinished_req(request)
    assert (bench.cache.total_size(), bench.cache.full_protected_size()) == before
    request.priority = None
    bench.finish(request)
    assert bench.cache.full_protected_size() == 0
    bench.check()
    bench.close()


@pytest.mark.parametrize("policy", ["lru", "ghd"])
def test_a_hint_that_is_none_changes_nothing(policy: str) -> None:
    """Found: where a policy learns, what had been inserted by then stayed locked."""
    bench = Bench(HiCacheConfig(page_size=4, radix_eviction_policy=policy), 64, disable=False)
    request = bench.start(prompt(20), session_hint="stay")
    for _ in range(4):
        bench.decode(request, 5)
    with pytest.raises(ValueError, match="hint: 'stay' is not one of end_of_session"):
        bench.cache.cache_finished_req(request)
    with pytest.raises(ValueError, match="hint: 'stay' is not one of end_of_session"):
        bench.cache.hint(RadixKey(prompt(20)), "stay")
    assert bench.cache.total_size() == 20
    request.session_hint = "end_of_session"
    bench.finish(request)
    assert bench.cache.total_size() == 24 and bench.cache.full_protected_size() == 0
    bench.check()
    bench.close()

"""What SGLang's own tests of its caches assert, on our class over SGLang's pools and records.

SGLang's tests are not in its wheel; the names here are theirs, or say which behaviour it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang.srt.disaggregation.kv_events import BlockStored
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    CacheRequestOutcome,
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from hiradix.tree import Tier
from tests.sglang.rig import NUM_TOKENS, PAGE, Rig, WindowRig


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


PROMPT = ids(100, 8 * PAGE)
STEM = PROMPT[: 4 * PAGE]


def on_host() -> Rig:
    """PROMPT was computed, and is on the host only."""
    rig = Rig()
    rig.run(PROMPT + [1])
    rig.settle()
    rig.evict_all()
    return rig


def in_storage(folder: Path) -> Rig:
    """PROMPT was computed, and is in storage only."""
    rig = Rig(folder)
    rig.run(PROMPT + [1])
    rig.settle()
    rig.cache.reset()
    return rig


def test_split_pending_write_through_publishes_fragments() -> None:
    """A node is split while its copy to the host runs: both halves arrive there, and are told of."""
    rig = Rig()
    rig.driver.held.add("write")
    rig.run(PROMPT + [1])
    assert len(rig.cache.ongoing_write_through) == 1
    rig.run(STEM + ids(500, 4 * PAGE) + [1])  # splits what is being copied
    rig.cache.take_events()
    rig.driver.held.clear()
    rig.settle()
    assert not rig.cache.ongoing_write_through
    told = [e for e in rig.cache.take_events() if isinstance(e, BlockStored) and e.medium == "CPU_PINNED"]
    assert sum(len(event.block_hashes) for event in told) == 12
    rig.evict_all()
    found = rig.match(rig.request(PROMPT + [1]))
    assert (found.device_prefix_len, found.host_hit_length) == (0, len(PROMPT))
    rig.check()


def test_span_includes_what_was_inserted_concurrently(tmp_path: Path) -> None:
    """Prefetch attribution: what came from storage is told with its place, behind what others computed."""
    rig = in_storage(tmp_path)
    req = rig.request(PROMPT + [1])
    rig.driver.held.add("fetch")
    handle = rig.prefetch(req)
    rig.run(STEM + [1])  # computes the first half in the meantime
    rig.driver.held.clear()
    rig.settle()
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.cache.pop_prefetch_loaded_span(handle) == (len(PROMPT) - len(STEM), len(STEM))
    found = rig.match(req)
    assert found.device_prefix_len + found.host_hit_length == len(PROMPT)
    rig.check()


def test_legacy_pop_cleans_up(tmp_path: Path) -> None:
    rig = in_storage(tmp_path)
    handle = rig.prefetch(rig.request(PROMPT + [1]))
    rig.settle()
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.cache.pop_prefetch_loaded_tokens(handle) == len(PROMPT)
    assert rig.cache.pop_prefetch_loaded_span(handle) == (0, None)


def test_abort_cleans_up(tmp_path: Path) -> None:
    rig = in_storage(tmp_path)
    rig.driver.held.add("fetch")
    handle = rig.prefetch(rig.request(PROMPT + [1]))
    assert not rig.cache.check_prefetch_progress(handle)
    rig.cache.finish(handle, CacheRequestOutcome.ABORT)
    rig.driver.held.clear()
    rig.settle()
    assert rig.cache.pop_prefetch_loaded_span(handle) == (0, None)
    assert not rig.cache.ongoing_prefetch and rig.cache.inner.num_in_flight == 0
    assert rig.match(rig.request(PROMPT + [1])).host_hit_length == 0, "nobody waited for it any more"
    rig.check()


def test_an_unknown_handle_is_no_reason_to_wait() -> None:
    assert Rig().cache.check_prefetch_progress(CacheRequestHandle("nobody", 3))


SPACES = (
    {},
    {"extra_key": "a"},
    {"extra_key": "b"},
    {"cache_salt": "a"},
    {"extra_key": "a", "cache_salt": "a"},
)


def test_extra_key_isolation(tmp_path: Path) -> None:
    """Equal tokens of several namespaces, in every tier."""
    rig = Rig(tmp_path)
    for number, space in enumerate(SPACES):
        for other in SPACES[number:]:
            found = rig.match(rig.request(PROMPT + [1], **other))
            assert found.device_prefix_len == found.host_hit_length == 0
        rig.run(PROMPT + [1], **space)
    rig.settle()
    assert all(rig.match(rig.request(PROMPT + [1], **s)).device_prefix_len == len(PROMPT) for s in SPACES)
    rig.evict_all()
    assert all(rig.match(rig.request(PROMPT + [1], **s)).host_hit_length == len(PROMPT) for s in SPACES)
    rig.cache.reset()
    stranger = rig.prefetch(rig.request(PROMPT + [1], extra_key="c"))
    known = rig.prefetch(rig.request(PROMPT + [1], cache_salt="a"))
    rig.settle()
    for handle, num_tokens in ((stranger, 0), (known, len(PROMPT))):
        assert rig.cache.check_prefetch_progress(handle)
        assert rig.cache.pop_prefetch_loaded_span(handle)[0] == num_tokens
    for space in SPACES:
        arrived = len(PROMPT) if space == {"cache_salt": "a"} else 0
        assert rig.match(rig.request(PROMPT + [1], **space)).host_hit_length == arrived
    rig.check()


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
@pytest.mark.parametrize("value", ["\ud800", "a\udfff"], ids=ascii)
def test_a_namespace_that_is_no_text_is_refused_at_the_door(
    field: str, value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is served, from pages of its equals alone, and nothing raises where storage is asked."""
    rig = Rig(tmp_path)
    rig.run(PROMPT + [1])
    for num_found in (0, len(PROMPT)):
        found = rig.run(PROMPT + [1], **{field: value})
        assert found.device_prefix_len == num_found
    rig.settle()
    rig.cache.reset()
    req = rig.request(PROMPT + [1], **{field: value})
    handle = rig.prefetch(req)
    rig.settle()
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.cache.num_not_text > 0 and caplog.text.count(f"{field}: half a character") == 1
    rig.check()


def test_eagle_keys_are_bigrams() -> None:
    """A page of bigrams needs the token behind it; matches end a token earlier."""
    rig = Rig(is_eagle=True)
    rig.run(PROMPT + [1])
    hits = [rig.match(rig.request(PROMPT[:n] + [999, 1])).device_prefix_len for n in (3, 4, 5, 8, 9)]
    assert hits == [0, 0, 4, 4, 8]
    rig.settle()
    rig.evict_all()
    again = rig.match(rig.request(PROMPT + [1, 1]))
    assert again.host_hit_length == len(PROMPT)
    rig.check()


def test_load_back_brings_all_that_was_promised_byte_for_byte() -> None:
    rig = on_host()
    for buffer in (*rig.kvcache.k_buffer, *rig.kvcache.v_buffer):
        buffer.zero_()
    req = rig.request(PROMPT + [1])
    found = rig.admit(req)
    assert found.host_hit_length == len(PROMPT) and req.prefix_len == len(PROMPT)
    rig.driver.run()
    assert torch.equal(rig.data(req.last_node), torch.tensor(PROMPT, dtype=torch.float32))
    rig.finish(req)
    rig.settle()
    rig.check()


def test_load_back_refused_leaves_the_device_prefix() -> None:
    """Nothing can be evicted for it: nothing is loaded, and the request is computed from where it was."""
    rig = on_host()
    held = rig.allocator.alloc(NUM_TOKENS - 4 * PAGE)
    req = rig.request(PROMPT + [1])
    found = rig.match(req)
    loaded = rig.cache.init_load_back(
        InitLoadBackParams(found.best_match_node, found.host_hit_length, None, req)
    )
    assert loaded == (0, req.last_node)
    rig.allocator.free(held)
    rig.check()


def test_a_load_whose_request_was_not_admitted_ends_all_the_same() -> None:
    rig = on_host()
    req = rig.request(PROMPT + [1])
    found = rig.match(req)
    params = InitLoadBackParams(found.best_match_node, found.host_hit_length, None, req)
    assert rig.cache.init_load_back(params)[0] == len(PROMPT)
    assert len(rig.cache.ongoing_load_back) == 1
    rig.settle()  # no batch was made of it
    rig.cache.check_hicache_events()
    rig.settle()
    assert not rig.cache.ongoing_load_back
    rig.check()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_write_policies(policy: str) -> None:
    """Which use brings a prompt to the host: the first, the second, or its eviction."""
    rig = Rig(hicache_write_policy=policy)
    num_backed_up = []
    for _ in range(2):
        rig.run(PROMPT + [1])
        rig.settle()
        host = rig.cache.token_to_kv_pool_host
        num_backed_up.append(host.logical_size - host.available_size())
    rig.evict_all()
    rig.settle()
    num_backed_up.append(host.logical_size - host.available_size())
    expected = {
        "write_through": [32, 32, 32],
        "write_through_selective": [0, 32, 32],
        "write_back": [0, 0, 32],
    }
    assert num_backed_up == expected[policy]
    rig.check()


def test_locks_move_tokens_between_evictable_and_protected() -> None:
    rig = Rig()
    rig.run(PROMPT + [1])
    rig.settle()
    node = rig.match(rig.request(PROMPT + [1])).last_device_node
    taken = rig.cache.inc_lock_ref(node)
    assert taken.delta == -len(PROMPT)
    assert (rig.cache.evictable_size(), rig.cache.protected_size()) == (0, len(PROMPT))
    assert rig.cache.evict(EvictParams(num_tokens=NUM_TOKENS)).num_tokens_evicted == 0
    assert rig.cache.dec_lock_ref(node, taken.to_dec_params()).delta == len(PROMPT)
    rig.evict_all()
    assert rig.cache.evictable_size() == rig.cache.protected_size() == 0
    rig.check()


def test_duplicates_of_concurrent_requests_are_freed_once() -> None:
    rig = Rig()
    pair = [rig.request(PROMPT + [n]) for n in (1, 2)]
    for req in pair:
        rig.admit(req)
    for req in pair:
        rig.cache.checkpoint(req, up_to=len(PROMPT))  # in the middle of the run
    rows = [rig.rows.req_to_token[req.kv.req_pool_idx, : len(PROMPT)].tolist() for req in pair]
    assert rows[0] == rows[1]
    for req in pair:
        rig.finish(req)
    rig.settle()
    assert rig.cache.evictable_size() == len(PROMPT)
    rig.check()


def test_a_match_looks_no_further_than_its_limit() -> None:
    rig = Rig()
    rig.run(PROMPT + [1])
    key = RadixKey(rig.request(PROMPT).origin_input_ids, limit=2 * PAGE + 1)
    assert rig.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len == 2 * PAGE


def test_touch_prefix_keeps_what_waits() -> None:
    """A waiting request's prefix is touched, and is not the first to go."""
    rig = Rig()
    rig.run(PROMPT + [1])
    rig.run(ids(900, 8 * PAGE) + [1])
    rig.settle()
    rig.cache.touch_prefix(RadixKey(rig.request(PROMPT).origin_input_ids))
    rig.cache.evict(EvictParams(num_tokens=8 * PAGE))
    assert rig.match(rig.request(PROMPT + [1])).device_prefix_len == len(PROMPT)
    assert rig.match(rig.request(ids(900, 8 * PAGE) + [1])).device_prefix_len == 0


def test_priority_decides_what_stays() -> None:
    rig = Rig(radix_eviction_policy="priority")
    for start, priority in ((100, 5), (300, None), (500, 7)):
        req = rig.request(ids(start, 8 * PAGE) + [1])
        req.priority = priority
        rig.admit(req)
        rig.finish(req)
    rig.settle()
    for expected in ([32, 0, 32], [0, 0, 32]):
        rig.cache.evict(EvictParams(num_tokens=8 * PAGE))
        asked = [rig.request(ids(start, 8 * PAGE) + [1]) for start in (100, 300, 500)]
        assert [rig.match(req).device_prefix_len for req in asked] == expected
    rig.check()


def test_swa_eviction_match() -> None:
    """Upstream's test_swa_radix_cache_1: a prefix that lost its window is matched only behind a whole one."""
    rig = WindowRig()
    rig.run(STEM + [1])
    rig.run(PROMPT + [1])
    rig.settle()
    rig.cache.inner.cache.supply.evict(Tier.HOST, NUM_TOKENS)  # the host has none of it

    def matched(*asked: list[int]) -> list[int]:
        return [rig.match(rig.request(tokens + [1])).device_prefix_len for tokens in asked]

    assert matched(STEM, PROMPT) == [len(STEM), len(PROMPT)]
    evict = rig.cache.evict(EvictParams(num_tokens=0, swa_num_tokens=6 * PAGE))
    assert (evict.num_tokens_evicted, evict.swa_num_tokens_evicted) == (0, 6 * PAGE), "window tokens alone"
    assert rig.cache.full_evictable_size() == len(PROMPT) and rig.cache.swa_evictable_size() == 2 * PAGE
    assert matched(STEM, PROMPT[: 6 * PAGE], PROMPT[: 7 * PAGE], PROMPT) == [0, 0, 0, len(PROMPT)]
    rig.check()


def test_swa_locks_cover_the_window_alone() -> None:
    rig = WindowRig()
    rig.run(PROMPT + [1])
    rig.settle()
    node = rig.match(rig.request(PROMPT + [1])).last_device_node
    taken = rig.cache.inc_lock_ref(node)
    assert (rig.cache.full_protected_size(), rig.cache.swa_protected_size()) == (len(PROMPT), rig.window)
    assert rig.cache.dec_lock_ref(node, taken.to_dec_params()).delta == len(PROMPT)
    assert (rig.cache.full_protected_size(), rig.cache.swa_protected_size()) == (0, 0)
    rig.check()


def test_swa_windows_come_back_from_the_host() -> None:
    rig = WindowRig()
    rig.run(PROMPT + [1])
    rig.settle()
    rig.evict_all()
    rig.cache.evict(EvictParams(num_tokens=0, swa_num_tokens=NUM_TOKENS))
    req = rig.request(PROMPT + [1])
    found = rig.admit(req)
    assert (found.host_hit_length, found.swa_host_hit_length) == (len(PROMPT), rig.window)
    rig.settle()
    slots = torch.tensor(rig.slots_of(req)[: len(PROMPT)])
    beside = rig.allocator.full_to_swa_index_mapping[slots]
    expected = torch.tensor(PROMPT, dtype=torch.float32)
    assert torch.equal(rig.kvcache.full_kv_pool.k_buffer[0][slots][:, 0, 0], expected)
    assert (beside > 0).tolist() == [False] * (len(PROMPT) - 2 * PAGE) + [True] * (2 * PAGE)
    window = rig.kvcache.swa_kv_pool.k_buffer[0][beside[-2 * PAGE :]][:, 0, 0]
    assert torch.equal(window, expected[-2 * PAGE :])
    rig.finish(req)
    rig.settle()
    rig.check()


def test_our_names_are_taken_by_the_command_line() -> None:
    from sglang.srt.server_args import prepare_server_args

    from hiradix.adapters.sglang.plugin import activate

    activate()
    flags = ["--model-path", "m", "--radix-eviction-policy", "ghd", "--hicache-storage-backend", "disk"]
    args = prepare_server_args(flags)
    assert (args.hicache_storage_backend, args.radix_eviction_policy) == ("disk", "ghd")

"""What SGLang's scheduler relies on, call by call: chunks, aborts, flushes, quotas, layers; no server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams

from hiradix.adapters.sglang.weights import Weights
from hiradix.config import parse_extra_config
from hiradix.storage.attach.rules import AttachRules, parse_rule
from hiradix.tree import Tier
from tests.sglang.rig import LAYERS, NUM_TOKENS, PAGE, Request, Rig, stored_in
from tests.sglang.test_named_after_upstream import PROMPT, STEM, in_storage, on_host


def asked(rig: Rig, req: Request, quota: int | None = None) -> tuple[int, int]:
    """What a request was promised of the host, and what it got: tokens."""
    found = rig.match(req)
    params = InitLoadBackParams(found.best_match_node, found.host_hit_length, quota, req)
    num_loaded, node = rig.cache.init_load_back(params)
    assert (num_loaded > 0) == (node is not req.last_node)
    return found.host_hit_length, num_loaded


def test_a_layer_is_read_only_when_it_has_been_loaded() -> None:
    """The workers stand still until somebody waits for a layer."""
    rig = on_host()
    for buffer in (*rig.kvcache.k_buffer, *rig.kvcache.v_buffer):
        buffer.zero_()
    req = rig.request(PROMPT + [1])
    rig.admit(req)
    slots = rig.slots_of(req)[: len(PROMPT)]
    expected = torch.tensor(PROMPT, dtype=torch.float32)
    for layer in range(LAYERS):
        keys, values = rig.kvcache.get_key_buffer(layer), rig.kvcache.get_value_buffer(layer)
        assert torch.equal(keys[slots][:, 0, 0], expected) and torch.equal(values[slots][:, 0, 0], expected)
    rig.finish(req)
    rig.settle()
    rig.check()


def test_a_chunked_request_runs_on_what_the_tree_holds() -> None:
    """After each chunk its node, lock and row are the tree's, and nothing evicts them."""
    rig = Rig()
    req = rig.request(PROMPT + [1])
    rig.admit(req)
    own = rig.slots_of(req)
    for end in (3 * PAGE + 1, 5 * PAGE, 8 * PAGE + 1):
        rig.cache.checkpoint(req, up_to=end)
        whole = end // PAGE * PAGE
        assert req.last_node is req.lock.node and req.kv.cache_protected_len == whole
        assert req.last_node.end * PAGE == whole and rig.slots_of(req) == own
        rig.evict_all()
        assert rig.cache.path_device_indices(req.last_node).tolist() == own[:whole]
        assert (rig.cache.protected_size(), rig.cache.evictable_size()) == (whole, 0)
    rig.finish(req)
    rig.settle()
    assert (rig.cache.protected_size(), rig.cache.evictable_size()) == (0, len(PROMPT))
    rig.check()


def test_a_chunk_that_another_has_computed_meanwhile_moves_the_row() -> None:
    rig = Rig()
    first, second = rig.request(PROMPT + [1]), rig.request(PROMPT + [2])
    for req in (first, second):
        rig.admit(req)
    rig.cache.checkpoint(first, up_to=len(PROMPT))
    before = rig.slots_of(second)
    for end in (4 * PAGE, 8 * PAGE):
        rig.cache.checkpoint(second, up_to=end)
        assert rig.slots_of(second) == rig.slots_of(first)[:end] + before[end:]
    for req in (first, second):
        rig.finish(req)
    rig.settle()
    rig.check()


def test_a_request_grows_behind_a_match_that_ended_inside_a_node() -> None:
    """What a match has looked at is SGLang's own array, which grows while the request runs."""
    rig = Rig()
    rig.run(PROMPT + [1])
    req = rig.request(PROMPT[: 5 * PAGE] + [7] * (3 * PAGE - 1))
    assert rig.admit(req).device_prefix_len == 5 * PAGE
    req.output_ids.append(7)
    req.refresh_fill_ids()
    assert len(req.full_untruncated_fill_ids) == 8 * PAGE
    rig.cache.checkpoint(req, up_to=7 * PAGE)
    rig.finish(req)
    assert rig.match(rig.request(PROMPT[: 5 * PAGE] + [7] * (3 * PAGE))).device_prefix_len == 7 * PAGE
    rig.check()


def test_what_is_kept_is_what_a_request_has_computed_not_what_it_was_matched_by() -> None:
    """SGLang builds the array anew where tokens change, as for images that are appended."""
    rig = Rig()
    req = rig.request([3] * 4 * PAGE + [1])
    rig.admit(req)
    req.origin_input_ids = type(req.origin_input_ids)("q", [4] * 4 * PAGE + [1])
    req.full_untruncated_fill_ids = req.origin_input_ids[:0]
    rig.finish(req)
    found = [rig.match(rig.request([token] * 4 * PAGE + [1])).device_prefix_len for token in (3, 4)]
    assert found == [0, 4 * PAGE]
    rig.check()


@pytest.mark.parametrize("num_tokens", [1, PAGE, PAGE + 1])
def test_an_eviction_frees_whole_pages_and_says_how_many_tokens(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    rig, told = Rig(), []
    for first in range(1, 6):
        rig.run([first] * PAGE + [1])
    monkeypatch.setattr(rig.cache, "update_eviction_metrics", lambda count, since: told.append(count))
    before = rig.allocator.available_size()
    freed = rig.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted
    assert freed == -(-num_tokens // PAGE) * PAGE == rig.allocator.available_size() - before
    assert told == [freed]
    rig.check()


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_an_aborted_request_gives_everything_back(num_chunks: int) -> None:
    rig = Rig()
    rig.run(STEM + [1])
    req = rig.request(PROMPT + [1])
    rig.admit(req)
    for _ in range(num_chunks):
        rig.cache.checkpoint(req, up_to=6 * PAGE)
    rig.abort(req)
    rig.settle()
    kept = 6 * PAGE if num_chunks else len(STEM)
    assert (rig.cache.protected_size(), rig.cache.evictable_size()) == (0, kept)
    rig.evict_all()
    assert rig.allocator.available_size() == NUM_TOKENS
    rig.check()


def test_an_aborted_request_that_is_asked_again_is_another_use() -> None:
    """Selective write-through copies down what is used twice."""
    rig = Rig(hicache_write_policy="write_through_selective")
    host = rig.cache.token_to_kv_pool_host
    for num_written in (0, len(STEM)):
        req = rig.request(PROMPT + [1])
        req.rid = "again"
        rig.admit(req)
        rig.cache.checkpoint(req, up_to=len(STEM))
        rig.abort(req)
        rig.settle()
        assert host.logical_size - host.available_size() == num_written
    rig.check()


def test_rows_are_freed_in_several_parts() -> None:
    """As after speculative decoding, where what was accepted and what was allocated end apart."""
    rig = Rig()
    req = rig.request(PROMPT + [1])
    rig.admit(req)
    seam = PAGE + 1  # inside a page, which is freed once
    rig.cache.free_kv_row(req.kv, [(0, seam), (seam, 3 * PAGE + 1), (5 * PAGE, len(PROMPT) + 1)])
    assert rig.allocator.available_size() == NUM_TOKENS - PAGE
    rig.cache.free_kv_row(req.kv, [(4 * PAGE, 4 * PAGE), (4 * PAGE, 5 * PAGE)])
    assert rig.allocator.available_size() == NUM_TOKENS
    rig.cache.unlock(req.lock)
    rig.check()


def test_a_load_back_within_its_quota_or_not_at_all() -> None:
    rig = on_host()
    req = rig.request(PROMPT + [1])
    assert asked(rig, req, len(PROMPT) - 1) == (len(PROMPT), 0)
    assert rig.cache.evictable_size() == rig.cache.protected_size() == 0
    assert asked(rig, req, len(PROMPT)) == (len(PROMPT), len(PROMPT))
    rig.cache.ready_to_load_host_cache()
    rig.settle()
    rig.check()


def test_a_host_hit_that_has_gone_since_is_not_loaded_in_part() -> None:
    """SGLang matches, and asks for the load later; in between the host may have made room."""
    rig = on_host()
    rig.run(STEM + [1])
    rig.settle()
    req = rig.request(PROMPT + [1])
    found = rig.match(req)
    assert (found.device_prefix_len, found.host_hit_length) == (len(STEM), len(PROMPT) - len(STEM))
    rig.cache.inner.cache.supply.evict(Tier.HOST, 2)
    left = rig.match(rig.request(PROMPT + [1])).host_hit_length
    assert left < found.host_hit_length
    params = InitLoadBackParams(found.best_match_node, found.host_hit_length, None, req)
    assert rig.cache.init_load_back(params) == (0, req.last_node)
    rig.check()


def test_a_prefetch_continues_what_is_cached(tmp_path: Path) -> None:
    rig = in_storage(tmp_path)
    rig.run(STEM + [1])
    rig.settle()
    req = rig.request(PROMPT + [1])
    handle = rig.prefetch(req)
    rig.settle()
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.cache.pop_prefetch_loaded_span(handle) == (len(PROMPT) - len(STEM), len(STEM))
    found = rig.match(req)
    assert (found.device_prefix_len, found.host_hit_length) == (len(STEM), len(PROMPT) - len(STEM))
    rig.check()


BY_NAMES = {"hicache_storage_identity": "rig"}
"""What pages are called is all that tells them apart: nothing is compared (test_canary.py)."""


def test_what_an_adapter_stored_is_another_ones_when_it_is_trained_further(tmp_path: Path) -> None:
    """SGLang's id of an adapter given at the start is made of name and path: the same after a restart."""
    lora = "0f" * 16

    def stored(weights: str, **space: str) -> int:
        """Tokens that an SGLang started with these weights finds in storage; it stores what it has not."""
        rig = Rig(tmp_path, adapters={lora: weights}, **BY_NAMES)
        handle = rig.prefetch(rig.request(PROMPT + [1], **space))
        rig.settle()
        assert rig.cache.check_prefetch_progress(handle)
        num_tokens = int(rig.cache.pop_prefetch_loaded_span(handle)[0])
        rig.run(PROMPT + [1], **space)
        assert rig.match(rig.request(PROMPT + [1], **space)).device_prefix_len == len(PROMPT)
        rig.settle()
        rig.check()
        return num_tokens

    for key in (lora, "tenant" + lora):
        assert [stored(weights, extra_key=key) for weights in ("a", "b", "a")] == [0, 0, len(PROMPT)]
    assert [stored(weights, extra_key="other") for weights in "ab"] == [0, len(PROMPT)]


def test_what_other_weights_stored_is_found_by_nobody(tmp_path: Path) -> None:
    """Changed in place, as SGLang does it; it flushes then. As they were again, and at the next start."""
    rig, model = Rig(tmp_path, **BY_NAMES), torch.nn.Linear(8, 8)
    extra = parse_extra_config(stored_in(tmp_path))
    rig.cache.watch(Weights(model), extra)
    found = []

    def asked(rig: Rig, first: int) -> None:
        """How much of a prompt storage has; what it has not is stored."""
        tokens = [first] * PAGE + PROMPT + [1]
        handle = rig.prefetch(rig.request(tokens))
        rig.settle()
        assert rig.cache.check_prefetch_progress(handle)
        found.append(int(rig.cache.pop_prefetch_loaded_span(handle)[0]))
        rig.run(tokens)
        rig.settle()
        rig.cache.reset()
        rig.check()

    for factor, first in ((1.0, 1), (1.0, 1), (2.0, 1), (1.0, 1), (1.0, 2), (0.5, 1), (1.0, 2)):
        with torch.no_grad():
            model.weight.mul_(factor)
        rig.cache.reset()
        asked(rig, first)
    rig.cache.release_host_resources()
    asked(Rig(tmp_path, **BY_NAMES), 1)
    asked(Rig(tmp_path, **BY_NAMES), 3)
    whole = len(PROMPT) + PAGE
    assert found == [0, whole, 0, whole, 0, whole, 0, whole, 0]


def test_what_is_computed_after_an_update_without_a_flush_is_found_by_nobody(tmp_path: Path) -> None:
    """It was stored as the first weights', and found when they were back; prompts cached before it too."""
    rig, model = Rig(tmp_path, **BY_NAMES), torch.nn.Linear(8, 8)
    extra = parse_extra_config(stored_in(tmp_path))
    rig.cache.watch(Weights(model), extra)

    def put_in(factor: float) -> None:
        with torch.no_grad():
            model.weight.mul_(factor)
        rig.cache.weights_put_in()

    def in_storage(rig: Rig, first: int) -> int:
        handle = rig.prefetch(rig.request([first] * PAGE + PROMPT + [1]))
        rig.settle()
        assert rig.cache.check_prefetch_progress(handle)
        return int(rig.cache.pop_prefetch_loaded_span(handle)[0])

    def run(first: int) -> None:
        rig.run([first] * PAGE + PROMPT + [1])
        rig.settle()

    run(1)
    put_in(2.0)
    opened = rig.cache.inner.attached.storage
    for first, factor in ((1, 2.0), (2, 0.5)):
        run(first)
        put_in(factor)  # in parts, as by SGLang's buckets: storage is not opened anew for each
    assert rig.cache.inner.attached.storage is opened is not None
    rig.cache.reset()  # from here on they have a name
    assert [in_storage(rig, first) for first in (1, 2)] == [0, 0]
    run(3)
    rig.cache.weights_put_in()  # the same
    with torch.no_grad():
        model.weight.mul_(0.5)
    rig.cache.reset()
    whole = len(PROMPT) + PAGE
    assert [in_storage(rig, first) for first in (1, 2, 3)] == [whole, 0, 0]
    put_in(2.0)
    run(4)
    with torch.no_grad():
        model.weight.mul_(0.5)
    rig.cache.reset()  # the first ones are back before any flush
    assert [in_storage(rig, first) for first in (1, 4)] == [whole, 0]
    rig.check()
    rig.cache.release_host_resources()
    assert in_storage(Rig(tmp_path, **BY_NAMES), 2) == 0


def test_a_storage_that_cannot_be_opened_for_other_weights_stays_away(tmp_path: Path) -> None:
    rig, model = Rig(tmp_path / "pages"), torch.nn.Linear(8, 8)
    rig.cache.watch(Weights(model), parse_extra_config('{"file_storage_path": "/dev/null/x"}'))
    with torch.no_grad():
        model.bias.add_(1.0)
    rig.cache.reset()
    assert not rig.cache.enable_storage and rig.cache.storage_name() is None
    rig.run(PROMPT + [1])
    rig.settle()
    rig.check()


@pytest.mark.parametrize("detached", [True, False])
def test_storage_whose_call_hangs_at_a_change_of_weights_is_opened_anew_later(
    tmp_path: Path, detached: bool
) -> None:
    """It looked attached and served nothing until somebody detached and attached it."""
    rig, model = Rig(tmp_path), torch.nn.Linear(8, 8)
    extra = parse_extra_config(stored_in(tmp_path))
    rig.cache.watch(Weights(model), extra)
    rig.driver.held.add("store")
    rig.run(PROMPT + [1])
    rig.settle()
    rig.driver.held.clear()
    assert rig.driver.step()  # it begins
    rig.driver.held.add("store")
    old = rig.cache.inner.attached.storage
    with torch.no_grad():
        model.weight.mul_(2.0)
    rig.cache.reset()
    for _ in range(3):
        rig.cache.check_hicache_events()
        assert rig.cache.inner.attached.storage is old
    if detached:
        assert not rig.cache.detach_storage_backend()[0], "it is still busy"
    rig.driver.held.clear()
    rig.settle()
    rig.check()
    if detached:
        assert rig.cache.detach_storage_backend()[0]
        rig.cache.check_hicache_events()
        assert rig.cache.storage_name() is None, "whoever detaches it does not get it back"
        return
    rig.cache.check_hicache_events()
    assert rig.cache.inner.attached.storage not in (None, old)
    handle = rig.prefetch(rig.request(PROMPT + [1]))
    rig.settle()
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.cache.pop_prefetch_loaded_span(handle) == (0, None), "those are of other weights"
    rig.run(PROMPT + [1])
    rig.settle()
    rig.cache.reset()
    handle = rig.prefetch(rig.request(PROMPT + [1]))
    rig.settle()
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.cache.pop_prefetch_loaded_span(handle)[0] == len(PROMPT)


@pytest.mark.parametrize("storage", [True, False])
def test_storage_that_is_attached_after_a_change_is_of_these_weights(tmp_path: Path, storage: bool) -> None:
    rig, model = Rig(tmp_path if storage else None), torch.nn.Linear(8, 8)
    extra = stored_in(tmp_path)
    rig.cache.watch(Weights(model), parse_extra_config(extra))
    rig.run(PROMPT + [1])
    rig.settle()
    rig.cache.detach_storage_backend()
    with torch.no_grad():
        model.weight.mul_(2.0)
    rig.cache.reset()
    rig.cache.read_attach_rules = lambda: AttachRules({}, (parse_rule(f"backend=file,path={tmp_path}", ""),))
    assert rig.cache.attach_storage_backend("file", extra)[0]
    handle = rig.prefetch(rig.request(PROMPT + [1]))
    rig.settle()
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.cache.pop_prefetch_loaded_span(handle) == (0, None)


def test_flush_while_pages_go_to_storage(tmp_path: Path) -> None:
    """A flush gives the host pages back only when the worker that reads them has ended."""
    rig = Rig(tmp_path)
    rig.driver.held.add("store")
    rig.run(PROMPT + [1])
    rig.settle()
    assert len(rig.cache.ongoing_backup) == 1
    rig.driver.held.clear()
    assert rig.driver.step()  # it begins
    rig.driver.held.add("store")
    rig.cache.reset()
    host = rig.cache.token_to_kv_pool_host
    assert host.logical_size - host.available_size() == len(PROMPT), "the worker still reads them"
    rig.check()
    rig.driver.held.clear()
    rig.settle()
    assert host.available_size() == host.logical_size
    assert (
        rig.allocator.available_size() == NUM_TOKENS and rig.match(rig.request(PROMPT)).host_hit_length == 0
    )
    rig.check()


def test_flush_while_a_request_is_fetched(tmp_path: Path) -> None:
    rig = in_storage(tmp_path)
    rig.driver.held.add("fetch")
    handle = rig.prefetch(rig.request(PROMPT + [1]))
    rig.cache.reset()
    rig.driver.held.clear()
    rig.settle()
    assert rig.cache.check_prefetch_progress(handle) and not rig.cache.ongoing_prefetch
    assert rig.cache.pop_prefetch_loaded_span(handle) == (0, None)
    assert rig.cache.token_to_kv_pool_host.available_size() == rig.cache.token_to_kv_pool_host.logical_size
    rig.check()

"""Recurrent states over SGLang's real request pool: each is found behind exactly the tokens it was taken at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.runtime_context
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams

from hiradix.adapters.sglang.states import RequestStates, require_known_states
from hiradix.errors import ConfigError
from hiradix.memory import DevicePool, HybridPools
from hiradix.memory.engine_pools import state_pools
from tests.sglang.rig import PAGE, RECORDS, StateRig, digest, stored_in

PROMPT = [3 + n % 11 for n in range(8 * PAGE)]
CHUNKS = (3 * PAGE, 5 * PAGE)  # of it: with one state a request has records where its chunks end


@pytest.fixture(autouse=True)
def grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang derives from the model that it runs."""
    monkeypatch.setattr(sglang.srt.runtime_context, "mamba_checkpoint_grid", lambda page: page)


@pytest.fixture(params=[False, True], ids=["one state", "extra buffers"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateRig]:
    rig = StateRig(tmp_path, has_buffers=request.param)
    yield rig
    rig.settle()
    rig.check()
    rig.evict_all()
    assert rig.rows.mamba_allocator.available_size() == RECORDS
    rig.check()


def test_a_prompt_goes_on_from_the_state_behind_its_prefix(rig: StateRig) -> None:
    rig.run([*PROMPT, 1], CHUNKS)
    found = rig.run([*PROMPT, 2, 2, 2])
    assert found.device_prefix_len == len(PROMPT)
    assert rig.restored[-1] == digest(PROMPT)
    again = rig.run([*PROMPT[: 3 * PAGE], *[1] * PAGE])
    assert again.device_prefix_len == 3 * PAGE and rig.restored[-1] == digest(PROMPT[: 3 * PAGE])


def test_without_a_state_pages_are_no_hit_and_where_one_would_be_is_told(rig: StateRig) -> None:
    rig.run([*PROMPT, 1])
    found = rig.run([*PROMPT[: 5 * PAGE], *[1] * PAGE])
    assert (found.device_prefix_len, found.mamba_branching_seqlen) == (0, 5 * PAGE)
    assert rig.restored[-1] == digest([])


def test_states_come_back_from_the_host_and_from_storage(rig: StateRig) -> None:
    rig.run([*PROMPT, 1], CHUNKS)
    rig.settle()
    rig.evict_all()
    found = rig.run([*PROMPT, 2, 2, 2])
    assert (found.device_prefix_len, found.host_hit_length) == (0, len(PROMPT))
    assert rig.restored[-1] == digest(PROMPT)
    rig.settle()
    rig.cache.reset()
    rig.rows.clear()
    rig.allocator.clear()
    req = rig.request([*PROMPT, 5, 5])
    handle = rig.prefetch(req)
    rig.settle()
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.cache.pop_prefetch_loaded_tokens(handle) == len(PROMPT)
    found = rig.admit(req)
    assert found.host_hit_length == len(PROMPT)
    rig.compute(req)
    assert rig.restored[-1] == digest(PROMPT)
    rig.finish(req)


def test_slots_set_aside_for_the_queue_serve_its_loads(rig: StateRig) -> None:
    """SGLang takes one for each request that waits before it looks at the first; with few free that is all."""
    known = [[first, *PROMPT] for first in (3, 4, 5)]
    for prompt in known:
        rig.run(prompt, chunks=(8 * PAGE,))
    rig.settle()
    rig.evict_all()
    slots = rig.rows.mamba_allocator
    slots.alloc_group_begin(slots.available_size())
    for prompt in known:
        req = rig.request([*prompt[:-1], 9, 9, 9])
        found = rig.match(req)
        params = InitLoadBackParams(found.best_match_node, found.host_hit_length, None, req)
        assert rig.cache.init_load_back(params)[0] == found.host_hit_length == 8 * PAGE
    slots.alloc_group_end()
    rig.cache.ready_to_load_host_cache()
    rig.settle()
    assert rig.cache.mamba_evictable_size() == 3


def test_two_at_once_have_states_of_their_own(rig: StateRig) -> None:
    rig.run([*PROMPT, 1], CHUNKS)
    first, second = rig.request([*PROMPT, *[6] * 9]), rig.request([*PROMPT, *[2] * 9])
    for req in (first, second):
        assert rig.admit(req).device_prefix_len == len(PROMPT)
    for req in (first, second):
        rig.compute(req, chunks=(PAGE,))
        assert req.prefix_len == len(PROMPT)
    for req in (second, first):
        rig.finish(req)
    for token in (6, 2):
        assert rig.run([*PROMPT, *[token] * 9, 3]).device_prefix_len > len(PROMPT)
    rig.settle()


def test_what_another_has_recorded_meanwhile_is_not_kept_twice(rig: StateRig) -> None:
    first, second = rig.request([*PROMPT, 1]), rig.request([*PROMPT, 2])
    for req in (first, second):
        rig.admit(req)
    for req in (first, second):
        rig.compute(req, chunks=(4 * PAGE, 4 * PAGE))
    for req in (first, second):
        rig.finish(req)
    rig.settle()
    rig.check()


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_an_aborted_request_gives_its_states_back(rig: StateRig, num_chunks: int) -> None:
    rig.run([*PROMPT, 1], CHUNKS)
    req = rig.request([*PROMPT, *[4] * (3 * PAGE)])
    rig.admit(req)
    if num_chunks:
        rig.forward(req, req.prefix_len, req.prefix_len + PAGE)
        rig.cache.checkpoint(req, up_to=req.prefix_len + PAGE)
    rig.abort(req)


def test_a_match_that_finds_nothing_any_more_forgets_what_it_found_before(rig: StateRig) -> None:
    """SGLang matches a waiting request anew in each round, and only says which record it was given."""
    rig.run([*PROMPT, 1], CHUNKS)
    rig.settle()
    req = rig.request([*PROMPT, 2, 2])
    assert rig.match(req).device_prefix_len and req.kv.mamba_cow_src_index is not None
    rig.cache.reset()
    rig.rows.clear()
    rig.allocator.clear()
    rig.admit(req)
    rig.compute(req)
    assert rig.restored[-1] == digest([])
    rig.finish(req)


def test_an_answer_that_is_cut_leaves_no_state_of_more_than_its_tokens(rig: StateRig) -> None:
    """A stop inside what was computed, or thinking that is stripped: the state is ahead of the tokens."""
    req = rig.request([*PROMPT, 1, 2, 3])
    rig.admit(req)
    rig.forward(req, 0, len(req.origin_input_ids))
    rig.finish(req, up_to=3 * PAGE)
    found = rig.run([*PROMPT[: 3 * PAGE], 9, 9, 9])
    assert found.device_prefix_len == 0


def test_the_state_before_serves_where_the_last_is_ahead() -> None:
    rig = StateRig(has_buffers=True)
    req = rig.request([*PROMPT, 1])
    rig.admit(req)
    rig.forward(req, 0, 3 * PAGE)
    rig.forward(req, 3 * PAGE, 6 * PAGE)
    rig.finish(req, up_to=4 * PAGE)
    assert rig.run([*PROMPT[: 4 * PAGE], 9, 9]).device_prefix_len == 3 * PAGE
    rig.settle()
    rig.check()


def test_without_room_for_a_record_nothing_is_kept_and_nothing_lost(rig: StateRig) -> None:
    held = rig.rows.mamba_allocator.alloc(RECORDS - 3)
    req = rig.request([*PROMPT, 1])
    rig.admit(req)
    if free := rig.rows.mamba_allocator.available_size():
        held = [*held, *rig.rows.mamba_allocator.alloc(free)]
    rig.forward(req, 0, 4 * PAGE)
    rig.cache.checkpoint(req, up_to=4 * PAGE)
    assert req.kv.cache_protected_len == 0
    rig.forward(req, 4 * PAGE, len(req.origin_input_ids))
    rig.finish(req)
    for slot in held:
        rig.rows.mamba_allocator.free(slot.view(1))


def test_records_leave_the_device_for_new_ones(rig: StateRig) -> None:
    for first in range(3, 3 + RECORDS):
        rig.run([first, *PROMPT, 1], CHUNKS)
        rig.settle()
        rig.check()
    found = rig.run([3 + RECORDS - 1, *PROMPT, 2])
    assert found.device_prefix_len or found.host_hit_length


def test_an_eviction_of_states_says_how_many(rig: StateRig) -> None:
    for first in range(3, 9):
        rig.run([first, *PROMPT, 1])
    rig.settle()
    before = rig.cache.mamba_evictable_size()
    done = rig.cache.evict(EvictParams(num_tokens=0, mamba_num=2))
    assert done.mamba_num_evicted >= 2
    assert rig.cache.mamba_evictable_size() == before - done.mamba_num_evicted


@pytest.mark.parametrize(
    "planted", ["another's record", "a record of a page before", "no clearing", "live slot"]
)
def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    """The rig's digests see what an adapter could do wrong."""
    rig = StateRig()
    rig.run([*PROMPT, 1], chunks=(4 * PAGE,))
    rig.run([9, *PROMPT, 1])
    start, give = RequestStates.start, RequestStates.give
    records = rig.cache.all_mamba_values_flatten().tolist()

    def wrong(self: Any, req: Any, record: int) -> None:
        others = [one for one in records if one != record and rig.state(one) != rig.state(record)]
        start(self, req, others[0] if record else 0)
        if planted == "no clearing":
            req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False

    def early(self: Any, req: Any, num_tokens: int) -> tuple[int, int | None]:
        found, record = give(self, req, num_tokens)
        return (found - 1 if planted.startswith("a record") and record else found), record

    def live(self: Any, req: Any, num_tokens: int) -> tuple[int, int | None]:
        if req.finished():
            return give(self, req, num_tokens)
        return num_tokens, int(req.kv.mamba_pool_idx)  # no copy: the request writes on

    if planted in ("another's record", "no clearing"):
        monkeypatch.setattr(RequestStates, "start", wrong)
    else:
        monkeypatch.setattr(RequestStates, "give", live if planted == "live slot" else early)
    with pytest.raises(
        AssertionError, match="a state that is not behind|accounted for|lost, or in two|tree already"
    ):
        rig.run([7, *PROMPT, 1], chunks=(4 * PAGE,))
        rig.run([7, *PROMPT, 1, 2, 3], chunks=(1,))
        rig.run([*PROMPT, 5])
        rig.settle()
        rig.check()


@pytest.mark.parametrize("exchanged", [False, True])
def test_layers_that_are_exchanged_after_a_restart_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: bool
) -> None:
    label = f'{stored_in(tmp_path)[:-1]}, "hicache_storage_identity": "rig"}}'
    monkeypatch.setattr("tests.sglang.rig.stored_in", lambda folder: label)
    rig = StateRig(tmp_path)
    rig.run([*PROMPT, 1], CHUNKS)
    rig.settle()

    def other(*given: Any) -> HybridPools:
        pools = state_pools(*given)
        arrays = {spec.name: pools.other.array(spec.name)[::-1] for spec in pools.other.shape.arrays}
        return replace(pools, other=DevicePool.wrap_arrays(pools.other.shape, arrays, 1))

    if exchanged:
        monkeypatch.setattr("tests.sglang.rig.state_pools", other)
    after = StateRig(tmp_path)
    req = after.request([*PROMPT, 5, 5])
    handle = after.prefetch(req)
    after.settle()
    assert after.cache.check_prefetch_progress(handle)
    assert after.cache.pop_prefetch_loaded_tokens(handle) == len(PROMPT)
    assert after.admit(req).host_hit_length == len(PROMPT)
    with pytest.raises(AssertionError, match="a state that is not behind") if exchanged else nullcontext():
        after.compute(req)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mamba_ckpt_pool": object()}, "--enable-int8-mamba-checkpoint"),
        ({"mamba_allocator": SimpleNamespace()}, "request pool .* with SimpleNamespace"),
    ],
)
def test_other_ways_to_keep_states_are_refused(change: dict[str, Any], told: str) -> None:
    rig = StateRig()
    for name, value in change.items():
        setattr(rig.rows, name, value)
    with pytest.raises(ConfigError, match=told):
        require_known_states(rig.rows)
    rig.rows.mamba_ckpt_pool = None
    with pytest.raises(ConfigError, match="request pool SimpleNamespace"):
        require_known_states(SimpleNamespace())

"""Slots of the state pool: when a record is taken, who has which, and what happens when they are short."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from hiradix.apps.engine import EngineConfig, SamplingParams
from hiradix.apps.engine.ranks import build_engine
from hiradix.apps.server.engine_service import snapshot_of
from hiradix.config import parse_extra_config
from hiradix.errors import ConfigError
from hiradix.prefix_cache import EvictParams, MatchPrefixParams
from hiradix.prefix_cache.records import STATE
from hiradix.tree import RadixKey, Tier
from tests.engine.checkpoints import Reference, prompts
from tests.engine.configs import CONFIGS, DEVICE_ONLY, TIERED, stored_in, with_storage
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Answer, assert_no_state_out, collect, drain, records, serve, storm, tokens
from tests.engine.test_tiers import GREEDY, served_from, settle
from tests.seeds import seeded, seeds

FAMILIES = ["lfm2", "qwen3-next"]


# -- what a record is, and when it is taken ----------------------------------------------


def test_records_are_where_chunks_prompts_and_answers_end(
    lfm2: Reference, make_recurrent: MakeEngine
) -> None:
    """Also when the prompt and the answer end inside a page: the last whole page has a record."""
    engine = make_recurrent(cache=DEVICE_ONLY)
    [prompt] = prompts([101], seed=2)
    [answer] = serve(engine, [prompt], SamplingParams(max_new_tokens=30))
    cache: Any = engine.cache
    ends = sorted(n.end * 8 for n in cache.tree.nodes() if n.resident(Tier.DEVICE, STATE))
    assert ends == [32, 64, 96, 128], "130 tokens have KV"
    found = cache.match_prefix(MatchPrefixParams(RadixKey(prompt + answer.token_ids)))
    assert len(found.device_indices) == 128
    parted = prompt[:80] + prompts([40], seed=3)[0]
    [other] = serve(engine, [parted], GREEDY)
    assert other.usage is not None and other.usage.cached_device == 64, "parts between two records"
    lfm2.judge([parted], [other.token_ids]).assert_holds()


def test_no_pass_is_spent_on_records(make_recurrent: MakeEngine) -> None:
    """Where a page ends inside a pass, the record is taken there: as many passes as without a cache."""
    steps = []
    for config in (CONFIGS["off"], DEVICE_ONLY):
        engine = make_recurrent(cache=config, max_total_tokens=1024)
        serve(engine, prompts([101, 55, 30, 77], seed=2), SamplingParams(max_new_tokens=30))
        steps.append(engine.num_steps)
    assert steps[0] == steps[1], steps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first", "chunk"), [(8, 8), (30, 15)])
def test_a_page_that_ends_behind_the_first_token_of_a_chunk(
    first: int, chunk: int, family: str, reference: Callable[[str], Reference], make_recurrent: MakeEngine
) -> None:
    """Found: the rest of the chunk went on from the states of whatever was computed in between.

    The second prompt gets the 7 tokens that the first, a decode or a prefill, leaves of a pass, and its next
    part is of 5, with the end of the page behind one.
    """
    judge, asked = reference(family), prompts([first, 12], seed=5)
    engine = make_recurrent(model_path=str(judge.path), chunked_prefill_size=chunk)
    answers: dict[str, Answer] = {}
    engine.add_request("r0", asked[0], GREEDY)
    if chunk == 8:
        collect(answers, engine.step())
    engine.add_request("r1", asked[1], GREEDY)
    drain(engine, answers)
    judge.judge(asked, tokens([answers["r0"], answers["r1"]])).assert_holds()
    settle(engine)
    assert_no_state_out(engine)


@pytest.mark.parametrize(("name", "num_slots"), [("off", 2), ("device", 4)])
def test_what_running_requests_have(name: str, num_slots: int, make_recurrent: MakeEngine) -> None:
    """A slot each; and one for the next record, where somebody will ask for it."""
    engine = make_recurrent(cache=CONFIGS[name])
    for rid, prompt in enumerate(prompts([9, 12], seed=2)):
        engine.add_request(str(rid), prompt, GREEDY)
    states: Any = engine._pools.states
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, states.num_pages - states.available - len(records(engine)))
    assert most == num_slots
    assert_no_state_out(engine)


@pytest.mark.parametrize("name", ["device", "tiers"])
def test_where_prompts_part_a_record_is_taken_for_the_next(
    name: str, lfm2: Reference, make_recurrent: MakeEngine
) -> None:
    """The first to share a beginning hits up to a record of another's; the second, all of it."""
    engine = make_recurrent(cache=CONFIGS[name], max_total_tokens=640)
    stem, *ends = prompts([81, 40, 40, 40, 3], seed=8)
    hits, steps = [], []
    for end in ends:
        before = engine.num_steps
        [answer] = serve(engine, [stem + end], GREEDY)
        settle(engine)
        assert answer.usage is not None
        hits.append(answer.usage.cached_device)
        steps.append(engine.num_steps - before)
        lfm2.judge([stem + end], [answer.token_ids]).assert_holds()
    assert hits == [0, 64, 80, 80], "pages of 8, chunks of 32"
    assert steps == [4 + 9, 3 + 9, 2 + 9, 1 + 9], "the second ends a pass at 80"


def test_records_in_the_tree_are_never_written(lfm2: Reference, make_recurrent: MakeEngine) -> None:
    """Two requests run on from one record at once, twice; it stays as it was taken."""
    engine = make_recurrent(cache=DEVICE_ONLY)
    stem, *ends = prompts([64, 30, 41], seed=7)
    serve(engine, [stem + [1]], SamplingParams(max_new_tokens=1))
    pool = engine._pools.hybrid.other  # type: ignore[union-attr]
    kept = {slot: [layer[slot].clone() for layer in pool.array("conv")] for slot in records(engine)}
    assert len(kept) == 2
    for _ in range(2):
        asked = [stem + end for end in ends]
        answers = serve(engine, asked, GREEDY)
        assert all(answer.usage is not None and answer.usage.cached_device >= 64 for answer in answers)
        lfm2.judge(asked, tokens(answers)).assert_holds()
    assert set(kept) <= set(records(engine))
    for slot, layers in kept.items():
        assert all(torch.equal(own, layer[slot]) for own, layer in zip(layers, pool.array("conv")))
    assert all(not layer[0].any() for layer in pool.array("conv")), "nobody writes what is before any token"


def test_a_record_that_leaves_takes_no_page_that_serves_another(
    lfm2: Reference, make_recurrent: MakeEngine
) -> None:
    engine = make_recurrent(cache=DEVICE_ONLY)
    [prompt] = prompts([101], seed=2)
    serve(engine, [prompt], GREEDY)
    cache: Any = engine.cache
    before = cache.total_size()
    done = cache.evict(EvictParams(num_tokens=0, mamba_num=2))
    assert (done.num_tokens_evicted, done.mamba_num_evicted) == (0, 2)
    assert cache.total_size() == (before[0], before[1] - 2)
    [again] = serve(engine, [prompt], GREEDY)
    assert again.usage is not None and again.usage.cached_device == 96
    assert cache.evict(EvictParams(num_tokens=0, mamba_num=100)).mamba_num_evicted > 0
    assert cache.total_size() == (0, 0), "pages in which no match can end are of no use"
    lfm2.judge([prompt], [again.token_ids]).assert_holds()


@pytest.mark.parametrize("name", ["device", "tiers", "write_back"])
def test_a_record_that_left_alone_comes_back_alone(
    name: str, lfm2: Reference, make_recurrent: MakeEngine
) -> None:
    engine = make_recurrent(cache=CONFIGS[name])
    [prompt] = prompts([101], seed=2)
    serve(engine, [prompt], GREEDY)
    settle(engine)
    cache: Any = engine.cache
    cache.evict(EvictParams(num_tokens=0, mamba_num=100))
    settle(engine)
    assert records(engine) == []
    resident = cache.total_size()[0]
    [again] = serve(engine, [prompt], GREEDY)
    assert again.usage is not None
    if name == "device":
        assert (resident, again.usage.cached_tokens) == (0, 0)
    else:
        assert (resident, again.usage.cached_host) == (104, 96)
        assert cache.cache.counters.loaded == 0, "no full page was copied"
    lfm2.judge([prompt], [again.token_ids]).assert_holds()


# -- pools that are short ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["off", "device", "tiers", "write_back", "small_host"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_smallest_state_pool_is_enough(
    name: str, family: str, reference: Callable[[str], Reference], make_recurrent: MakeEngine
) -> None:
    judge = reference(family)
    engine = make_recurrent(
        model_path=str(judge.path), cache=CONFIGS[name], max_mamba_cache_size=4, max_running_requests=6,
        chunked_prefill_size=8, max_total_tokens=240,
    )  # fmt: skip
    asked = prompts([90, 33, 61], seed=12)
    for _ in range(2):
        answers = serve(engine, asked, SamplingParams(max_new_tokens=30))
        judge.judge(asked, tokens(answers)).assert_holds()
    settle(engine)
    assert_no_state_out(engine)


def test_retraction_gives_states_back(lfm2: Reference, make_recurrent: MakeEngine) -> None:
    engine = make_recurrent(max_total_tokens=160)
    asked = prompts([20, 31, 18, 25, 40], seed=6)
    answers = serve(engine, asked, SamplingParams(max_new_tokens=60))
    assert engine.info().num_retractions > 0
    lfm2.judge(asked, tokens(answers)).assert_holds()
    settle(engine)
    assert_no_state_out(engine)


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_in_every_state(num_steps: int, lfm2: Reference, make_recurrent: MakeEngine) -> None:
    engine = make_recurrent()
    asked = prompts([120, 90], seed=4)
    serve(engine, asked, GREEDY)
    settle(engine)
    serve(engine, prompts([150, 150], seed=5), GREEDY)  # pushes them to the host
    settle(engine)
    engine.add_request("gone", asked[0], GREEDY)
    engine.add_request("kept", asked[1] + [3], SamplingParams(max_new_tokens=20))
    for _ in range(num_steps):
        engine.step()
    engine.abort("gone")
    if num_steps % 2:
        engine.abort("kept")  # what it has is shared up to its last whole page
    drain(engine)
    settle(engine)
    assert_no_state_out(engine)
    lfm2.judge(asked, tokens(serve(engine, asked, GREEDY))).assert_holds()


def test_a_load_that_fails_advances_no_state(
    lfm2: Reference, make_recurrent: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass is run again, so a request that decodes in it must not have moved on in its first layers."""
    engine = make_recurrent(max_total_tokens=640)
    cache: Any = engine.cache
    stem, other = prompts([100, 40], seed=2)
    serve(engine, [stem], GREEDY)
    settle(engine)
    cache.evict(EvictParams(num_tokens=10_000))
    engine.add_request("runs", other, SamplingParams(max_new_tokens=40))
    answers: dict[str, Answer] = {}
    for _ in range(6):
        collect(answers, engine.step())
    transport = cache.controller._copies._pairs[STATE].transport
    pool = engine._pools.hybrid.other  # type: ignore[union-attr]
    copy, get, failed, last_layer = transport.copy_pages, pool.get_arrays, [], Event()

    def fail_once(source: Any, target: Any, sources: Any, targets: Any, layers: Any) -> None:
        if layers == range(1, 2) and not failed:
            assert last_layer.wait(30), "the model has not come to the pool's last layer"
            failed.append(len(sources))
            raise RuntimeError("injected")
        copy(source, target, sources, targets, layers)

    def get_arrays(layer: int) -> Any:
        if layer == 1:
            last_layer.set()
        return get(layer)

    monkeypatch.setattr(transport, "copy_pages", fail_once)
    monkeypatch.setattr(pool, "get_arrays", get_arrays)
    last_layer.clear()
    engine.add_request("loads", stem, GREEDY)
    drain(engine, answers)
    assert failed == [1] and cache.cache.counters.load_failed > 0
    asked = {"runs": other, "loads": stem}
    lfm2.judge([asked[r] for r in answers], [answers[r].token_ids for r in answers]).assert_holds()
    settle(engine)
    assert_no_state_out(engine)


@seeded
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", seeds(4))
def test_a_storm_of_requests_loses_no_state(
    seed: int, family: str, reference: Callable[[str], Reference], make_recurrent: MakeEngine
) -> None:
    """Shared beginnings, short and long answers, aborts at any step, both pools short: all slots counted."""
    judge, rng = reference(family), random.Random(seed)
    engine = make_recurrent(
        model_path=str(judge.path),
        cache=rng.choice([DEVICE_ONLY, TIERED, CONFIGS["write_back"], CONFIGS["small_host"]]),
        max_total_tokens=rng.choice([256, 400, 640]), max_mamba_cache_size=rng.choice([4, 7, 12, 30]),
        chunked_prefill_size=rng.choice([8, 24, 40, 13]), max_running_requests=rng.choice([2, 5]),
    )  # fmt: skip
    storm(engine, judge, rng, seed)
    settle(engine)
    assert_no_state_out(engine)


def test_what_does_not_fit_is_named(
    lfm2: Reference, llama: Reference, make_recurrent: MakeEngine, tmp_path: Path
) -> None:
    def refused(words: str, **fields: object) -> None:
        with pytest.raises(ConfigError, match=words):
            make_recurrent(**fields)

    refused("max_mamba_cache_size=3: a request needs 4", max_mamba_cache_size=3)
    refused("max_mamba_cache_size=0: must be at least 1", max_mamba_cache_size=0)
    refused("max_mamba_cache_size=24: the model keeps no recurrent state", model_path=str(llama.path))
    refused("swa_full_tokens_ratio=0.5: the model does not mix", swa_full_tokens_ratio=0.5)
    files = parse_extra_config('{"naming": "sglang"}')
    stored = replace(with_storage(tmp_path, "file"), hicache_storage_backend_extra_config=files)
    refused("naming: SGLang's files are full attention only, not state", cache=stored)
    with pytest.raises(ConfigError, match="tp_size=3: the model's num_attention_heads is 4"):
        build_engine(EngineConfig(str(lfm2.path)), tp_size=3)
    odd = tmp_path / "odd"
    shutil.copytree(lfm2.path, odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"layer_types": ["conv"] * 4}))
    refused("layer_types .*conv.*: full_attention and conv are needed", model_path=str(odd))


def test_administration(lfm2: Reference, make_recurrent: MakeEngine, tmp_path: Path) -> None:
    """Figures in records, storage attached while serving, and a flush."""
    engine = make_recurrent()
    asked = prompts([100, 60], seed=3)
    serve(engine, asked, GREEDY)
    settle(engine)
    info, stats = engine.info(), engine.cache.stats()  # type: ignore[attr-defined]
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4, "two layers keep something per token"
    assert stats.window is None and stats.state.device_total == 24
    assert stats.state.host_used == len(records(engine, Tier.HOST)) > 0
    figures = snapshot_of(engine)
    assert figures.window == {} and figures.state["host_used"] == stats.state.host_used
    ok, message = engine.attach_storage("file", stored_in(tmp_path, "file"), "wait_complete")
    assert ok, message
    serve(engine, asked, GREEDY)
    settle(engine)
    assert engine.flush() and records(engine) == []
    assert engine.cache.stats().state.device_available == 24  # type: ignore[attr-defined]
    answers = serve(engine, asked, GREEDY)
    assert served_from(answers)["storage"] > 100
    lfm2.judge(asked, tokens(answers)).assert_holds()
    settle(engine)
    assert engine.clear_storage() and engine.detach_storage()[0]

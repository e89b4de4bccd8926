"""Models that mix full attention and sliding windows, with a pool of their own for the windows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hiradix.apps.engine import Engine, EngineConfig, SamplingParams
from hiradix.config import parse_extra_config
from hiradix.errors import ConfigError
from tests.engine.checkpoints import Reference, prompts
from tests.engine.configs import CONFIGS, DEVICE_ONLY, TIERED, stored_in
from tests.engine.conftest import MakeEngine
from tests.engine.driving import assert_empty, drain, serve, storm, tokens
from tests.engine.test_tiers import GREEDY, converse, served_from, settle
from tests.seeds import seeded, seeds

WINDOW = 1  # the component


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_do_not_depend_on_the_cache(name: str, gemma: Reference, make_hybrid: MakeEngine) -> None:
    engine = make_hybrid(cache=CONFIGS[name])
    identity, answers = converse(engine, gemma)
    identity.assert_holds()
    assert_empty(engine)
    used = served_from(answers)
    assert (used["device"] > 0) == (name != "off"), used
    if name != "small_host":
        assert (used["host"] > 0) == (name not in ("off", "device")), used


@pytest.mark.parametrize("family", ["gemma3", "qwen2-window"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_page_sizes_and_places_of_windows(
    family: str, page_size: int, reference: Callable[[str], Reference], make_hybrid: MakeEngine
) -> None:
    judge = reference(family)
    engine = make_hybrid(model_path=str(judge.path), cache=replace(TIERED, page_size=page_size))
    identity, _ = converse(engine, judge, num_turns=3)
    identity.assert_holds()


def test_a_long_request_holds_a_window_of_pages(gemma: Reference, make_hybrid: MakeEngine) -> None:
    """A prompt of 300 tokens and an answer of 120 through a window pool of 96."""
    engine = make_hybrid(max_total_tokens=480, swa_full_tokens_ratio=0.2)
    [prompt] = prompts([300], seed=9)
    engine.add_request("long", prompt, SamplingParams(max_new_tokens=120))
    allocator = engine._pools.allocator
    most, answer = 0, []
    while engine.has_work:
        for output in engine.step():
            answer += output.token_ids
        most = max(most, allocator.size_swa - allocator.swa_available_size() - window_tokens(engine))
        if engine.is_blocked:
            engine.wait(1.0)
    assert most <= 24 + 32 + 2 * 8, "of its own: a window, a chunk, and their ends"
    gemma.judge([prompt], [answer]).assert_holds()


def window_tokens(engine: Engine) -> int:
    cache: Any = engine.cache
    return cache.total_size()[WINDOW]


def test_windows_run_short_before_full_slots(gemma: Reference, make_hybrid: MakeEngine) -> None:
    """Requests that fit the full pool together do not fit the window pool: some wait or are retracted."""
    engine = make_hybrid(max_total_tokens=800, swa_full_tokens_ratio=0.12, max_running_requests=6)
    asked = prompts([60, 41, 77, 33, 50, 64], seed=6)
    answers = serve(engine, asked, SamplingParams(max_new_tokens=40))
    gemma.judge(asked, tokens(answers)).assert_holds()
    settle(engine)
    assert_empty(engine)


@pytest.mark.parametrize("name", ["off", "device", "tiers", "write_back"])
def test_the_smallest_window_pool_is_enough(name: str, gemma: Reference, make_hybrid: MakeEngine) -> None:
    """Eight pages: a locked window of three, one of its own, and two ends. Found: six were thought enough."""
    engine = make_hybrid(
        cache=CONFIGS[name], max_total_tokens=240, swa_full_tokens_ratio=0.27, chunked_prefill_size=8
    )
    assert engine._pools.hybrid is not None and engine._pools.hybrid.other.num_pages == 8
    with pytest.raises(ConfigError, match=r"7 window pages of 8 tokens; a request needs 8"):
        make_hybrid(max_total_tokens=240, swa_full_tokens_ratio=0.25, chunked_prefill_size=8)
    asked = prompts([90, 33, 61], seed=12)
    for _ in range(2):
        answers = serve(engine, asked, SamplingParams(max_new_tokens=30))
        gemma.judge(asked, tokens(answers)).assert_holds()
    settle(engine)
    assert_empty(engine)


def test_whole_prompts_without_chunks(gemma: Reference, make_hybrid: MakeEngine) -> None:
    engine = make_hybrid(chunked_prefill_size=None, swa_full_tokens_ratio=1.0)
    asked = prompts([120, 61, 90], seed=8)
    gemma.judge(asked, tokens(serve(engine, asked, GREEDY))).assert_holds()


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_in_every_state(num_steps: int, gemma: Reference, make_hybrid: MakeEngine) -> None:
    engine = make_hybrid()
    asked = prompts([120, 90], seed=4)
    serve(engine, asked, GREEDY)
    settle(engine)
    serve(engine, prompts([150, 150], seed=5), GREEDY)  # pushes them to the host
    settle(engine)
    engine.add_request("gone", asked[0], GREEDY)
    engine.add_request("kept", asked[1], GREEDY)
    for _ in range(num_steps):
        engine.step()
    engine.abort("gone")
    drain(engine)
    settle(engine)
    assert_empty(engine)
    gemma.judge(asked, tokens(serve(engine, asked, GREEDY))).assert_holds()


def test_what_does_not_fit_is_named(gemma: Reference, llama: Reference) -> None:
    with pytest.raises(ConfigError, match="swa_full_tokens_ratio=0.5: the model does not mix"):
        Engine(EngineConfig(str(llama.path), swa_full_tokens_ratio=0.5))
    with pytest.raises(ConfigError, match=r"window pages of 64 tokens; a request needs 11 \(window 24, 512"):
        Engine(EngineConfig(str(gemma.path), max_total_tokens=1024, swa_full_tokens_ratio=0.1))
    with pytest.raises(ConfigError, match=r"swa_full_tokens_ratio=1.5: must be in"):
        EngineConfig(str(gemma.path), swa_full_tokens_ratio=1.5)
    files = parse_extra_config('{"naming": "sglang"}')
    stored = replace(TIERED, hicache_storage_backend="file", hicache_storage_backend_extra_config=files)
    with pytest.raises(ConfigError, match="naming: SGLang's files are full attention only, not window-24"):
        Engine(EngineConfig(str(gemma.path), swa_full_tokens_ratio=0.9, cache=stored, max_total_tokens=2048))


@seeded
@pytest.mark.parametrize("seed", seeds(4))
def test_a_storm_of_requests_loses_no_page(seed: int, gemma: Reference, make_hybrid: MakeEngine) -> None:
    """Shared beginnings, short and long answers, aborts at any step, both pools short: all pages counted."""
    rng = random.Random(seed)
    engine = make_hybrid(
        cache=replace(rng.choice([DEVICE_ONLY, TIERED, CONFIGS["write_back"], CONFIGS["small_host"]])),
        max_total_tokens=rng.choice([256, 400, 640]), swa_full_tokens_ratio=rng.choice([0.4, 0.5, 0.9]),
        chunked_prefill_size=rng.choice([8, 24, 40]), max_running_requests=rng.choice([2, 5]),
    )  # fmt: skip
    storm(engine, gemma, rng, seed)
    settle(engine)
    assert_empty(engine)


def test_administration(gemma: Reference, make_hybrid: MakeEngine, tmp_path: Path) -> None:
    """Figures, storage attached while serving, and a flush, as with one pool."""
    engine = make_hybrid()
    asked = prompts([100, 60], seed=3)
    serve(engine, asked, GREEDY)
    settle(engine)
    info, stats = engine.info(), engine.cache.stats()  # type: ignore[attr-defined]
    assert info.max_total_tokens == 384 and info.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
    assert stats.host_used > 0 and stats.device_total == 384
    ok, message = engine.attach_storage("file", stored_in(tmp_path, "file"), "wait_complete")
    assert ok, message
    serve(engine, asked, GREEDY)
    settle(engine)
    assert engine.flush() and window_tokens(engine) == 0
    assert engine.info().available_tokens == 384
    answers = serve(engine, asked, GREEDY)
    assert served_from(answers)["storage"] > 100
    gemma.judge(asked, tokens(answers)).assert_holds()
    settle(engine)
    assert engine.clear_storage() and engine.detach_storage()[0]

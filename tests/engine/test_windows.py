"""Models that mix full attention and sliding windows, with a pool of their own for the windows."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.engine import Engine, EngineConfig, SamplingParams
from hiradix.errors import ConfigError
from hiradix.memory import HostPool
from hiradix.storage.seal import SEAL_BYTES
from hiradix.tree import Tier
from tests.engine.checkpoints import Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Answer, assert_empty, collect, drain, serve, tokens
from tests.engine.test_tiers import GREEDY, converse, served_from, settle

WINDOW = 1  # the component
DEVICE_ONLY = HiCacheConfig(page_size=8)
TIERED = replace(DEVICE_ONLY, enable_hierarchical_cache=True, hicache_no_regret=False, hicache_ratio=2.0)
CONFIGS = {
    "off": replace(DEVICE_ONLY, disable_radix_cache=True),
    "device": DEVICE_ONLY,
    "tiers": TIERED,
    "write_back": replace(TIERED, hicache_write_policy="write_back"),
    "layer_first": replace(TIERED, hicache_mem_layout="layer_first"),
    "small_host": replace(TIERED, hicache_ratio=0.6),
}


@pytest.fixture
def gemma(reference: Callable[[str], Reference]) -> Reference:
    """Layers 0 and 2 see 24 tokens, layers 1 and 3 all of them."""
    return reference("gemma3")


def stored_in(folder: Path, backend: str) -> str:
    """Keys of a backend, as JSON."""
    own = {f"{backend}_storage_path": str(folder / backend), "max_size": "16MiB", "min_free_space": 0}
    return json.dumps(own | {"prefetch_threshold": 8})


def with_storage(folder: Path, backend: str, **fields: object) -> HiCacheConfig:
    return replace(
        TIERED, hicache_storage_backend=backend, hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=parse_extra_config(stored_in(folder, backend)), **fields,
    )  # fmt: skip


@pytest.fixture
def make_hybrid(make_engine: MakeEngine, gemma: Reference) -> MakeEngine:
    def make(**fields: object) -> Engine:
        sizes: dict[str, object] = {
            "model_path": str(gemma.path), "cache": TIERED, "max_total_tokens": 384,
            "chunked_prefill_size": 32, "swa_full_tokens_ratio": 0.5,
        }  # fmt: skip
        return make_engine(**{**sizes, **fields})

    return make


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


@pytest.mark.parametrize("policy", ["wait_complete", "best_effort", "timeout"])
def test_answers_do_not_depend_on_storage(
    policy: str, gemma: Reference, make_hybrid: MakeEngine, tmp_path: Path
) -> None:
    config = with_storage(tmp_path, "disk")
    engine = make_hybrid(cache=replace(config, hicache_storage_prefetch_policy=policy))
    identity, _ = converse(engine, gemma)
    identity.assert_holds()
    assert_empty(engine)


@pytest.mark.parametrize("backend", ["file", "disk"])
@pytest.mark.parametrize("family", ["gemma3", "qwen2-window"])
def test_storage_serves_windows_after_a_flush_and_in_another_engine(
    backend: str,
    family: str,
    reference: Callable[[str], Reference],
    make_hybrid: MakeEngine,
    tmp_path: Path,
) -> None:
    judge, asked = reference(family), prompts([100, 130, 75], seed=2)
    config = with_storage(tmp_path, backend)
    engine = make_hybrid(model_path=str(judge.path), cache=config)
    first = serve(engine, asked, GREEDY)
    judge.judge(asked, tokens(first)).assert_holds()
    settle(engine)
    assert engine.flush()
    for served in (engine, make_hybrid(model_path=str(judge.path), cache=config)):
        answers = serve(served, asked, GREEDY)
        judge.judge(asked, tokens(answers)).assert_holds()
        assert [answer.usage.cached_storage for answer in answers if answer.usage] == [96, 128, 72]
        settle(served)
        assert_empty(served)


def test_storage_serves_no_windows_to_other_weights(
    gemma: Reference, make_hybrid: MakeEngine, tmp_path: Path
) -> None:
    """Same name, shapes and folder of pages: only the weights say that the pages are not theirs."""
    other = tmp_path / gemma.path.name
    shutil.copytree(gemma.path, other)
    file = other / "model.safetensors"
    save_file({name: own * 1.25 for name, own in load_file(file).items()}, file, {"format": "pt"})
    asked, config = prompts([100, 130], seed=4), with_storage(tmp_path, "file")
    first = make_hybrid(cache=config)
    serve(first, asked, GREEDY)
    settle(first)
    second = make_hybrid(model_path=str(other), cache=config)
    assert second.model_name == first.model_name
    answers = serve(second, asked, GREEDY)
    Reference.load(other).judge(asked, tokens(answers)).assert_holds()
    assert [answer.usage.cached_storage for answer in answers if answer.usage] == [0, 0]


@pytest.mark.parametrize("component", [0, WINDOW])
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_corrupted_page_from_storage_is_seen(
    component: int, is_checked: bool, gemma: Reference, make_hybrid: MakeEngine, tmp_path: Path
) -> None:
    """Damaged files are misses; with the checks off the answer goes wrong, so these pages are read."""
    asked = prompts([120], seed=3)
    config = with_storage(tmp_path, "file")
    extra = config.hicache_storage_backend_extra_config.with_backend(checksum=is_checked)
    engine = make_hybrid(cache=replace(config, hicache_storage_backend_extra_config=extra))
    serve(engine, asked, GREEDY)
    settle(engine)
    part = engine.cache.storage.parts[component]  # type: ignore[attr-defined]
    for path in (tmp_path / "file" / part.backend.inner._folder.namespace).rglob("*.page"):
        data = bytearray(path.read_bytes())
        junk = torch.empty((len(data) - SEAL_BYTES) // 4)
        data[SEAL_BYTES:] = junk.normal_(generator=torch.Generator().manual_seed(1)).numpy().tobytes()
        path.write_bytes(data)
    assert engine.flush()
    [answer] = serve(engine, asked, GREEDY)
    assert answer.usage is not None and (answer.usage.cached_storage == 0) == is_checked
    assert gemma.judge(asked, [answer.token_ids]).holds == is_checked


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


@pytest.mark.parametrize("component", [0, WINDOW])
def test_identity_rule_goes_red_on_one_corrupted_host_page(
    component: int, gemma: Reference, make_hybrid: MakeEngine, host_pools: list[HostPool]
) -> None:
    """The positive control, for a full page and for a window page that came back from the host."""
    engine = make_hybrid()
    asked = prompts([100], seed=2)
    assert gemma.judge(asked, tokens(serve(engine, asked, GREEDY))).holds
    settle(engine)
    serve(engine, prompts([170, 170], seed=5), GREEDY)
    settle(engine)
    cache: Any = engine.cache
    held = [n.residency(component, Tier.HOST).pages for n in cache.tree.nodes()]
    for page in [int(page) for pages in held if pages is not None for page in pages]:
        for view in host_pools[component].page_views(page):
            torch.frombuffer(view, dtype=torch.float32).normal_(generator=torch.Generator().manual_seed(1))
    [answer] = serve(engine, asked, GREEDY)
    assert answer.usage is not None and answer.usage.cached_host > 0
    assert not gemma.judge(asked, [answer.token_ids]).holds


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


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_requests_loses_no_page(seed: int, gemma: Reference, make_hybrid: MakeEngine) -> None:
    """Shared beginnings, short and long answers, aborts at any step, both pools short: all pages counted."""
    rng = random.Random(seed)
    engine = make_hybrid(
        cache=replace(rng.choice([DEVICE_ONLY, TIERED, CONFIGS["write_back"], CONFIGS["small_host"]])),
        max_total_tokens=rng.choice([256, 400, 640]), swa_full_tokens_ratio=rng.choice([0.4, 0.5, 0.9]),
        chunked_prefill_size=rng.choice([8, 24, 40]), max_running_requests=rng.choice([2, 5]),
    )  # fmt: skip
    stems = prompts([70, 45], seed=seed)
    asked: dict[str, list[int]] = {}
    answers: dict[str, Answer] = {}
    for number in range(14):
        rid, stem = f"r{number}", rng.choice(stems)
        [more] = prompts([rng.randrange(1, 40)], seed=99 + number)
        asked[rid] = stem[: rng.randrange(8, len(stem))] + more
        engine.add_request(rid, asked[rid], SamplingParams(max_new_tokens=rng.randrange(1, 40)))
        for _ in range(rng.randrange(4)):
            collect(answers, engine.step())
        if rng.random() < 0.3:
            engine.abort(rng.choice(list(asked)))
    drain(engine, answers)
    whole = [rid for rid in asked if answers[rid].finish_reason == "length"]
    assert len(whole) >= 5 and set(answers) == set(asked)
    judged = gemma.judge([asked[rid] for rid in whole], [answers[rid].token_ids for rid in whole])
    judged.assert_holds()
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

"""The engine on the real prefix cache: answers do not depend on what is cached, nor where."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hiradix.apps.engine import Engine, SamplingParams, Scope
from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.memory import HostPool, make_transport
from hiradix.prefix_cache import MatchPrefixParams, build_prefix_cache
from hiradix.transfer import JobKind
from hiradix.tree import RadixKey, Tier
from tests.engine.checkpoints import Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Answer, assert_empty, drain, serve, tokens
from tests.identity import Identity

GREEDY = SamplingParams(max_new_tokens=10)
DEVICE_ONLY = HiCacheConfig(page_size=16)
OFF = replace(DEVICE_ONLY, disable_radix_cache=True)
TIERED = HiCacheConfig(
    page_size=16, enable_hierarchical_cache=True, hicache_no_regret=False, hicache_ratio=2.0
)

Configure = Callable[[str], HiCacheConfig]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Cache configurations by name; those with storage share one directory."""
    keys = {"prefetch_threshold": 16, "file_storage_path": str(tmp_path / "pages"), "deadline_s": 60}
    extra = parse_extra_config(json.dumps(keys))
    stored = replace(
        TIERED,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=extra,
        hicache_storage_prefetch_policy="wait_complete",
    )
    configs = {
        "off": OFF,
        "device": DEVICE_ONLY,
        "tiers": TIERED,
        "stored": stored,
        "selective": replace(TIERED, hicache_write_policy="write_through_selective"),
        "write_back": replace(TIERED, hicache_write_policy="write_back"),
        "layer_first": replace(TIERED, hicache_mem_layout="layer_first"),
        "best_effort": replace(stored, hicache_storage_prefetch_policy="best_effort"),
        "timeout": replace(stored, hicache_storage_prefetch_policy="timeout"),
        "small_host": replace(TIERED, hicache_ratio=0.6),
    }
    return configs.__getitem__


@pytest.fixture
def make_cached(make_engine: MakeEngine) -> MakeEngine:
    """Checked engines over the real prefix cache, with a device pool that does not hold the workload."""

    def make(**fields: object) -> Engine:
        sizes: dict[str, object] = {"max_total_tokens": 384, "chunked_prefill_size": 64}
        return make_engine(**{**sizes, **fields}, build_cache=build_prefix_cache)

    return make


def settle(engine: Engine) -> None:
    """Let transfers under way end."""
    for _ in range(1000):
        if engine.is_idle():
            return
        engine.wait(0.1)
        engine.step()
    raise AssertionError(f"never idle: {engine.info()}")


def converse(engine: Engine, judge: Reference, num_turns: int = 4) -> tuple[Identity, list[Answer]]:
    """Conversations that grow by each answer and some new tokens, all talking at once, turn by turn."""
    talks = prompts([50, 57, 64, 71, 78], seed=21)
    identity, answers = Identity(), []
    for turn in range(num_turns):
        said = serve(engine, talks, GREEDY)
        for talk, answer, more in zip(talks, said, prompts([19] * len(talks), seed=30 + turn), strict=True):
            expected = judge.answer(talk, len(answer.token_ids))
            identity.compare(talk, expected, answer.token_ids, judge.logprobs_after)
            talk += answer.token_ids + more
        answers += said
    settle(engine)
    return identity, answers


def served_from(answers: list[Answer]) -> dict[str, int]:
    usages = [answer.usage for answer in answers if answer.usage is not None]
    return {tier: sum(getattr(u, f"cached_{tier}") for u in usages) for tier in ("device", "host", "storage")}


@pytest.mark.parametrize(
    "name",
    ["off", "device", "tiers", "stored", "selective", "write_back", "layer_first", "best_effort", "timeout"]
    + ["small_host"],
)
def test_answers_do_not_depend_on_the_cache(
    name: str, configure: Configure, llama: Reference, make_cached: MakeEngine
) -> None:
    engine = make_cached(cache=configure(name))
    identity, answers = converse(engine, llama)
    identity.assert_holds()
    assert_empty(engine)
    used = served_from(answers)
    assert (used["device"] > 0) == (name != "off"), used
    if name != "small_host":  # what so small a host still has depends on when copies end
        assert (used["host"] > 0) == (name not in ("off", "device")), used


@pytest.mark.parametrize(
    "family", ["qwen3", "mistral-window", "llama-plain", "deepseek", "deepseek-v2", "gemma3"]
)
def test_other_families_through_all_tiers(
    family: str, configure: Configure, reference: Callable[[str], Reference], make_cached: MakeEngine
) -> None:
    judge = reference(family)
    engine = make_cached(model_path=str(judge.path), cache=configure("stored"))
    identity, _ = converse(engine, judge, num_turns=3)
    identity.assert_holds()


ROUND_TRIPS = ["llama", "llama-plain", "deepseek", "gemma3"]


@pytest.mark.parametrize(("layout", "eviction"), [("page_first", "ghd"), ("layer_first", "lru")])
@pytest.mark.parametrize("family", ROUND_TRIPS)
def test_storage_serves_another_engine(
    family: str,
    layout: str,
    eviction: str,
    configure: Configure,
    reference: Callable[[str], Reference],
    make_cached: MakeEngine,
) -> None:
    """Device, host, storage, another process's host, its device: the answers are those of computing anew."""
    judge, asked = reference(family), prompts([100, 130, 75], seed=2)
    config = replace(configure("stored"), hicache_mem_layout=layout, radix_eviction_policy=eviction)
    settings = {"model_path": str(judge.path), "cache": config, "max_total_tokens": 1024}
    first = make_cached(**settings)
    serve(first, asked, GREEDY)
    settle(first)
    first.close()
    second = make_cached(**settings)
    answers = serve(second, asked, GREEDY)
    judge.judge(asked, tokens(answers)).assert_holds()
    assert [answer.usage.cached_storage for answer in answers if answer.usage] == [96, 128, 64]


def test_quantised_pages_serve_who_asks_for_them_alone(
    configure: Configure, llama: Reference, make_cached: MakeEngine
) -> None:
    """Another engine of the same keys is served; one whose answers are to be exact finds nothing."""
    exact, asked = configure("stored"), prompts([100, 130], seed=2)
    keys = exact.hicache_storage_backend_extra_config
    extra = replace(keys, backend={**keys.backend, "quantise": "fp8"})
    lossy = replace(exact, hicache_storage_backend_extra_config=extra)
    settings = {"model_path": str(llama.path), "max_total_tokens": 1024}
    found = []
    for config in (lossy, lossy, exact):
        engine = make_cached(**settings, cache=config)
        answers = serve(engine, asked, GREEDY)
        found.append([answer.usage.cached_storage for answer in answers if answer.usage])
        settle(engine)
        assert_empty(engine)
        engine.close()
    assert found == [[0, 0], [96, 128], [0, 0]]
    llama.judge(asked, tokens(answers)).assert_holds()


def test_flush_keeps_storage_only(configure: Configure, llama: Reference, make_cached: MakeEngine) -> None:
    engine = make_cached(cache=configure("stored"))
    asked = prompts([100], seed=2)
    serve(engine, asked, GREEDY)
    settle(engine)
    assert engine.flush()
    assert engine.info().available_tokens == engine.info().max_total_tokens
    [answer] = serve(engine, asked, GREEDY)
    assert answer.usage is not None
    assert (answer.usage.cached_device, answer.usage.cached_host, answer.usage.cached_storage) == (0, 0, 96)
    llama.judge(asked, [answer.token_ids]).assert_holds()


class FailingLoads:
    """Copies pages, but none to the device while `fails`."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.fails = False

    def copy_pages(self, src: Any, dst: Any, *more: Any) -> None:
        if self.fails and isinstance(src, HostPool):
            raise OSError("bus error")
        self.inner.copy_pages(src, dst, *more)


def test_loads_that_always_fail_cost_time_and_count_as_nothing_used(
    configure: Configure, llama: Reference, make_cached: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def failing(*arguments: Any) -> FailingLoads:
        made.append(FailingLoads(make_transport(*arguments)))
        return made[-1]

    monkeypatch.setattr("hiradix.prefix_cache.lower_tiers.make_transport", failing)
    engine = make_cached(cache=configure("tiers"))
    asked = prompts([100], seed=2)
    serve(engine, asked, GREEDY)
    settle(engine)
    serve(engine, prompts([170, 170], seed=5), GREEDY)  # pushes the first off the device, most of it
    settle(engine)
    made[0].fails = True
    [answer] = serve(engine, asked, GREEDY)
    loads = engine.cache.stats().transfers.kinds[JobKind.LOAD]
    assert sum(loads.failures.values()) == 2, "tried again once, then computed"
    assert answer.usage is not None and answer.usage.cached_host == answer.usage.cached_storage == 0
    assert answer.usage.cached_device < 96, "the rest was on the host"
    llama.judge(asked, [answer.token_ids]).assert_holds()
    settle(engine)
    assert_empty(engine)


def test_namespaces_share_nothing(configure: Configure, llama: Reference, make_cached: MakeEngine) -> None:
    engine = make_cached(cache=configure("stored"), max_total_tokens=1024)
    [prompt] = prompts([100], seed=2)
    for rid, scope in enumerate((None, Scope(cache_salt="b"), Scope(extra_key="b"), Scope(cache_salt="b"))):
        engine.add_request(str(rid), prompt, GREEDY, scope)
        [answer] = drain(engine).values()
        settle(engine)
        assert answer.usage is not None
        assert answer.usage.cached_tokens == (96 if rid == 3 else 0)
        llama.judge([prompt], [answer.token_ids]).assert_holds()


def test_retraction_with_tiers(configure: Configure, llama: Reference, make_cached: MakeEngine) -> None:
    engine = make_cached(cache=configure("tiers"), max_total_tokens=160)
    asked = prompts([20, 31, 18, 25, 40], seed=6)
    answers = serve(engine, asked, SamplingParams(max_new_tokens=60))
    assert engine.info().num_retractions > 0
    llama.judge(asked, tokens(answers)).assert_holds()
    settle(engine)
    assert_empty(engine)


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_in_every_state_with_tiers(
    num_steps: int, configure: Configure, llama: Reference, make_cached: MakeEngine
) -> None:
    engine = make_cached(cache=configure("stored"), chunked_prefill_size=32)
    asked = prompts([120, 90], seed=4)
    serve(engine, asked, GREEDY)  # on the host and in storage afterwards
    settle(engine)
    if num_steps % 2:
        assert engine.flush()  # waits for a prefetch first, else loads back
    else:
        serve(engine, prompts([150, 150], seed=5), GREEDY)
    engine.add_request("gone", asked[0], GREEDY)
    engine.add_request("kept", asked[1], GREEDY)
    for _ in range(num_steps):
        engine.step()
    engine.abort("gone")
    engine.abort("kept")
    engine.step()
    settle(engine)
    assert_empty(engine)
    llama.judge(asked, tokens(serve(engine, asked, GREEDY))).assert_holds()


def pages_of(engine: Engine, prompt: list[int], tier: Tier) -> list[int]:
    """Pages of the cached beginning of `prompt` in `tier`."""
    match = engine.cache.match_prefix(MatchPrefixParams(RadixKey(prompt)))
    node = match.last_device_node if tier is Tier.DEVICE else match.last_host_node
    cache: Any = engine.cache
    return [int(page) for page in cache.tree.pages(node, tier)]


def test_identity_rule_goes_red_on_one_corrupted_device_page(
    configure: Configure, llama: Reference, make_cached: MakeEngine
) -> None:
    """The positive control: tests that compare answers would see wrong cached data."""
    engine = make_cached(cache=configure("device"))
    asked = prompts([100], seed=2)
    assert llama.judge(asked, tokens(serve(engine, asked, GREEDY))).holds
    cache: Any = engine.cache
    page = pages_of(engine, asked[0], Tier.DEVICE)[2]
    for values in cache.token_to_kv_pool_allocator.get_kvcache().v_buffer:
        values[page * 16 : (page + 1) * 16].normal_(generator=torch.Generator().manual_seed(1))
    assert not llama.judge(asked, tokens(serve(engine, asked, GREEDY))).holds


@pytest.mark.parametrize("family", ROUND_TRIPS)
def test_identity_rule_goes_red_on_one_corrupted_host_page(
    family: str,
    configure: Configure,
    reference: Callable[[str], Reference],
    make_cached: MakeEngine,
    host_pools: list[HostPool],
) -> None:
    judge = reference(family)
    engine = make_cached(model_path=str(judge.path), cache=configure("tiers"))
    asked = prompts([100], seed=2)
    assert judge.judge(asked, tokens(serve(engine, asked, GREEDY))).holds
    settle(engine)
    serve(engine, prompts([170, 170], seed=5), GREEDY)  # pushes the first off the device
    settle(engine)
    page = pages_of(engine, asked[0], Tier.HOST)[2]
    for view in host_pools[0].page_views(page):
        torch.frombuffer(view, dtype=torch.float32).normal_(generator=torch.Generator().manual_seed(1))
    [answer] = serve(engine, asked, GREEDY)
    assert answer.usage is not None and answer.usage.cached_host > 0
    assert not judge.judge(asked, [answer.token_ids]).holds

"""The reference engine: each token of a prompt has one source, each computed one a reason."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from hiradix.apps.engine import Engine, SamplingParams, Scope
from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.explain import Explanation, Reason, TokenSource
from hiradix.prefix_cache import build_prefix_cache
from hiradix.storage.generations import NUM_SLOTS, record_key
from tests.engine.conftest import MakeEngine, llama, make_engine, one_quiet_thread, reference
from tests.engine.driving import Answer, drain

__all__ = ["llama", "make_engine", "one_quiet_thread", "reference"]

PAGE = 16
DEVICE_ONLY = HiCacheConfig(page_size=PAGE)
TIERED = replace(DEVICE_ONLY, enable_hierarchical_cache=True, hicache_no_regret=False, hicache_ratio=2.0)
ONE_TOKEN = SamplingParams(max_new_tokens=1)


def stored_in(folder: Path, **keys: object) -> HiCacheConfig:
    extra = {"prefetch_threshold": PAGE, "file_storage_path": str(folder), "deadline_s": 60, **keys}
    return replace(
        TIERED,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=parse_extra_config(json.dumps(extra)),
        hicache_storage_prefetch_policy="wait_complete",
    )


@pytest.fixture
def make_cached(make_engine: MakeEngine) -> MakeEngine:
    def make(**fields: object) -> Engine:
        sizes: dict[str, object] = {"max_total_tokens": 384, "chunked_prefill_size": 64}
        return make_engine(**{**sizes, **fields}, build_cache=build_prefix_cache)

    return make


def ask(engine: Engine, prompt: list[int], **scope: str) -> Explanation:
    """The explanation of one request, checked against its usage; served to its end, transfers included."""
    engine.add_request("r", prompt, ONE_TOKEN, Scope(**scope))
    return checked(drain(engine)["r"], prompt, engine)


def checked(answer: Answer, prompt: list[int], engine: Engine) -> Explanation:
    for _ in range(1000):
        if engine.is_idle():
            break
        engine.wait(0.1)
        engine.step()
    usage = answer.usage
    assert usage is not None and usage.explanation is not None
    found = usage.explanation
    assert found.num_tokens == len(prompt), "all of it, once"
    sources = found.tokens_by_source()
    assert (sources["device"], sources["host"], sources["storage"]) == (
        usage.cached_device, usage.cached_host, usage.cached_storage,
    )  # fmt: skip
    assert sources["computed"] == len(prompt) - usage.cached_tokens == sum(found.tokens_by_reason().values())
    return found


def reasons(found: Explanation) -> list[tuple[int, int, Reason]]:
    return [(span.start, span.end, span.reason) for span in found.spans if span.reason is not None]


def prompt_of(seed: int, num_tokens: int = 6 * PAGE + 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 90) for _ in range(num_tokens)]


def test_what_nobody_sent_before_was_never_seen(make_cached: MakeEngine) -> None:
    engine, prompt = make_cached(cache=DEVICE_ONLY), prompt_of(1)
    assert reasons(ask(engine, prompt)) == [(0, 96, Reason.NEVER_SEEN), (96, 99, Reason.BOUNDARY)]
    again = ask(engine, prompt)
    assert again.spans[0].source is TokenSource.DEVICE and reasons(again) == [(96, 99, Reason.BOUNDARY)]
    longer = ask(engine, [*prompt[:96], *prompt_of(2)])
    assert longer.spans[0].end == 96
    assert [reason for _, _, reason in reasons(longer)] == [Reason.NEVER_SEEN, Reason.BOUNDARY]


def test_a_prompt_whose_log_probabilities_are_asked_for_is_not_looked_up(make_cached: MakeEngine) -> None:
    engine, prompt = make_cached(cache=DEVICE_ONLY), prompt_of(1)
    ask(engine, prompt)
    engine.add_request("r", prompt, SamplingParams(max_new_tokens=1, prompt_logprobs=0), Scope())
    found = checked(drain(engine)["r"], prompt, engine)
    assert reasons(found) == [(0, 99, Reason.BOUNDARY)] and "log probabilities" in found.spans[0].detail


@pytest.mark.parametrize(
    ("at", "cause"),
    [(PAGE + 3, "a timestamp in the system prompt"), (3 * PAGE, "tool order"), (70, "a block that is empty")],
)
def test_where_a_prompt_parts_from_its_relative(make_cached: MakeEngine, at: int, cause: str) -> None:
    engine, prompt = make_cached(cache=DEVICE_ONLY), prompt_of(1)
    ask(engine, prompt)
    other = list(prompt)
    other[at] = 4
    found = ask(engine, other)
    first = at // PAGE * PAGE
    assert reasons(found) == [(first, 96, Reason.PARTED), (96, 99, Reason.BOUNDARY)], cause
    (span,) = [span for span in found.spans if span.reason is Reason.PARTED]
    assert f"token {at} " in span.detail


def test_another_salt_and_another_adapter(make_cached: MakeEngine) -> None:
    engine, prompt = make_cached(cache=DEVICE_ONLY), prompt_of(1)
    ask(engine, prompt, cache_salt="alice")
    for scope in ({"cache_salt": "bob"}, {}, {"cache_salt": "alice", "extra_key": "lora"}):
        found = ask(engine, prompt, **scope)
        assert reasons(found)[0] == (0, 96, Reason.OTHER_NAMESPACE), scope
        assert "alice" not in json.dumps(found.as_json()), "whose it is is nobody else's business"


@pytest.mark.parametrize("tier", ["device", "host"])
def test_what_was_evicted_says_from_which_tier(make_cached: MakeEngine, tier: str) -> None:
    engine = make_cached(cache=DEVICE_ONLY if tier == "device" else replace(TIERED, hicache_ratio=1.01))
    prompt = prompt_of(1)
    ask(engine, prompt)
    for seed in range(2, 14):
        ask(engine, prompt_of(seed))
    found = ask(engine, prompt)
    assert reasons(found) == [(0, 96, Reason.EVICTED), (96, 99, Reason.BOUNDARY)]
    assert found.spans[0].detail.startswith(f"left the {tier} by ghd ")


def test_a_flush_is_a_reason_of_its_own(make_cached: MakeEngine) -> None:
    engine, prompt = make_cached(cache=TIERED), prompt_of(1)
    ask(engine, prompt)
    engine.cache.reset()
    assert reasons(ask(engine, prompt))[0] == (0, 96, Reason.FLUSHED)


def test_what_was_forgotten_says_so(make_cached: MakeEngine) -> None:
    from hiradix.intents import Selector
    from hiradix.tree import RadixKey

    engine, prompt = make_cached(cache=TIERED), prompt_of(1)
    ask(engine, prompt)
    engine.cache.forget(Selector.prefix(RadixKey(prompt)), ("device", "host"))
    for _ in range(5):
        engine.step()
    assert reasons(ask(engine, prompt))[0] == (0, 96, Reason.FORGOTTEN)


def test_storage_below_its_threshold_and_damaged(make_cached: MakeEngine, tmp_path: Path) -> None:
    prompt, other, cached = prompt_of(1), prompt_of(2), stored_in(tmp_path)
    first = make_cached(cache=cached)
    ask(first, prompt)
    ask(first, other)
    short = make_cached(cache=stored_in(tmp_path, prefetch_threshold=200))
    assert reasons(ask(short, prompt))[0] == (0, 96, Reason.BELOW_THRESHOLD)
    engine = make_cached(cache=cached)
    assert ask(engine, other).tokens_by_source()["storage"] == 96, "compared with what is stored by now"
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 1024:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    assert reasons(ask(engine, prompt))[0] == (0, 96, Reason.DAMAGED)


def test_storage_that_is_damaged_before_it_is_compared(make_cached: MakeEngine, tmp_path: Path) -> None:
    prompt, cached = prompt_of(1), stored_in(tmp_path)
    ask(make_cached(cache=cached), prompt)
    records = tuple(record_key("", slot) for slot in range(NUM_SLOTS))
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 1024 and not path.name.startswith(records):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    assert reasons(ask(make_cached(cache=cached), prompt))[0] == (0, 96, Reason.DAMAGED)


def test_a_device_without_room_for_a_load(make_cached: MakeEngine) -> None:
    """The gate of promise 7 says no: loading is predicted to be slower."""
    engine, prompt = make_cached(cache=replace(TIERED, hicache_ratio=4.0)), prompt_of(1)
    ask(engine, prompt)
    for seed in range(2, 8):
        ask(engine, prompt_of(seed))
    engine.cache.no_regret.takes = lambda move, num_pages: False  # type: ignore[method-assign]
    assert reasons(ask(engine, prompt))[0] == (0, 96, Reason.PREDICTED_SLOWER)


def test_nothing_is_explained_where_nothing_is_remembered(make_cached: MakeEngine) -> None:
    engine = make_cached(cache=replace(DEVICE_ONLY, explain_names=0))
    engine.add_request("r", prompt_of(1), ONE_TOKEN)
    usage = drain(engine)["r"].usage
    assert usage is not None and usage.explanation is None


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_adds_up(make_cached: MakeEngine, tmp_path: Path, seed: int) -> None:
    """Conversations that grow, tenants, evictions in every tier, flushes: sums are exact after every request."""
    rng = random.Random(seed)
    config = replace(stored_in(tmp_path), hicache_ratio=1.5)
    engine = make_cached(cache=rng.choice((DEVICE_ONLY, TIERED, config)))
    talks = [prompt_of(n, rng.randrange(1, 60)) for n in range(6)]
    total = 0
    for _ in range(40):
        talk = rng.randrange(len(talks))
        talks[talk] = [*talks[talk], *prompt_of(rng.randrange(1000), rng.randrange(1, 40))][-200:]
        scope = {"cache_salt": rng.choice("ab")} if rng.random() < 0.3 else {}
        found = ask(engine, talks[talk], **scope)
        total += found.tokens_by_source()["computed"]
        assert sum(engine.cache.cache.misses.tokens_by_reason.values()) == total
        if rng.random() < 0.05:
            engine.cache.reset()

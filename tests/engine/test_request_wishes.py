"""Wishes of requests inside the engine: alike on all ranks, and each with an answer."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from hiradix.apps.engine.api import PromptWish, SamplingParams, Scope
from hiradix.apps.engine.ranks import _scope
from hiradix.config import HiCacheConfig
from hiradix.intents import Selector, Verb
from hiradix.prefix_cache import build_prefix_cache
from hiradix.tree import RadixKey
from tests.engine.conftest import MakeEngine


def test_a_requests_wishes_reach_the_other_ranks_as_they_are() -> None:
    hold = PromptWish("cache_control", {"verb": "hold", "ttl_s": 300.0}, 48)
    told = PromptWish("prompt_cache_key", answer={"state": "done"})
    keep = PromptWish("prompt_cache_retention", {"verb": "bring", "target": "storage"}, or_hold_s=86400.0)
    scope = Scope(cache_salt="alice", session="s", wishes=(hold, told, keep))
    assert _scope(json.loads(json.dumps(asdict(scope)))) == scope
    assert _scope(asdict(Scope())) == Scope()


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_request_that_is_aborted_is_forgotten_too(make_engine: MakeEngine, num_steps: int) -> None:
    """While its prompt is computed, and behind its first token."""
    cache = HiCacheConfig(page_size=16)
    engine = make_engine(build_cache=build_prefix_cache, cache=cache, chunked_prefill_size=32)
    prompt = list(range(1, 81))
    key = RadixKey(prompt, cache_salt="alice")

    def found() -> int:
        return engine.cache.locate(Selector.prefix(key)).found["device"].tokens

    asked: list[tuple[PromptWish, ...]] = [(), (PromptWish("hiradix", {"verb": "forget"}),)]
    for wishes in asked:
        engine.add_request(
            "r", prompt, SamplingParams(max_new_tokens=50), Scope(None, "alice", wishes=wishes)
        )
        for _ in range(num_steps):
            engine.step()
        assert engine.abort("r")
        if not wishes:
            assert found() > 0, "what was computed stays"
    for _ in range(2):
        engine.step()
    assert found() == 0, "and is gone where that is wished"
    [receipt] = [one for one in engine.cache.intents() if one.verb is Verb.FORGET]
    assert receipt.state.value == "done"


def test_the_end_of_a_session_ends_no_leases_of_others(make_engine: MakeEngine) -> None:
    """Whatever its name: "*" is what leases of no session go by."""
    engine = make_engine(build_cache=build_prefix_cache, cache=HiCacheConfig(page_size=16))
    hold = (PromptWish("hiradix", {"verb": "hold", "ttl_s": 60}),)
    scopes = [Scope(extra_key, "alice", session=name) for extra_key in (None, "x") for name in ("", "*")]
    for number, scope in enumerate(scopes):
        engine.add_request(
            f"r{number}", list(range(1, 33)), SamplingParams(max_new_tokens=2), replace(scope, wishes=hold)
        )
        while engine.has_work:
            engine.step()
    engine.step()
    leases = engine.cache.cache.intents.book.leases
    assert len(leases) == 4
    for left, scope in ((4, scopes[0]), (3, scopes[1]), (2, scopes[3])):
        engine.hint([1], replace(scope, hint="end_of_session"))
        assert len(leases) == left


def test_a_locate_says_what_is_found(make_engine: MakeEngine) -> None:
    engine = make_engine(build_cache=build_prefix_cache, cache=HiCacheConfig(page_size=16))
    wishes = tuple(
        PromptWish("hiradix", {"verb": "locate", "tiers": tiers}) for tiers in (None, ["host", "storage"])
    )
    engine.add_request("r", list(range(1, 41)), SamplingParams(max_new_tokens=1), Scope(wishes=wishes))
    outputs = [output for _ in range(9) for output in engine.step()]
    here, below = outputs[-1].usage.wishes
    assert here["state"] == "done" and here["found"] == {"device": 32, "host": 32}
    assert below["state"] == "accepted" and below["found"] == {"host": 32}


@pytest.mark.parametrize("disable", [False, True])
def test_a_hold_says_what_it_lacks(make_engine: MakeEngine, disable: bool) -> None:
    """Nothing is known that might be loaded: neither room nor a price is the reason."""
    cache = HiCacheConfig(page_size=16, disable_radix_cache=disable)
    engine = make_engine(build_cache=build_prefix_cache, cache=cache)
    wishes = (PromptWish("hiradix", {"verb": "hold", "ttl_s": 60}),)
    engine.add_request("r", list(range(1, 41)), SamplingParams(max_new_tokens=3), Scope(wishes=wishes))
    [wish] = [output for _ in range(9) for output in engine.step()][-1].usage.wishes
    assert wish["state"] == ("refused" if disable else "held")
    assert ("nowhere in the cache" in wish.get("reason", "")) == disable

"""Requests that wait in our engine use what storage has for them, however many wait."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hiradix.apps.engine import Engine, SamplingParams
from hiradix.config import parse_extra_config
from hiradix.prefix_cache import build_prefix_cache
from hiradix.transfer import JobKind
from tests.cache.nothing_held import NothingHeld
from tests.engine.checkpoints import Reference, prompts
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Answer, collect
from tests.engine.test_tiers import TIERED, served_from, settle
from tests.identity import Identity

PAGE = 16
NUM_PROMPTS, NUM_TOKENS = 20, 81  # five pages each are in storage
DEVICE_TOKENS = 448  # five prompts with their answers
SHORT = SamplingParams(max_new_tokens=3)


@pytest.fixture
def restart(make_engine: MakeEngine, tmp_path: Path) -> MakeEngine:
    """Engines that begin anew over one store."""
    keys = {"prefetch_threshold": PAGE, "file_storage_path": str(tmp_path / "pages"), "deadline_s": 60}
    cache = replace(
        TIERED,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=parse_extra_config(json.dumps(keys)),
        hicache_storage_prefetch_policy="wait_complete",
    )

    def make(**fields: object) -> Engine:
        return make_engine(
            cache=cache, max_total_tokens=DEVICE_TOKENS, build_cache=build_prefix_cache, **fields
        )

    return make


def asked_at_once(engine: Engine, asked: Sequence[list[int]], at_once: int) -> list[Answer]:
    """The answers; when one is there the next prompt arrives."""
    answers: dict[str, Answer] = {}
    waiting = list(enumerate(asked))
    while waiting or engine.has_work:
        running = sum(
            f"r{n}" in answers and answers[f"r{n}"].finish_reason is None for n in range(len(asked))
        )
        while waiting and running < at_once:
            number, prompt = waiting.pop(0)
            answers[f"r{number}"] = Answer()
            engine.add_request(f"r{number}", prompt, SHORT)
            running += 1
        collect(answers, engine.step())
        if engine.is_blocked:
            engine.wait(1.0)
    return [answers[f"r{number}"] for number in range(len(asked))]


def check(engine: Engine, llama: Reference, asked: Sequence[list[int]], at_once: int) -> tuple[int, int]:
    """Ask all; the answers are the model's. Tokens used from storage, and fetched."""
    answers, identity = asked_at_once(engine, asked, at_once), Identity()
    for prompt, answer in zip(asked, answers, strict=True):
        expected = llama.answer(prompt, len(answer.token_ids))
        identity.compare(prompt, expected, answer.token_ids, llama.logprobs_after)
    identity.assert_holds()
    settle(engine)
    assert engine.cache.stats().waiting_reserved == 0
    return served_from(answers)["storage"], engine.cache.stats().prefetched


def unlike(num_prompts: int, shared: int = 0) -> list[list[int]]:
    """Prompts that share their first `shared` tokens alone."""
    (head,) = prompts([shared], seed=7) if shared else ([],)
    return [head + tail for tail in prompts([NUM_TOKENS - shared] * num_prompts, seed=8)]


@pytest.mark.long(20)
@pytest.mark.parametrize("shared", [0, 48])
def test_what_waits_keeps_what_was_fetched_for_it(restart: MakeEngine, llama: Reference, shared: int) -> None:
    asked = unlike(NUM_PROMPTS, shared)
    first = restart()
    check(first, llama, asked, 1)
    first.close()
    whole = NUM_TOKENS // PAGE * PAGE
    fresh = whole * NUM_PROMPTS - shared * (NUM_PROMPTS - 1)  # each page once
    for at_once in (1, 5, NUM_PROMPTS):
        engine = restart()
        used, fetched = check(engine, llama, asked, at_once)
        assert used >= 0.95 * fresh and fetched <= 1.1 * used, (at_once, used, fetched, fresh)
        engine.close()


def test_what_many_requests_want_at_once_is_read_once(restart: MakeEngine, llama: Reference) -> None:
    """Four equal requests of eight pages, and a system prompt of five with 64 clients."""
    equal, system = prompts([8 * PAGE + 1, 5 * PAGE], seed=9)
    clients = [[*system, *own] for own in prompts([20] * 64, seed=10)]
    first = restart()
    check(first, llama, [equal, [*system, 5]], 1)
    first.close()
    engine = restart()
    for asked, num_read in (([equal] * 4, 8), (clients, 8 + 5)):
        check(engine, llama, asked, len(asked))
        assert engine.cache.controller.stats().kinds[JobKind.READ].num_pages == num_read


def test_it_is_the_holding_that_does_it(
    restart: MakeEngine, llama: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control: the same requests, with nothing held for them."""
    asked = unlike(NUM_PROMPTS)
    first = restart()
    check(first, llama, asked, 1)
    first.close()
    monkeypatch.setattr("hiradix.cache.core.Prefetcher", NothingHeld)
    used, _ = check(restart(), llama, asked, NUM_PROMPTS)
    assert used < 0.7 * NUM_TOKENS // PAGE * PAGE * NUM_PROMPTS, used

"""Runs an engine to the end of its work and collects what it said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hiradix.apps.engine import Engine, Output, SamplingParams, TokenLogprob, Usage
from hiradix.prefix_cache.records import STATE
from hiradix.tree import Tier
from tests.engine.checkpoints import Reference, prompts

MAX_STEPS = 5000


@dataclass
class Answer:
    """All Outputs of one request put together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None


def collect(answers: dict[str, Answer], outputs: Sequence[Output]) -> None:
    """Add a step's Outputs to the answers; nothing may follow a last one."""
    for output in outputs:
        answer = answers.setdefault(output.rid, Answer())
        assert answer.finish_reason is None, f"{output.rid}: an Output after its last"
        answer.token_ids += output.token_ids
        answer.text += output.text
        answer.logprobs += output.logprobs
        answer.finish_reason, answer.usage, answer.error = output.finish_reason, output.usage, output.error


def drain(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    """Step until nothing is left to do; what is said then is added to `answers`, if given."""
    answers = {} if answers is None else answers
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            return answers
        collect(answers, engine.step())
        if engine.is_blocked:
            engine.wait(1.0)
    raise AssertionError(f"still working after {MAX_STEPS} steps: {engine.info()}")


def serve(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
    """The answers to `prompts`, all sent at once."""
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", prompt, params)
    answers = drain(engine)
    return [answers[f"r{index}"] for index in range(len(prompts))]


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def assert_empty(engine: Engine) -> None:
    """Nothing running, waiting or lost: every page is free or evictable."""
    info = engine.info()
    assert (info.num_running, info.num_waiting, info.protected_tokens) == (0, 0, 0), info
    assert info.available_tokens + info.evictable_tokens == info.max_total_tokens, info


def records(engine: Engine, tier: Tier = Tier.DEVICE) -> list[int]:
    """Where the tree has records of recurrent state."""
    cache: Any = engine.cache
    found: list[int] = cache.tree.all_pages(tier, STATE).tolist()
    return found


def assert_no_state_out(engine: Engine) -> None:
    """As `assert_empty`, and every slot of the state pool is free or an evictable record."""
    assert_empty(engine)
    cache: Any = engine.cache
    states: Any = engine._pools.states
    assert cache.mamba_protected_size() == 0
    assert states.available + cache.mamba_evictable_size() == states.num_pages


def storm(engine: Engine, judge: Reference, rng: random.Random, seed: int) -> None:
    """Shared beginnings, short and long answers, aborts at any step; what was answered whole is right."""
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
    judged = judge.judge([asked[rid] for rid in whole], [answers[rid].token_ids for rid in whole])
    judged.assert_holds()

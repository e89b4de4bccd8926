"""The answers of `bench_quantise.py`: the demo's conversations over pages that come back from storage."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Row

from hiradix.apps.bench.client import Conversation
from hiradix.apps.bench.report import TIE_GAP
from hiradix.apps.bench.workload import Size, make_workload
from hiradix.apps.engine import Engine, EngineConfig, SamplingParams
from hiradix.apps.engine.api import TokenLogprob
from hiradix.config import ExtraConfig, HiCacheConfig

TURNS = 4  # the first of them fills the store
ANSWER_TOKENS = 24
LIKELIEST = 10
WAIT_S = 120.0
GREEDY = SamplingParams(max_new_tokens=ANSWER_TOKENS, logprobs=50)


@dataclass(frozen=True)
class Told:
    """An answer to a prompt of so many tokens, of which so many came from storage."""

    text: str
    tokens: tuple[TokenLogprob, ...]
    num_prompt: int
    num_stored: int


@dataclass(frozen=True)
class Compared:
    """An answer beside the reference's: so many equal tokens lead, of so many; log-probabilities apart."""

    is_identical: bool
    num_leading: int
    num_tokens: int
    apart: tuple[float, ...]


def measure_answers(folder: Path, model_path: str | None, quick: bool) -> list[Row]:
    """Shares of equal answers and tokens, and how far the first token's log-probabilities are off."""
    from hiradix.apps.engine.smollm2 import smollm2_path

    path = model_path or str(smollm2_path())
    size = Size(0, 1, 0, 0, 0, 0) if quick else Size(4, 4, 4, 1, 1, 1)
    conversations = make_workload(size).conversations
    num_turns = 2 if quick else TURNS
    engine = Engine(EngineConfig(path, cache=HiCacheConfig(disable_radix_cache=True), max_running_requests=1))
    played = [list(play(engine, one, num_turns)) for one in conversations]
    engine.close()
    print("computed anew: all turns", file=sys.stderr, flush=True)
    found = {}
    for name, keys in (("hiradix", {"quantise": "fp8"}), ("exact", {})):
        found[name] = replay(path, played, {"disk_storage_path": str(folder / f"answers-{name}"), **keys})
    reference = [told for turns in played for _, told in turns[1:]]
    case = f"answers, {len(conversations)} conversations x {num_turns - 1} turns"
    return rows_of(case, reference, found)


def play(engine: Engine, one: Conversation, num_turns: int) -> Iterator[tuple[list[int], Told]]:
    """Prompts and answers, computed anew; the answers are said before the next turn."""
    assert engine.tokenizer is not None
    said = [{"role": "system", "content": one.system}]
    said += [{"role": message.role, "content": message.content} for message in one.history]
    for turn in one.user_turns[:num_turns]:
        said.append({"role": "user", "content": turn})
        prompt = engine.tokenizer.apply_chat(said)
        told = answer(engine, prompt)
        assert not told.num_stored
        said.append({"role": "assistant", "content": told.text})
        yield prompt, told


def replay(path: str, played: Sequence[Sequence[tuple[list[int], Told]]], keys: dict[str, Any]) -> list[Told]:
    """Answers to the same prompts but the first of each conversation, from an engine that has nothing of them
    but in storage."""
    more = {"max_size": "4GiB", "min_free_space": 0, "prefetch_threshold": 1}
    cache = HiCacheConfig(
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_no_regret=False,
        hicache_storage_backend="disk",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=ExtraConfig.from_mapping(keys | more),
    )
    engine = Engine(EngineConfig(path, cache=cache, max_total_tokens=8192, max_running_requests=1))
    found = []
    for turns in played:
        for number, (prompt, _) in enumerate(turns):
            told = answer(engine, prompt)
            assert engine.flush(), "not idle"
            if number:
                assert told.num_stored >= engine.info().page_size, f"{told.num_stored} from storage"
                found.append(told)
    engine.close()
    return found


def answer(engine: Engine, prompt: list[int]) -> Told:
    """From an idle engine, which is idle again after."""
    engine.add_request("one", prompt, GREEDY)
    text, tokens, deadline = "", [], time.monotonic() + WAIT_S
    usage = None
    while usage is None or not engine.is_idle():
        for output in engine.step():
            assert output.error is None, output.error
            text += output.text
            tokens += output.logprobs
            usage = output.usage if output.finish_reason else usage
        if usage is not None or engine.is_blocked:
            engine.wait(0.01)
        if time.monotonic() > deadline:
            raise RuntimeError(f"no answer within {WAIT_S} s")
    return Told(text, tuple(tokens), len(prompt), usage.cached_storage)


def compare(ours: Told, reference: Told) -> Compared:
    """By the demo's rule: the first token that differs is none where the reference saw a tie."""
    pairs = list(zip(ours.tokens, reference.tokens, strict=False))
    parted = next((at for at, (a, b) in enumerate(pairs) if a.token_id != b.token_id), len(pairs))
    is_same = parted == len(pairs) and len(ours.tokens) == len(reference.tokens)
    if parted < len(pairs):
        a, b = pairs[parted]
        is_same = abs(b.logprob - dict(b.top).get(a.token_id, float("-inf"))) < TIE_GAP
    least, found = ours.tokens[0].top[-1][1], dict(ours.tokens[0].top)
    apart = [abs(value - found.get(token, least)) for token, value in reference.tokens[0].top[:LIKELIEST]]
    return Compared(is_same, parted, len(reference.tokens), tuple(apart))


def rows_of(case: str, reference: Sequence[Told], found: dict[str, list[Told]]) -> list[Row]:
    """A row for each question; `hiradix` is quantised pages."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    for name, answers in found.items():
        all_of = [compare(one, other) for one, other in zip(answers, reference, strict=True)]
        apart = [value for one in all_of for value in one.apart]
        for question, value in {
            ("identical to computed anew", "share"): statistics.mean(one.is_identical for one in all_of),
            ("equal leading tokens", "share"): sum(one.num_leading for one in all_of)
            / sum(one.num_tokens for one in all_of),
            ("same first token", "share"): statistics.mean(one.num_leading > 0 for one in all_of),
            ("first token's log-probabilities off, mean", "nat"): statistics.mean(apart),
            ("first token's log-probabilities off, largest", "nat"): max(apart),
            ("prompt tokens from storage", "share"): sum(one.num_stored for one in answers)
            / sum(one.num_prompt for one in answers),
        }.items():
            values.setdefault(question, {})[name] = float(value)
    return [Row(case, metric, unit, each.pop("hiradix"), each) for (metric, unit), each in values.items()]

"""Prompts with a fact far back: two of a pair differ by that alone, and by the answer that a model gives."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.identity import FIRST_LOGPROBS

VOCAB = 380  # tokens that all the ladder's models know
FACT_START, FACT_TOKENS = 4, 24
NUM_NEEDLES = 38
LENGTHS = 3  # prompts of so many lengths, a page apart
ROOM = 9  # tokens from a prompt's end to the end of its page: a longer answer needs another one
LEAST_TOKENS = 192


@dataclass(frozen=True)
class Needle:
    """A prompt, and how many of its tokens are there when its fact has ended: a hit of fewer proves nothing."""

    prompt: list[int]
    fact_end: int = FACT_START + FACT_TOKENS


def needles(count: int, page: int, name: str) -> list[Needle]:
    """Pairs of prompts of at least `LEAST_TOKENS`, and of two whole pages. Only those of a pair begin alike."""
    made = []
    least, question = max(2, -(-LEAST_TOKENS // page)) * page, page - ROOM if page > ROOM else ROOM
    for number in range(count):
        pair = number // 2
        tokens = _tokens(f"{name}/{pair}", least + pair % LENGTHS * page + question)
        tokens[FACT_START : FACT_START + FACT_TOKENS] = _tokens(f"{name}/fact/{number}", FACT_TOKENS)
        made.append(Needle(tokens))
    return made


def _tokens(name: str, count: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def least_apart(answers: Sequence[dict[str, Any]]) -> float:
    """How far the first token's log probabilities are apart within the pair that knows least of its fact, as a
    multiple of what rounding may make."""
    pairs = zip(answers[::2], answers[1::2], strict=True)
    return min(_apart(*pair) for pair in pairs) / FIRST_LOGPROBS


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    a, b = one["logprobs"][0], other["logprobs"][0]
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=math.inf)

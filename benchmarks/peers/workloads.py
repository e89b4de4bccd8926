"""The same prompts for every peer: made from seeds, so each worker process makes its own copy."""

from __future__ import annotations

import random
from array import array
from functools import cache

import numpy as np

VOCABULARY = 128_000
TURN_TOKENS = (200, 600)  # new tokens of a turn, drawn evenly


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    """`count` random token ids as fresh int objects, as a tokenizer gives them."""
    return rng.integers(1000, VOCABULARY, count).tolist()


@cache
def prompt(num_tokens: int, seed: int = 0) -> array:
    """One long prompt; shorter ones of the same seed are its prefixes."""
    return array("q", tokens(np.random.default_rng(seed), num_tokens))


@cache
def conversations(count: int, num_turns: int) -> list[list[array]]:
    """Per conversation, the prompt of each turn: everything said before, and 200 to 600 tokens more."""
    rng = np.random.default_rng(2)
    low, high = TURN_TOKENS
    told = []
    for _ in range(count):
        said, prompts = array("q"), []
        for _ in range(num_turns):
            said = said + array("q", tokens(rng, int(rng.integers(low, high + 1))))
            prompts.append(said)
        told.append(prompts)
    return told


def round_robin(count: int, num_turns: int) -> list[tuple[int, int]]:
    """(conversation, turn) in the order: everyone's first turn, everyone's second, ..."""
    return [(i, turn) for turn in range(num_turns) for i in range(count)]


@cache
def sliding(num_steps: int, num_turns: int, count: int) -> list[tuple[int, int]]:
    """(conversation, turn): 3/10 of `count` are live at a time, the oldest more often, then they leave."""
    live, mean = count * 3 // 10, count * 8 // 100
    rng = random.Random(5)
    told: dict[int, int] = {}
    steps: list[tuple[int, int]] = []
    base = 0
    while len(steps) < num_steps:
        i = base + min(live - 1, int(rng.expovariate(1 / mean)))
        turn = told.get(i, 0)
        if turn < num_turns:
            told[i] = turn + 1
            steps.append((i, turn))
            if len(steps) % num_turns == 0:
                base += 1
        while told.get(base, 0) >= num_turns:
            base += 1
    return steps


def leaves(count: int, size: int) -> np.ndarray:
    """int64 [count, size]: prompts that differ in their first token."""
    rows = np.random.default_rng(3).integers(1000, VOCABULARY, (count, size))
    rows[:, 0] = np.arange(count) + 200_000
    return rows

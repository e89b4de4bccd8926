"""Every two values of the cache's flags together, through a real start: answers are those of transformers."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hiradix.apps.engine import Engine
from hiradix.apps.server.flags import parse_serve_args
from hiradix.config import HiCacheConfig
from hiradix.settings import setting_of
from tests.engine.checkpoints import Reference, prompts
from tests.engine.configs import stored_in
from tests.engine.driving import Answer, assert_empty, serve, tokens
from tests.engine.test_tiers import GREEDY, served_from, settle
from tests.identity import Identity

LENGTHS = (50, 57, 64, 71, 78)


def _choices(name: str) -> list[str]:
    """What the setting may be: a choice that is there to be refused with its reason is none."""
    one = setting_of(HiCacheConfig, name)
    return [choice for choice in one.choices if choice not in one.refused]


FLAGS: dict[str, list[str]] = {
    "--page-size": ["1", "8", "24"],
    "--hicache-mem-layout": _choices("hicache_mem_layout"),
    "--hicache-io-backend": _choices("hicache_io_backend"),
    "--hicache-write-policy": _choices("hicache_write_policy"),
    "--hicache-storage-prefetch-policy": _choices("hicache_storage_prefetch_policy"),
    "--hicache-storage-backend": ["file", "disk"],
    "--hicache-ratio": ["0.6", "2"],
    "--hicache-no-regret": ["on", "off"],
    "--radix-eviction-policy": ["lru", "ghd", "2q,lru"],
    "--chunked-prefill-size": ["-1", "7", "64"],
}


def all_pairs(factors: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Rows with a value of each factor, in which every two values of two factors meet. Greedy."""
    rng, rows = random.Random(1), []
    left = {
        (a, x, b, y)
        for (a, first), (b, second) in itertools.combinations(enumerate(factors), 2)
        for x in first
        for y in second
    }

    def gain(row: tuple[str, ...]) -> int:
        return sum(row[a] == x and row[b] == y for a, x, b, y in left)

    while left:
        a, x, b, y = min(left)
        tried = [[rng.choice(factor) for factor in factors] for _ in range(40)]
        for row in tried:
            row[a], row[b] = x, y
        best = max((tuple(row) for row in tried), key=gain)
        left -= {(a, best[a], b, best[b]) for a, b in itertools.combinations(range(len(factors)), 2)}
        rows.append(best)
    return rows


ROWS = all_pairs(list(FLAGS.values()))


def arguments(row: Sequence[str]) -> Iterator[str]:
    for flag, value in zip(FLAGS, row, strict=True):
        yield f"{flag}={value}"


def test_every_two_values_meet() -> None:
    for (a, first), (b, second) in itertools.combinations(enumerate(FLAGS.values()), 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(first, second))


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_answers_do_not_depend_on_the_flags(row: tuple[str, ...], llama: Reference, tmp_path: Path) -> None:
    """Fresh, again with what is cached, and after a flush from storage."""
    backend = row[list(FLAGS).index("--hicache-storage-backend")]
    extra = json.dumps({**json.loads(stored_in(tmp_path, backend)), "prefetch_timeout_base": 30})
    config = parse_serve_args(
        ["--model-path", str(llama.path), "--check-invariants", "--enable-hicache", *arguments(row)]
        + ["--max-total-tokens", "384", "--hicache-storage-backend-extra-config", extra]
    ).engine
    engine = Engine(config)
    asked, answers = prompts(LENGTHS, seed=21), list[Answer]()
    try:
        for _ in range(3):
            answers += serve(engine, asked, GREEDY)
            settle(engine)
        assert engine.flush()
        answers += serve(engine, asked, GREEDY)
        settle(engine)
        assert_empty(engine)
    finally:
        engine.close()
    first = tokens(answers[: len(asked)])
    llama.judge(asked, first).assert_holds()
    identity = Identity()
    for prompt, expected, answer in zip(asked * 4, first * 4, answers, strict=True):
        identity.compare(prompt, expected, answer.token_ids, llama.logprobs_after)
    identity.assert_holds()
    used = served_from(answers)
    surely_stored = {"wait_complete", "off"} <= {*row} and "write_back" not in row
    assert used["device"] > 0 and (used["storage"] > 0 or not surely_stored), used

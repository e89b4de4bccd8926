"""Two to eight simulated ranks with different speeds, pools, backends and faults keep identical trees."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hiradix.cache.core import COPY_WAIT_S
from tests.ranks.planted import PLANTED, assert_caught
from tests.ranks.world import Rank, Ranks, Setup
from tests.seeds import FIRST, is_enough, seeded
from tests.transfer.doubles import guarded

BUDGET_S = float(os.environ.get("HIRADIX_RANKS_BUDGET_S", "0"))  # goes on beyond the seeds until this is over
NUM_SEEDS = int(os.environ.get("HIRADIX_RANKS_SEEDS", "60"))
MIN_SEEDS = 60
NUM_MOVES = 250
SETUPS = (
    Setup(2),
    Setup(3, write_policy="write_back", device_pages=9, host_pages=10),
    Setup(4, prefetch_policy="wait_complete", host_pages=8),
    Setup(2, replicated=True),
    Setup(8, write_policy="write_through_selective", prefetch_policy="best_effort"),
    Setup(4, write_policy="write_back", replicated=True),
)
ORDERS = ("lru", "lfu", "ghd", "2q", "slru", "lru,ghd", "ghd,lru", "tlru", "mru", "filo")
COUNTED = ("evicted_device", "evicted_host", "written", "loaded", "load_failed", "backed_up", "prefetched",
           "load_too_slow")  # fmt: skip


def play(seed: int, num_moves: int = NUM_MOVES) -> Ranks:
    """One seed's life; its set-up follows from it."""
    order = ORDERS[seed // len(SETUPS) % len(ORDERS)]
    try:
        return Ranks(seed, replace(SETUPS[seed % len(SETUPS)], order=order)).play(num_moves)
    except Exception as error:
        raise AssertionError(f"replay with play({seed}, {num_moves}): {error!r:.2000}") from error


def counts(ranks: Ranks) -> Counter[str]:
    counters = ranks.ranks[0].cache.counters
    names = [f.name for f in fields(counters) if f.name in COUNTED]
    return Counter({name: getattr(counters, name) for name in names})


@seeded
@pytest.mark.long(40)
@pytest.mark.timeout(600)
def test_ranks_keep_identical_trees(record_property: Callable[[str, object], None]) -> None:
    """HIRADIX_RANKS_SEEDS=600 for more, HIRADIX_RANKS_BUDGET_S=3600 for as many as an hour allows."""
    seed, rank_ticks, done, begin = 0, 0, Counter[str](), time.monotonic()
    while seed < NUM_SEEDS or time.monotonic() < begin + BUDGET_S:
        ranks = play(FIRST + seed)
        rank_ticks += ranks.num_rank_ticks
        done += counts(ranks)
        seed += 1
    spent_s = time.monotonic() - begin
    record_property(
        "told", f"simulated ranks: {seed} seeds, {rank_ticks:,} rank-ticks in {spent_s:.0f} s, {dict(done)}"
    )
    assert is_enough(rank_ticks > 50_000)
    assert is_enough(all(done[name] > 50 for name in COUNTED)), done


def test_a_seed_replays() -> None:
    def story(seed: int) -> Any:
        ranks = play(seed, 120)
        return ranks.num_rank_ticks, counts(ranks), [rank.driver.now() for rank in ranks.ranks]

    assert story(2) == story(2)
    assert story(2) != story(8)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_caught(name: str) -> None:
    assert_caught(name, play, MIN_SEEDS)


def test_a_rank_that_drains_meets_the_others_while_it_waits() -> None:
    """However long it may take: who hears nothing of a rank for `--dist-timeout` takes it for lost."""
    met_s: list[float] = []

    def agree(vector: np.ndarray) -> np.ndarray:
        met_s.append(rank.driver.now() if rank is not None else 0.0)
        return vector

    rank: Rank | None = None
    rank = Rank(0, 1, Setup(1), agree, None)
    rank.cache.attach_storage(guarded(rank.storage, rank.clock))
    rank.do_request()
    rank.driver.held = {w.name for w in rank.controller._job_table.workers.values()}
    begin_s = rank.driver.now()
    assert len(rank.cache.in_flight) and not rank.cache.drain(600.0)
    assert rank.driver.now() - begin_s >= 600.0
    assert max(after - before for before, after in pairwise(met_s)) <= COPY_WAIT_S

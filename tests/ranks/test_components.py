"""Ranks of a model with windows and state records keep identical trees, in every component and tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.ranks.component_ranks import ComponentRanks, StoredRanks, setup_of
from tests.ranks.planted import assert_caught
from tests.seeds import is_enough, seeded, seeds

SEEDS, NUM_MOVES = 60, 120
COUNTED = ("written", "loaded", "load_failed", "load_too_slow", "evicted_device", "evicted_host")
STORED = ("backed_up", "backup_failed", "prefetched")


def play(seed: int, kind: type[ComponentRanks] = ComponentRanks) -> ComponentRanks:
    try:
        ranks = kind(seed, setup_of(seed))
        ranks.play(NUM_MOVES)
        return ranks
    except Exception as error:
        raise AssertionError(f"replay with play({seed}) of {setup_of(seed)}: {error!r:.2000}") from error


@seeded
@pytest.mark.timeout(600)
def test_ranks_keep_identical_trees(record_property: Callable[[str, object], None]) -> None:
    done: Counter[str] = Counter()
    for seed in seeds(SEEDS):
        ranks = play(seed)
        done["rank-ticks"] += ranks.num_rank_ticks
        counters = ranks.ranks[0].cache.counters
        done.update({name: getattr(counters, name) for name in COUNTED})
    record_property("told", f"ranks of several components: {SEEDS} seeds, {dict(done)}")
    assert is_enough(all(done[name] > 20 for name in COUNTED)), done


@seeded
@pytest.mark.timeout(600)
def test_ranks_with_storage_keep_identical_trees(record_property: Callable[[str, object], None]) -> None:
    done: Counter[str] = Counter()
    for seed in seeds(SEEDS):
        ranks = play(seed, StoredRanks)
        done["rank-ticks"] += ranks.num_rank_ticks
        counters = ranks.ranks[0].cache.counters
        done.update({name: getattr(counters, name) for name in STORED})
    record_property("told", f"ranks of several components with storage: {SEEDS} seeds, {dict(done)}")
    assert is_enough(all(done[name] > 20 for name in STORED)), done


@pytest.mark.parametrize("name", ["own results", "own page counts"])
def test_planted_fault_is_caught_with_storage(name: str) -> None:
    assert_caught(name, lambda seed: play(seed, StoredRanks), SEEDS)


@pytest.mark.parametrize("name", ["own results", "own page counts", "own host pool", "own speeds"])
def test_planted_fault_is_caught(name: str) -> None:
    assert_caught(name, play, SEEDS)

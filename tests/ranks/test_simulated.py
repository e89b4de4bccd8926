"""Two to eight simulated ranks with different speeds, pools, backends and faults keep identical trees."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from hiradix.cache import core
from hiradix.cache.agreement import Agreement
from tests.ranks.world import Ranks, Setup

BUDGET_S = float(os.environ.get("HIRADIX_RANKS_BUDGET_S", "40"))
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
COUNTED = ("evicted_device", "evicted_host", "written", "loaded", "load_failed", "backed_up", "prefetched",
           "load_too_slow")  # fmt: skip


def play(seed: int, num_moves: int = NUM_MOVES) -> Ranks:
    """One seed's life; its set-up follows from it."""
    try:
        return Ranks(seed, SETUPS[seed % len(SETUPS)]).play(num_moves)
    except BaseException as error:
        raise AssertionError(f"replay with play({seed}, {num_moves}): {error!r:.2000}") from error


def counts(ranks: Ranks) -> Counter[str]:
    counters = ranks.ranks[0].cache.counters
    names = [f.name for f in fields(counters) if f.name in COUNTED]
    return Counter({name: getattr(counters, name) for name in names})


@pytest.mark.timeout(600)
def test_ranks_keep_identical_trees(record_property: Callable[[str, object], None]) -> None:
    """As many seeds as the budget allows, at least MIN_SEEDS; HIRADIX_RANKS_BUDGET_S=3600 for a long run."""
    seed, rank_ticks, done, begin = 0, 0, Counter[str](), time.monotonic()
    while seed < MIN_SEEDS or time.monotonic() < begin + BUDGET_S:
        ranks = play(seed)
        rank_ticks += ranks.num_rank_ticks
        done += counts(ranks)
        seed += 1
    spent_s = time.monotonic() - begin
    record_property(
        "told", f"simulated ranks: {seed} seeds, {rank_ticks:,} rank-ticks in {spent_s:.0f} s, {dict(done)}"
    )
    assert rank_ticks > 50_000
    assert all(done[name] > 50 for name in COUNTED), done


def test_a_seed_replays() -> None:
    def story(seed: int) -> Any:
        ranks = play(seed, 120)
        return ranks.num_rank_ticks, counts(ranks), [rank.driver.now() for rank in ranks.ranks]

    assert story(2) == story(2)
    assert story(2) != story(8)


# -- planted faults: each must be caught --------------------------------------------------


def _own_results(self: Agreement, results: Any, ok: bool) -> Any:
    """Apply what has come here, and let the others see to themselves."""
    own = list(results)
    for result in own:
        self._held[result.ticket] = result
    _, agreed = _EXCHANGE(self, (), ok)
    self._held.clear()
    return own, agreed


def _arrival_order(self: Agreement, results: Any, ok: bool) -> Any:
    """Apply the common results in the order they came in on this rank."""
    results = list(results)
    arrived = [*self._held, *(result.ticket for result in results)]
    common, agreed = _EXCHANGE(self, results, ok)
    return sorted(common, key=lambda result: arrived.index(result.ticket)), agreed


def _own_ok(self: Agreement, results: Any, ok: bool) -> Any:
    return _EXCHANGE(self, results, ok)[0], ok


def _only_with_news(self: Any, ok: bool) -> bool:
    """A collective call in a branch that depends on this rank's own progress."""
    if not self.controller._desk._outbox and self._ranks is not None and self._ranks.num_exchanges:
        return ok
    return _APPLY(self, ok)


def _own_share(name: str) -> Any:
    """One shared number, given by the function it comes from, is read from this rank instead."""

    def share(self: Agreement, source: Any) -> Any:
        shared = _SHARE(self, source)
        return source if source.__name__ == name else shared

    return share


def _attach_alone(self: Any, storage: Any) -> None:
    settled = self.settle
    self.settle = lambda ok=True: settled(True) and ok
    try:
        _ATTACH(self, storage)
    finally:
        del self.settle


_EXCHANGE = Agreement.exchange
_SHARE = Agreement.share
_APPLY = core.HierarchicalCache._apply
_ATTACH = core.HierarchicalCache.attach_storage
PLANTED: dict[str, tuple[str, Any]] = {
    "own results": ("hiradix.cache.agreement.Agreement.exchange", _own_results),
    "arrival order": ("hiradix.cache.agreement.Agreement.exchange", _arrival_order),
    "own outcome of a wait": ("hiradix.cache.agreement.Agreement.exchange", _own_ok),
    "own page counts": ("hiradix.cache.agreement._cut", lambda own, outcome: own),
    "own clock": ("hiradix.cache.agreement.Agreement.share", _own_share("own_clock")),
    "own speeds": ("hiradix.cache.agreement.Agreement.share", _own_share("speed")),
    "own load failures": ("hiradix.cache.agreement.Agreement.share", _own_share("_find_failed_slot")),
    "own host pool": ("hiradix.cache.core._common_pages", lambda host, agree: host.pages),
    "exchange only with news": ("hiradix.cache.core.HierarchicalCache._apply", _only_with_news),
    "attach alone": ("hiradix.cache.core.HierarchicalCache.attach_storage", _attach_alone),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[name])
    with pytest.raises(AssertionError, match="replay with play"):
        for seed in range(MIN_SEEDS):
            play(seed)

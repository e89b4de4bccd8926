"""Promise 7 for each request on virtual time; and known ways to break it, which must be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hiradix.policy import no_regret
from hiradix.policy.no_regret import GatedTransfer, NoRegret
from tests.seeds import is_enough, seeded, seeds
from tests.simulation.clocked import play, totals

SEEDS = 24


@seeded
@pytest.mark.long(16)
def test_no_request_regrets_the_cache(record_property: Callable[[str, object], None]) -> None:
    ledgers = [play(seed) for seed in seeds(SEEDS)]
    found = totals(ledgers)
    record_property("told", f"promise 7: {found}")
    assert is_enough(found["load taken"] > 1000 and found["load refused"] > 1000), found
    assert is_enough(found["fetch taken"] > 500 and found["fetch refused"] > 1000), found
    assert is_enough(found["strict"] > 0.9 * found["requests"]), found
    for ledger in ledgers:
        assert ledger.probes_s <= 0.02 * ledger.recomputed_s, ledger
    gains = [ledger.taken_s / ledger.recomputed_s for ledger in ledgers]
    assert is_enough(min(gains) < 0.6) and max(gains) < 1.0, gains


def _all(self: NoRegret, move: GatedTransfer, num_pages: int) -> bool:
    return True


def _own_cost_only(self: NoRegret, move: GatedTransfer, num_pages: int) -> bool:
    """A fetch is not asked to be worth its load."""
    speed = self._computing()
    return speed <= 0 or self._speed[move]() <= 0 or self.predicted_s(move, num_pages) <= num_pages / speed


def _by_rates(self: NoRegret, move: GatedTransfer, num_pages: int) -> bool:
    """Rates, with what a forward costs in any case."""
    rates = self.rates()
    return not rates["compute"] or not rates[move.value] or rates[move.value] >= rates["compute"]


class _Blind(no_regret.Cost):
    """Remembers the fastest measurement."""

    def add(self, units: float, seconds: float) -> None:
        if units > 0 and seconds > 0 and (not self._weight or units / seconds > self.rate()):
            self.forget()
            super().add(units, seconds)


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "no gate": (NoRegret, "takes", _all),
    "a fetch without its load": (NoRegret, "takes", _own_cost_only),
    "rates, not costs": (NoRegret, "takes", _by_rates),
    "a tier's best day": (no_regret, "Cost", _Blind),
    "everything is a probe": (no_regret, "PROBE_SHARE", 1e6),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[name])
    with pytest.raises(AssertionError, match=r"took|Ledger"):
        for seed in range(SEEDS):
            ledger = play(seed)
            assert ledger.probes_s <= 0.02 * ledger.recomputed_s, ledger

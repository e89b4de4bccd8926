"""One kind of call goes wrong and the others work: what requests lose is bounded by what the docs say, on
virtual time; and ways to lose more, which must be seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hiradix.policy.no_regret import Drought, NoRegret
from hiradix.storage.guard.breaker import Breaker, Breakers
from hiradix.storage.kit.meters import Op
from tests.simulation.gray import CASES, LIMITS, PARTS, Story, play

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"
PATTERN = (
    r"at most \*\*(\d+) deadlines and ([\d.]+) % of the time\*\*, "
    r"and one request at most \*\*(\d+) deadlines\*\*"
)
FAILS = ("hangs", "errs", "slows")
"""Each call fails, so that the breaker keeps calls away until they work again. What fails now and then, or is
slow and does not fail, is the gate's: see the docs."""


def bound() -> tuple[float, float, float]:
    """Of docs/reliability.md: seconds at once, the share of the time beyond, the seconds of one request."""
    found = re.findall(PATTERN, " ".join(DOCS.read_text().split()))
    assert len(found) == 1, "the bound stands there once"
    start, share, one = map(float, found[0])
    return start * LIMITS.deadline_s, share / 100, one * LIMITS.deadline_s


def check(story: Story) -> None:
    """What was lost, in all and by the one that lost most, is within the bound."""
    at_once_s, share, one_s = bound()
    most_s, lost_s = at_once_s + share * story.ill_s, sum(story.ill.losses)
    assert lost_s <= most_s, f"lost {lost_s:.1f} s of {story.ill_s:.0f}, more than {most_s:.1f}"
    assert story.ill.worst_s <= one_s + 1e-6, f"one request lost {story.ill.worst_s:.3f} s"


@pytest.mark.parametrize(("op", "how"), CASES, ids=[f"{op.value} {how}" for op, how in CASES])
def test_what_a_gray_failure_costs_is_bounded(op: Op, how: str) -> None:
    story = play(1, {op: how})
    check(story)
    assert story.well.worst_s < 0.01 and story.served_well > 50, "it is of use"
    assert story.calls[op] > 0, "the fault was met"
    if op in (Op.PUT, Op.DELETE):
        assert story.served_ill > 50, "what is there goes on being served"
        assert sum(story.ill.losses) < 0.1, "and nobody waits for a write"
    elif how in FAILS:
        assert story.served_again > 30, "70 s after it was cured it is of use again, at once"


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("how", PARTS)
def test_a_store_that_brings_a_part_costs_no_more(how: str, has_gate: bool) -> None:
    """And what comes at once is taken, however small a part it is."""
    if "slowly" in how and not has_gate:
        pytest.skip("half a second a hit is less than a hit is taken to be worth: see the docs")
    story = play(1, {Op.GET: how}, has_gate)
    check(story)
    assert story.calls[Op.GET] > 0, "the fault was met"
    if "at once" in how:
        assert story.served_ill > 400 and sum(story.ill.losses) < 0.1, "it is worth its time"


def test_a_long_run_costs_no_more() -> None:
    """Most of an hour: probes are all that is lost."""
    story = play(3, {Op.GET: "hangs"}, num_ill=600)
    check(story)
    assert story.ill_s > 1800 and story.served_again > 30


@pytest.mark.parametrize(("op", "how"), [(Op.EXISTS, "hangs"), (Op.GET, "stops"), (Op.GET, "brings nothing")])
def test_the_same_where_nobody_measures_what_computing_takes(op: Op, how: str) -> None:
    """Inside SGLang and vLLM."""
    check(play(2, {op: how}, has_gate=False))


def test_where_nobody_measures_a_slow_store_costs_half_a_deadline_a_call() -> None:
    """It does not fail, and what it is compared with is not known."""
    story = play(2, {Op.EXISTS: "just in time"}, has_gate=False)
    assert story.ill.mean_s <= LIMITS.deadline_s / 2


def _deaf(patch: pytest.MonkeyPatch) -> None:
    """The gate hears of nothing that brought nothing."""
    patch.setattr(Drought, "refuses", lambda self: False)
    patch.setattr(NoRegret, "fetched", lambda self, asked, num_pages, seconds: None)


def _one_breaker(patch: pytest.MonkeyPatch) -> None:
    """Calls of all kinds count together, so that lookups and writes that work close it again."""
    _deaf(patch)
    patch.setattr(Breakers, "of", lambda self, op: self._of[Op.GET])


def _never_opens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Breaker, "_open", lambda self, longer: None)


def _same_interval(patch: pytest.MonkeyPatch) -> None:
    """The time between two probes does not grow."""
    opened: Callable[..., None] = Breaker._open
    patch.setattr(Breaker, "_open", lambda self, longer: opened(self, False))


def _always_asks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NoRegret, "asks", lambda self, num_pages: True)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Op, str, bool]] = {
    "one breaker for all kinds": (_one_breaker, Op.GET, "hangs", True),
    "a breaker that never opens": (_never_opens, Op.EXISTS, "hangs", False),
    "probes as often as ever": (_same_interval, Op.GET, "hangs", True),
    "lookups are no cost": (_always_asks, Op.EXISTS, "just in time", True),
    "fetches that bring nothing are no cost": (_deaf, Op.GET, "brings nothing", True),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_breaks_the_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, op, how, has_gate = PLANTED[name]
    plant(monkeypatch)
    story: Any = play(1, {op: how}, has_gate)
    with pytest.raises(AssertionError, match="lost"):
        check(story)

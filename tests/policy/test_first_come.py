"""The shadow of first come, first served: waits by hand, and nothing kept of who has left."""

from __future__ import annotations

import pytest

from hiradix.policy.first_come import KEPT_WAITS, FirstComeShadow


def test_waits_are_those_of_a_queue() -> None:
    shadow = FirstComeShadow(100)
    shadow.arrive("a", 0.0, 4.0, 40, 0.0)
    assert shadow.longest_s(0.0) == 4.0
    shadow.arrive("b", 1.0, 3.0, 30, 0.0)
    assert shadow.longest_s(1.0) == 6.0
    shadow.arrive("a", 10.0, 4.5, 45, 6.0)  # cached: half a second
    shadow.arrive("b", 10.0, 5.0, 50, 6.0)
    assert shadow.longest_s(10.0) == 6.0
    after_s = 7.0 + KEPT_WAITS * 6.0 + 0.1
    assert shadow.longest_s(after_s) == 0.0


@pytest.mark.parametrize("capacity, second_s", [(100, 1.0), (99, 5.0)])
def test_a_session_that_does_not_fit_is_computed_anew(capacity: int, second_s: float) -> None:
    shadow = FirstComeShadow(capacity)
    shadow.arrive("a", 0.0, 4.0, 50, 0.0)
    shadow.arrive("b", 500.0, 0.1, 50, 0.0)
    shadow.arrive("a", 1000.0, 5.0, 50, 0.0)
    assert shadow.longest_s(1000.0) == second_s


def test_one_that_asks_sooner_than_the_shadow_answers_waits_once() -> None:
    shadow = FirstComeShadow(10)
    for turn in range(50):
        for name in "abc":
            shadow.arrive(name, turn * 0.1, 10.0, 9, 1.0)
    assert shadow.longest_s(5.0) <= 30.0


def test_what_is_taken_back_or_over_leaves_nothing() -> None:
    shadow = FirstComeShadow(100)
    for name in "abcd":
        shadow.arrive(name, 0.0, 10.0, 10, 0.0)
    for name in "bcd":
        shadow.remove(name)
    assert shadow.longest_s(0.0) == 10.0
    for name in "abcd":
        shadow.forget(name)
    assert shadow.longest_s(10_000.0) == 0.0
    assert not (shadow._sessions or shadow._queue or shadow._coming or shadow._waits)

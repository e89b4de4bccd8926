"""The shadow of first come, first served: waits by hand, and nothing kept of who has left."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


class Searched(FirstComeShadow):
    """Looks through the whole queue each time."""

    def longest_s(self, now_s: float) -> float:
        self._run(now_s)
        self._is_known = False
        return super().longest_s(now_s)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30))
def test_the_longest_wait_is_what_a_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    capacity, names, now_s = rng.choice([50, 200, 10_000]), rng.choice(["abc", "abcdefghijkl"]), 0.0
    both = FirstComeShadow(capacity), Searched(capacity)
    for _ in range(300):
        now_s += rng.choice([0.0, 0.1, 1.0, 1.0, 30.0, -0.5])
        name, what = rng.choice(names), rng.random()
        if what < 0.7:
            said = rng.choice([0.0, 0.3, 2.0]), rng.randrange(1, 60), rng.choice([0.0, 0.5, 5.0])
            for shadow in both:
                shadow.arrive(name, now_s, *said)
        else:
            for shadow in both:
                (shadow.remove if what < 0.9 else shadow.forget)(name)
        if rng.random() < 0.7:
            assert both[0].longest_s(now_s) == both[1].longest_s(now_s)


def test_one_that_asks_again_and_again_waits_once() -> None:
    """Found: each time it took its question back and asked again it was in the queue once more."""
    shadow = FirstComeShadow(1000)
    shadow.arrive("a", 0.0, 100.0, 10, 0.0)
    for turn in range(1, 1000):
        shadow.arrive("b", turn * 1e-3, 5.0, 10, 0.0)
        assert shadow.longest_s(turn * 1e-3) <= 105.0
        shadow.remove("b")
    assert len(shadow._queue) + len(shadow._coming) <= 4


def test_what_is_asked_anew_does_not_keep_its_place() -> None:
    shadow = FirstComeShadow(1000)
    for name in "abc":
        shadow.arrive(name, 0.0, 4.0, 10, 0.0)
    shadow.remove("b")
    shadow.arrive("b", 1.0, 4.0, 10, 0.0)
    assert shadow.longest_s(1.0) == 11.0, "behind c: served at 12"


def test_an_answer_that_began_later_than_the_next_question_is_no_gap() -> None:
    shadow = FirstComeShadow(1000)
    shadow.arrive("x", 0.0, 10.0, 10, 0.0)
    shadow.arrive("a", 0.0, 4.0, 10, 0.0)
    shadow.arrive("a", 1.0, 5.0, 10, -50.0)
    assert shadow.longest_s(20.0) == 15.0 and shadow.longest_s(1000.0) == 0.0

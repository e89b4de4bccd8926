"""What an exploration must find, and print so that it can be played again. Collected by its name alone."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.seeds import FIRST, seeded, seeds


@given(st.lists(st.integers(0, 1000)))
def test_no_sum_is_large(numbers: list[int]) -> None:
    assert sum(numbers) < 1500, numbers


@seeded
def test_seeds_of_every_run_are_good() -> None:
    for seed in seeds(3):
        assert seed < 3, f"seed {seed} draws {random.Random(seed).random()}"


@given(st.integers())
def test_holds(number: int) -> None:
    assert number + FIRST - FIRST == number

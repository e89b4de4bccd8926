"""The seeds of tests that play random lives: the same on every run, others in `make explore`.

A test that takes its seeds from here bears the mark `seeded`, by which the exploration finds it:

    @seeded
    def test_lives() -> None:
        for seed in seeds(20):
            play(seed)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import pytest

SEED_VARIABLE = "HIRADIX_SEED"
FIRST = int(os.environ.get(SEED_VARIABLE, "0"))
"""0 in `make test` and the lanes."""
EXPLORING = SEED_VARIABLE in os.environ
JUDGING = os.environ.get("HIRADIX_JUDGING") == "1"
"""Fewer lives are played, to see whether they see a planted fault (`tests/planting.py`)."""

seeded = pytest.mark.seeded


def seeds(count: int, start: int = 0, step: int = 1) -> range:
    """`count` seeds, `step` apart."""
    first = FIRST + start
    return range(first, first + count * step, step)


def assert_seen(play: Callable[[int], object], seeds: Iterable[int], match: str | None = None) -> None:
    """One of the lives that `play` plays sees the fault that is planted: it fails. They end with that one."""
    with pytest.raises(AssertionError, match=match):
        for seed in seeds:
            play(seed)


def is_enough(condition: bool) -> bool:
    """Whether a test played what it is there for: known of the seeds of `make test`, not asked of others."""
    return condition or EXPLORING or JUDGING

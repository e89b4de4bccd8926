"""The ladder of SGLang, sampled, for those families that no other test of this lane takes through all arms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ladder.climb import Climb, assert_right, climbed
from tests.ladder.controls import wrong_answers
from tests.ladder.sglang import Sglang

NEEDLES = 4


@pytest.mark.long(120)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["window", "mamba 2"])
def test_every_arm_answers_as_without_a_cache(family: str, tmp_path: Path) -> None:
    for row in climbed(Climb(Sglang(), family, tmp_path, NEEDLES, is_quick=True)):
        assert_right(row)


def test_a_planted_fault_is_seen(tmp_path: Path) -> None:
    climb = Climb(Sglang(), "mamba 2", tmp_path, NEEDLES, is_quick=True)
    assert wrong_answers(climb, "a state one block off") > 0

"""The ladder of vLLM, sampled, for those families that no other test of this lane takes through all arms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ladder.climb import Climb, assert_right, climbed
from tests.ladder.controls import wrong_answers
from tests.ladder.vllm import Vllm

NEEDLES = 6


@pytest.mark.long(120)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["window", "mamba 2"])
def test_every_arm_answers_as_without_a_cache(family: str, tmp_path: Path) -> None:
    for row in climbed(Climb(Vllm(), family, tmp_path, NEEDLES, is_quick=True)):
        assert_right(row)


def test_two_groups_that_are_exchanged_are_seen(tmp_path: Path) -> None:
    climb = Climb(Vllm(), "window", tmp_path, NEEDLES, is_quick=True)
    assert wrong_answers(climb, "two groups exchanged") > 0

"""The ladder of our own engine, sampled: all of it is `make ladder`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.checkpoints import Reference
from tests.ladder.climb import FAMILIES, Climb, assert_right, climbed
from tests.ladder.controls import FAULTS, wrong_answers
from tests.ladder.own import Own

NEEDLES = 4


@pytest.mark.long(30)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_arm_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    climb = Climb(Own(), family, tmp_path, NEEDLES, is_quick=True)
    for row in climbed(climb):
        assert_right(row)
    assert climb.preempted > 0
    judge = Reference.load(climb.model)
    judge.judge(climb.prompts, [answer["tokens"] for answer in climb.expected]).assert_holds()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "groups" not in fault])
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path) -> None:
    """In the first of the families in which it can happen; `make ladder` plants it in all."""
    climb = Climb(Own(), FAULTS[fault][0], tmp_path, NEEDLES, is_quick=True)
    assert wrong_answers(climb, fault) > 0

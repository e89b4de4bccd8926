"""The kill table names tests that are there."""

from __future__ import annotations

from tests.planting import ROOT
from tests.simulation.kill_table import BUGS


def test_each_bug_has_a_name_and_its_tests_are_there() -> None:
    assert len({bug.fault.name for bug in BUGS}) == len(BUGS) >= 50
    missing = [test for bug in BUGS for test in bug.tests if not (ROOT / test).exists()]
    assert not missing

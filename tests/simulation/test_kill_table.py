"""The kill table stays up to date: each bug still has its place in the code."""

from __future__ import annotations

import pytest

from tests.planting import ROOT, is_current
from tests.simulation.kill_table import BUGS, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.fault.name)
def test_a_known_bug_can_be_planted(bug: Bug) -> None:
    assert is_current(bug.fault), f"{bug.fault.old!r} in {bug.fault.file}"
    assert all((ROOT / test).exists() for test in bug.tests)

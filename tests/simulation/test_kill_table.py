"""The kill table stays up to date: each bug still has its place in the code."""

from __future__ import annotations

import pytest

from tests.simulation.kill_table import BUGS, Bug
from tests.tree.mutation import ROOT


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.fault.name)
def test_a_known_bug_can_be_planted(bug: Bug) -> None:
    text = (ROOT / "hiradix" / bug.fault.file).read_text(encoding="utf-8")
    assert text.count(bug.fault.old) == 1, f"{bug.fault.old!r} in {bug.fault.file}"
    assert all((ROOT / test).exists() for test in bug.tests)

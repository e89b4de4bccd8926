"""The planted faults fit the code they are planted in: `python -m tests.tree.mutation` runs them."""

from __future__ import annotations

import re

import pytest

from tests.planting import ROOT, Fault, is_current
from tests.tree.mutation import FAULTS, TESTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_up_to_date(fault: Fault) -> None:
    assert is_current(fault) and fault.old != fault.new


def test_no_fault_is_planted_twice() -> None:
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS) >= 25


def test_the_table_names_each_fault_and_a_test_that_is_there() -> None:
    table = (ROOT / "docs/tree.md").read_text(encoding="utf-8").partition("| fault | seen by |")[2]
    rows = re.findall(r"^\| ([^|]+: [^|]+) \| (test_\w+\.py)::(test_\w+) \|$", table, re.MULTILINE)
    assert [name for name, *_ in rows] == [fault.name for fault in FAULTS]
    files = {path.rpartition("/")[2]: (ROOT / path).read_text(encoding="utf-8") for path in TESTS}
    lost = [(file, test) for _, file, test in rows if f"def {test}(" not in files.get(file, "")]
    assert not lost, lost

"""The table of docs/lab/tree.md is that of `python -m tests.tree.mutation`."""

from __future__ import annotations

import re

from tests.planting import ROOT
from tests.tree.mutation import FAULTS, TESTS


def test_no_fault_is_planted_twice() -> None:
    assert len({(f.function, f.code, f.becomes, f.at) for f in FAULTS}) == len(FAULTS) >= 25


def test_the_table_names_each_fault_and_a_test_that_is_there() -> None:
    table = (ROOT / "docs/lab/tree.md").read_text(encoding="utf-8").partition("| fault | seen by |")[2]
    rows = re.findall(r"^\| ([^|]+: [^|]+) \| (test_\w+\.py)::(test_\w+) \|$", table, re.MULTILINE)
    assert [name for name, *_ in rows] == [fault.name for fault in FAULTS]
    files = {path.rpartition("/")[2]: (ROOT / path).read_text(encoding="utf-8") for path in TESTS}
    lost = [(file, test) for _, file, test in rows if f"def {test}(" not in files.get(file, "")]
    assert not lost, lost

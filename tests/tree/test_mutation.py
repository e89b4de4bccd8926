"""The planted faults fit the code they are planted in: `python -m tests.tree.mutation` runs them."""

from __future__ import annotations

import pytest

from tests.planting import Fault, is_current
from tests.tree.mutation import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_up_to_date(fault: Fault) -> None:
    assert is_current(fault) and fault.old != fault.new


def test_no_fault_is_planted_twice() -> None:
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS) >= 25

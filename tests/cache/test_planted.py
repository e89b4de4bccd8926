"""The planted faults fit the code they are planted in: `python -m tests.cache.planted` runs them."""

from __future__ import annotations

import pytest

from tests.cache.planted import FAULTS
from tests.planting import Fault, is_current


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_up_to_date(fault: Fault) -> None:
    assert is_current(fault) and fault.old != fault.new

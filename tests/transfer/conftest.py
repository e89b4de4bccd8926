"""The rig with either division of labour; released and closed at the end of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hiradix.transfer import (
    FOUR_WORKERS,
    TWO_WORKERS,
)
from tests.transfer.doubles import NORMAL
from tests.transfer.rig import DEADLINE_S, Rig


@pytest.fixture(params=[FOUR_WORKERS, TWO_WORKERS], ids=["four", "two"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(workers=request.param)
    yield made
    made.transport.before = lambda *args: None
    made.storage.before = lambda call, keys: NORMAL
    made.controller.close(DEADLINE_S)

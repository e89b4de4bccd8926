"""What an exploration must not wait for. Collected by its name alone."""

from __future__ import annotations

import time

from tests.seeds import seeded


@seeded
def test_hangs() -> None:
    time.sleep(120.0)

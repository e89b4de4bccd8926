"""Refusals of clients before there is a request: counted, and logged now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

WARN_EVERY_S = 10.0

REFUSALS = {"invalid": 0, "late": 0, "full": 0}
"""Connections of this process that were refused: no HTTP, a head that did not come, too many of them."""


class Sparing(logging.Filter):
    """Lets a warning pass once in WARN_EVERY_S; the next one says how many like it there were meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}  # when last, and how often not since

    def filter(self, record: logging.LogRecord) -> bool:
        """Let one warning of each text pass in WARN_EVERY_S. For a logger whose warnings are a few fixed
        texts, as there is an entry for each."""
        if record.levelno != logging.WARNING:
            return True
        now_s, text = self._clock(), str(record.msg)
        last_s, num_held = self._said.get(text, (float("-inf"), 0))
        if now_s - last_s < WARN_EVERY_S:
            self._said[text] = last_s, num_held + 1
            return False
        self._said[text] = now_s, 0
        if num_held:
            record.msg = f"{text} (and {num_held} more)"
        return True

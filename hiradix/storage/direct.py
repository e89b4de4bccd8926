"""Calls that run on their caller's thread, with the caller's pages.

The kernel may be writing into a page, so such a call is never walked away from. What a deadline can still do
is to keep everybody else out: while one call is overdue, the store is taken for hung.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

DIRECT_PIECE_BYTES = 256 << 20
"""Longer batches pass in pieces; between two of them the deadline is looked at."""


class DirectCalls:
    """The deadlines of the calls under way. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._deadlines: dict[int, float] = {}

    @contextmanager
    def call(self, deadline: float) -> Iterator[None]:
        """The time of one call."""
        number = next(self._numbers)
        self._deadlines[number] = deadline
        try:
            yield
        finally:
            del self._deadlines[number]

    def overdue(self, now: float) -> bool:
        """Whether a call should have ended before `now`."""
        return any(deadline < now for deadline in list(self._deadlines.values()))

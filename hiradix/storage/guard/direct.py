"""Calls that run on their caller's thread, with the caller's pages.

The kernel may be writing into a page, so such a call is never walked away from. What a deadline can still do
is to keep everybody else out: while one call is overdue, the store is taken for hung.
"""

from __future__ import annotations

import itertools

DIRECT_PIECE_BYTES = 256 << 20
"""Longer batches pass in pieces; between two of them the deadline is looked at."""


class DirectCalls:
    """The deadlines of the calls under way. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._deadlines: dict[int, float] = {}

    def begin(self, deadline: float) -> int:
        """A call begins; what `end` is to be told."""
        number = next(self._numbers)
        self._deadlines[number] = deadline
        return number

    def end(self, number: int) -> None:
        """The call has ended, however it did."""
        del self._deadlines[number]

    def overdue(self, now: float) -> bool:
        """Whether a call should have ended before `now`."""
        return bool(self._deadlines) and min(list(self._deadlines.values()), default=now) < now

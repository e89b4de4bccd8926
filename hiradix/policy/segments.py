"""Segments: data last used by one request and of one class, and the votes it gives as it ages.

What happens is noted as it happens and counted in batches, in numpy: a request costs a few appends.
"""

from __future__ import annotations

import numpy as np

from hiradix.policy.class_ranks import BUCKETS
from hiradix.policy.counting import count
from hiradix.policy.counting_numpy import columns_of, forget
from hiradix.policy.ghd_tables import ClassTables

CAPACITY = 1 << 17  # segments followed at a time; the older half is forgotten when they run out
WAITING = 1 << 14  # numbers that may wait to be put into rows, or to be taken off them


class Segments:
    """Follows segments through the age buckets. Each gives one vote per bucket, whatever its pages.

    What waits to be counted is bounded too: a client's hints come without requests, which have it counted.
    Numbers count up for ever. A segment forgotten for want of room has no further say, in either direction.
    """

    def __init__(self, tables: ClassTables):
        self._tables = tables
        self._base = 0  # the number of the segment in row 0
        self._rows = 0
        self._born = np.zeros(CAPACITY, np.int64)  # clock at its last use
        self._class = np.zeros(CAPACITY, np.int64)
        self._pages = np.zeros(CAPACITY)  # it started with
        self._left = np.zeros(CAPACITY)  # not used again, and still known
        self._passed = np.zeros(BUCKETS, np.int64)  # per bucket, the first number that has not left it
        self._new: list[int] = []  # clock, class, pages of one after the other
        self._used: list[int] = []  # number, age, pages
        self._gone: list[int] = []  # number, pages
        self._next = 0  # the number of the next to begin
        self._may_wait = min(CAPACITY, WAITING)

    def __len__(self) -> int:
        return self._rows + len(self._new) // 3

    def start(self, class_id: int, num_pages: int, clock: int) -> int:
        """A segment begins its life; its number."""
        if len(self._new) >= self._may_wait:
            self._settle()
        new = self._new
        new.append(clock)
        new.append(class_id)
        new.append(num_pages)
        self._next = number = self._next + 1
        return number - 1

    def use(self, number: int, age: int, num_pages: int) -> None:
        """Count a use of so many pages of a segment, `age` tokens after the last one."""
        used = self._used
        used.append(number)
        used.append(age)
        used.append(num_pages)

    def forget(self, number: int, num_pages: int) -> None:
        """Count so many pages of a segment as unknown from now on: nobody would see their next use."""
        self._gone += (number, num_pages)
        if len(self._gone) >= self._may_wait:
            self._drop_pages()

    def forget_all(self) -> None:
        self._settle()
        self._left[: self._rows] = 0

    def count(self, clock: int) -> None:
        """Turn what happened since the last time into votes. O(what happened)."""
        self._settle()
        rows, tables = self._rows, self._tables
        n = len(tables)
        columns = self._born[:rows], self._class[:rows], self._pages[:rows], self._left[:rows], self._passed
        votes = tables.used[:n], tables.exposed[:n], tables.started[:n]
        count((self._used, self._gone), columns, votes, self._base, clock)
        self._used.clear()
        self._gone.clear()

    def _drop_pages(self) -> None:
        self._settle()
        forget(self._gone, self._left[: self._rows], self._base)
        self._gone.clear()

    def _settle(self) -> None:
        """Put new segments, at most half of `CAPACITY`, into rows."""
        if not self._new:
            return
        new = len(self._new) // 3
        if self._rows + new > CAPACITY:
            self._make_room()
        at = slice(self._rows, self._rows + new)
        self._born[at], self._class[at], pages = columns_of(self._new, 3)
        self._pages[at] = self._left[at] = pages
        self._new.clear()
        self._rows += new

    def _make_room(self) -> None:
        half = self._rows // 2
        for table in (self._born, self._class, self._pages, self._left):
            table[: self._rows - half] = table[half : self._rows].copy()
        self._rows -= half
        self._base += half

"""Segments: data last used by one request and of one class, and the votes it gives as it ages.

What happens is noted as it happens and counted in batches, in numpy: a request costs a few appends.
"""

from __future__ import annotations

from array import array

import numpy as np

from hiradix.policy.ghd_tables import EDGES, ClassTables
from hiradix.policy.gittins_numpy import Floats, Ints
from hiradix.policy.ranks import BUCKETS

CAPACITY = 1 << 17  # segments followed at a time; the older half is forgotten when they run out
WAITING = 1 << 14  # numbers that may wait to be put into rows, or to be taken off them
UNIT = float(1 << 20)  # parts of a vote: sums of 2 ** 33 votes are exact
_BUCKETS = np.arange(BUCKETS)


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
        self._new += (clock, class_id, num_pages)
        self._next = number = self._next + 1
        return number - 1

    def use(self, uses: list[int]) -> None:
        """Segments were used again: number, tokens since the last time, and pages of one after the other."""
        self._used += uses

    def forget(self, number: int, num_pages: int) -> None:
        """So many of its pages are not known any more: nobody would see their next use."""
        self._gone += (number, num_pages)
        if len(self._gone) >= self._may_wait:
            self._drop_pages()

    def forget_all(self) -> None:
        self._settle()
        self._left[: self._rows] = 0

    def count(self, clock: int) -> None:
        """Turn what happened since the last time into votes. O(what happened), vectorised."""
        self._settle()
        low = np.maximum(self._passed - self._base, 0)
        self._count_uses(low)
        self._drop_pages()
        born = self._born[: self._rows]
        high = np.maximum(np.searchsorted(born, clock - EDGES[1:], side="right"), low)
        first = np.maximum(low, np.append(high[1:], 0))  # to have left this bucket and no further one
        counts = np.maximum(high - first, 0)
        end = np.repeat(_BUCKETS + 1, counts)
        row = np.arange(len(end))
        row -= np.repeat(np.cumsum(counts) - counts - first, counts)
        class_id, begin = np.take(self._class, row), _counted(low, row)
        votes = np.rint(np.take(self._left, row) * UNIT / np.take(self._pages, row))
        self._add(self._tables.exposed, class_id, begin, end, votes)
        self._add(self._tables.started, class_id, begin, end, np.full(len(row), UNIT))
        self._passed = high + self._base

    def _count_uses(self, low: Ints) -> None:
        if not self._used:
            return
        number, age, pages = _columns(self._used, 3)
        self._used.clear()
        row = number - self._base
        known = row >= 0
        row, age, pages = row[known], age[known], pages[known]
        bucket = np.minimum(np.searchsorted(EDGES, age, side="right") - 1, BUCKETS - 1)
        votes = np.rint(pages * UNIT / self._pages[row])
        class_id = np.take(self._class, row)
        self._add(self._tables.used, class_id, bucket, bucket + 1, votes)
        # Buckets a page has lived through that are not counted yet: it will be missing when they are.
        begin = np.minimum(_counted(low, row), bucket)
        self._add(self._tables.exposed, class_id, begin, bucket + 1, votes)
        np.subtract.at(self._left, row, pages)

    def _add(self, table: Floats, class_id: Ints, begin: Ints, end: Ints, votes: Floats) -> None:
        """Add `votes`, whole numbers of 1 / UNIT, to the buckets [begin, end) of their classes. Exact."""
        if len(votes):
            shape, at = (len(self._tables), BUCKETS + 1), class_id * (BUCKETS + 1)
            size = shape[0] * shape[1]
            change = np.bincount(at + begin, votes, size) - np.bincount(at + end, votes, size)
            table[: shape[0]] += np.cumsum(change.reshape(shape), 1)[:, :-1] / UNIT

    def _drop_pages(self) -> None:
        self._settle()
        if self._gone:
            number, pages = _columns(self._gone, 2)
            self._gone.clear()
            row = number - self._base
            np.subtract.at(self._left, row[row >= 0], pages[row >= 0])

    def _settle(self) -> None:
        """Put new segments, at most half of `CAPACITY`, into rows."""
        if not self._new:
            return
        count = len(self._new) // 3
        if self._rows + count > CAPACITY:
            self._make_room()
        at = slice(self._rows, self._rows + count)
        self._born[at], self._class[at], pages = _columns(self._new, 3)
        self._pages[at] = self._left[at] = pages
        self._new.clear()
        self._rows += count

    def _make_room(self) -> None:
        half = self._rows // 2
        for table in (self._born, self._class, self._pages, self._left):
            table[: self._rows - half] = table[half : self._rows].copy()
        self._rows -= half
        self._base += half


def _counted(low: Ints, row: Ints) -> Ints:
    """How many buckets each row has left already. low: per bucket, the first that has not; they fall."""
    return np.searchsorted(-low, -row)


def _columns(events: list[int], width: int) -> Ints:
    """Events of `width` numbers each, laid end to end: int64 [width, events]."""
    return np.frombuffer(array("q", events), np.int64).reshape(-1, width).T

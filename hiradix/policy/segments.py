"""Segments: data last used by one request and of one class, and the votes it gives as it ages.

What happens is noted as it happens and counted in batches, in numpy: a request costs a few appends.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hiradix.policy.ghd_tables import BUCKETS, EDGES, ClassTables, Floats

Ints: TypeAlias = npt.NDArray[np.int64]

CAPACITY = 1 << 17  # segments followed at a time; the older half is forgotten when they run out
WAITING = 1 << 14  # numbers that may wait to be put into rows, or to be taken off them
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
        self._cell = np.zeros(CAPACITY, np.int64)  # of its class, the first
        self._pages = np.zeros(CAPACITY)  # it started with
        self._left = np.zeros(CAPACITY)  # not used again, and still known
        self._passed = np.zeros(BUCKETS, np.int64)  # per bucket, the first number that has not left it
        self._new: list[int] = []  # clock, class, pages of one after the other
        self._used: list[int] = []  # number, age, pages
        self._gone: list[int] = []  # number, pages
        self._next = 0  # the number of the next to begin

    def __len__(self) -> int:
        return self._rows + len(self._new) // 3

    def start(self, class_id: int, num_pages: int, clock: int) -> int:
        """A segment begins its life; its number."""
        if len(self._new) >= min(3 * CAPACITY // 2, WAITING):
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
        if len(self._gone) >= min(CAPACITY, WAITING):
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
        counts = high - low
        cell = np.repeat(_BUCKETS, counts)
        row = np.arange(len(cell))
        row -= np.repeat(np.cumsum(counts) - counts - low, counts)
        cell += np.take(self._cell, row)
        self._add(cell, np.take(self._left, row) / np.take(self._pages, row), self._tables.exposed)
        self._add(cell, None, self._tables.started)
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
        votes = pages / self._pages[row]
        cell = np.take(self._cell, row)
        self._add(cell + bucket, votes, self._tables.used, self._tables.exposed)
        # Buckets a page has lived through that are not counted yet: it will be missing when they are.
        late = np.maximum(bucket - np.searchsorted(-low, -row), 0)  # of buckets, `low` falls
        which = np.repeat(np.arange(len(row)), late)
        through = np.arange(len(which)) - np.repeat(np.cumsum(late) - bucket, late)
        self._add(np.take(cell, which) + through, np.take(votes, which), self._tables.exposed)
        np.subtract.at(self._left, row, pages)

    def _drop_pages(self) -> None:
        self._settle()
        if self._gone:
            number, pages = _columns(self._gone, 2)
            self._gone.clear()
            row = number - self._base
            np.subtract.at(self._left, row[row >= 0], pages[row >= 0])

    @staticmethod
    def _add(cell: Ints, votes: Floats | None, *tables: Floats) -> None:
        if len(cell):
            found = np.bincount(cell, votes)
            for table in tables:
                table.reshape(-1)[: len(found)] += found

    def _settle(self) -> None:
        """Put new segments, at most half of `CAPACITY`, into rows."""
        if not self._new:
            return
        count = len(self._new) // 3
        if self._rows + count > CAPACITY:
            self._make_room()
        at = slice(self._rows, self._rows + count)
        self._born[at], of_class, pages = _columns(self._new, 3)
        self._cell[at] = of_class * BUCKETS
        self._pages[at] = self._left[at] = pages
        self._new.clear()
        self._rows += count

    def _make_room(self) -> None:
        half = self._rows // 2
        for table in (self._born, self._cell, self._pages, self._left):
            table[: self._rows - half] = table[half : self._rows].copy()
        self._rows -= half
        self._base += half


def _columns(events: list[int], width: int) -> Ints:
    """Events of `width` numbers each, laid end to end: int64 [width, events]."""
    return np.frombuffer(array("q", events), np.int64).reshape(-1, width).T

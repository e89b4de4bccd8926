"""Segments: data last used by one request and of one class, and the votes it gives as it ages.

What happens is noted as it happens and counted in batches, in numpy: a request costs a few list appends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hiradix.policy.ghd_tables import BUCKETS, EDGES, ClassTables, Floats

CAPACITY = 1 << 17  # segments followed at a time; the older half is forgotten when they run out


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
        self._new: list[tuple[int, int, int]] = []
        self._used: list[tuple[int, int, int]] = []
        self._gone: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self._rows + len(self._new)

    def start(self, class_id: int, num_pages: int, clock: int) -> int:
        """A segment begins its life; its number."""
        if 2 * len(self._new) >= CAPACITY:
            self._settle()
        self._new.append((clock, class_id, num_pages))
        return self._base + self._rows + len(self._new) - 1

    def use(self, number: int, age: int, num_pages: int) -> None:
        """So many of its pages were used again, `age` tokens after the last time."""
        self._used.append((number, age, num_pages))

    def forget(self, number: int, num_pages: int) -> None:
        """So many of its pages are not known any more: nobody would see their next use."""
        self._gone.append((number, num_pages))
        if 2 * len(self._gone) >= CAPACITY:
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
        bucket = np.repeat(np.arange(BUCKETS), counts)
        row = np.arange(len(bucket)) - np.repeat(np.cumsum(counts) - counts - low, counts)
        cell = self._class[row] * BUCKETS + bucket
        self._add(self._tables.exposed, cell, self._left[row] / self._pages[row])
        self._add(self._tables.started, cell, np.ones(len(cell)))
        self._passed = high + self._base

    def _count_uses(self, low: npt.NDArray[np.int64]) -> None:
        if not self._used:
            return
        number, age, pages = np.array(self._used, np.int64).T
        self._used = []
        row = number - self._base
        known = row >= 0
        row, age, pages = row[known], age[known], pages[known]
        bucket = np.minimum(np.searchsorted(EDGES, age, side="right") - 1, BUCKETS - 1)
        votes = pages / self._pages[row]
        cell = self._class[row] * BUCKETS
        self._add(self._tables.used, cell + bucket, votes)
        self._add(self._tables.exposed, cell + bucket, votes)
        # Buckets a page has lived through that are not counted yet: it will be missing when they are.
        late = (row[:, None] >= low) & (np.arange(BUCKETS) < bucket[:, None])
        which, through = np.nonzero(late)
        self._add(self._tables.exposed, cell[which] + through, votes[which])
        np.subtract.at(self._left, row, pages)

    def _drop_pages(self) -> None:
        self._settle()
        if self._gone:
            number, pages = np.array(self._gone, np.int64).T
            self._gone = []
            row = number - self._base
            np.subtract.at(self._left, row[row >= 0], pages[row >= 0])

    @staticmethod
    def _add(table: Floats, cell: npt.NDArray[Any], votes: Floats) -> None:
        if len(cell):
            size = (int(cell.max()) // BUCKETS + 1) * BUCKETS
            table.reshape(-1)[:size] += np.bincount(cell, votes, size)

    def _settle(self) -> None:
        """Put new segments, at most half of `CAPACITY`, into rows."""
        if not self._new:
            return
        if self._rows + len(self._new) > CAPACITY:
            self._make_room()
        fresh = np.array(self._new, np.int64)
        self._new = []
        at = slice(self._rows, self._rows + len(fresh))
        self._born[at], self._class[at] = fresh[:, 0], fresh[:, 1]
        self._pages[at] = self._left[at] = fresh[:, 2]
        self._rows += len(fresh)

    def _make_room(self) -> None:
        half = self._rows // 2
        for table in (self._born, self._class, self._pages, self._left):
            table[: self._rows - half] = table[half : self._rows].copy()
        self._rows -= half
        self._base += half

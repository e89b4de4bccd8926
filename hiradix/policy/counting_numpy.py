"""Counting by numpy: `hiradix.policy.counting` without `_counting.c`, and its reference."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np

from hiradix.policy.class_ranks import BUCKETS, EDGE_LIST
from hiradix.policy.gittins_numpy import Floats, Ints

Events: TypeAlias = tuple[list[int], list[int]]
Columns: TypeAlias = tuple[Ints, Ints, Floats, Floats, Ints]
Tables: TypeAlias = tuple[Floats, Floats, Floats]

UNIT = float(1 << 20)  # parts of a vote: sums of 2 ** 33 votes are exact
_EDGES = np.array(EDGE_LIST, np.int64)
_BUCKETS = np.arange(BUCKETS)


def count(events: Events, columns: Columns, tables: Tables, base: int, clock: int) -> None:
    born, classes, pages, left, passed = columns
    low = np.maximum(passed - base, 0)
    if events[0]:
        _count_uses(columns_of(events[0], 3), columns, tables, base)
    forget(events[1], left, base)
    high = np.maximum(np.searchsorted(born, clock - _EDGES[1:], side="right"), low)
    first = np.maximum(low, np.append(high[1:], 0))  # to have left this bucket and no further one
    counts = np.maximum(high - first, 0)
    end = np.repeat(_BUCKETS + 1, counts)
    row = np.arange(len(end))
    row -= np.repeat(np.cumsum(counts) - counts - first, counts)
    class_id, begin = np.take(classes, row), _counted(low, row)
    votes = np.rint(np.take(left, row) * UNIT / np.take(pages, row))
    _add(tables[1], class_id, begin, end, votes)
    _add(tables[2], class_id, begin, end, np.full(len(row), UNIT))
    passed[:] = high + base


def forget(gone: list[int], left: Floats, base: int) -> None:
    """Take off what is gone: number and pages of one segment after the other."""
    if gone:
        number, pages = columns_of(gone, 2)
        row = number - base
        np.subtract.at(left, row[row >= 0], pages[row >= 0])


def columns_of(events: list[int], width: int) -> Ints:
    """Events of `width` numbers each, laid end to end: int64 [width, events]."""
    return np.frombuffer(array("q", events), np.int64).reshape(-1, width).T


def _count_uses(uses: Ints, columns: Columns, tables: Tables, base: int) -> None:
    _, classes, all_pages, left, passed = columns
    number, age, pages = uses
    row = number - base
    known = row >= 0
    row, age, pages = row[known], age[known], pages[known]
    bucket = np.minimum(np.searchsorted(_EDGES, age, side="right") - 1, BUCKETS - 1)
    votes = np.rint(pages * UNIT / all_pages[row])
    class_id = np.take(classes, row)
    _add(tables[0], class_id, bucket, bucket + 1, votes)
    # Buckets a page has lived through that are not counted yet: it will be missing when they are.
    begin = np.minimum(_counted(np.maximum(passed - base, 0), row), bucket)
    _add(tables[1], class_id, begin, bucket + 1, votes)
    np.subtract.at(left, row, pages)


def _add(table: Floats, class_id: Ints, begin: Ints, end: Ints, votes: Floats) -> None:
    """Add `votes`, whole numbers of 1 / UNIT, to the buckets [begin, end) of their classes. Exact."""
    if len(votes):
        shape, at = (len(table), BUCKETS + 1), class_id * (BUCKETS + 1)
        size = shape[0] * shape[1]
        change = np.bincount(at + begin, votes, size) - np.bincount(at + end, votes, size)
        table += np.cumsum(change.reshape(shape), 1)[:, :-1] / UNIT


def _counted(low: Ints, row: Ints) -> Ints:
    """The number of buckets that each row has left. low: per bucket, the first row that has not left it;
    descending."""
    return np.searchsorted(-low, -row)

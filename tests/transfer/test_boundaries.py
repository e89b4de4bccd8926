"""Where hits of storage end when a cache has several components: at the last page that ends all they need."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.errors import StorageError
from hiradix.transfer.jobs import (
    FailReason,
    QueryPayload,
    ReadPayload,
    StorePayload,
    TrailingPages,
    TrailingWindow,
)
from hiradix.transfer.runtime import Runtime, TransferLimits
from hiradix.transfer.storage_runner import MAX_LOOKS, StorageRunner
from hiradix.transfer.worker import Stopped
from hiradix.tree.hashing import PageRows, hash_pages
from tests.transfer.doubles import run, task_of

MANY = 40
ROWS = PageRows(b"", np.arange(4 * MANY, dtype=np.int64).reshape(MANY, 4))
NAMES = [digest.hex() for digest in hash_pages(ROWS)]


class Shelf:
    """Pages by name: those at `places`, a byte of content each."""

    def __init__(self, places: Sequence[int] = ()):
        self.pages = {NAMES[place]: b"x" for place in places}
        self.asked: list[str] = []
        self.num_calls = 0

    def exists(self, keys: Sequence[str]) -> int:
        self.num_calls += 1
        self.asked += keys
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, keys: Sequence[str], into: Any) -> list[bool]:
        for key, (view,) in zip(keys, into):
            view[:] = self.pages.get(key, b"-")
        return [key in self.pages for key in keys]

    def put(self, keys: Sequence[str], pages: Any) -> list[bool]:
        self.pages.update({key: bytes(view) for key, (view,) in zip(keys, pages)})
        return [True] * len(keys)


class Host:
    """A pool of pages of a byte each."""

    def __init__(self) -> None:
        self.data = bytearray(2 * MANY)

    def page_views(self, page: int) -> list[memoryview]:
        return [memoryview(self.data)[page : page + 1]]


def runner_of(shelves: Sequence[Any], batch_pages: int = 3) -> StorageRunner:
    runner = StorageRunner(
        cast(Any, [Host() for _ in shelves]), Runtime(limits=TransferLimits(batch_pages=batch_pages))
    )
    runner.use(cast(Any, SimpleNamespace(parts=shelves)))
    return runner


def expected(full: set[int], trails: Sequence[tuple[set[int], int]], count: int, first: int) -> int:
    """The rule itself, page by page; places are counted from the first of all rows."""
    hits = next((n for n in range(count) if first + n not in full), count)
    for end in range(hits, -1, -1):
        if all(first + page in there for there, reach in trails for page in range(max(0, end - reach), end)):
            return end
    raise AssertionError("no pages at all always end well")


places = st.sets(st.integers(0, MANY - 1)).map(lambda holes: set(range(MANY)) - holes)


@settings(max_examples=300, deadline=None)
@given(
    st.sets(st.integers(0, MANY - 1), max_size=1).map(lambda holes: set(range(MANY)) - holes),
    st.lists(st.tuples(places, st.integers(1, 9)), max_size=3),
    st.integers(0, MANY),
    st.integers(1, 12),
)
def test_hits_end_where_the_rule_says_and_no_page_is_asked_for_twice(
    full: set[int], trails: list[tuple[set[int], int]], count: int, batch_pages: int
) -> None:
    shelves = [Shelf(sorted(full)), *(Shelf(sorted(there)) for there, _ in trails)]
    query = QueryPayload(
        ROWS, count, tuple(TrailingWindow(i, reach) for i, (_, reach) in enumerate(trails, 1))
    )
    task = run(runner_of(shelves, batch_pages).query, task_of(query))
    assert task.num_pages == expected(full, trails, count, MANY - count)
    if len(trails) == 1:
        assert len(set(shelves[1].asked)) == len(shelves[1].asked)


def test_a_search_that_finds_nothing_jumps_by_reach() -> None:
    shelves = [Shelf(range(MANY)), Shelf([])]
    task = run(runner_of(shelves).query, task_of(QueryPayload(ROWS, MANY, (TrailingWindow(1, 8),))))
    assert task.num_pages == 0 and shelves[1].num_calls == MANY // 8


def test_a_search_has_an_end() -> None:
    rows = PageRows(b"", np.arange(2 * MAX_LOOKS, dtype=np.int64).reshape(-1, 1))

    class Nothing(Shelf):
        def exists(self, keys: Sequence[str]) -> int:
            self.num_calls += 1
            return 0

    class All(Shelf):
        def exists(self, keys: Sequence[str]) -> int:
            return len(keys)

    nothing = Nothing()
    task = run(
        runner_of([All(), nothing]).query, task_of(QueryPayload(rows, len(rows), (TrailingWindow(1, 1),)))
    )
    assert task.num_pages == 0 and nothing.num_calls == MAX_LOOKS


def test_a_query_that_is_stopped_before_it_knows_has_found_nothing() -> None:
    """What was counted of one component alone is no place where a match may end."""
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 15:
            raise Stopped(FailReason.CANCELLED)

    task = task_of(QueryPayload(ROWS, MANY, (TrailingWindow(1, 2),)), check)
    with pytest.raises(Stopped):
        run(runner_of([Shelf(range(MANY)), Shelf(range(5))]).query, task)
    assert task.num_pages == 0


def test_a_read_counts_on_from_component_to_component_and_ends_at_the_first_gap() -> None:
    digests = tuple(hash_pages(ROWS))[:6]
    for window, want in (({4, 5}, 8), ({4}, 7), ({5}, 6)):
        shelves = [Shelf(range(6)), Shelf(sorted(window))]
        runner = runner_of(shelves)
        tails = (TrailingPages(np.arange(6, dtype=np.int32)), TrailingPages(np.array([11, 9], np.int32), 1))
        task = run(runner.read, task_of(ReadPayload(digests, tails)))
        assert task.num_pages == want
        data = cast(Any, runner._hosts[1]).data
        assert (data[11] == ord("x")) is (4 in window)
        assert (data[9] == ord("x")) is (5 in window)


def test_a_store_puts_the_last_pages_of_each_component_under_the_same_names() -> None:
    shelves = [Shelf(), Shelf()]
    runner = runner_of(shelves)
    hosts = cast(Any, runner._hosts)
    hosts[0].data[:5], hosts[1].data[:5] = b"abcde", b"ABCDE"
    tails = (TrailingPages(np.arange(4, dtype=np.int32)), TrailingPages(np.array([4, 0], np.int32), 1))
    task = run(runner.store, task_of(StorePayload(ROWS, tails)))
    assert task.num_pages == 6 and len(task.hashes) == MANY
    assert shelves[0].pages == dict(zip(NAMES[-4:], [b"a", b"b", b"c", b"d"]))
    assert shelves[1].pages == dict(zip(NAMES[-2:], [b"E", b"A"]))


def test_storage_of_other_components_than_the_pools_is_refused() -> None:
    runner = runner_of([Shelf(), Shelf()])
    with pytest.raises(StorageError, match="1 components of 2"):
        runner.use(cast(Any, SimpleNamespace(parts=[Shelf()])))

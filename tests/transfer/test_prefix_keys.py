"""Calls of a job say what precedes their pages in the chain, as far as it is known, and are one use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hiradix.storage import Batch
from hiradix.transfer.jobs import QueryPayload, ReadPayload, StorePayload, TrailingPages
from hiradix.transfer.storage_runner import StorageRunner
from hiradix.tree.hashing import PageRows, hash_pages
from tests.transfer.doubles import TWO_PAGES, run, task_of


class Asked:
    """Has every page; notes what it was asked."""

    def __init__(self) -> None:
        self.calls: list[Batch] = []

    def get(self, batch: Batch, into: Any) -> list[bool]:
        self.calls.append(batch)
        return [True] * len(batch)

    put = get

    def exists(self, batch: Batch) -> int:
        self.calls.append(batch)
        return len(batch)


def calls_of(payload: Any, move: str) -> list[Batch]:
    storage = Asked()
    runner = StorageRunner([cast(Any, SimpleNamespace(page_views=lambda page: []))], TWO_PAGES)
    runner.use(cast(Any, SimpleNamespace(parts=[storage])))
    run(getattr(runner, move), task_of(payload))
    return storage.calls


def rows_of(count: int, start: int = 0) -> PageRows:
    prior = b"before".ljust(32) if start else b""
    return PageRows(prior, np.arange(count * 4, dtype=np.int64).reshape(count, 4), start=start)


def names_of(rows: PageRows) -> tuple[str, ...]:
    return tuple(digest.hex() for digest in hash_pages(rows))


def test_a_lookup_names_the_chain_in_front_of_it() -> None:
    chain = names_of(rows_of(6))
    calls = calls_of(QueryPayload(rows_of(6), 5), "query")
    assert [(tuple(one), one.before) for one in calls] == [
        (chain[1:3], chain[:1]), (chain[3:5], chain[:3]), (chain[5:], chain[:5]),
    ]  # fmt: skip


@pytest.mark.parametrize("move", ["query", "store"])
def test_of_a_chain_that_is_not_known_from_its_start_the_page_in_front_is_said(move: str) -> None:
    rows = rows_of(4, start=3)
    payload = QueryPayload(rows, 4) if move == "query" else StorePayload(rows, (TrailingPages(np.arange(4)),))
    calls = calls_of(payload, move)
    assert [one.before for one in calls] == [None, None]
    assert [one.after for one in calls] == [rows.prior.hex(), names_of(rows)[1]]


def test_pages_are_stored_with_the_chain_before_them() -> None:
    rows = rows_of(5)
    chain, calls = names_of(rows), calls_of(StorePayload(rows, (TrailingPages(np.arange(4)),)), "store")
    assert [(tuple(one), one.before) for one in calls] == [(chain[at : at + 2], chain[:at]) for at in (1, 3)]
    assert calls[0].use is calls[1].use and [one.start for one in calls] == [0, 2]


@pytest.mark.parametrize("known", [True, False])
def test_pages_are_read_with_the_chain_before_them(known: bool) -> None:
    digests = tuple(hash_pages(rows_of(5)))
    chain = names_of(rows_of(5))
    read = ReadPayload(digests[1:], (TrailingPages(np.arange(4)),), digests if known else None)
    calls = calls_of(read, "read")
    assert [(tuple(one), one.before) for one in calls] == [
        (chain[at : at + 2], chain[:at] if known else None) for at in (1, 3)
    ]
    assert [one.after for one in calls] == [chain[0] if known else "", chain[2]]
    assert calls[0].use is calls[1].use


def test_a_read_of_a_chain_that_is_not_known_from_its_start_says_the_page_in_front() -> None:
    digests, chain = tuple(hash_pages(rows_of(5))), names_of(rows_of(5))
    trailing = TrailingPages(np.arange(4)), TrailingPages(np.arange(1))
    calls = calls_of(ReadPayload(digests[1:], trailing, after=digests[0]), "read")
    assert [(one.before, one.after) for one in calls] == [
        (None, chain[0]), (None, chain[2]), (None, chain[3]),
    ]  # fmt: skip

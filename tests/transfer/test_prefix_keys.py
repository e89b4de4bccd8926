"""Lookups name the pages before them to storage that asked, where the chain is known from its start."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hiradix.transfer.jobs import QueryPayload, ReadPayload, StorePayload, TrailingPages
from hiradix.transfer.storage_runner import StorageRunner
from hiradix.tree.hashing import PageRows, hash_pages
from tests.transfer.doubles import TWO_PAGES, run, task_of


class Asked:
    """Has every page; notes what it was asked."""

    def __init__(self, wants: bool):
        self.wants_prefix_keys = wants
        self.calls: list[tuple[list[str], list[str]]] = []

    def get(self, keys: Sequence[str], into: Any, prefix_keys: Sequence[str] | None = None) -> list[bool]:
        self.calls.append((list(keys), list(prefix_keys or ["-"])))
        return [True] * len(keys)

    put = get

    def exists(self, keys: Sequence[str], prefix_keys: Sequence[str] = ()) -> int:
        self.calls.append((list(keys), list(prefix_keys)))
        return len(keys)


def look_up(storage: Asked, rows: PageRows, num_pages: int) -> int:
    runner = StorageRunner([cast(Any, None)], TWO_PAGES)
    runner.use(cast(Any, storage))
    return run(runner.query, task_of(QueryPayload(rows, num_pages))).num_pages


def moved(storage: Asked, payload: Any, move: str) -> list[tuple[list[str], list[str]]]:
    host = SimpleNamespace(page_views=lambda page: [])
    runner = StorageRunner([cast(Any, host)], TWO_PAGES)
    runner.use(cast(Any, storage))
    run(getattr(runner, move), task_of(payload))
    return storage.calls


def rows_of(count: int, start: int = 0) -> PageRows:
    return PageRows(b"", np.arange(count * 4, dtype=np.int64).reshape(count, 4), start=start)


def test_prefix_and_keys_are_one_chain_from_the_start() -> None:
    storage = Asked(True)
    assert look_up(storage, rows_of(6), 5) == 5
    chain = [digest.hex() for digest in hash_pages(rows_of(6))]
    assert storage.calls == [(chain[1:3], chain[:1]), (chain[3:5], chain[:3]), (chain[5:], chain[:5])]


@pytest.mark.parametrize(("wants", "start"), [(False, 0), (True, 3)])
def test_nothing_is_said_unasked_or_without_the_start(wants: bool, start: int) -> None:
    storage = Asked(wants)
    assert look_up(storage, rows_of(4, start), 3) == 3
    assert [before for _, before in storage.calls] == [[], []]


UNKNOWN = ["-"]


@pytest.mark.parametrize(("wants", "start"), [(True, 0), (False, 0), (True, 3)])
def test_pages_are_stored_with_the_chain_before_them(wants: bool, start: int) -> None:
    rows = rows_of(5, start)
    chain = [digest.hex() for digest in hash_pages(rows)]
    calls = moved(Asked(wants), StorePayload(rows, (TrailingPages(np.arange(4)),)), "store")
    known = wants and not start
    assert calls == [(chain[at : at + 2], chain[:at] if known else UNKNOWN) for at in (1, 3)]


@pytest.mark.parametrize(("wants", "known"), [(True, True), (False, True), (True, False)])
def test_pages_are_read_with_the_chain_before_them(wants: bool, known: bool) -> None:
    digests = tuple(hash_pages(rows_of(5)))
    chain = [digest.hex() for digest in digests]
    read = ReadPayload(digests[1:], (TrailingPages(np.arange(4)),), digests if known else None)
    calls = moved(Asked(wants), read, "read")
    assert calls == [(chain[at : at + 2], chain[:at] if wants and known else UNKNOWN) for at in (1, 3)]

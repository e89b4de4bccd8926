"""Lookups name the pages before them to storage that asked, where the chain is known from its start."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hiradix.transfer.jobs import Query
from hiradix.transfer.runners import StorageRunner
from hiradix.tree.hashing import PageRows, hash_pages


class Asked:
    """Has every page; notes what it was asked."""

    def __init__(self, wants: bool):
        self.wants_prefix_keys = wants
        self.calls: list[tuple[list[str], list[str]]] = []

    def exists(self, keys: Sequence[str], prefix_keys: Sequence[str] = ()) -> int:
        self.calls.append((list(keys), list(prefix_keys)))
        return len(keys)


def look_up(storage: Asked, rows: PageRows, num_pages: int) -> int:
    runner = StorageRunner(cast(Any, None), hash_pages, 2)
    runner.storage = cast(Any, storage)
    task = SimpleNamespace(job=SimpleNamespace(payload=Query(rows, num_pages)), check=lambda: None,
                           num_pages=0, hashes=())  # fmt: skip
    for _ in runner.query(cast(Any, task)):
        pass
    return task.num_pages


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

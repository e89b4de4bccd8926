"""Whose pages a job moves, and which component's, is said with each of its calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hiradix.storage import Batch
from hiradix.transfer.jobs import QueryPayload, ReadPayload, StorePayload, TrailingPages, TrailingWindow
from hiradix.transfer.storage_runner import StorageRunner
from hiradix.tree.hashing import PageRows, hash_pages
from tests.transfer.doubles import TWO_PAGES, run, task_of

ROWS = PageRows(b"", np.arange(12, dtype=np.int64).reshape(3, 4), tenant="salt:alice", extra_key="adapter")
TAILS = (TrailingPages(np.arange(3)), TrailingPages(np.arange(2), 1))


class Asked:
    """Has every page, and takes every page; notes what it was told of them."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str | None, int, int]] = []

    def _note(self, batch: Batch) -> None:
        self.told.append((batch.tenant, batch.extra_key, batch.component, len(batch)))

    def exists(self, batch: Batch) -> int:
        self._note(batch)
        return len(batch)

    def get(self, batch: Batch, into: Any) -> list[bool]:
        self._note(batch)
        return [True] * len(batch)

    put = get


@pytest.mark.parametrize("move", ["query", "read", "store"])
def test_every_call_says_whose_pages_they_are(move: str) -> None:
    stores = [Asked(), Asked()]
    runner = StorageRunner([cast(Any, SimpleNamespace(page_views=lambda page: []))] * 2, TWO_PAGES)
    runner.use(cast(Any, SimpleNamespace(parts=stores)))
    payload = {
        "query": QueryPayload(ROWS, 3),
        "read": ReadPayload(tuple(hash_pages(ROWS)), TAILS, extra_key=ROWS.extra_key, tenant=ROWS.tenant),
        "store": StorePayload(ROWS, TAILS),
    }[move]
    run(getattr(runner, move), task_of(payload))
    whose = "salt:alice", "adapter"
    assert stores[0].told == [(*whose, 0, 2), (*whose, 0, 1)]
    assert stores[1].told == ([] if move == "query" else [(*whose, 1, 2)])


def test_a_query_names_its_chain_once() -> None:
    """However many calls it takes: a use takes as long to make as the chain is."""
    uses: list[Any] = []

    class Noting(Asked):
        def _note(self, batch: Batch) -> None:
            uses.append(batch.use)

    runner = StorageRunner([cast(Any, SimpleNamespace(page_views=lambda page: []))] * 2, TWO_PAGES)
    runner.use(cast(Any, SimpleNamespace(parts=[Noting(), Noting()])))
    assert run(runner.query, task_of(QueryPayload(ROWS, 3, (TrailingWindow(1, 3),)))).num_pages == 3
    assert [use.component for use in uses] == [0, 0, 1, 1]
    assert uses[0] is uses[1] and uses[2] is uses[3]

"""Whose pages a put stores is said to storage that asked."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hiradix.transfer.jobs import StorePayload, TrailingPages
from hiradix.transfer.storage_runner import StorageRunner
from hiradix.tree.hashing import PageRows
from tests.transfer.doubles import TWO_PAGES, run, task_of


class Asked:
    """Takes every page; notes what came beside it."""

    def __init__(self, wants: bool):
        self.wants_tenant = wants
        self.calls: list[tuple[Any, ...]] = []

    def put(self, keys: Sequence[str], pages: Any, *more: Any) -> list[bool]:
        self.calls.append(more)
        return [True] * len(keys)


@pytest.mark.parametrize(("wants", "said"), [(True, (None, "salt:alice")), (False, ())])
def test_every_part_of_a_store_names_the_tenant(wants: bool, said: tuple[Any, ...]) -> None:
    storage = Asked(wants)
    runner = StorageRunner([cast(Any, SimpleNamespace(page_views=lambda page: []))], TWO_PAGES)
    runner.use(cast(Any, storage))
    rows = PageRows(b"", np.arange(12, dtype=np.int64).reshape(3, 4), tenant="salt:alice")
    task = run(runner.store, task_of(StorePayload(rows, (TrailingPages(np.arange(3)),))))
    assert task.num_pages == 3 and storage.calls == [said, said]


def test_pages_of_every_component_are_the_tenants() -> None:
    stores = [Asked(True), Asked(True)]
    runner = StorageRunner([cast(Any, SimpleNamespace(page_views=lambda page: []))] * 2, TWO_PAGES)
    runner.use(cast(Any, SimpleNamespace(parts=stores)))
    rows = PageRows(b"", np.arange(12, dtype=np.int64).reshape(3, 4), tenant="salt:alice")
    tails = (TrailingPages(np.arange(2)), TrailingPages(np.arange(2), 1))
    assert run(runner.store, task_of(StorePayload(rows, tails))).num_pages == 4
    assert [store.calls for store in stores] == [[(None, "salt:alice")]] * 2

"""The calls of a job are one use of one chain: a store that is full takes from it from the end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hiradix.storage import GuardedStorage, PageFingerprint, StorageContext, Stores, open_storage
from hiradix.storage.backends.file.page_dir import footprint
from hiradix.storage.kit.seal import SEAL_BYTES
from hiradix.transfer.jobs import ReadPayload, StorePayload, TrailingPages
from hiradix.transfer.storage_runner import StorageRunner
from hiradix.tree.hashing import PageRows, hash_pages
from tests.transfer.doubles import TWO_PAGES, run, task_of

PAGE_BYTES, ROOM = 4096, 24
FINGERPRINT = PageFingerprint("test/model")


def stored(folder: Path, name: str) -> GuardedStorage:
    room = {"min_free_space": 0, "max_size": ROOM * footprint(SEAL_BYTES + PAGE_BYTES)}
    file = {"file_storage_path": str(folder / "file"), **room}
    upper = {"backend": "file", "file_storage_path": str(folder / "upper"), **room}
    keys = {"file": file, "tier": {"upper": upper, "lower": {"backend": "file", **file}}}[name]
    return open_storage(name, StorageContext(FINGERPRINT, {"deadline_s": 60.0, **keys}, PAGE_BYTES))


def rows_of(count: int, first: int = 0, behind: PageRows | None = None) -> PageRows:
    """behind: the rows in front of these, all of their chain."""
    rows = (first + np.arange(count * 4, dtype=np.int64)).reshape(count, 4)
    return PageRows(hash_pages(behind)[-1], rows, start=len(behind)) if behind else PageRows(b"", rows)


def names_of(rows: PageRows) -> list[str]:
    return [digest.hex() for digest in hash_pages(rows)]


class Driven:
    """Jobs of two pages a call against a real store."""

    def __init__(self, storage: GuardedStorage):
        self._memory = memoryview(bytearray(PAGE_BYTES))
        host = SimpleNamespace(page_views=lambda page: [self._memory])
        self._runner = StorageRunner([cast(Any, host)], TWO_PAGES)
        self._runner.use(Stores([storage]))

    def store(self, rows: PageRows) -> int:
        return run(
            self._runner.store, task_of(StorePayload(rows, (TrailingPages(np.arange(len(rows))),)))
        ).num_pages

    def read(self, rows: PageRows, count: int | None = None) -> int:
        """The last `count` pages of a chain."""
        digests, count = tuple(hash_pages(rows)), len(rows) if count is None else count
        tails = (TrailingPages(np.arange(count)),)
        return run(self._runner.read, task_of(ReadPayload(digests[-count:], tails, digests))).num_pages


@pytest.mark.parametrize("name", ["file", "tier"])
@pytest.mark.parametrize("read", [False, True])
def test_what_leaves_is_a_chains_end(tmp_path: Path, name: str, read: bool) -> None:
    storage = stored(tmp_path, name)
    driven, rows = Driven(storage), rows_of(20)
    assert driven.store(rows) == 20
    if read:
        assert driven.read(rows) == 20
    assert driven.store(rows_of(10, 10_000)) == 10
    there = [storage.exists([one]) == 1 for one in names_of(rows)]
    assert 10 <= there.count(True) < 20 and there == sorted(there, reverse=True), there
    storage.close()


def test_jobs_are_uses_of_their_own(tmp_path: Path) -> None:
    """Else what one job stored would leave for the next one's sake, however old what came before is."""
    storage = stored(tmp_path, "file")
    driven = Driven(storage)
    assert driven.store(rows_of(12)) == 12 and driven.store(rows_of(12, 10_000)) == 12
    assert driven.store(rows_of(6, 20_000)) == 6
    assert storage.exists(names_of(rows_of(12, 10_000))) == 12, "the chain used last before this one"
    storage.close()


@pytest.mark.parametrize("name", ["file", "tier"])
@pytest.mark.parametrize("read", [False, True])
def test_what_a_later_job_moves_makes_what_was_before_it_used(tmp_path: Path, name: str, read: bool) -> None:
    """A conversation that goes on lost its first pages, and what it had stored since was found by nobody."""
    storage = stored(tmp_path, name)
    driven, head = Driven(storage), rows_of(6)
    tail, both = rows_of(6, 24, behind=head), rows_of(12)
    assert names_of(both) == [*names_of(head), *names_of(tail)]
    assert driven.store(head if not read else both) == len(head if not read else both)
    assert driven.store(rows_of(10, 10_000)) == 10
    assert (driven.read(both, 6) if read else driven.store(tail)) == 6
    assert driven.store(rows_of(9, 20_000)) == 9
    assert storage.exists(names_of(both)) == 12
    storage.close()

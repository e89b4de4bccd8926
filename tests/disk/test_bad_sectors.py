"""Slots that the disk cannot read or write any more: their pages are forgotten and stored elsewhere."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import StorageError
from hiradix.storage import Batch
from hiradix.storage.backends.disk import DiskBackend
from hiradix.storage.backends.disk.bad_slots import FAILURES, MOST_UNWRITABLE
from hiradix.storage.backends.disk.config import slot_bytes
from hiradix.storage.backends.disk.index import RETIRED_SHARE
from hiradix.storage.guard.calls import FlagsWithReason
from hiradix.storage.kit.meters import MissReason
from tests.contracts.storage import OTHER, PAGE_BYTES, blank, hits, keys_of, put
from tests.disk.places import open_disk

SLOT = slot_bytes(PAGE_BYTES)
Make = Callable[..., DiskBackend]
CONFIG = {"io_engine": "threads", "direct_io": "off"}


class Disk:
    """Which slots cannot be read, and which not written; all reads, or none."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.unreadable: set[int] = set()
        self.unwritable: set[int] = set()
        self.is_away = False
        self.code = errno.EIO
        preadv, pwritev = os.preadv, os.pwritev

        def read(fd: int, buffers: Any, offset: int, *flags: int) -> int:
            self._refuse(self.unreadable, buffers, offset)
            return preadv(fd, buffers, offset, *flags)

        def write(fd: int, buffers: Any, offset: int, *flags: int) -> int:
            if "segment" in os.readlink(f"/proc/self/fd/{fd}"):
                self._refuse(self.unwritable, buffers, offset)
            return pwritev(fd, buffers, offset, *flags)

        patch.setattr("hiradix.storage.kit.vectored.preadv", read)
        patch.setattr("hiradix.storage.kit.vectored.pwritev", write)

    def _refuse(self, bad: set[int], buffers: Any, offset: int) -> None:
        end = offset + sum(map(len, buffers))
        if self.is_away or any(offset < (slot + 1) * SLOT and slot * SLOT < end for slot in bad):
            raise OSError(self.code, "bad sector")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    opened: list[DiskBackend] = []

    def make(*args: Any, **config: Any) -> DiskBackend:
        opened.append(open_disk(tmp_path, *args, **CONFIG | config))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def slot_of(store: DiskBackend, key: str) -> int:
    return store._store.shelf.pages[key].place[1]


def read(store: DiskBackend, keys: list[str]) -> list[bool]:
    """What comes; nothing where the store says that nothing can be read."""
    try:
        return hits(store, keys)
    except StorageError:
        return [False] * len(keys)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.EBADMSG])
def test_a_page_that_cannot_be_read_is_stored_elsewhere(make: Make, disk: Disk, code: int) -> None:
    store, keys = make(), keys_of(4)
    assert all(put(store, keys))
    disk.unreadable, disk.code = {slot_of(store, keys[1])}, code
    for _ in range(FAILURES):
        assert store.exists(keys) == 4 and hits(store, keys) == [True, False, True, True]
    assert store.exists(keys) == 1, "it is not promised any more"
    assert store.stats()["retired_slots"] == 1
    assert put(store, keys) == [True] * 4 and slot_of(store, keys[1]) not in disk.unreadable
    assert all(hits(store, keys))


def test_what_cannot_be_read_is_said_to_be_an_error(make: Make, disk: Disk) -> None:
    store, keys = make(), keys_of(4)
    assert all(put(store, keys))
    disk.unreadable = {slot_of(store, keys[1])}
    answer = store.get(Batch.of(keys), [blank() for _ in keys])
    assert isinstance(answer, FlagsWithReason) and answer.reasons == {MissReason.ERROR: 1}


def test_no_other_page_comes_into_a_bad_slot(make: Make, disk: Disk) -> None:
    """Nor one of another process, or after a restart, or when the log was written anew."""
    store, other, keys = make(), make(OTHER), keys_of(4)
    assert all(put(store, keys))
    disk.unreadable = {slot_of(store, keys[0]), slot_of(store, keys[2])}
    for _ in range(FAILURES):
        hits(store, keys)
    with store._store.locked(), store._store.mutex:
        store._store._log.rewrite()
    for one in (store, other, make()):
        more = keys_of(20, 100)
        assert all(put(one, more)) and all(hits(one, more))
        assert not disk.unreadable & {slot_of(one, key) for key in more}
        assert one.stats()["retired_slots"] == 2


def test_pages_that_are_read_one_by_one_count_too(make: Make, disk: Disk) -> None:
    store, keys = make(), keys_of(2)
    assert all(put(store, keys))
    disk.unreadable = {slot_of(store, keys[0])}
    for _ in range(FAILURES):
        assert [read(store, [key]) for key in keys] == [[False], [True]]
    assert store.exists(keys) == 0 and store.stats()["retired_slots"] == 1


def test_a_disk_that_is_away_for_a_while_loses_no_page(make: Make, disk: Disk) -> None:
    """Its controller or cable fails: every read does, and none says anything of a slot."""
    store, keys = make(), keys_of(4)
    assert all(put(store, keys))
    disk.is_away = True
    for _ in range(10 * FAILURES):
        assert read(store, keys) == [False] * 4 == read(store, keys[:2]) + read(store, keys[2:])
    disk.is_away = False
    assert all(hits(store, keys)) and store.stats()["retired_slots"] == 0


def test_a_page_that_is_read_again_is_forgiven(make: Make, disk: Disk) -> None:
    store, keys = make(), keys_of(4)
    assert all(put(store, keys))
    bad = {slot_of(store, keys[1])}
    for _ in range(5):
        disk.unreadable = bad
        for _ in range(FAILURES - 1):
            hits(store, keys)
        disk.unreadable = set()
        assert all(hits(store, keys))
    assert store.stats()["retired_slots"] == 0


def test_a_fault_of_another_kind_says_nothing_of_a_slot(make: Make, disk: Disk) -> None:
    store, keys = make(), keys_of(4)
    assert all(put(store, keys))
    disk.unreadable, disk.code = {slot_of(store, keys[1])}, errno.ENOMEM
    for _ in range(10 * FAILURES):
        hits(store, keys)
    assert store.exists(keys) == 4 and store.stats()["retired_slots"] == 0


def test_a_slot_that_cannot_be_written_is_left_out(make: Make, disk: Disk) -> None:
    """Free slots are taken in order, so that each put would fail there."""
    store, keys = make(), keys_of(8)
    assert all(put(store, keys[:1]))
    disk.unwritable = {slot_of(store, keys[0]) + 1}
    with pytest.raises(StorageError, match="bad sector"):
        put(store, keys)
    assert put(store, keys) == [True] * 8 and all(hits(store, keys))


def test_the_same_of_puts_of_one_page(make: Make, disk: Disk) -> None:
    store, keys = make(), keys_of(8)
    assert all(put(store, keys[:1]))
    disk.unwritable = {slot_of(store, keys[0]) + 1}
    for _ in range(FAILURES):
        with pytest.raises(StorageError, match="bad sector"):
            put(store, keys[1:2])
    assert put(store, keys[1:2]) == [True]


def test_a_disk_that_takes_nothing_for_a_while_keeps_its_slots(make: Make, disk: Disk) -> None:
    """Its path fails under a put, and under many more: at most a few of its slots are taken for bad."""
    store, keys = make(), keys_of(200)
    assert all(put(store, keys[:100]))
    for first in [110] + 50 * FAILURES * [0]:
        disk.unwritable = set(range(first, 10_000))
        with pytest.raises(StorageError, match="bad sector"):
            put(store, keys)
    disk.unwritable = set()
    assert all(put(store, keys)) and store.stats()["retired_slots"] <= 2 * MOST_UNWRITABLE
    assert all(hits(store, keys))


def test_a_slot_that_is_left_out_is_said(make: Make, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    store, keys = make(), keys_of(8)
    disk.unwritable = {3}
    with pytest.raises(StorageError, match="bad sector"):
        put(store, keys)
    assert re.search(r"cannot write slot 3 of segment \d+, nor 0 more", caplog.text)


def test_a_disk_that_fails_everywhere_is_not_given_up_slot_by_slot(make: Make, disk: Disk) -> None:
    store, keys = make(segment_size=8 * SLOT), keys_of(40)
    assert all(put(store, keys))
    disk.unreadable = {slot_of(store, key) for key in keys} - {0}
    for _ in range(FAILURES):
        read(store, keys)
    figures = store.stats()
    assert figures["retired_slots"] == figures["slots"] // RETIRED_SHARE
    assert store.exists(keys) == 1, "but their pages are stored again, if they can be"


def test_a_folder_that_is_only_read_forgets_what_it_cannot_read(
    make: Make, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(4)
    writer = make()
    assert all(put(writer, keys))
    disk.unreadable = {slot_of(writer, keys[1])}
    refused = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr("hiradix.storage.backends.disk.store.refusal", lambda *_: refused)
    reader = make()
    for _ in range(FAILURES):
        hits(reader, keys)
    assert reader.exists(keys) == 1 and writer.exists(keys) == 4

"""A disk that others have filled to its last block: no page more, not even a record, and reads go on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import ConfigError
from hiradix.storage import BreakerState, GuardedStorage, open_storage
from hiradix.storage.backends.disk import log as log_module
from tests.contracts.storage import hits, keys_of, put
from tests.disk.places import context

Write = Callable[..., int]


class FullDisk:
    """Writes to the log, and to the probe, end at `left` bytes more, as on a file system without blocks."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.left: int | None = None
        self._write, self._open = log_module.write_from, open
        patch.setattr(log_module, "write_from", self.write)
        patch.setattr("hiradix.storage.backends.disk.probe.open", self.open, raising=False)

    def write(self, fd: int, parts: Any, offset: int = 0) -> int:
        if self.left is None:
            return self._write(fd, parts, offset)
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = b"".join(parts)[: self.left]
        self.left -= len(part)
        return self._write(fd, [part], offset)

    def open(self, path: Any, mode: str) -> Any:
        if self.left is not None and mode == "xb":
            Path(path).touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._open(path, mode)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


@pytest.fixture
def guard(tmp_path: Path, disk: FullDisk) -> Iterator[GuardedStorage]:
    store = open_guard(tmp_path)
    yield store
    store.close()


def open_guard(folder: Path, **config: Any) -> GuardedStorage:
    return open_storage("disk", context(folder, deadline_s=60.0, breaker_failures=2, **config))


@pytest.mark.parametrize("left", [0, 1, 95, 96, 200, 96 * 8])
def test_pages_are_refused_and_others_read(guard: GuardedStorage, disk: FullDisk, left: int) -> None:
    """The log could not say where they are: that was an error, and three of these ended all reading."""
    assert all(put(guard, keys_of(4)))
    disk.left = left
    for number in range(5):
        wanted = keys_of(2) + keys_of(6, 100 + 10 * number)
        stored = put(guard, wanted)
        assert stored[:2] == [True, True] and not all(stored)
        assert hits(guard, wanted) == stored and all(hits(guard, keys_of(4)))
    stats = guard.stats()
    assert guard.state is BreakerState.CLOSED and "put_missed_error" not in stats
    assert stats["backend_put_no_room"] >= 6 * 4
    disk.left = None
    assert all(put(guard, keys_of(12, 200))) and all(hits(guard, keys_of(12, 200)))
    assert all(hits(guard, keys_of(4)))


def test_a_fault_of_the_disk_is_no_lack_of_room(guard: GuardedStorage, monkeypatch: Any) -> None:
    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(log_module, "write_from", fails)
    assert put(guard, keys_of(2)) == [False] * 2 and guard.stats()["put_missed_error"] == 2


@pytest.mark.parametrize("config", [{}, {"io_engine": "threads"}, {"direct_io": "off"}])
def test_a_store_on_a_full_disk_is_opened_and_read(
    tmp_path: Path, disk: FullDisk, config: dict[str, Any]
) -> None:
    store = open_guard(tmp_path)
    assert all(put(store, keys_of(4)))
    store.close()
    disk.left = 0
    store = open_guard(tmp_path, **config)
    assert all(hits(store, keys_of(4))) and put(store, keys_of(5)) == [True] * 4 + [False]
    disk.left = None
    assert all(put(store, keys_of(5))) and all(hits(store, keys_of(5)))
    store.close()
    assert not list(tmp_path.rglob("probe-*"))


def test_a_new_store_on_a_full_disk_is_refused(tmp_path: Path, disk: FullDisk) -> None:
    disk.left = 0
    with pytest.raises(ConfigError, match="disk_storage_path: cannot use .*No space left"):
        open_guard(tmp_path)

"""The file backend's own promises: damage, foreign files, room, leftovers, configuration."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import ConfigError, StorageError
from hiradix.storage import Batch, open_storage
from hiradix.storage.backends.file import backend as file
from hiradix.storage.backends.file.backend import FileBackend
from hiradix.storage.backends.file.config import PATH_ENV, FileConfig
from hiradix.storage.kit import vectored
from hiradix.storage.kit.seal import SEAL_BYTES
from tests.contracts.clocks import check_a_clock_that_was_ahead
from tests.contracts.storage import (
    FINGERPRINT,
    OTHER,
    PAGE_BYTES,
    blank,
    bytes_of,
    hits,
    key_of,
    keys_of,
    put,
)
from tests.seeds import FIRST, seeded
from tests.storage.files import (
    FILE_BYTES,
    bytes_in_ledger,
    bytes_on_disk,
    context,
    open_file,
    page_files,
    path_of,
)

NUM_FAULTS = int(os.environ.get("HIRADIX_STORAGE_FAULTS", "2000"))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATH_ENV, raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileBackend]:
    backend = open_file(tmp_path)
    yield backend
    backend.close()


# -- damage -------------------------------------------------------------------------------


class Vandal:
    """Spoils page files one at a time, in every way a file can go wrong."""

    def __init__(self, place: Path, seed: int):
        self.place, self.rng = place, random.Random(seed)
        theirs = open_file(place, OTHER)
        put(theirs, keys_of(8))
        theirs.close()
        self.foreign = {path.name: path.read_bytes() for path in page_files(place)}

    def spoil(self, path: Path) -> str:
        kinds = (
            self.flip, self.truncate, self.empty, self.extend, self.swap, self.torn, self.foreign_page,
            self.zero, self.scramble, self.rotate,
        )  # fmt: skip
        kind = self.rng.choice(kinds)
        good = path.read_bytes()
        bad = kind(path, bytearray(good))
        assert bad != good
        path.write_bytes(bad)
        return kind.__name__

    def flip(self, path: Path, data: bytearray) -> bytes:
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        return data

    def truncate(self, path: Path, data: bytearray) -> bytes:
        return data[: self.rng.randrange(1, len(data))]

    def empty(self, path: Path, data: bytearray) -> bytes:
        return b""

    def extend(self, path: Path, data: bytearray) -> bytes:
        return data + self.rng.randbytes(self.rng.randrange(1, 100))

    def swap(self, path: Path, data: bytearray) -> bytes:
        other = self.rng.choice([other for other in page_files(path.parents[2]) if other.name != path.name])
        return other.read_bytes()

    def torn(self, path: Path, data: bytearray) -> bytes:
        at = self.rng.randrange(len(data) - 4)
        return data[:at] + bytes(byte ^ 0xA5 for byte in data[at:])

    def foreign_page(self, path: Path, data: bytearray) -> bytes:
        return self.foreign[path.name]

    def zero(self, path: Path, data: bytearray) -> bytes:
        at = self.rng.randrange(len(data) - 64)
        data[at : at + 64] = bytes(64)
        return data

    def scramble(self, path: Path, data: bytearray) -> bytes:
        return self.rng.randbytes(len(data))

    def rotate(self, path: Path, data: bytearray) -> bytes:
        at = self.rng.randrange(1, len(data))
        return data[at:] + data[:at]


@seeded
def test_no_damage_goes_unseen(tmp_path: Path) -> None:
    """Thousands of faults, every one a miss; the file is removed and its page can be stored again."""
    vandal = Vandal(tmp_path, FIRST + 1)
    store = open_file(tmp_path)
    keys = keys_of(8)
    put(store, keys)
    paths = {key: path_of(tmp_path / store._folder.namespace, key) for key in keys}
    for number in range(NUM_FAULTS):
        key = keys[number % len(keys)]
        kind = vandal.spoil(paths[key])
        assert hits(store, [key]) == [False], kind
        assert not paths[key].exists(), kind
        assert put(store, [key]) == [True]
    assert all(hits(store, keys))
    figures = store.stats()
    assert figures["read_damaged"] + figures["read_foreign"] == NUM_FAULTS
    store.close()
    again = open_file(tmp_path)
    assert bytes_in_ledger(tmp_path) == bytes_on_disk(tmp_path)
    again.close()


def test_damage_to_neighbours_in_a_batch(store: FileBackend, tmp_path: Path) -> None:
    put(store, keys_of(6))
    path_of(tmp_path, key_of(2)).write_bytes(b"short")
    path_of(tmp_path, key_of(4)).unlink()
    assert hits(store, keys_of(6)) == [True, True, False, True, False, True]
    assert store.stats()["read_damaged"] == 1


def test_checksum_off_still_checks_identity_and_length(tmp_path: Path) -> None:
    """The positive control of all tests above: without the checksum a flipped bit is served."""
    store = open_file(tmp_path, checksum=False)
    put(store, keys_of(3))
    first, second, third = (path_of(tmp_path, key) for key in keys_of(3))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    second.write_bytes(third.read_bytes())
    third.write_bytes(third.read_bytes()[:-1])
    page = blank()
    assert store.get(Batch.of(keys_of(1)), [page]) == [True] and bytes(page[0]) != bytes_of(key_of(0))
    assert hits(store, keys_of(2, start=1)) == [False, False]
    store.close()


def test_page_removed_behind_its_back(store: FileBackend, tmp_path: Path) -> None:
    put(store, keys_of(3))
    path_of(tmp_path, key_of(1)).unlink()
    assert hits(store, keys_of(3)) == [True, False, True]
    assert put(store, keys_of(3)) == [True] * 3 and all(hits(store, keys_of(3)))


@pytest.mark.parametrize("call, step", [("get", "_load"), ("put", "_store")])
def test_page_deleted_while_it_is_used_is_not_believed_to_be_there(
    store: FileBackend, monkeypatch: pytest.MonkeyPatch, call: str, step: str
) -> None:
    """The use came after the deletion, and put the page into the index for good."""
    put(store, keys_of(2 if call == "get" else 0))
    before = getattr(store, step)

    def deleted_after(*args: Any) -> Any:
        done = before(*args)
        store.delete(keys_of(1))
        return done

    monkeypatch.setattr(store, step, deleted_after)
    assert (hits if call == "get" else put)(store, keys_of(2)) == [True, True]
    monkeypatch.undo()
    assert store.exists(keys_of(1)) == 0 and hits(store, keys_of(2)) == [False, True]
    assert store.stats()["files"] == 1


def test_whole_directory_removed_behind_its_back(store: FileBackend, tmp_path: Path) -> None:
    put(store, keys_of(3))
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert not any(hits(store, keys_of(3)))
    assert put(store, keys_of(3)) == [True] * 3 and all(hits(store, keys_of(3)))


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "loop"])
def test_odd_things_in_a_pages_place_are_misses(store: FileBackend, tmp_path: Path, kind: str) -> None:
    put(store, keys_of(2))
    path = path_of(tmp_path, key_of(0))
    data = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.symlink_to(path)
    assert hits(store, keys_of(2)) == [False, True]
    if kind != "folder":
        assert put(store, keys_of(2)) == [True, True] and all(hits(store, keys_of(2)))
        assert kind != "link" or (tmp_path / "elsewhere").read_bytes() == data


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / "notes.txt", tmp_path / "v2-future" / "0" / "0" / "x.page", tmp_path / "a_0_1.bin"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100_000))
    store = open_file(tmp_path, max_size=4 * FILE_BYTES)
    for number in range(10):
        put(store, [key_of(number)])
    store.clear()
    store.close()
    assert all(path.stat().st_size == 100_000 for path in others)


# -- room ---------------------------------------------------------------------------------


def test_names_that_are_no_keys_are_left_alone_and_stop_nothing(tmp_path: Path) -> None:
    """They were counted and, when room had to be made, stood for an error of every put."""
    store = open_file(tmp_path, max_size=4 * FILE_BYTES)
    assert all(put(store, keys_of(3)))
    store.close()
    whole = path_of(tmp_path, key_of(0))
    others = [whole.with_name(name) for name in ("ключ.page", "a b.page", f"{'k' * 201}.page", ".page")]
    kept = whole.parents[2].with_name(f"{whole.parents[2].name}.bak") / "0" / "0"
    kept.mkdir(parents=True)
    for path in (*others, kept / whole.name):
        path.write_bytes(whole.read_bytes())
        os.utime(path, (1, 1))
    store = open_file(tmp_path, max_size=4 * FILE_BYTES)
    assert hits(store, keys_of(3)) == [True] * 3
    assert put(store, keys_of(4, 10)) == [True] * 4 and hits(store, keys_of(4, 10)) == [True] * 4
    store.clear()
    store.close()
    assert all(path.exists() for path in (*others, kept / whole.name))


def test_a_page_in_another_keys_folder_goes_like_others_and_is_no_page(tmp_path: Path) -> None:
    """Such files counted towards the cap, could not be evicted and were said to be there."""
    store = open_file(tmp_path, max_size=4 * FILE_BYTES)
    assert all(put(store, keys_of(4)))
    store.close()
    for key in keys_of(4):
        path = path_of(tmp_path, key)
        x, y = path.parent.parent.name, path.parent.name
        target = path.parents[2] / f"{int(x, 16) ^ 1:x}" / y
        target.mkdir(parents=True, exist_ok=True)
        path.rename(target / path.name)
    store = open_file(tmp_path, max_size=4 * FILE_BYTES)
    assert store.exists(keys_of(4)) == 0 and not any(hits(store, keys_of(4)))
    assert put(store, keys_of(2)) == [True] * 2 and hits(store, keys_of(2)) == [True] * 2
    assert bytes_on_disk(tmp_path) == bytes_in_ledger(tmp_path) == 4 * FILE_BYTES
    store.clear()
    assert not page_files(tmp_path) and store.stats()["files"] == store.stats()["used_bytes"] == 0
    store.close()


def test_ledger_says_what_is_on_disk(tmp_path: Path) -> None:
    store = open_file(tmp_path, max_size=20 * FILE_BYTES)
    rng = random.Random(3)
    for _ in range(60):
        keys = rng.sample(keys_of(40), 5)
        rng.choice([put, put, hits, lambda s, k: s.delete(k)])(store, keys)
        assert bytes_in_ledger(tmp_path) == bytes_on_disk(tmp_path) <= 20 * FILE_BYTES
    store.close()


def test_cap_is_on_by_default(store: FileBackend) -> None:
    assert 0 < store.stats()["max_bytes"] == FileConfig(Path()).max_bytes < 1 << 40


def test_cap_counts_all_models_and_evicts_across_them(tmp_path: Path) -> None:
    ours = open_file(tmp_path, max_size=6 * FILE_BYTES)
    theirs = open_file(tmp_path, OTHER, max_size=6 * FILE_BYTES)
    put(theirs, keys_of(6))
    for number in range(6):
        assert put(ours, [key_of(number)]) == [True]
        assert bytes_on_disk(tmp_path) <= 6 * FILE_BYTES
    assert all(hits(ours, keys_of(6))) and not any(hits(theirs, keys_of(6)))
    ours.close()
    theirs.close()


def test_lowered_cap_holds_from_the_start(tmp_path: Path) -> None:
    store = open_file(tmp_path)
    put(store, keys_of(12))
    store.close()
    smaller = open_file(tmp_path, max_size=5 * FILE_BYTES)
    assert len(page_files(tmp_path)) == 5
    assert hits(smaller, keys_of(12)) == [True] * 5 + [False] * 7
    smaller.close()


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    ticks = itertools.count(1_700_000_000_000_000_000, 10**12)
    store = open_file(tmp_path, time_ns=lambda: next(ticks))
    for number in range(6):
        put(store, [key_of(number)])
    hits(store, [key_of(0), key_of(1)])
    store.close()
    smaller = open_file(tmp_path, max_size=3 * FILE_BYTES)
    assert hits(smaller, keys_of(6)) == [True, True, False, False, False, True]
    smaller.close()


def test_pages_of_a_clock_that_was_ahead_go_first_unless_they_are_used(tmp_path: Path) -> None:
    check_a_clock_that_was_ahead(lambda clock: open_file(tmp_path, time_ns=clock, max_size=3 * FILE_BYTES))


def test_reads_do_not_write_again_and_again(tmp_path: Path) -> None:
    now_ns = 1_700_000_000_000_000_000
    store = open_file(tmp_path, time_ns=lambda: now_ns, touch_interval_s=60)
    put(store, keys_of(1))
    before = path_of(tmp_path, key_of(0)).stat().st_mtime_ns
    now_ns += 59 * 10**9
    hits(store, keys_of(1))
    assert path_of(tmp_path, key_of(0)).stat().st_mtime_ns == before
    now_ns += 2 * 10**9
    hits(store, keys_of(1))
    assert path_of(tmp_path, key_of(0)).stat().st_mtime_ns > before
    store.close()


def test_nothing_is_written_when_the_disk_must_stay_free(tmp_path: Path) -> None:
    store = open_file(tmp_path)
    put(store, keys_of(4))
    store.close()
    strict = open_file(tmp_path, min_free_space="8000T")
    assert put(strict, keys_of(2, start=50)) == [False, False]
    assert strict.stats()["put_no_room"] == 2 and not page_files(tmp_path)
    strict.close()


class Told(threading.Condition):
    """Says when somebody waits, however long."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = False

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited = self.is_awaited or timeout != 0
        return super().wait(timeout)


def _closed_while_writing(store: FileBackend, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a put of three pages gave, or raised, that `close` met while its first page was being written.

    The write goes on when close waits, or has ended.
    """
    real, found, closer = os.pwritev, [], threading.Thread(target=store.close)
    store._puts._changed = told = Told()

    def slow(fd: int, buffers: Any, offset: int = 0) -> int:
        if closer.ident is None:
            closer.start()
            while closer.is_alive() and not told.is_awaited:
                time.sleep(0)
        return real(fd, buffers, offset)

    monkeypatch.setattr(vectored, "pwritev", slow)
    try:
        found += put(store, keys_of(3))
    except StorageError as error:
        found.append(str(error))
    closer.join()
    return found


def test_close_waits_for_puts_under_way(
    store: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed_in: list[int] = []
    real = store._folder.leave

    def leave() -> None:
        signed_in.append(len(page_files(tmp_path)))
        real()

    monkeypatch.setattr(store._folder, "leave", leave)
    monkeypatch.setattr(file, "CLOSE_TIMEOUT_S", 60.0)
    assert _closed_while_writing(store, monkeypatch) == [True] * 3
    assert signed_in == [3] and not list((tmp_path / "writers").iterdir())
    assert bytes_in_ledger(tmp_path) == bytes_on_disk(tmp_path) == 3 * FILE_BYTES
    again = open_file(tmp_path)
    assert all(hits(again, keys_of(3)))
    again.close()


def test_close_does_not_wait_for_ever_and_the_put_leaves_nothing(
    store: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "CLOSE_TIMEOUT_S", 0.0)
    (message,) = _closed_while_writing(store, monkeypatch)
    assert "closed" in message
    assert not page_files(tmp_path) and not list((tmp_path / "tmp").iterdir())
    again = open_file(tmp_path)
    assert bytes_in_ledger(tmp_path) == 0 and put(again, keys_of(3)) == [True] * 3
    again.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_refuses_pages_and_goes_on(
    store: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    put(store, keys_of(2))
    real, calls = os.pwritev, itertools.count()

    def full(fd: int, buffers: Any, offset: int = 0) -> int:
        if next(calls) >= 2:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    monkeypatch.setattr(vectored, "pwritev", full)
    assert put(store, keys_of(6, start=10)) == [True, True, False, False, False, False]
    monkeypatch.undo()
    assert hits(store, keys_of(6, start=10)) == [True, True, False, False, False, False]
    assert all(hits(store, keys_of(2))) and not list((tmp_path / "tmp").iterdir())
    assert bytes_in_ledger(tmp_path) == bytes_on_disk(tmp_path)
    assert put(store, keys_of(6, start=10)) == [True] * 6


def test_other_write_fault_is_an_error_and_leaves_nothing(
    store: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, buffers: Any, offset: int = 0) -> int:
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(vectored, "pwritev", broken)
    with pytest.raises(StorageError, match="bad disk"):
        put(store, keys_of(3))
    monkeypatch.undo()
    assert not list((tmp_path / "tmp").iterdir()) and bytes_in_ledger(tmp_path) == 0
    assert put(store, keys_of(3)) == [True] * 3


def test_fault_while_naming_gives_everything_back(
    store: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.replace, itertools.count()

    def broken(source: str, target: str) -> None:
        if next(calls) < 2:  # page 0: its folder is missing, so it is tried twice
            raise FileNotFoundError(errno.ENOENT, "bad disk")
        real(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(StorageError):
        put(store, keys_of(4))
    monkeypatch.undo()
    assert hits(store, keys_of(4)) == [False, True, True, True]
    assert not list((tmp_path / "tmp").iterdir())
    assert bytes_in_ledger(tmp_path) == bytes_on_disk(tmp_path)
    assert put(store, keys_of(4)) == [True] * 4


def test_read_faults(store: FileBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, keys_of(3))
    real, calls = os.preadv, itertools.count()

    def flaky(fd: int, buffers: Any, offset: int = 0) -> int:
        if next(calls) == 1:
            raise OSError(errno.EIO, "bad sector")
        return real(fd, buffers, offset)

    monkeypatch.setattr(vectored, "preadv", flaky)
    assert hits(store, keys_of(3)) == [True, False, True]

    def broken(fd: int, buffers: Any, offset: int = 0) -> int:
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(vectored, "preadv", broken)
    with pytest.raises(StorageError, match="bad disk"):
        hits(store, keys_of(3))
    monkeypatch.undo()
    assert all(hits(store, keys_of(3)))


def test_short_reads_and_writes_are_continued(store: FileBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(real: Any) -> Any:
        def call(fd: int, buffers: Any, offset: int = 0) -> int:
            first = memoryview(buffers[0])
            return int(real(fd, [first[: max(1, min(len(first), 701))]], offset))

        return call

    monkeypatch.setattr(vectored, "pwritev", short(os.pwritev))
    monkeypatch.setattr(vectored, "preadv", short(os.preadv))
    assert all(put(store, keys_of(2))) and all(hits(store, keys_of(2)))


def test_damaged_byte_count_is_made_anew(tmp_path: Path) -> None:
    store = open_file(tmp_path, max_size=8 * FILE_BYTES)
    put(store, keys_of(4))
    for bad in (b"", b"x", b"HRXU" + bytes(12), bytes(16)):
        (tmp_path / "hiradix.lock").write_bytes(bad)
        put(store, [key_of(bad.hex())])
        assert bytes_in_ledger(tmp_path) == bytes_on_disk(tmp_path)
    store.close()


# -- leftovers ----------------------------------------------------------------------------


def test_leftovers_of_dead_writers_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    living = open_file(tmp_path)
    mine = tmp_path / "tmp" / f"{living._folder._writer}.77"
    mine.write_bytes(bytes(1000))
    (tmp_path / "writers" / "dead").write_bytes(b"")
    (tmp_path / "tmp" / "dead.0").write_bytes(bytes(5000))
    (tmp_path / "tmp" / "nobody.1").write_bytes(bytes(5000))
    newcomer = open_file(tmp_path)
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == [mine.name]
    assert len(list((tmp_path / "writers").iterdir())) == 2
    assert newcomer.stats()["leftovers_removed"] == 2
    assert bytes_in_ledger(tmp_path) == bytes_on_disk(tmp_path)
    living.close()
    newcomer.close()
    assert not list((tmp_path / "writers").iterdir())


def test_lock_held_elsewhere_is_an_error_in_time(tmp_path: Path) -> None:
    store = open_file(tmp_path, lock_timeout_s=0.01)
    other = open_file(tmp_path)
    with other._room.locked(), pytest.raises(StorageError, match="lock"):
        put(store, keys_of(1))
    assert put(store, keys_of(1)) == [True]
    store.close()
    other.close()


# -- configuration ------------------------------------------------------------------------


def test_environment_beats_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_ENV, str(tmp_path / "env"))
    store = open_file(tmp_path / "key")
    put(store, keys_of(1))
    store.close()
    assert page_files(tmp_path / "env") and not (tmp_path / "key").exists()


def test_default_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert FileConfig.from_mapping({}).path == tmp_path / "hiradix" / "pages"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FileConfig.from_mapping({}).path == tmp_path / ".cache" / "hiradix" / "pages"


@pytest.mark.parametrize("source", ["file_storage_path", PATH_ENV])
def test_unusable_folder_names_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    if source == PATH_ENV:
        monkeypatch.setenv(PATH_ENV, str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=source):
        open_file(tmp_path / "file" / "below")


def test_folder_that_nobody_may_make_names_its_key() -> None:
    with pytest.raises(ConfigError, match="file_storage_path"):
        open_file(Path("/proc/nothing/here"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_size", "lots"), ("max_size", -1), ("max_size", 1.5), ("max_size", True), ("max_size",
        PAGE_BYTES), ("max_size", "10XB"), ("min_free_space", "-1"), ("touch_interval_s", "x"),
        ("lock_timeout_s", float("nan")), ("fsync", 1), ("checksum", "yes"), ("file_storage_path", 7),
        ("file_storage_path", "a\0b"), ("file_storage_path", ""), ("max_sizes", 1), ("unknown", None),
        pytest.param("max_size", "9" * 400 + "GiB", id="more than a float"),
    ],
)  # fmt: skip
def test_bad_value_names_its_key(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        open_storage("file", context(tmp_path, **{key: value}))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1048576", 1 << 20), ("64KiB", 64 << 10), ("2 GB", 2 * 10**9), ("1.5g", 3 << 29), ("1tib", 1 << 40)],
)
def test_sizes(tmp_path: Path, text: str, num_bytes: int) -> None:
    assert FileConfig.from_mapping({"max_size": text}).max_bytes == num_bytes


def test_upstream_keys_without_effect_are_accepted(tmp_path: Path) -> None:
    open_file(tmp_path, enable_metadata_cache=True, metadata_ttl=5, eviction_ratio=0.9).close()


def test_fsync_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    store = open_file(tmp_path, fsync=True)
    put(store, keys_of(3))
    assert len(synced) == 3 and all(hits(store, keys_of(3)))
    store.close()


def test_page_file_is_a_seal_and_the_page(store: FileBackend, tmp_path: Path) -> None:
    put(store, keys_of(1))
    data = path_of(tmp_path, key_of(0)).read_bytes()
    assert data[:4] == b"HRXP" and data[SEAL_BYTES:] == bytes_of(key_of(0))
    assert data[16:32].hex() == FINGERPRINT.digest()[:32]
    assert path_of(tmp_path, key_of(0)).stat().st_mode & 0o777 == 0o600

"""The disk backend beyond the contract: buffers, page cache, room, other processes, faults, options."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import ConfigError, StorageError
from hiradix.storage import Batch, StorageContext, open_storage
from hiradix.storage.backends.disk import DiskBackend
from hiradix.storage.backends.disk import log as log_module
from hiradix.storage.backends.disk.record import RECORD_BYTES
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
    page_of,
    put,
    run_all,
)
from tests.disk.places import MODES, bytes_on_disk, cap_of, context, log_file, open_disk, segment_files

ALIGNED = 8192
Make = Callable[..., DiskBackend]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    opened: list[DiskBackend] = []

    def make(*args: Any, **config: Any) -> DiskBackend:
        opened.append(open_disk(tmp_path, *args, **config))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


class Pool:
    """Page-aligned memory of `count` aligned pages, each of its key's bytes."""

    def __init__(self, count: int, pieces: int = 1):
        self.memory = memoryview(mmap.mmap(-1, count * ALIGNED))
        self.keys = Batch.of(keys_of(count))
        step = ALIGNED // pieces
        self.pages = [
            [self.memory[at : at + step] for at in range(i * ALIGNED, (i + 1) * ALIGNED, step)]
            for i in range(count)
        ]
        self.fill()

    def fill(self) -> None:
        for number, key in enumerate(self.keys):
            self.memory[number * ALIGNED : (number + 1) * ALIGNED] = bytes_of(key, ALIGNED)

    def is_right(self) -> bool:
        return bytes(self.memory) == b"".join(bytes_of(key, ALIGNED) for key in self.keys)

    def round_trip(self, store: DiskBackend) -> None:
        assert all(store.put(self.keys, self.pages))
        self.memory[:] = bytes(len(self.memory))
        assert all(store.get(self.keys, self.pages)) and self.is_right()


# -- buffers and ways ---------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_aligned_pages_go_straight_past_the_page_cache(make: Make, engine: str, pieces: int) -> None:
    store = make(page_bytes=ALIGNED, io_engine=engine, direct_io="on", direct_writes=True)
    Pool(40, pieces).round_trip(store)
    figures = store.stats()
    assert (figures["written_direct"], figures["read_direct"]) == (40, 40)
    assert figures["read_bounced"] == figures["written_bounced"] == figures["read_cached"] == 0


def test_unaligned_pages_bounce(make: Make) -> None:
    store = make(direct_io="on", direct_writes=True, use_page_cache=False)
    assert all(put(store, keys_of(20))) and all(hits(store, keys_of(20)))
    assert store.stats()["written_bounced"] == store.stats()["read_bounced"] == 20


def test_more_than_a_bounce_buffer_bounces_in_turns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.storage.backends.disk.moves.BOUNCE_BYTES", 3 * 8192)
    store = make(direct_io="on", direct_writes=True, use_page_cache=False)
    assert all(put(store, keys_of(20))) and all(hits(store, keys_of(20)))


def test_what_is_in_the_page_cache_is_read_from_there(make: Make) -> None:
    store = make(page_bytes=ALIGNED, direct_io="on")
    if not store.stats()["cachestat"]:
        pytest.skip("this kernel has no cachestat: nothing is ever taken for cached")
    pool = Pool(32)
    pool.round_trip(store)
    assert store.stats()["read_cached"] == 32
    for path in segment_files(Path(store.config.path).parent):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    assert all(store.get(pool.keys, pool.pages)) and pool.is_right()
    assert store.stats()["read_direct"] == 32


def test_batch_that_is_partly_cached(make: Make) -> None:
    store = make(page_bytes=ALIGNED, direct_io="on")
    pool = Pool(64)
    assert all(store.put(pool.keys, pool.pages))
    (path,) = segment_files(Path(store.config.path).parent)
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 8 * ALIGNED, 24 * ALIGNED, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    pool.memory[:] = bytes(len(pool.memory))
    assert all(store.get(pool.keys, pool.pages)) and pool.is_right()
    figures = store.stats()
    assert figures["read_direct"] + figures["read_cached"] == 64


def test_batches_longer_than_the_ring(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.storage.backends.disk.moves.DIRECT_OPERATION_BYTES", ALIGNED)
    store = make(page_bytes=ALIGNED, io_engine="io_uring", direct_io="on", direct_writes=True)
    Pool(600).round_trip(store)


def test_several_threads_have_rings_of_their_own(make: Make) -> None:
    store = make(page_bytes=ALIGNED, io_engine="io_uring", direct_io="on", use_page_cache=False)
    pools = [Pool(48) for _ in range(4)]
    assert all(store.put(pools[0].keys, pools[0].pages))
    run_all([lambda p=p: [store.get(p.keys, p.pages) for _ in range(10)] for p in pools])  # type: ignore[misc]
    assert all(pool.is_right() for pool in pools)


def test_io_uring_that_is_forbidden_gives_threads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("hiradix.storage.backends.disk.kernel.io_uring_setup", forbidden)
    store = make()
    assert store.stats()["io_uring"] == 0
    assert all(put(store, keys_of(5))) and all(hits(store, keys_of(5)))
    with pytest.raises(ConfigError, match="io_engine"):
        make(io_engine="io_uring")


def test_directory_without_o_direct_is_used_buffered(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_buffered(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", open_buffered)
    store = make()
    assert store.stats()["direct_io"] == 0
    assert all(put(store, keys_of(5))) and all(hits(store, keys_of(5)))
    with pytest.raises(ConfigError, match="direct_io"):
        make(direct_io="on")


@pytest.mark.parametrize("mode", MODES)
def test_page_of_another_length_is_refused(make: Make, mode: str) -> None:
    store = make(**MODES[mode])
    with pytest.raises(StorageError, match="100 bytes"):
        store.put(Batch.of(keys_of(1)), [blank(100)])
    with pytest.raises(StorageError, match="100 bytes"):
        store.get(Batch.of(keys_of(1)), [blank(100)])


# -- faults of the disk -------------------------------------------------------------------


def test_short_reads_are_completed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may stop in the middle of a read; the rest is fetched, and only a short file is a miss."""
    store = make(page_bytes=ALIGNED, io_engine="io_uring", direct_io="on", use_page_cache=False)
    pool = Pool(20)
    assert all(store.put(pool.keys, pool.pages))
    real = store._io._engine.run

    def cut(*args: Any) -> Any:
        for ended, results in real(*args):
            yield ended, [result - 4096 for result in results]

    monkeypatch.setattr(store._io._engine, "run", cut)
    pool.memory[:] = bytes(len(pool.memory))
    assert all(store.get(pool.keys, pool.pages)) and pool.is_right()


def test_read_errors_raise_only_if_nothing_came(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(page_bytes=ALIGNED, io_engine="threads", direct_io="off")
    pool = Pool(4)
    assert all(store.put(pool.keys, pool.pages))
    real, bad = os.preadv, {0}

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if any(offset <= slot * ALIGNED < offset + sum(map(len, buffers)) for slot in bad):
            raise OSError(errno.EIO, "bad sector")
        return real(fd, buffers, offset)

    monkeypatch.setattr("hiradix.storage.kit.vectored.preadv", preadv)
    assert store.get(pool.keys, pool.pages) == [False, True, True, True]
    bad |= {1, 2, 3}
    with pytest.raises(StorageError, match="bad sector"):
        store.get(pool.keys, pool.pages)
    bad.clear()
    assert all(store.get(pool.keys, pool.pages)), "an error of the disk is no reason to forget a page"


def test_failed_write_is_not_published(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(page_bytes=ALIGNED, io_engine="threads", direct_io="off")
    pool = Pool(3)

    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "bad sector")

    with monkeypatch.context() as patch:
        patch.setattr("hiradix.storage.backends.disk.moves.write_from", lambda *_: pwritev(*_))
        with pytest.raises(StorageError, match="bad sector"):
            store.put(pool.keys, pool.pages)
    assert store.exists(pool.keys) == 0 and not any(store.get(pool.keys, pool.pages))
    pool.fill()
    pool.round_trip(store)


def test_full_disk_refuses_pages_and_keeps_what_is_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(segment_size=4 * 8192)
    assert all(put(store, keys_of(4)))

    def no_room(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert put(store, keys_of(3, 10)) == [True] * 3, "older pages make room"
    assert hits(store, keys_of(4)) == [True, False, False, False]
    assert put(store, keys_of(6, 20)) == [True] * 4 + [False] * 2
    assert len(segment_files(Path(store.config.path).parent)) == 1


def test_free_space_is_left_to_others(make: Make) -> None:
    store = make(min_free_space=1 << 60)
    assert put(store, keys_of(3)) == [False] * 3
    assert store.stats()["put_no_room"] == 3 and not segment_files(Path(store.config.path).parent)


# -- room -----------------------------------------------------------------------------------


def test_cap_counts_everything_in_the_directory(make: Make, tmp_path: Path) -> None:
    store = make(max_size=cap_of(24))
    for number in range(200):
        assert all(put(store, keys_of(3, 3 * number)))
        assert bytes_on_disk(tmp_path) <= cap_of(24)
    assert store.stats()["log_rewrites"] >= 3 and store.stats()["pages"] <= 24


def test_an_opened_store_keeps_nothing_twice_and_no_slots_that_are_taken(make: Make) -> None:
    """What a million pages cost in memory: what they have in common is there once."""
    config = {"max_size": cap_of(64), "segment_size": 16 * 8192}
    store = make(**config)
    assert all(put(store, keys_of(40)))
    store.delete(keys_of(3, 10))
    store.close()
    again = make(**config)
    shelf = again._store.shelf
    entries = list(shelf.pages.values())
    assert len(entries) == 37 and len({entry.place[0] for entry in entries}) > 1
    for shared in (lambda e: e.namespace, lambda e: e.num_bytes, lambda e: e.place[0]):
        assert len({id(shared(entry)) for entry in entries}) == len({shared(entry) for entry in entries})
    assert shelf.heap == sorted(shelf.free) and not shelf.free & {entry.place for entry in entries}
    assert all(put(again, keys_of(64))) and all(hits(again, keys_of(64)))


def test_smaller_cap_at_the_next_start_takes_the_coldest(make: Make, tmp_path: Path) -> None:
    now = [1_000_000_000_000]
    store = make(max_size=cap_of(64), segment_size=4 * 8192, time_ns=lambda: now[0])
    for number in range(64):
        now[0] += 10_000_000_000
        put(store, [key_of(number)])
    store.close()
    store = make(max_size=cap_of(20))
    assert bytes_on_disk(tmp_path) <= cap_of(20)
    answer = hits(store, keys_of(64))
    assert answer == sorted(answer) and 16 <= sum(answer) <= 20


def test_other_page_sizes_give_way_when_they_are_colder(make: Make, tmp_path: Path) -> None:
    """An operator changes the page size: the cap is full of pages that nobody asks for any more."""
    config = {"max_size": cap_of(32), "segment_size": 4 * 8192}
    old = make(**config)
    assert all(put(old, keys_of(32)))
    new = make(OTHER, page_bytes=3 * 8192, **config)
    pages = [page_of(key, 3 * 8192) for key in keys_of(6)]
    assert all(new.put(Batch.of(keys_of(6)), pages))
    assert all(new.get(Batch.of(keys_of(6)), [blank(3 * 8192) for _ in range(6)]))
    assert bytes_on_disk(tmp_path) <= cap_of(32)
    assert 0 < sum(hits(old, keys_of(32))) < 16
    for number in range(10):
        new.put(Batch.of(keys_of(6, 10 * number)), pages)
        assert bytes_on_disk(tmp_path) <= cap_of(32)


def test_chain_of_several_calls_is_evicted_from_its_end(make: Make) -> None:
    """128 pages per call, head first: without care the head would be the coldest."""
    now = [10_000_000_000]
    store = make(max_size=cap_of(100), time_ns=lambda: now[0])
    chain = Batch.of(keys_of(80))
    for start in range(0, 80, 20):
        put(store, chain[start : start + 20])
        now[0] += 1_000_000
    now[0] += 60_000_000_000
    for number in range(5):
        put(store, keys_of(10, 1000 + 10 * number))
        now[0] += 60_000_000_000
        left = [store.exists([key]) == 1 for key in chain]
        assert left == sorted(left, reverse=True), "a hole before the tail"
    assert 40 <= sum(left) <= 50
    read = Batch.of(chain[:40])
    for start in range(0, 40, 20):
        hits(store, read[start : start + 20])
    now[0] += 60_000_000_000
    put(store, keys_of(80, 2000))
    left = [store.exists([key]) == 1 for key in chain]
    assert left == sorted(left, reverse=True) and 0 < sum(left) < 40


def test_order_of_use_survives_a_restart(make: Make) -> None:
    now = [10_000_000_000]
    config = {"max_size": cap_of(10), "touch_interval_s": 1.0, "time_ns": lambda: now[0]}
    store = make(**config)
    for number in range(10):
        put(store, [key_of(number)])
        now[0] += 5_000_000_000
    hits(store, keys_of(3))
    store.close()
    now[0] += 5_000_000_000
    store = make(**config)
    put(store, keys_of(7, 100))
    assert [store.exists([key]) for key in keys_of(10)] == [1] * 3 + [0] * 7


def test_pages_that_are_put_again_count_as_used(make: Make) -> None:
    now = [10_000_000_000]
    store = make(max_size=cap_of(10), touch_interval_s=1.0, time_ns=lambda: now[0])
    for number in range(10):
        put(store, [key_of(number)])
        now[0] += 5_000_000_000
    assert all(put(store, keys_of(3)))
    put(store, keys_of(7, 100))
    assert [store.exists([key]) for key in keys_of(10)] == [1] * 3 + [0] * 7


# -- several handles ------------------------------------------------------------------------


def test_reads_do_not_write_to_the_log_again_and_again(make: Make, tmp_path: Path) -> None:
    """A use is written down once in `touch_interval_s`, with the next put."""
    now_s = [1_800_000_000.0]
    store = make(FINGERPRINT, lambda: int(now_s[0] * 1e9), touch_interval_s=60.0)
    put(store, keys_of(4))

    def records_of_a_put(number: int) -> int:
        before = log_file(tmp_path).stat().st_size
        assert all(hits(store, keys_of(4))) and put(store, [key_of(number)]) == [True]
        return (log_file(tmp_path).stat().st_size - before) // RECORD_BYTES

    alone = records_of_a_put(100)
    assert records_of_a_put(101) == alone
    now_s[0] += 61.0
    assert [records_of_a_put(number) for number in (102, 103)] == [alone + 4, alone]


def test_pages_of_a_clock_that_was_ahead_go_first_unless_they_are_used(make: Make) -> None:
    check_a_clock_that_was_ahead(lambda clock: make(time_ns=clock, max_size=cap_of(3)))


@pytest.mark.parametrize("verify", ["off", "always"])
def test_reader_is_not_given_a_page_that_was_replaced_meanwhile(make: Make, verify: str) -> None:
    """Another process evicts the page and writes its slot between our look-up and the end of our read. That
    is no damage."""
    ours, theirs = (make(max_size=cap_of(2), verify=verify) for _ in range(2))
    put(ours, keys_of(2))
    assert all(hits(ours, keys_of(2)))
    real = ours._io.read

    def late(*args: Any) -> Any:
        put(theirs, keys_of(2, 50))
        return real(*args)

    ours._io.read = late  # type: ignore[method-assign]
    assert hits(ours, keys_of(2)) == [False, False]
    ours._io.read = real  # type: ignore[method-assign]
    assert all(hits(ours, keys_of(2, 50))) and "read_damaged" not in ours.stats()


def test_log_rewritten_by_another_between_look_up_and_read(make: Make) -> None:
    ours, theirs = make(), make()
    put(ours, keys_of(5))
    real = ours._io.read

    def late(*args: Any) -> Any:
        with theirs._store.locked(), theirs._store.mutex:
            theirs._store._log.rewrite()
        return real(*args)

    ours._io.read = late  # type: ignore[method-assign]
    assert all(hits(ours, keys_of(5))), "the pages are where they were"


def test_a_listing_during_which_the_log_is_rewritten_is_whole(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named what had been read of the old log when that was cut."""
    store, keys, reads = make(), keys_of(20), []
    assert all(put(store, keys))

    def cut_short(fd: int, start: int, end: int) -> bytes:
        reads.append(end)
        if len(reads) > 1:
            return whole(fd, start, end)
        head = whole(fd, start, start + 8 * RECORD_BYTES)
        with store._store.locked(), store._store.mutex:
            store._store._log.rewrite()
        return head + whole(fd, start + len(head), end)

    whole = log_module._read
    monkeypatch.setattr(log_module, "_read", cut_short)
    listed = {entry.name for entry in log_module.pages_in(tmp_path / "store")}
    assert listed == set(keys) and len(reads) > 1


def test_new_log_that_never_came_stops_nobody(make: Make, tmp_path: Path) -> None:
    """A process dies after it announced a new log, before it had one: what the old one says is still so."""
    ours, theirs = make(), make()
    put(ours, keys_of(5))
    with theirs._store.locked(), theirs._store.mutex:
        theirs._store._log._retire()
    assert all(hits(ours, keys_of(5))) and ours.exists(keys_of(5)) == 5
    assert all(put(theirs, keys_of(2, 50)))
    assert all(hits(ours, keys_of(5))) and all(hits(ours, keys_of(2, 50)))


def test_half_a_record_is_cut_off(make: Make, tmp_path: Path) -> None:
    ours, theirs = make(), make()
    put(ours, keys_of(5))
    with open(log_file(tmp_path), "ab") as file:
        file.write(b"HR" + bytes(50))
    assert all(hits(theirs, keys_of(5)))
    assert all(put(theirs, keys_of(3, 10)))
    assert log_file(tmp_path).stat().st_size % RECORD_BYTES == 0
    assert all(hits(ours, keys_of(3, 10)))


def tampered(log: Path, how: str, older: bytes) -> None:
    """The log becomes as it was when `older` was read, by what an operator or a backup may do."""
    if how == "cut":
        os.truncate(log, len(older))
    else:
        copy = log.with_name("copy")
        copy.write_bytes(older)
        os.replace(copy, log)


@pytest.mark.parametrize("more", [1, 5])
@pytest.mark.parametrize(
    ("how", "ours_does"),
    [("cut", "get"), ("cut", "delete"), ("cut", "put"), ("replaced", "delete"), ("replaced", "put")],
)
def test_a_log_that_was_put_back_while_open_is_read_anew(
    make: Make, tmp_path: Path, how: str, ours_does: str, more: int
) -> None:
    """Others begin where the old state ends, and write to slots that this process has pages of its own in:
    it went on from where it was, and had their pages for its own."""
    ours = make(max_size=cap_of(24))
    assert all(put(ours, keys_of(8)))
    older = log_file(tmp_path).read_bytes()
    assert all(put(ours, keys_of(16, 100)))
    tampered(log_file(tmp_path), how, older)
    theirs = make(max_size=cap_of(24))
    for number in range(more):
        assert all(put(theirs, keys_of(4, 200 + 4 * number)))
    if ours_does == "delete":
        ours.delete(keys_of(1, 100))
    elif ours_does == "put":
        assert all(put(ours, keys_of(2, 300)))
    for keys in (keys_of(8), keys_of(16, 100), keys_of(4 * more, 200)):
        assert hits(ours, keys) == hits(theirs, keys)
    assert any(hits(ours, keys_of(4 * more, 200)))


@pytest.mark.parametrize("remake", [False, True])
def test_directory_removed_behind_our_back(make: Make, tmp_path: Path, remake: bool) -> None:
    import shutil

    store = make()
    put(store, keys_of(5))
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StorageError):
        store.ping()
    other = make() if remake else None
    assert all(put(store, keys_of(3, 10))) and all(hits(store, keys_of(3, 10)))
    assert not any(hits(store, keys_of(5)))
    store.ping()
    if other is not None:
        assert all(hits(other, keys_of(3, 10)))


def test_lock_held_by_another_fails_puts_and_not_reads(make: Make) -> None:
    ours, theirs = make(lock_timeout_s=0.01), make()
    put(ours, keys_of(3))
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with theirs._store.locked():
            holding.set()
            assert release.wait(60)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert holding.wait(60)
    assert all(hits(ours, keys_of(3))) and ours.exists(keys_of(3)) == 3
    assert put(ours, keys_of(3)) == [True] * 3, "nothing to write"
    with pytest.raises(StorageError, match="directory lock"):
        put(ours, keys_of(1, 9))
    release.set()
    holder.join(60)
    assert all(put(ours, keys_of(1, 9)))


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("verify", "sometimes"), ("io_engine", "aio"), ("direct_io", True), ("max_size", 1000),
        ("io_threads", 0), ("fsync", 1), ("disk_storage_path", ""), ("disk_storage_path", 7),
        ("segment_size", "x"), ("unknown", 1), ("file_storage_path", "/x"),
    ],
)  # fmt: skip
def test_bad_option_names_its_key(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        open_disk(tmp_path, **{key: value})


def test_no_checksum_is_no_verification(tmp_path: Path) -> None:
    store = open_disk(tmp_path, checksum=False)
    assert store.config.verify == "off"
    store.close()


def test_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(ConfigError, match="disk_storage_path"):
        open_disk(tmp_path)


def test_somebody_elses_log_is_left_alone(make: Make, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    log_file(tmp_path).write_text("step 1, loss 3.2\n" * 50)
    for _ in range(2):
        with pytest.raises(ConfigError, match="disk_storage_path.*is no log of a disk store.*another folder"):
            make()
    assert log_file(tmp_path).read_text() == "step 1, loss 3.2\n" * 50
    assert os.listdir(tmp_path / "store") == ["log"]


def test_a_store_of_another_format_is_left_as_it_is(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("hiradix.storage.backends.disk.log.FORMAT_VERSION", 2)
        newer.setattr("hiradix.storage.backends.disk.record.FORMAT_VERSION", 2)
        store = make()
        assert all(put(store, keys_of(4)))
        with pytest.raises(ConfigError, match="is of format 2, this is 1"):
            monkeypatch.setattr("hiradix.storage.backends.disk.log.FORMAT_VERSION", 1)
            monkeypatch.setattr("hiradix.storage.backends.disk.record.FORMAT_VERSION", 1)
            make()
        newer.setattr("hiradix.storage.backends.disk.log.FORMAT_VERSION", 2)
        newer.setattr("hiradix.storage.backends.disk.record.FORMAT_VERSION", 2)
        assert hits(store, keys_of(4)) == hits(make(), keys_of(4)) == [True] * 4


def test_a_log_whose_first_record_is_damaged_begins_anew_and_says_so(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make()
    put(store, keys_of(2))
    store.close()
    log_file(tmp_path).write_bytes(b"\0" + log_file(tmp_path).read_bytes()[1:])
    store = make()
    assert hits(store, keys_of(2)) == [False] * 2 and all(put(store, keys_of(2)))
    assert "the store begins empty" in caplog.text


def test_what_a_link_in_a_segments_place_leads_to_is_left_alone(make: Make, tmp_path: Path) -> None:
    store = make()
    put(store, keys_of(2))
    store.close()
    (mine,) = segment_files(tmp_path)
    for link in (mine, mine.with_name("segment-0000000007.pages")):
        elsewhere = tmp_path / f"{link.name} of somebody"
        elsewhere.write_bytes(b"theirs")
        link.unlink(missing_ok=True)
        link.symlink_to(elsewhere)
    store = make()
    assert hits(store, keys_of(2)) == [False] * 2 and all(put(store, keys_of(2)))
    assert {path.read_bytes() for path in tmp_path.glob("*somebody")} == {b"theirs"}


def test_guarded_by_name_reads_into_the_callers_pages(tmp_path: Path) -> None:
    more = {"deadline_s": 30.0, "direct_io": "on", "use_page_cache": False}
    keys = dict(context(tmp_path).extra_config) | more
    storage = open_storage("disk", StorageContext(FINGERPRINT, keys, ALIGNED))
    pool = Pool(16)
    assert all(storage.put(pool.keys, pool.pages))
    pool.memory[:] = bytes(len(pool.memory))
    assert all(storage.get(pool.keys, pool.pages)) and pool.is_right()
    assert storage.stats()["backend_read_direct"] == 16
    storage.close()


def opened_for(place: Path) -> list[str]:
    """What this process has open below `place`, and its rings. Threads of other tests open what they like."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return sorted(name for name in found if name.startswith(str(place)) or "io_uring" in name)


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = opened_for(tmp_path)
    for mode in MODES.values():
        store = open_disk(tmp_path, **mode)
        put(store, keys_of(5, 100))
        hits(store, keys_of(5, 100))
        assert len(opened_for(tmp_path)) > len(before)
        store.close()
        store.close()
        assert opened_for(tmp_path) == before
    assert PAGE_BYTES == 6000

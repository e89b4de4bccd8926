"""The parts of the disk backend by themselves: records, recency, io_uring, batches that end early."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiradix.errors import StorageError
from hiradix.os_memory import address_of
from hiradix.storage import Batch
from hiradix.storage.backends.disk import backend, kernel
from hiradix.storage.backends.disk.engines import IOEngine, Operation, ThreadEngine, UringEngine
from hiradix.storage.backends.disk.log import Log
from hiradix.storage.backends.disk.moves import PageIO, _PageBatch
from hiradix.storage.backends.disk.record import (
    RECORD_BYTES,
    Kind,
    Record,
    header_of,
    name_of,
    pack,
    packed_name,
    unpack,
    unpacked_name,
)
from hiradix.storage.backends.disk.segments import SegmentFile
from hiradix.storage.backends.disk.uring import OPERATION, READ, Ring
from tests.contracts.storage import HOSTILE_KEYS, hits, key_of, keys_of, put
from tests.disk.places import open_disk
from tests.seeds import seeded, seeds

PAGE = 4096


def memory(num_pages: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_pages * PAGE))


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.write_bytes(b"".join(bytes([number]) * PAGE for number in range(100)))
    return path


# -- records --------------------------------------------------------------------------------


def records(count: int, seed: int) -> list[Record]:
    rng = random.Random(seed)
    return [
        Record(
            rng.choice([Kind.PUT, Kind.FREE, Kind.TOUCH]), rng.randrange(1 << 32), rng.randrange(1 << 32),
            rng.randrange(1 << 64), rng.randbytes(16), rng.randbytes(32), rng.randrange(1 << 32),
            rng.randrange(3), rng.randrange(1 << 64), rng.randrange(1 << 62), rng.randrange(2),
        )
        for _ in range(count)
    ]  # fmt: skip


@seeded
@pytest.mark.parametrize("seed", seeds(20))
def test_records_come_back_from_their_own_place_in_their_own_log(seed: int) -> None:
    made = records(20, seed)
    raw = pack(made, 7 * seed, 100)
    assert len(raw) == 20 * RECORD_BYTES and list(unpack(raw, 7 * seed, 100)) == made
    assert list(unpack(raw, 7 * seed + 1, 100)) == [None] * 20, "another log's"
    assert list(unpack(raw, 7 * seed, 101)) == [None] * 20, "moved by one"
    swapped = raw[RECORD_BYTES : 2 * RECORD_BYTES] + raw[:RECORD_BYTES]
    assert list(unpack(swapped, 7 * seed, 100)) == [None] * 2


def test_every_flipped_bit_of_a_record_is_seen() -> None:
    (raw,) = [pack(records(1, 3), 5, 9)]
    for bit in range(8 * RECORD_BYTES):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << bit % 8
        assert list(unpack(bytes(bad), 5, 9)) == [None]


def test_half_a_record_is_none() -> None:
    raw = pack(records(3, 1), 5, 0)
    assert len(list(unpack(raw[:-1], 5, 0))) == 2 and list(unpack(raw[:50], 5, 0)) == []


@pytest.mark.parametrize("raw", [b"", b"x" * 95, bytes(96), b"HR" + bytes(94), bytes(1000)])
def test_what_is_no_log_has_no_number(raw: bytes) -> None:
    assert header_of(raw) is None


def test_names_of_keys_never_meet() -> None:
    plain = key_of(1)
    others = ["a", "A" * 64, plain.upper(), plain[:-1], plain + "0", "g" * 64]
    names = [name_of(key) for key in (plain, *others)]
    assert names[0] == plain and len(set(names)) == len(names)
    assert all(isinstance(name, bytes) for name in names[1:])
    assert all(unpacked_name(*packed_name(name)) == name for name in names)
    for key in HOSTILE_KEYS:
        with pytest.raises(StorageError):
            name_of(key)


# -- recency --------------------------------------------------------------------------------


def test_reading_a_long_chain_orders_each_page_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going over the pages before with each call cost more than reading from a fast disk."""
    store = open_disk(tmp_path)
    gone_through: list[int] = []
    uses = backend._uses

    def counted(names: Any, now_ns: int) -> Any:
        gone_through.append(len(names))
        return uses(names, now_ns)

    monkeypatch.setattr(backend, "_uses", counted)
    chain = Batch.of(keys_of(640))
    for start in range(0, 640, 64):
        hits(store, chain[start : start + 64])
    assert sum(gone_through) == 0
    put(store, keys_of(1, 9999))
    assert sum(gone_through) == 640 + 1
    store.close()


# -- io_uring and threads ---------------------------------------------------------------------


def reads(fd: int, into: memoryview, numbers: list[int]) -> Any:
    operations = np.zeros(len(numbers), OPERATION)
    operations["opcode"], operations["fd"], operations["length"] = READ, fd, PAGE
    operations["offset"] = [number * PAGE for number in numbers]
    operations["address"] = [address_of(into[i * PAGE :]) for i in range(len(numbers))]
    return operations


@pytest.mark.parametrize("wave", [1, 3, 90])
def test_ring_smaller_than_its_batch(pages: Path, wave: int) -> None:
    ring, into, fd = Ring(8), memory(90), os.open(pages, os.O_RDONLY)
    seen: list[int] = []
    for ended, results in ring.run(reads(fd, into, list(range(89, -1, -1))), wave):
        assert results == [PAGE] * len(ended)
        assert all(into[i * PAGE] == 89 - i for i in ended)
        seen += ended
    assert sorted(seen) == list(range(90))
    ring.close()
    ring.close()
    os.close(fd)


@pytest.mark.parametrize("depth", [1, 3, 8, 90])
def test_a_ring_is_filled_up_before_results_are_looked_at(pages: Path, depth: int) -> None:
    """And never beyond `depth`, nor its own length."""
    ring, into, fd = Ring(8), memory(90), os.open(pages, os.O_RDONLY)
    num_ended = 0
    for ended, results in ring.run(reads(fd, into, list(range(90))), 1, depth):
        assert results == [PAGE] * len(ended)
        num_ended += len(ended)
        assert int(ring._sq_tail[0]) - num_ended == min(depth, 8, 90 - num_ended)
        assert ring._sq_head[0] == ring._sq_tail[0], "the kernel was not told of some"
    assert num_ended == 90 and [into[i * PAGE] for i in range(90)] == list(range(90))
    ring.close()
    os.close(fd)


def test_ring_goes_round_its_counters(pages: Path) -> None:
    ring, into, fd = Ring(4), memory(3), os.open(pages, os.O_RDONLY)
    for turn in range(200):
        numbers = [turn % 90, (turn + 1) % 90, (turn + 2) % 90]
        assert sum(len(ended) for ended, _ in ring.run(reads(fd, into, numbers), 3)) == 3
        assert [into[i * PAGE] for i in range(3)] == numbers
    ring.close()
    os.close(fd)


def test_ring_that_is_left_early_has_ended_everything(pages: Path) -> None:
    ring, into, fd = Ring(32), memory(64), os.open(pages, os.O_RDONLY)
    running = ring.run(reads(fd, into, list(range(64))), 1)
    next(running)
    running.close()
    into[:] = bytes(len(into))
    assert sum(len(ended) for ended, _ in ring.run(reads(fd, into, [5]), 1)) == 1
    assert into[0] == 5 and not any(into[PAGE:]), "a read that nobody waited for"
    ring.close()
    os.close(fd)


@pytest.mark.parametrize("make", [UringEngine, lambda: ThreadEngine(2)])
def test_engines_tell_errors_and_short_reads(pages: Path, make: Any) -> None:
    engine: IOEngine = make()
    fd, into = os.open(pages, os.O_RDONLY), memory(3)
    operations = [
        Operation(where, offset, [into[at : at + PAGE]], [(address_of(into[at:]), PAGE)])
        for at, where, offset in ((0, fd, 0), (PAGE, fd, 100 * PAGE - 10), (2 * PAGE, 10_000, 0))
    ]
    found = dict(pair for landing in engine.run(operations, False, 3) for pair in zip(*landing))
    assert found == {0: PAGE, 1: 10, 2: -errno.EBADF}
    engine.close()
    os.close(fd)


def test_a_check_that_raises_leaves_no_read_behind(pages: Path) -> None:
    into = memory(64)
    io = PageIO(UringEngine(), use_cache=False, write_direct=False)
    segment = SegmentFile(str(pages), direct=True)
    moves = [(segment, n * PAGE, [into[n * PAGE : (n + 1) * PAGE]]) for n in range(0, 64, 2)]

    def fail(index: int) -> bool:
        raise MemoryError

    try:
        io.read(moves, PAGE, fail)
    except MemoryError as error:
        into[:] = bytes(len(into))  # the traceback is alive, the reads are not
        assert error.__traceback__ is not None and not any(into)
    assert all(io.read(moves, PAGE)[0]) and into[62 * PAGE] == 62
    io.close()


@pytest.mark.parametrize("use_cache", [False, True], ids=["past the cache", "through it"])
def test_pages_go_in_the_order_of_the_disk_and_to_where_each_was_asked_for(
    pages: Path, monkeypatch: pytest.MonkeyPatch, use_cache: bool
) -> None:
    """Neighbours are one operation in whatever order, also around one that is asked for twice."""
    asked, into = [9, 40, 8, 41, 90, 10, 9], memory(7)
    io, starts = PageIO(UringEngine(), use_cache, write_direct=False), []
    operation, plainly = _PageBatch.operation, _PageBatch.plainly

    def seen(call: Any) -> Any:
        def counted(batch: _PageBatch, run: Any) -> Any:
            starts.append((batch.moves[run.indices[0]][1] // PAGE, len(run.indices)))
            return call(batch, run)

        return counted

    monkeypatch.setattr(_PageBatch, "operation", seen(operation))
    monkeypatch.setattr(_PageBatch, "plainly", seen(plainly))
    segment = SegmentFile(str(pages), direct=not use_cache)
    moves = [(segment, n * PAGE, [into[at * PAGE : (at + 1) * PAGE]]) for at, n in enumerate(asked)]
    assert io.read(moves, PAGE) == ([True] * 7, {}) and [into[at * PAGE] for at in range(7)] == asked
    assert starts == [(8, 2), (9, 2), (40, 2), (90, 1)], "8 and 9, 9 once more and 10, 40 and 41, 90"
    io.close()


@pytest.mark.parametrize("use_cache", [False, True], ids=["past the cache", "through it"])
@pytest.mark.parametrize("asked", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_pages_of_two_files_are_no_run_where_their_offsets_follow(
    pages: Path, tmp_path: Path, use_cache: bool, asked: list[int]
) -> None:
    other, into = tmp_path / "other", memory(4)
    other.write_bytes(b"".join(bytes([100 + number]) * PAGE for number in range(100)))
    io = PageIO(UringEngine(), use_cache, write_direct=False)
    first, second = (SegmentFile(str(path), direct=not use_cache) for path in (pages, other))
    moves = [(first if n < 2 else second, n * PAGE, [into[n * PAGE : (n + 1) * PAGE]]) for n in asked]
    assert io.read(moves, PAGE) == ([True] * 4, {})
    assert [into[n * PAGE] for n in range(4)] == [0, 1, 102, 103]
    io.close()


def test_file_size_and_cache_share(pages: Path) -> None:
    fd = os.open(pages, os.O_RDWR)
    assert kernel.file_size(fd) == 100 * PAGE
    if kernel.has_cachestat(fd):
        assert kernel.cached_share(fd, 0, 100 * PAGE) == 1.0
    os.close(fd)
    with pytest.raises(OSError):
        kernel.file_size(fd)
    assert not kernel.has_cachestat(fd)


# -- the log --------------------------------------------------------------------------------


def test_uses_that_were_not_logged_count_after_another_process_replaced_the_log(tmp_path: Path) -> None:
    namespace = bytes(16)
    ours, theirs = Log(tmp_path, namespace), Log(tmp_path, namespace)
    ours.open()
    ours.append([Record(Kind.SEGMENT, 1, 4, num_bytes=PAGE)])
    for slot in range(3):
        key, flags = packed_name(name_of(key_of(slot)))
        put = Record(Kind.PUT, 1, slot, slot + 1, namespace, key, PAGE, used_ns=slot + 1, flags=flags)
        ours.append([put])
    ours.index.use(ours.index.by_place[1, 0], 10)
    theirs.open()
    theirs.rewrite()
    assert ours.refresh()
    coldest = ours.index.coldest(ours.index.shelf(PAGE), 3, ())
    assert [entry.place[1] for entry in coldest] == [1, 2, 0]
    ours.close()
    theirs.close()

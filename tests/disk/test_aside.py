"""Pages that a thread of its own checks beside the next read: whose memory it is, and until when."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hiradix.storage.backends.disk.engines import IOEngine, ThreadEngine, UringEngine
from hiradix.storage.backends.disk.moves import CHECKED_ASIDE_BYTES, Aside, Move, PageIO
from hiradix.storage.backends.disk.segments import SegmentFile

SIZE, NUM = 64 << 10, 64
WAIT_S = 60.0


@pytest.fixture
def segment(tmp_path: Path) -> SegmentFile:
    path = tmp_path / "pages"
    path.write_bytes(b"".join(bytes([number]) * SIZE for number in range(NUM)))
    return SegmentFile(str(path), False)


@pytest.fixture(params=[UringEngine, lambda: ThreadEngine(2)], ids=["io_uring", "threads"])
def io(request: pytest.FixtureRequest) -> Iterator[PageIO]:
    try:
        engine: IOEngine = request.param()
    except OSError:
        pytest.skip("io_uring is not allowed here")
    made = PageIO(engine, True, False)
    yield made
    made.close()


def moves_of(segment: SegmentFile, numbers: range = range(NUM)) -> list[Move]:
    return [(segment, number * SIZE, [memoryview(bytearray(SIZE))]) for number in numbers]


def checker(moves: list[Move], seen: list[int]) -> Callable[[int], bool]:
    def check(index: int) -> bool:
        seen.append(index)
        view = moves[index][2][0]
        return view[0] == moves[index][1] // SIZE and bytes(view) == bytes(view[:1]) * SIZE

    return check


@pytest.mark.parametrize("step", [1, 2], ids=["one run", "scattered"])
def test_each_page_is_checked_once_when_it_has_come(io: PageIO, segment: SegmentFile, step: int) -> None:
    moves, seen = moves_of(segment, range(0, NUM, step)), list[int]()
    ok, faults = io.read(moves, SIZE, checker(moves, seen))
    assert ok == [True] * len(moves) and not faults and sorted(seen) == list(range(len(moves)))


def test_a_bad_page_is_none_of_its_neighbours(io: PageIO, segment: SegmentFile) -> None:
    os.pwrite(segment.fd, b"\xff", 5 * SIZE + 9)
    moves = moves_of(segment)
    ok, _ = io.read(moves, SIZE, checker(moves, []))
    assert [index for index, good in enumerate(ok) if not good] == [5]


def test_a_file_that_ends_in_a_page_costs_those_behind(io: PageIO, segment: SegmentFile) -> None:
    os.truncate(segment.fd, 40 * SIZE + 100)
    moves, seen = moves_of(segment), list[int]()
    ok, _ = io.read(moves, SIZE, checker(moves, seen))
    assert ok == [True] * 40 + [False] * (NUM - 40) and max(seen) == 39


def test_a_check_that_hangs_holds_up_its_own_call_alone(io: PageIO, segment: SegmentFile) -> None:
    """And nobody gets the memory back before the last look at it."""
    moves, begun, release, ended = moves_of(segment), threading.Event(), threading.Event(), []

    def slow(_: int) -> bool:
        begun.set()
        assert release.wait(WAIT_S)
        return True

    def read() -> None:
        io.read(moves, SIZE, slow)
        ended.append(True)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(WAIT_S)
    others = moves_of(segment)
    assert all(io.read(others, SIZE, checker(others, []))[0]) and not ended
    release.set()
    thread.join(WAIT_S)
    assert ended


def test_closing_during_a_read_has_its_pages_checked(io: PageIO, segment: SegmentFile) -> None:
    moves, seen = moves_of(segment), list[int]()
    check = checker(moves, seen)

    def closing(index: int) -> bool:
        io.close()
        return check(index)

    ok, _ = io.read(moves, SIZE, closing)
    assert all(ok) and sorted(seen) == list(range(NUM))


def test_a_check_that_raises_ends_the_call_after_all_others(io: PageIO, segment: SegmentFile) -> None:
    moves, under_way = moves_of(segment), set[int]()

    def check(index: int) -> bool:
        under_way.add(index)
        if index == 3:
            under_way.discard(index)
            raise ValueError("a buffer was given back")
        under_way.discard(index)
        return True

    with pytest.raises(ValueError, match="given back"):
        io.read(moves, SIZE, check)
    assert not under_way


def test_short_batches_are_checked_by_their_reader(io: PageIO, segment: SegmentFile) -> None:
    moves, threads = moves_of(segment, range(CHECKED_ASIDE_BYTES // SIZE)), set[int]()

    def check(_: int) -> bool:
        threads.add(threading.get_ident())
        return True

    assert all(io.read(moves, SIZE, check)[0]) and threads == {threading.get_ident()}


def test_what_the_thread_has_not_begun_its_owner_does() -> None:
    with ThreadPoolExecutor(1) as thread:
        release, done = threading.Event(), []
        thread.submit(release.wait, WAIT_S)
        aside = Aside(thread)
        for number in range(5):
            aside.add(lambda number=number: done.append((number, threading.get_ident())))  # type: ignore[misc]
        aside.finish()
        assert sorted(done) == [(number, threading.get_ident()) for number in range(5)]
        release.set()


def test_what_a_thread_that_did_not_start_was_given_is_not_looked_at_later(
    io: PageIO, segment: SegmentFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool keeps work that it could not begin, and the process is at its limit of threads for a while."""
    moves, seen, others = moves_of(segment), list[int](), moves_of(segment)
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("hiradix-disk-check"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert all(io.read(moves, SIZE, checker(moves, seen))[0])
        assert sorted(seen) == list(range(NUM))
    assert all(io.read(others, SIZE, checker(others, []))[0])
    io._checker.submit(int).result(WAIT_S)
    assert len(seen) == NUM


def test_what_its_owner_did_is_not_held_by_the_threads_queue() -> None:
    """The pages' memory is the caller's again, however long the thread is busy with another's."""
    with ThreadPoolExecutor(1) as thread:
        release, memory = threading.Event(), bytearray(1)
        thread.submit(release.wait, WAIT_S)
        aside = Aside(thread)
        aside.add(memoryview(memory).tobytes)  # type: ignore[arg-type]
        aside.finish()
        del aside
        try:
            memory.append(0)
        finally:
            release.set()

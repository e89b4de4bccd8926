"""The guard: whatever a backend does, the answer is a miss in time, and nobody's pages are touched late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from hiradix.storage import (
    Batch,
    BreakerLimits,
    BreakerState,
    GuardedStorage,
    GuardLimits,
    Page,
    PageFingerprint,
    Traits,
)
from hiradix.storage.guard.breaker import Breaker
from hiradix.storage.guard.calls import ThreadSession
from hiradix.storage.kit.call_threads import CallThreadPool, CallTimeout
from hiradix.storage.kit.meters import Op
from hiradix.storage.kit.seal import SEAL_BYTES, Sealer, Verdict
from tests.contracts.storage import (
    FINGERPRINT,
    OTHER,
    PAGE_BYTES,
    blank,
    bytes_of,
    content,
    hits,
    keys_of,
    put,
)
from tests.seeds import seeded, seeds
from tests.storage.doubles import (
    FakeClock,
    FaultyBackend,
    MemoryBackend,
    answer,
    exit_thread,
    fill,
    half,
    memory_context,
    raise_error,
    shifted,
)

SHORT_S = 0.02  # a deadline that a hanging call is meant to miss; nothing depends on its size
PATIENT = GuardLimits(deadline_s=30.0, breaker=BreakerLimits(failures_to_open=1000))


class World:
    """A guarded faulty memory backend with a clock of its own."""

    def __init__(self, limits: GuardLimits, fingerprint: PageFingerprint = FINGERPRINT):
        self.memory = MemoryBackend(memory_context(fingerprint, PAGE_BYTES))
        self.faulty = FaultyBackend(self.memory)
        self.clock = FakeClock()
        self.storage = GuardedStorage(self.faulty, fingerprint, limits, self.clock)

    def figure(self, name: str) -> float:
        return self.storage.stats().get(name, 0)

    def fault(self, value: Callable[..., Any] | None, *names: str) -> None:
        for name in names or ("exists", "get", "put"):
            if value is None:
                self.faulty.faults.pop(name, None)
            else:
                self.faulty.faults[name] = value


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def make(limits: GuardLimits = PATIENT) -> World:
        worlds.append(World(limits))
        return worlds[-1]

    yield make
    for world in worlds:
        world.faulty.release.set()
        world.fault(None)
        world.storage.close()


# -- answers ------------------------------------------------------------------------------

GET_FAULTS = {
    "error": (raise_error, "error"),
    "exit": (exit_thread, "error"),
    "garbage": (fill(b"garbage"), "damaged"),
    "zeros": (fill(b"\0"), "damaged"),
    "half a page": (half, "damaged"),
    "pages of other keys": (shifted, "foreign"),
    "none": (answer(None), "bad_answer"),
    "true": (answer(True), "bad_answer"),
    "count": (answer(4), "bad_answer"),
    "short list": (answer([True, True]), "bad_answer"),
    "long list": (answer([True] * 5), "bad_answer"),
    "no bools": (answer([1, 1, 1, 1]), "bad_answer"),
    "nones": (answer([True, None, True, True]), "bad_answer"),
    "text": (answer("yes!"), "bad_answer"),
}


@pytest.mark.parametrize("name", GET_FAULTS)
def test_faulty_get_is_a_miss_with_its_reason_and_touches_nothing(make: Make, name: str) -> None:
    world = make()
    put(world.storage, keys_of(4))
    fault, reason = GET_FAULTS[name]
    world.fault(fault, "get")
    pages = [[memoryview(bytearray(b"mine" * (PAGE_BYTES // 4)))] for _ in range(4)]
    assert world.storage.get(keys_of(4), pages) == [False] * 4
    assert all(content(page) == b"mine" * (PAGE_BYTES // 4) for page in pages)
    assert world.figure(f"get_missed_{reason}") == 4 and world.figure("get_pages") == 0
    world.fault(None)
    assert all(hits(world.storage, keys_of(4)))


@pytest.mark.parametrize("damage", ["flipped", "swapped"])
def test_damaged_page_is_replaced_by_the_next_put(
    make: Make, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = make()
    put(world.storage, keys_of(4))
    pages = world.faulty.inner.pages
    names = [next(name for name in pages if name.endswith(key)) for key in keys_of(4)]
    if damage == "flipped":
        pages[names[1]] = bytes([pages[names[1]][0] ^ 1]) + pages[names[1]][1:]
    else:
        pages[names[1]] = pages[names[2]]
    for _ in range(3):
        assert hits(world.storage, keys_of(4)) == [True, False, True, True]
    assert sum(" is damaged: " in record.getMessage() for record in caplog.records) == 1
    world.faulty.calls.clear()
    assert all(put(world.storage, keys_of(4))) and all(hits(world.storage, keys_of(4)))
    assert world.faulty.calls.count("delete") == 1, "more was removed than what was damaged"


@pytest.mark.parametrize("value", [None, True, -1, 5, "4", 4.0, [True] * 4])
def test_faulty_exists_is_zero(make: Make, value: Any) -> None:
    world = make()
    put(world.storage, keys_of(4))
    world.fault(answer(value), "exists")
    assert world.storage.exists(keys_of(4)) == 0
    assert world.figure("exists_missed_bad_answer") == 4


@pytest.mark.parametrize("value", [None, True, [], [True] * 3, [True, 1, True, True]])
def test_faulty_put_is_not_stored(make: Make, value: Any) -> None:
    world = make()
    world.fault(answer(value), "put")
    assert put(world.storage, keys_of(4)) == [False] * 4
    assert world.figure("put_missed_bad_answer") == 4


def test_partial_answers_pass_as_they_are(make: Make) -> None:
    world = make()
    world.fault(lambda call, keys, pages: [*call(keys, pages)[:2], False, True], "put")
    assert put(world.storage, keys_of(4)) == [True, True, False, True]
    world.fault(lambda call, keys, into: [*call(keys, into)[:3], False], "get")
    assert hits(world.storage, keys_of(4)) == [True, True, True, False]
    assert world.figure("get_missed_absent") == 1 and world.figure("get_pages") == 3
    assert world.figure("get_bytes") == 3 * PAGE_BYTES


@pytest.mark.parametrize(("width", "pieces"), [(1, [2, 2, 2, 1]), (3, [3, 3, 1]), (100, [7])])
def test_a_backend_with_many_requests_under_way_gets_as_many_pages(width: int, pieces: list[int]) -> None:
    """Two pages of staging memory."""
    backend = MemoryBackend(memory_context(FINGERPRINT, PAGE_BYTES))
    backend.traits = Traits(width=width)
    asked: list[int] = []
    read = backend.get

    def get(keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        asked.append(len(keys))
        return read(keys, into)

    backend.get = get  # type: ignore[method-assign]
    limits = GuardLimits(deadline_s=30.0, staging_bytes=2 * (PAGE_BYTES + SEAL_BYTES))
    storage = GuardedStorage(backend, FINGERPRINT, limits)
    assert all(put(storage, keys_of(7))) and all(hits(storage, keys_of(7))) and asked == pieces
    storage.close()


def test_pieces_before_a_fault_count(make: Make) -> None:
    """A batch passes in pieces of two pages; the third piece fails."""
    world = make(GuardLimits(deadline_s=30.0, staging_bytes=2 * (PAGE_BYTES + SEAL_BYTES)))
    put(world.storage, keys_of(8))
    calls = []

    def third_fails(call: Callable[..., Any], *args: Any) -> Any:
        calls.append(args)
        return raise_error(call) if len(calls) == 3 else call(*args)

    world.fault(third_fails, "get")
    assert hits(world.storage, keys_of(8)) == [True] * 4 + [False] * 4
    assert world.figure("get_missed_error") == 4 and len(calls) == 3


IN_TWO_CHUNKS = GuardLimits(deadline_s=30.0, staging_bytes=2 * (PAGE_BYTES + SEAL_BYTES))


class SecondRead:
    """Reads of `memory`, of which the second says when it begins and ends."""

    def __init__(self, memory: MemoryBackend):
        self._get, self._number = memory.get, 0
        self.begun, self.may_end, self.ended = (threading.Event() for _ in range(3))

    def __call__(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        self._number += 1
        if self._number != 2:
            return self._get(keys, into)
        self.begun.set()
        assert self.may_end.wait(30.0)
        try:
            return self._get(keys, into)
        finally:
            self.ended.set()


def test_pages_are_checked_while_the_next_are_being_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make(IN_TWO_CHUNKS)
    put(world.storage, keys_of(4))
    second, check = SecondRead(world.memory), Sealer.check

    def checked(*args: Any) -> Verdict:
        assert second.begun.wait(30.0)
        verdict = check(*args)
        second.may_end.set()
        assert second.ended.wait(30.0), "what is copied out is what was checked, whatever has come since"
        return verdict

    monkeypatch.setattr(world.memory, "get", second)
    monkeypatch.setattr(Sealer, "check", checked)
    assert hits(world.storage, keys_of(4)) == [True] * 4


def test_what_checking_took_is_not_waited_for_once_more() -> None:
    """Found: a read that hung beside a check was waited for as long as if the check had taken no time."""
    now, waits = [0.0], []

    class Waiting:
        def start(self, work: Callable[[], Any]) -> Callable[[], Any]:
            return work

        def finish(self, call: Callable[[], Any], timeout_s: float) -> Any:
            waits.append(timeout_s)
            return call()

    session = ThreadSession(lambda: now[0], 2.0, cast(Any, Waiting()), lambda: None)
    ended = session.start(lambda: "read")
    now[0] = 1.5
    assert ended() == "read" and waits == [0.5]


def test_a_lane_is_not_given_back_while_it_reads(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where our own code fails: the read would go on in memory that is somebody else's by then."""
    world = make(IN_TWO_CHUNKS)
    put(world.storage, keys_of(4))
    second = SecondRead(world.memory)

    def fail(*_: object) -> Verdict:
        assert second.begun.wait(30.0)
        threading.Timer(0.0, second.may_end.set).start()
        raise RuntimeError("a bug")

    monkeypatch.setattr(world.memory, "get", second)
    monkeypatch.setattr(Sealer, "check", fail)
    assert hits(world.storage, keys_of(4)) == [False] * 4
    assert second.ended.is_set() and world.storage.stats()["workers_busy"] == 0


class FirstWrite:
    """Writes to `memory`, of which the first goes on only when it may."""

    def __init__(self, memory: MemoryBackend):
        self._put, self._number = memory.put, 0
        self.begun, self.may_go_on, self.ended = (threading.Event() for _ in range(3))

    def __call__(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        self._number += 1
        if self._number != 1:
            return self._put(keys, pages)
        self.begun.set()
        assert self.may_go_on.wait(30.0), "the next pages were not sealed meanwhile"
        try:
            return self._put(keys, pages)
        finally:
            self.ended.set()


def test_pages_are_sealed_while_those_before_are_being_stored(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is stored is what was sealed, whatever the next pages are."""
    world = make(IN_TWO_CHUNKS)
    first, seal, keys = FirstWrite(world.memory), Sealer.seal, keys_of(5)

    def sealed(sealer: Sealer, key: str, page: Page) -> bytes:
        made = seal(sealer, key, page)
        if key == keys[3]:
            assert first.begun.wait(30.0) and not first.ended.is_set()
            first.may_go_on.set()
        return made

    monkeypatch.setattr(world.memory, "put", first)
    monkeypatch.setattr(Sealer, "seal", sealed)
    assert all(put(world.storage, keys)) and hits(world.storage, keys) == [True] * 5


def test_a_lane_is_not_given_back_while_it_stores(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored before our own code failed counts."""
    world = make(IN_TWO_CHUNKS)
    first, seal, keys = FirstWrite(world.memory), Sealer.seal, keys_of(4)

    def fail(sealer: Sealer, key: str, page: Page) -> bytes:
        if key != keys[2]:
            return seal(sealer, key, page)
        assert first.begun.wait(30.0)
        threading.Timer(0.0, first.may_go_on.set).start()
        raise RuntimeError("a bug")

    monkeypatch.setattr(world.memory, "put", first)
    monkeypatch.setattr(Sealer, "seal", fail)
    assert put(world.storage, keys) == [True, True, False, False]
    assert first.ended.is_set() and world.storage.stats()["workers_busy"] == 0


def test_nothing_is_stored_after_a_piece_that_failed(make: Make) -> None:
    world = make(IN_TWO_CHUNKS)
    calls = []

    def second_fails(call: Callable[..., Any], *args: Any) -> Any:
        calls.append(args)
        return raise_error(call) if len(calls) == 2 else call(*args)

    world.fault(second_fails, "put")
    assert put(world.storage, keys_of(8)) == [True] * 2 + [False] * 6
    assert len(calls) == 2 and world.figure("put_missed_error") == 6


def test_fault_in_stats_or_register_hurts_nobody(make: Make) -> None:
    world = make()
    world.fault(raise_error, "stats", "clear", "delete", "ping")
    assert all(put(world.storage, keys_of(3))) and all(hits(world.storage, keys_of(3)))
    assert world.storage.clear() is False and world.storage.delete(keys_of(1)) is False
    assert world.storage.ping() is False
    assert world.storage.stats()["stats_failed"] >= 2


@pytest.mark.parametrize("does", [True, False])
def test_a_backend_is_told_of_memory_once(does: bool) -> None:
    """It may take long, and may hang: nobody is to wait for it again, whatever came of it."""
    world, told = World(PATIENT), []

    def register(memory: memoryview) -> None:
        told.append(memory.nbytes)
        if not does:
            raise OSError("no such memory")

    world.storage._register = register
    pool = memoryview(bytearray(64))
    assert [world.storage.register(view) for view in (pool, pool[:32], pool)] == [does] * 3
    assert told == [64, 32]


def test_pages_of_another_fingerprint_in_the_same_store_are_misses() -> None:
    """Two guards on one store that cannot tell fingerprints apart; then even the keys are made to meet."""
    ours = World(PATIENT)
    theirs = GuardedStorage(ours.memory, OTHER, PATIENT)
    put(ours.storage, keys_of(3))
    assert theirs.exists(keys_of(3)) == 0 and not any(hits(theirs, keys_of(3)))
    for name, stored in list(ours.memory.pages.items()):
        ours.memory.pages[f"{OTHER.digest()[:32]}-{name.partition('-')[2]}"] = stored
    assert theirs.exists(keys_of(3)) == 3
    assert not any(hits(theirs, keys_of(3)))
    assert theirs.stats()["get_missed_foreign"] == 3
    assert all(hits(ours.storage, keys_of(3)))


@seeded
@pytest.mark.parametrize("seed", seeds(4))
def test_no_damage_to_stored_pages_goes_unseen(seed: int) -> None:
    world, rng = World(PATIENT), random.Random(seed)
    keys = keys_of(16)
    for _ in range(60):
        put(world.storage, keys)
        good = dict(world.memory.pages)
        world.memory.pages.update((name, spoil(rng, good, name)) for name in good)
        assert not any(hits(world.storage, keys))
        world.memory.pages.clear()
    world.storage.close()


def spoil(rng: random.Random, pages: Any, name: str) -> bytes:
    """The bytes under `name`, with one fault."""
    stored = bytearray(pages[name])
    kind = rng.randrange(5)
    if kind == 0:
        stored[rng.randrange(len(stored))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        return bytes(stored[: rng.randrange(len(stored))])
    elif kind == 2:
        at = rng.randrange(len(stored) - 8)
        stored[at : at + 8] = bytes(byte ^ 0x55 for byte in stored[at : at + 8])
    elif kind == 3:
        other = rng.choice([key for key in pages if key != name])
        return bytes(pages[other][:-SEAL_BYTES]) + bytes(stored[-SEAL_BYTES:])
    else:
        at = rng.randrange(1, len(stored))
        return bytes(stored[at:] + stored[:at])
    return bytes(stored)


# -- time ---------------------------------------------------------------------------------


def test_hanging_calls_are_misses_at_the_deadline(make: Make) -> None:
    world = make(GuardLimits(deadline_s=SHORT_S, bytes_per_s=1e12))
    world.fault(world.faulty.hang)
    assert world.storage.exists(keys_of(2)) == 0
    assert not any(hits(world.storage, keys_of(2)))
    assert not any(put(world.storage, keys_of(2)))
    assert not world.faulty.release.is_set(), "the calls came back while the backend still hung"
    for op in ("exists", "get", "put"):
        assert world.figure(f"{op}_missed_timeout") == 2


def test_late_read_touches_nobodys_pages(make: Make) -> None:
    world = make(GuardLimits(deadline_s=SHORT_S, bytes_per_s=1e12, num_workers=1))
    put_patiently(world, 2)
    world.fault(world.faulty.hang, "get")
    pages = [blank() for _ in range(2)]
    assert not any(world.storage.get(keys_of(2), pages))
    for page in pages:
        page[0][:] = b"\x07" * PAGE_BYTES
    world.faulty.release.set()
    wait_for(lambda: world.figure("late_answers") == 1)
    assert all(content(page) == b"\x07" * PAGE_BYTES for page in pages)


def test_late_lookup_asks_for_the_keys_that_were_given() -> None:
    """Its caller uses the list for others by then."""
    asked: list[list[str]] = []
    memory = MemoryBackend(memory_context(FINGERPRINT, PAGE_BYTES))
    memory.traits = Traits(namespaced=True)
    faulty = FaultyBackend(memory)
    faulty.traits = memory.traits
    storage = GuardedStorage(faulty, FINGERPRINT, GuardLimits(deadline_s=SHORT_S))

    def late(call: Any, batch: Batch) -> Any:
        found = faulty.hang(call, batch)
        asked.append([*(batch.before or ()), *batch])
        return found

    faulty.faults["exists"] = late
    keys, before = keys_of(2), keys_of(1, 5)
    assert storage.exists(Batch.of(keys, before)) == 0
    keys[:], before[:] = keys_of(2, 10), keys_of(1, 15)
    faulty.release.set()
    wait_for(lambda: storage.stats()["late_answers"] == 1)
    assert asked == [keys_of(1, 5) + keys_of(2)]
    storage.close()


def test_late_write_stores_what_was_given(make: Make) -> None:
    world = make(GuardLimits(deadline_s=SHORT_S, bytes_per_s=1e12, num_workers=1))
    world.fault(world.faulty.hang, "put")
    pages = [[memoryview(bytearray(bytes_of(key)))] for key in keys_of(3)]
    assert not any(world.storage.put(keys_of(3), pages))
    for page in pages:
        page[0][:] = bytes(PAGE_BYTES)
    world.faulty.release.set()
    wait_for(lambda: world.figure("late_answers") == 1)
    world.fault(None)
    assert len(world.memory.pages) == 3
    patient = GuardedStorage(world.memory, FINGERPRINT, PATIENT)
    assert all(hits(patient, keys_of(3)))
    patient.close()


def test_workers_are_capped_and_come_back(make: Make) -> None:
    limits = GuardLimits(SHORT_S, 1e12, num_workers=2, breaker=BreakerLimits(failures_to_open=1000))
    world = make(limits)
    before = set(threading.enumerate())
    world.fault(world.faulty.hang)
    for _ in range(6):
        assert world.storage.exists(keys_of(1)) == 0
    for _ in range(2):
        world.faulty.wait_until_hanging()  # a worker may begin a call only after its caller has left
    assert world.faulty.calls.count("exists") == 2 and len(workers_since(before)) == 2
    assert world.figure("exists_missed_timeout") == 2 and world.figure("exists_missed_busy") == 4
    assert world.figure("workers_busy") == 2
    world.faulty.release.set()
    wait_for(lambda: world.figure("workers_busy") == 0)
    world.fault(None)
    assert world.figure("late_answers") == 2 and len(workers_since(before)) == 2


def test_one_hanging_call_does_not_delay_others(make: Make) -> None:
    world = make()
    put(world.storage, keys_of(4))
    world.fault(world.faulty.hang, "put")
    slow = threading.Thread(target=lambda: put(world.storage, keys_of(2, start=9)), daemon=True)
    slow.start()
    world.faulty.wait_until_hanging()
    assert all(hits(world.storage, keys_of(4)))
    world.faulty.release.set()
    slow.join(30)
    assert not slow.is_alive()


def test_closing_while_a_call_hangs_ends_in_time(make: Make) -> None:
    world = make(GuardLimits(deadline_s=SHORT_S, bytes_per_s=1e12))
    world.fault(world.faulty.hang, "get", "close")
    assert not any(hits(world.storage, keys_of(1)))
    world.storage.close(timeout_s=SHORT_S)
    assert not any(hits(world.storage, keys_of(1))) and world.figure("get_missed_closed") == 1
    assert world.storage.clear() is False
    world.fault(None)


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "beside another"])
def test_a_backend_whose_calls_all_hang_is_closed(make: Make, is_shared: bool) -> None:
    """Closing had no worker, and what the backend held (connections, threads, lent memory) stayed."""
    world = make(GuardLimits(deadline_s=SHORT_S, bytes_per_s=1e12, num_workers=2))
    closed = [threading.Event(), threading.Event()]
    world.memory.close = closed[0].set  # type: ignore[method-assign]
    other = MemoryBackend(memory_context(OTHER, PAGE_BYTES))
    other.close = closed[1].set  # type: ignore[method-assign]
    beside = world.storage.beside(other, OTHER) if is_shared else None
    world.fault(world.faulty.hang, "get")
    for number in range(2):
        assert not any(hits(world.storage, keys_of(1, start=number)))
    if beside is not None:
        beside.close(timeout_s=SHORT_S)
    world.storage.close(timeout_s=SHORT_S)
    assert closed[0].wait(60) and (not is_shared or closed[1].wait(60))
    assert world.figure("workers_busy") <= 3


def test_threads_end_after_close(make: Make) -> None:
    before = set(threading.enumerate())
    world = make()
    put(world.storage, keys_of(2))
    assert len(workers_since(before)) == 1
    world.storage.close()
    wait_for(lambda: not workers_since(before))


# -- the breaker --------------------------------------------------------------------------

THREE_THEN_TEN_S = GuardLimits(deadline_s=30.0, breaker=BreakerLimits(failures_to_open=3, retry_after_s=10.0))


def open_breaker(world: World) -> None:
    """All kinds of calls have failed."""
    world.fault(raise_error)
    for _ in range(3):
        assert world.storage.exists(keys_of(1)) == 0
        assert not any(put(world.storage, keys_of(1))) and not any(hits(world.storage, keys_of(1)))
    opened = [op for op, state in world.storage.breakers.states.items() if state is BreakerState.OPEN]
    assert opened == [Op.EXISTS, Op.GET, Op.PUT] and world.storage.state is BreakerState.OPEN


def test_failures_in_a_row_open_it_and_calls_stay_away(make: Make) -> None:
    world = make(THREE_THEN_TEN_S)
    open_breaker(world)
    num_calls = len(world.faulty.calls)
    assert not any(hits(world.storage, keys_of(5))) and not any(put(world.storage, keys_of(5)))
    assert world.storage.exists(keys_of(5)) == 0
    assert len(world.faulty.calls) == num_calls
    assert world.figure("get_missed_breaker_open") == 5 and world.figure("breaker_open") == 1
    assert [world.figure(f"{op}_breaker_open") for op in ("exists", "get", "put", "delete")] == [1, 1, 1, 0]


def test_failures_between_successes_do_not(make: Make) -> None:
    world = make(THREE_THEN_TEN_S)
    for _ in range(5):
        world.fault(raise_error)
        world.storage.exists(keys_of(1))
        world.storage.exists(keys_of(1))
        world.fault(None)
        world.storage.exists(keys_of(1))
    assert world.storage.state is BreakerState.CLOSED and world.figure("breaker_opened") == 0


def test_misses_and_refusals_are_no_failures(make: Make) -> None:
    world = make(THREE_THEN_TEN_S)
    world.fault(answer([False]), "put")
    for _ in range(10):
        put(world.storage, keys_of(1))
        hits(world.storage, keys_of(1))
    assert world.storage.state is BreakerState.CLOSED


def test_back_within_one_probe_interval(make: Make) -> None:
    world = make(THREE_THEN_TEN_S)
    put(world.storage, keys_of(3))
    open_breaker(world)
    world.fault(None)
    world.clock.now_s += 9.9
    assert not any(hits(world.storage, keys_of(3)))
    world.clock.now_s += 0.2
    assert all(hits(world.storage, keys_of(3))) and all(put(world.storage, keys_of(3)))
    assert world.storage.exists(keys_of(3)) == 3
    assert world.storage.state is BreakerState.CLOSED


def test_failed_probes_keep_it_open_and_double_the_interval(make: Make) -> None:
    limits = BreakerLimits(failures_to_open=3, retry_after_s=10.0, retry_max_s=40.0)
    world = make(GuardLimits(deadline_s=30.0, breaker=limits))
    world.fault(raise_error, "put")
    for _ in range(3):
        put(world.storage, keys_of(1))
    for interval_s in (10.0, 20.0, 40.0, 40.0):
        num_calls = world.faulty.calls.count("put")
        world.clock.now_s += interval_s - 0.1
        assert not any(put(world.storage, keys_of(1))) and world.faulty.calls.count("put") == num_calls
        world.clock.now_s += 0.2
        assert not any(put(world.storage, keys_of(1))) and not any(put(world.storage, keys_of(1)))
        assert world.faulty.calls.count("put") == num_calls + 1, "one probe per interval"
        assert world.storage.state is BreakerState.OPEN
    assert world.figure("breaker_opened") == 5 == world.figure("put_breaker_opened")


def test_a_ping_says_nothing_of_calls(make: Make) -> None:
    """One that hangs or fails keeps no call away that works."""
    world = make(THREE_THEN_TEN_S)
    open_breaker(world)
    world.fault(None)
    world.fault(raise_error, "ping")
    world.clock.now_s += 10.1
    assert all(put(world.storage, keys_of(1))) and all(hits(world.storage, keys_of(1)))


KINDS: dict[str, Callable[[World], object]] = {
    "exists": lambda world: world.storage.exists(keys_of(2)) == 2,
    "get": lambda world: all(hits(world.storage, keys_of(2))),
    "put": lambda world: all(put(world.storage, keys_of(2))),
    "delete": lambda world: world.storage.delete(keys_of(1, 90)),
}


@pytest.mark.parametrize("bad", KINDS)
@pytest.mark.parametrize("how", ["error", "hang"])
def test_a_kind_of_call_that_fails_leaves_the_others_alone(make: Make, bad: str, how: str) -> None:
    """Others that work reset nothing of it, and are not kept from the store by it; hung calls not either."""
    deadline_s = SHORT_S if how == "hang" else 30.0
    world = make(GuardLimits(deadline_s, 1e12, num_workers=3, breaker=BreakerLimits(3, 10.0)))
    put(world.storage, keys_of(2))
    world.fault(world.faulty.hang if how == "hang" else raise_error, bad)
    num_calls = world.faulty.calls.count(bad)
    for _ in range(6):
        for name, works in KINDS.items():
            moot = bad == "get" and name == "exists" and world.storage.state is BreakerState.OPEN
            if how == "error":  # a busy machine may miss a short deadline
                assert bool(works(world)) == (name != bad and not moot), name
            else:
                works(world)
    assert world.faulty.calls.count(bad) == num_calls + 3
    if how == "error":
        states = world.storage.breakers.states
        assert [op.value for op, state in states.items() if state is BreakerState.OPEN] == [bad]


def test_while_reads_fail_lookups_are_misses_until_a_read_has_worked(make: Make) -> None:
    """A lookup finds out: by a page that is read, not by a call that works while reads hang."""
    world = make(THREE_THEN_TEN_S)
    put(world.storage, keys_of(3))
    world.fault(raise_error, "get")
    for _ in range(3):
        hits(world.storage, keys_of(3))
    world.faulty.calls.clear()
    assert world.storage.exists(keys_of(3)) == 0 and not world.faulty.calls
    assert world.figure("exists_missed_breaker_open") == 3 and all(put(world.storage, keys_of(3)))
    world.clock.now_s += 10.1
    world.faulty.calls.clear()
    assert world.storage.exists(keys_of(2, 90)) == 0 and world.faulty.calls == ["exists", "stats"]
    assert world.storage.exists(keys_of(3)) == 0 and world.storage.exists(keys_of(3)) == 0
    assert world.faulty.calls.count("get") == 1, "one page by one lookup"
    world.fault(None)
    world.clock.now_s += 20.1
    assert world.storage.exists(keys_of(3)) == 3 and all(hits(world.storage, keys_of(3)))
    assert world.storage.state is BreakerState.CLOSED


@pytest.mark.parametrize("bad", ["exists", "get"])
def test_calls_that_take_most_of_their_time_are_failures(make: Make, bad: str) -> None:
    """Their answers are used; a call that takes less than half of it is none."""
    world = make(GuardLimits(2.0, 1e12, breaker=BreakerLimits(3, 10.0)))
    put(world.storage, keys_of(2))

    def takes(seconds: float) -> Callable[..., Any]:
        def slow(call: Callable[..., Any], *args: Any) -> Any:
            world.clock.now_s += seconds
            return call(*args)

        return slow

    world.fault(takes(0.9), bad)
    assert all(KINDS[bad](world) for _ in range(5)) and world.storage.state is BreakerState.CLOSED
    world.fault(takes(1.9), bad)
    assert all(KINDS[bad](world) for _ in range(3)) and world.storage.state is BreakerState.OPEN
    world.fault(takes(1.9), "put")
    assert all(KINDS["put"](world) for _ in range(5)), "nobody waits for a write"


@pytest.mark.parametrize("bad", ["exists", "get"])
def test_what_a_store_of_guarded_stores_takes_is_for_their_breakers(make: Make, bad: str) -> None:
    """A half of a tier that hangs takes most of the whole's time, and leaves the other half to be had."""
    world = make(GuardLimits(2.0, 1e12, breaker=BreakerLimits(3, 10.0)))
    world.faulty.traits = Traits(guarded=True)
    storage = GuardedStorage(world.faulty, FINGERPRINT, world.storage.limits, world.clock)
    put(storage, keys_of(2))

    def slow(call: Callable[..., Any], *args: Any) -> Any:
        world.clock.now_s += 1.1
        return call(*args)

    world.fault(slow, bad)
    for _ in range(5):
        assert storage.exists(keys_of(2)) == 2 and all(hits(storage, keys_of(2)))
    world.fault(raise_error, bad)
    for _ in range(3):
        storage.exists(keys_of(2)), hits(storage, keys_of(2))
    assert storage.state is BreakerState.OPEN, "what it says itself counts"
    storage.close()
    world.fault(world.faulty.hang, bad)
    hangs = GuardedStorage(world.faulty, FINGERPRINT, GuardLimits(SHORT_S, 1e12))
    for _ in range(3):
        assert not (hangs.exists(keys_of(2)) if bad == "exists" else any(hits(hangs, keys_of(2))))
    assert hangs.state is BreakerState.CLOSED
    hangs.close()


def test_waiting_for_workers_of_others_is_no_failure(make: Make) -> None:
    """Writes may take long; a lookup that is answered as soon as a worker is free says nothing ill."""
    world = make(GuardLimits(2.0, 1e12, num_workers=1, breaker=BreakerLimits(3, 10.0)))
    put(world.storage, keys_of(2))
    acquire = CallThreadPool._acquire

    def busy(pool: CallThreadPool, *args: Any) -> Any:
        world.clock.now_s += 1.5
        return acquire(pool, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallThreadPool, "_acquire", busy)
        assert [world.storage.exists(keys_of(2)) for _ in range(5)] == [2] * 5
        assert [all(hits(world.storage, keys_of(2))) for _ in range(5)] == [True] * 5
    assert world.storage.state is BreakerState.CLOSED


def test_a_backend_that_raises_the_guards_own_errors_keeps_no_worker(make: Make) -> None:
    world = make(GuardLimits(30.0, 1e12, num_workers=1, breaker=BreakerLimits(9, 10.0)))

    def raises(call: Callable[..., Any], *args: Any) -> Any:
        raise CallTimeout("a guard within says so")

    world.fault(raises, "get")
    assert not any(hits(world.storage, keys_of(2))) and world.figure("get_missed_error") == 2
    world.fault(None)
    assert all(put(world.storage, keys_of(2))) and all(hits(world.storage, keys_of(2)))
    assert world.figure("workers_busy") == 0


def test_a_call_that_ends_as_it_is_left_counts_for_its_own_kind() -> None:
    """Its worker may be in a call of another kind before whoever left it says so."""
    pool = CallThreadPool(2)
    for _ in range(3):
        done = threading.Event()
        with pytest.raises(CallTimeout), pool.thread(30.0, kind="read") as thread:
            try:
                thread.run(done.wait, 0.0)
            except CallTimeout:
                done.set()
                while pool.num_busy:
                    time.sleep(0.001)
                with pool.thread(30.0, kind="write"):
                    pass
                raise
        assert pool.num_busy == 0 and not any(pool._abandoned.values())
    pool.close()


def test_probes_that_work_while_calls_do_not_cost_one_call_an_interval() -> None:
    clock = FakeClock()
    breaker = Breaker(BreakerLimits(3, 5.0, 20.0), clock)
    num_failed = 0
    for _ in range(1000):
        clock.now_s += 1.0
        while (admission := breaker.admit()) is not None:
            is_probe = breaker.state is BreakerState.HALF_OPEN
            num_failed += not is_probe
            breaker.record(admission, is_probe)
    assert num_failed <= 3 + 1000 / 20 + 3


def test_a_breaker_may_be_opened_and_told_to_try_again() -> None:
    clock = FakeClock()
    breaker = Breaker(BreakerLimits(3, 5.0, 20.0), clock)
    breaker.trip()
    assert breaker.state is BreakerState.OPEN and breaker.admit() is None
    breaker.retry_now()
    probe = breaker.admit()
    assert probe is not None and not breaker.record(probe, None) and breaker.state is BreakerState.OPEN
    probe = breaker.admit()
    assert probe is not None and breaker.record(probe, True) and breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("how", ["error", "hang"])
def test_deletions_on_a_puts_way_that_fail_are_no_failed_puts(make: Make, how: str) -> None:
    """A damaged page is deleted before it is put again."""
    deadline_s = 1.0 if how == "hang" else 30.0  # of what hangs; nothing else takes a half of it
    world = make(GuardLimits(deadline_s, 1e12, breaker=BreakerLimits(2, 10.0)))
    put(world.storage, keys_of(2))
    for name in list(world.memory.pages):
        world.memory.pages[name] = b"x" * len(world.memory.pages[name])
    world.fault(world.faulty.hang if how == "hang" else raise_error, "delete")
    for _ in range(4):
        hits(world.storage, keys_of(2))
        assert not any(put(world.storage, keys_of(2)))
    assert world.faulty.calls.count("delete") == 2
    assert world.storage.breakers.states[Op.PUT] is BreakerState.CLOSED
    assert all(put(world.storage, keys_of(1, 90)))
    world.faulty.release.set()
    wait_for(lambda: world.figure("workers_busy") == 0)  # a late deletion would take what is put next
    world.fault(None, "delete")
    world.clock.now_s += 10.1
    assert all(put(world.storage, keys_of(2))) and all(hits(world.storage, keys_of(2)))


def test_one_warning_for_each_change(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of failures and a failed probe: one line that says what, of which store, and how; one when it
    is over."""
    world = make(THREE_THEN_TEN_S)
    world.storage.name = "shelf"
    put(world.storage, keys_of(1))
    world.fault(raise_error, "get")
    for _ in range(100):
        hits(world.storage, keys_of(1))
        world.clock.now_s += 1.0
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "open for reads of shelf" in warnings[0] and "on fire" in warnings[0]
    world.fault(None)
    world.clock.now_s += 100.0
    for _ in range(10):
        hits(world.storage, keys_of(1))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and "closed for reads of shelf" in warnings[1]


@pytest.mark.parametrize("ended_well", [True, False])
def test_a_call_from_before_the_breaker_opened_says_nothing_after_it(ended_well: bool) -> None:
    """It may have hung all that time: neither its success closes the breaker, nor its failure opens it."""
    clock = FakeClock()
    breaker = Breaker(BreakerLimits(failures_to_open=1, retry_after_s=5.0), clock)
    early, failing = breaker.admit(), breaker.admit()
    assert early is not None and failing is not None and breaker.record(failing, False)
    assert not breaker.record(early, ended_well) and breaker.state is BreakerState.OPEN
    clock.now_s += 5.0
    probe = breaker.admit()
    assert probe is not None and not breaker.record(early, ended_well)
    assert breaker.state is BreakerState.HALF_OPEN and breaker.admit() is None
    assert breaker.record(probe, True) and not breaker.record(early, ended_well)
    assert breaker.state is BreakerState.CLOSED and breaker.num_opened == 1


def test_only_one_caller_probes(make: Make) -> None:
    world = make(THREE_THEN_TEN_S)
    world.fault(raise_error)
    for _ in range(3):
        world.storage.exists(keys_of(1))
    world.fault(world.faulty.hang)
    world.clock.now_s += 10.1
    found: list[int] = []
    probe = threading.Thread(target=lambda: found.append(world.storage.exists(keys_of(1))), daemon=True)
    probe.start()
    world.faulty.wait_until_hanging()
    assert world.storage.state is BreakerState.HALF_OPEN
    assert world.storage.exists(keys_of(7)) == 0 and world.figure("exists_missed_breaker_open") == 7
    world.faulty.release.set()
    probe.join(30)
    assert found == [0] and world.storage.state is BreakerState.CLOSED


def test_hanging_backend_opens_it_and_callers_stop_waiting(make: Make) -> None:
    limits = GuardLimits(SHORT_S, 1e12, breaker=BreakerLimits(2, 10.0))
    world = make(limits)
    world.fault(world.faulty.hang)
    for _ in range(10):
        assert world.storage.exists(keys_of(1)) == 0
    assert world.figure("exists_missed_timeout") == 2 and world.figure("exists_missed_breaker_open") == 8


def test_answer_from_before_it_opened_says_nothing(make: Make) -> None:
    world = make(THREE_THEN_TEN_S)
    world.fault(world.faulty.hang, "get")
    slow = threading.Thread(target=lambda: hits(world.storage, keys_of(1)), daemon=True)
    slow.start()
    world.faulty.wait_until_hanging()
    world.fault(raise_error, "get")
    for _ in range(3):
        hits(world.storage, keys_of(1))
    assert world.storage.state is BreakerState.OPEN
    world.faulty.release.set()
    slow.join(30)
    assert world.storage.state is BreakerState.OPEN


# -- figures ------------------------------------------------------------------------------


def test_figures_add_up(make: Make) -> None:
    world = make()
    put(world.storage, keys_of(6))
    hits(world.storage, keys_of(8))
    world.storage.exists(keys_of(8))
    figures = world.storage.stats()
    assert (figures["put_pages"], figures["get_pages"], figures["exists_pages"]) == (6, 6, 6)
    assert (figures["get_missed_absent"], figures["exists_missed_absent"]) == (2, 2)
    assert figures["get_bytes"] == figures["put_bytes"] == 6 * PAGE_BYTES
    assert (figures["put_calls"], figures["get_calls"], figures["exists_calls"]) == (1, 1, 1)
    assert figures["backend_pages"] == 6


def test_durations_are_those_of_the_clock(make: Make) -> None:
    world = make()

    def slow(call: Callable[..., Any], *args: Any) -> Any:
        world.clock.now_s += 0.25
        return call(*args)

    world.fault(slow, "exists")
    for _ in range(4):
        world.storage.exists(keys_of(1))
    assert world.figure("exists_seconds") == pytest.approx(1.0)
    assert world.figure("exists_p50_s") == 0.3 and world.figure("exists_p95_s") == 0.3


def test_backend_without_optional_calls_works() -> None:
    class Small:
        """The least a third party may bring."""

        def __init__(self) -> None:
            self.pages: dict[str, bytes] = {}

        def exists(self, keys: list[str]) -> int:
            return sum(key in self.pages for key in keys)

        def get(self, keys: list[str], into: Any) -> list[bool]:
            for key, page in zip(keys, into):
                page[0][:] = self.pages.get(key, bytes(len(page[0])))
            return [key in self.pages for key in keys]

        def put(self, keys: list[str], pages: Any) -> list[bool]:
            self.pages.update((key, bytes(page[0])) for key, page in zip(keys, pages))
            return [True] * len(keys)

        def delete(self, keys: list[str]) -> None: ...
        def clear(self) -> None: ...
        def close(self) -> None: ...

    clock = FakeClock()
    storage = GuardedStorage(Small(), FINGERPRINT, THREE_THEN_TEN_S, clock)  # type: ignore[arg-type]
    assert all(put(storage, keys_of(3))) and all(hits(storage, keys_of(3))) and storage.ping()
    assert storage.register(memoryview(b"")) and storage.clear()
    storage.close()


def put_patiently(world: World, count: int) -> None:
    """Store pages for a test whose guard has a short deadline."""
    patient = GuardedStorage(world.memory, FINGERPRINT, PATIENT)
    assert all(put(patient, keys_of(count)))


def workers_since(before: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t not in before and t.name == "hiradix-storage"]


def wait_for(condition: Callable[[], bool]) -> None:
    """Until another thread has made `condition` true."""
    pause = threading.Event()
    for _ in range(30_000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it never came true")

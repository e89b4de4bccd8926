"""Backends that get their callers' thread and pages: what the guard still does for them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hiradix.storage import BreakerLimits, BreakerState, GuardedStorage, GuardLimits
from hiradix.storage.guard.direct import DirectCalls
from hiradix.storage.protocol import check_keys
from tests.contracts.storage import FINGERPRINT, HOSTILE_KEYS, PAGE_BYTES, blank, hits, keys_of, page_of, put
from tests.storage.doubles import (
    DirectMemory,
    FakeClock,
    FaultyBackend,
    answer,
    exit_thread,
    memory_context,
    raise_error,
)

LIMITS = GuardLimits(deadline_s=2.0, bytes_per_s=1e12, breaker=BreakerLimits(2, 10.0))


class World:
    def __init__(self, limits: GuardLimits = LIMITS) -> None:
        self.faulty = FaultyBackend(DirectMemory(memory_context(FINGERPRINT, PAGE_BYTES)))
        self.faulty.traits = DirectMemory.traits
        self.clock = FakeClock()
        self.storage = GuardedStorage(self.faulty, FINGERPRINT, limits, self.clock)

    def figure(self, name: str) -> float:
        return self.storage.stats().get(name, 0)

    def late(self, seconds: float) -> Callable[..., Any]:
        """A fault that does the call, which takes so long."""

        def fault(call: Callable[..., Any], *args: Any) -> Any:
            self.clock.now_s += seconds
            return call(*args)

        return fault


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.faulty.faults.clear()
    made.faulty.release.set()
    made.storage.close()


@pytest.mark.parametrize("name", ["get", "put"])
def test_backend_sees_the_callers_own_buffers_on_its_thread(world: World, name: str) -> None:
    put(world.storage, keys_of(3))
    seen: list[Any] = []

    def look(call: Callable[..., Any], keys: Sequence[str], pages: Any) -> Any:
        seen.extend([threading.current_thread(), *(view.obj for page in pages for view in page)])
        return call(keys, pages)

    world.faulty.faults[name] = look
    pages = [page_of(key) for key in keys_of(3)]
    assert all(getattr(world.storage, name)(keys_of(3), pages))
    assert seen[0] is threading.current_thread()
    assert [id(buffer) for buffer in seen[1:]] == [id(page[0].obj) for page in pages]


def test_late_call_keeps_its_pages_and_counts_as_a_failure(world: World) -> None:
    put(world.storage, keys_of(3))
    world.faulty.faults["get"] = world.late(2.5)
    assert hits(world.storage, keys_of(3)) == [True] * 3
    assert world.storage.state is BreakerState.CLOSED
    hits(world.storage, keys_of(3))
    assert world.storage.state is BreakerState.OPEN


def test_everybody_else_gets_misses_while_a_call_is_overdue(world: World) -> None:
    put(world.storage, keys_of(3))
    world.faulty.faults["get"] = world.faulty.hang
    found: list[list[bool]] = []
    slow = threading.Thread(target=lambda: found.append(hits(world.storage, keys_of(3))), daemon=True)
    slow.start()
    world.faulty.wait_until_hanging()
    assert world.storage.exists(keys_of(3)) == 3, "not overdue yet"
    world.clock.now_s += 2.5
    assert world.storage.exists(keys_of(3)) == 0 and not any(put(world.storage, keys_of(4)))
    assert world.figure("exists_missed_busy") == 3 and world.figure("put_missed_busy") == 4
    world.faulty.release.set()
    slow.join(30)
    assert found == [[True] * 3], "the pages came, if late"
    assert world.storage.exists(keys_of(3)) == 3
    world.faulty.faults.clear()


def test_one_overdue_call_of_several_is_enough() -> None:
    calls = DirectCalls()
    assert not calls.overdue(1e9)
    calls.begin(9.0)
    hung = calls.begin(2.0)
    calls.begin(7.0)
    assert not calls.overdue(2.0) and calls.overdue(2.1)
    calls.end(hung)
    assert not calls.overdue(2.1) and calls.overdue(7.1)


def test_no_piece_is_begun_after_the_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.storage.guard.guard.DIRECT_PIECE_BYTES", 2 * PAGE_BYTES)
    put(world.storage, keys_of(8))
    world.faulty.faults["get"] = world.late(1.5)
    assert hits(world.storage, keys_of(8)) == [True] * 4 + [False] * 4
    assert world.faulty.calls.count("get") == 2 and world.figure("get_missed_timeout") == 4


class Panic(BaseException):
    """As extensions written in Rust raise, and what cancels a coroutine."""


def panic(call: Callable[..., Any], *args: Any) -> Any:
    raise Panic("in a library")


@pytest.mark.parametrize("fault", [raise_error, exit_thread, panic, answer(None), answer([True, 1, True])])
def test_faults_are_misses(world: World, fault: Callable[..., Any]) -> None:
    put(world.storage, keys_of(3))
    for name in ("exists", "get", "put"):
        world.faulty.faults[name] = fault
    for _ in range(2):
        assert world.storage.get(keys_of(3), [blank() for _ in range(3)]) == [False] * 3
    assert world.storage.exists(keys_of(3)) == 0
    assert world.storage.state is BreakerState.OPEN


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_one_bad_key_among_page_hashes_is_seen(world: World, key: str) -> None:
    keys = keys_of(5)
    assert world.storage.exists([*keys, key]) == 0 and world.storage.exists([key, *keys]) == 0
    assert world.figure("exists_missed_bad_key") == 12 and "exists" not in world.faulty.calls
    bad = (key + "/" * 64)[:64]
    assert world.storage.exists([*keys, bad]) == 0, "as long as a page hash"


def test_keys_of_any_legal_form_pass() -> None:
    check_keys([])
    check_keys([*keys_of(4), "a.b-c_d", "0"])
    check_keys(["A" * 64, "a" * 32 + "-" * 32])


class Checking(DirectMemory):
    """Looks at its keys itself, as the disk backend does."""

    traits = dataclasses.replace(DirectMemory.traits, checks_keys=True)

    def _names(self, keys: Sequence[str]) -> list[str]:
        check_keys(keys)
        return super()._names(keys)


def checking(clock: FakeClock) -> GuardedStorage:
    return GuardedStorage(Checking(memory_context(FINGERPRINT, PAGE_BYTES)), FINGERPRINT, LIMITS, clock)


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_bad_keys_a_backend_refuses_are_no_fault_of_the_store(key: str) -> None:
    storage = checking(FakeClock())
    for _ in range(LIMITS.breaker.failures_to_open + 1):
        assert storage.exists([*keys_of(2), key]) == 0
        assert not any(put(storage, [key])) and not any(hits(storage, [key]))
    assert storage.state is BreakerState.CLOSED and all(put(storage, keys_of(2)))
    stats = storage.stats()
    assert [stats[f"{name}_missed_bad_key"] for name in ("exists", "put", "get")] == [9, 3, 3]
    assert "exists_missed_error" not in stats


def test_a_probe_with_a_bad_key_ends() -> None:
    clock = FakeClock()
    storage = checking(clock)
    good, storage.backend = storage.backend, FaultyBackend(storage.backend)
    storage.backend.faults["exists"] = raise_error
    for _ in range(LIMITS.breaker.failures_to_open):
        storage.exists(keys_of(1))
    assert storage.state is BreakerState.OPEN
    storage.backend = good
    clock.now_s += LIMITS.breaker.retry_after_s
    assert storage.exists(["../x"]) == 0 and storage.state is BreakerState.OPEN, "that says nothing"
    assert storage.exists(keys_of(1)) == 0 and storage.state is BreakerState.CLOSED

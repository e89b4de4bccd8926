"""A store that does not answer when it is opened: misses, attempts beside them, then all of it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hiradix.errors import ConfigError, StorageError, Unreachable
from hiradix.storage import (
    Batch,
    BreakerState,
    ComponentPages,
    JoiningStorage,
    StorageContext,
    StoragePart,
    Traits,
    Trust,
    open_storage,
    open_stores,
    register_storage_backend,
    registry,
    trusted_stores,
)
from hiradix.storage.generations import COMPARED_PUTS, NUM_SLOTS, record_key
from hiradix.storage.guard.joining import MAX_UNDER_WAY
from hiradix.storage.kit.call_threads import ABANDONED
from hiradix.storage.kit.reach import is_unreachable
from tests.contracts.storage import FINGERPRINT, OTHER, PAGE_BYTES, hits, keys_of, put
from tests.storage.doubles import MemoryBackend
from tests.storage.test_generations import COMPONENTS, KEYS, Engine, witness_of

QUICK = {"join_retry_s": 0.01, "deadline_s": 30.0, "retries": 0}
WAIT_S = 60.0


class World:
    """Whether the stores answer, and with what; and who has asked."""

    def __init__(self) -> None:
        self.fault: BaseException | None = ConnectionRefusedError(111, "nobody is there")
        self.hold: threading.Event | None = None
        self.places: dict[str, OrderedDict[str, bytes]] = {}
        self.made: list[Moody] = []
        self.num_asked = 0


world = World()


class Moody(MemoryBackend):
    """Memory behind a world that may be down."""

    traits = Traits(namespaced=False)

    def __init__(self, context: StorageContext):
        world.num_asked += 1
        if world.hold is not None:
            assert world.hold.wait(WAIT_S), "never let go"
        if world.fault is not None:
            raise world.fault
        super().__init__(context, world.places)
        self.registered: list[int] = []
        self.is_closed = False
        if context.extra_config.get("place") == "lasting":
            self.traits = Traits(deletes=False)
        self.tenants: list[str] = []
        world.made.append(self)

    def put(self, keys: Any, pages: Any) -> list[bool]:
        self.tenants.append(keys.tenant)
        return super().put(keys, pages)

    def register(self, memory: memoryview) -> None:
        self.registered.append(memory.nbytes)

    def close(self) -> None:
        self.is_closed = True
        super().close()


@pytest.fixture(autouse=True)
def down(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The backend `moody`, whose world is down."""
    global world
    world = World()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register_storage_backend("moody", f"{__name__}:Moody")
    yield world
    if world.hold is not None:
        world.hold.set()


def context(required: bool = False, **keys: Any) -> StorageContext:
    return StorageContext(FINGERPRINT, {**QUICK, **keys}, PAGE_BYTES, required=required)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


@contextlib.contextmanager
def joining(**keys: Any) -> Iterator[StoragePart]:
    with contextlib.closing(open_storage("moody", context(**keys))) as store:
        assert isinstance(store, JoiningStorage) and not store.is_joined
        yield store


def test_misses_until_the_world_answers_then_hits(down: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), joining() as store:
        assert store.exists(keys_of(3)) == 0 and not any(put(store, keys_of(2)))
        assert not any(hits(store, keys_of(4))) and not store.ping() and not store.clear()
        assert store.state is BreakerState.OPEN
        figures = store.stats()
        assert figures["joined"] == 0 and figures["breaker_open"] == 1
        assert [figures[f"{op}_missed_not_joined"] for op in ("exists", "put", "get")] == [3, 2, 4]
        until(lambda: down.num_asked > 3)
        down.fault = None
        until(lambda: store.is_joined)
        assert all(put(store, keys_of(2))) and all(hits(store, keys_of(2))) and store.exists(keys_of(2)) == 2
        figures = store.stats()
        assert figures["joined"] == 1 and figures["get_missed_not_joined"] == 4 and figures["get_pages"] == 2
        assert store.state is BreakerState.CLOSED and figures["breaker_open"] == 0
    told = [line.message for line in caplog.records if "joined" in line.message]
    assert len(told) == 2 and "not joined" in told[0] and "moody: joined" in told[1], told
    assert down.made[0].is_closed and len(down.made) == 1


def test_a_store_that_is_required_is_an_error(down: World) -> None:
    with pytest.raises(Unreachable, match="--hicache-storage-backend moody: ConnectionRefusedError"):
        open_storage("moody", context(required=True))
    assert down.num_asked == 1


def test_a_store_that_answers_at_once_is_the_guard_itself(down: World) -> None:
    down.fault = None
    with contextlib.closing(open_storage("moody", context())) as store:
        assert not isinstance(store, JoiningStorage) and store.is_joined and store.stats()["joined"] == 1


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"encryption_key_file": "/no/such/file"}, "encryption_key_file"),
        ({"retries": -1}, "retries"),
        ({"join_retry_s": 0}, "join_retry_s"),
        ({"join_timeout_s": "soon"}, "join_timeout_s"),
        ({"quota": 1}, "quota_path"),
        ({"compression": "zstd"}, "compression: this backend stores pages of one length"),
        ({"quantise": "fp8"}, "quantise"),
    ],
)
def test_wrong_values_end_the_start_though_the_world_is_down(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        open_storage("moody", context(**keys))
    assert not isinstance(raised.value, Unreachable)


def test_what_is_refused_later_is_said_once_and_tried_on(
    down: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), joining() as store:
        down.fault = ConfigError("url: wrong password")
        until(lambda: store.stats()["join_refused"] == 1)
        before = down.num_asked
        until(lambda: down.num_asked > before + 3)
        assert not store.is_joined
        assert sum("wrong password" in line.message for line in caplog.records) == 1
        down.fault = None
        until(lambda: store.is_joined)
        assert store.stats()["join_refused"] == 0


def test_a_constructor_that_hangs_does_not_hold_the_start(down: World) -> None:
    down.fault, down.hold = None, threading.Event()
    before = ABANDONED.num_threads
    with joining(join_timeout_s=0.01) as store:
        until(lambda: down.num_asked == MAX_UNDER_WAY)
        assert not any(hits(store, keys_of(1)))
        down.hold.set()
        until(lambda: store.is_joined)
        until(lambda: sum(not one.is_closed for one in down.made) == 1)
        assert all(put(store, keys_of(1)))
    until(lambda: ABANDONED.num_threads == before)  # the attempt that nobody wanted is closed, then booked


def test_closing_ends_it_and_what_comes_later_is_closed(down: World) -> None:
    down.fault, down.hold = None, threading.Event()
    before = ABANDONED.num_threads
    with joining(join_timeout_s=0.01) as store:
        until(lambda: down.num_asked >= 1)
    assert ABANDONED.num_threads > before
    asked = down.num_asked
    assert not any(hits(store, keys_of(1))) and store.stats()["get_missed_closed"] == 1
    down.hold.set()
    until(lambda: len(down.made) == asked and all(one.is_closed for one in down.made))
    until(lambda: ABANDONED.num_threads == before)
    assert not store.is_joined and down.num_asked == asked
    assert not any(thread.name == "hiradix-storage-join" for thread in threading.enumerate())


def test_memory_and_whoever_asked_come_before_pages(down: World) -> None:
    seen: list[tuple[bool, list[int]]] = []
    with joining() as store:
        assert store.register(memoryview(bytearray(64)))

        def look(joined: Any) -> None:
            seen.append((store.is_joined, list(down.made[0].registered)))
            assert all(put(joined.parts[0], keys_of(1)))

        def fail(joined: Any) -> None:
            raise RuntimeError("whoever asked is broken")

        store.when_joined(fail)
        store.when_joined(look)
        down.fault = None
        until(lambda: store.is_joined)
        assert seen == [(False, [64])] and store.exists(keys_of(1)) == 1
        store.when_joined(lambda joined: seen.append((store.is_joined, [])))
        assert seen[1:] == [(True, [])]
        store.register(memoryview(bytearray(32)))
        assert down.made[0].registered == [64, 32]


def test_traits_are_those_of_the_joined_backend(down: World) -> None:
    with joining(place="lasting") as store:
        assert store.frees_deleted
        down.fault = None
        until(lambda: store.is_joined)
        pages = [[memoryview(bytearray(PAGE_BYTES))]]
        assert store.put(Batch.of(keys_of(1), tenant="salt:a"), pages) == [True]
        assert down.made[0].tenants == ["salt:a"] and not store.frees_deleted


BOTH = [ComponentPages(FINGERPRINT, PAGE_BYTES), ComponentPages(OTHER, PAGE_BYTES)]


def test_components_are_joined_together(down: World) -> None:
    with contextlib.closing(open_stores("moody", QUICK, BOTH, required=False)) as stores:
        assert len(stores.parts) == 2 and not stores.is_joined and stores.stats()["joined"] == 0
        stores.parts[1].register(memoryview(bytearray(16)))
        seen: list[Any] = []
        stores.when_joined(seen.append)
        down.fault = None
        until(lambda: stores.is_joined)
        assert all(part.is_joined for part in stores.parts) and len(seen) == 1 and len(seen[0].parts) == 2
        assert [one.registered for one in down.made] == [[], [16]]
        for part in stores.parts:
            assert all(put(part, keys_of(2))) and all(hits(part, keys_of(2)))
        assert stores.stats()["joined"] == 1
    assert all(one.is_closed for one in down.made)
    with pytest.raises(Unreachable):
        down.fault = TimeoutError()
        open_stores("moody", QUICK, BOTH)


@pytest.mark.parametrize("away", ["lower", "upper", "both"])
def test_the_half_of_a_tier_that_is_there_serves(down: World, away: str, tmp_path: Any) -> None:
    near = {"backend": "file", "file_storage_path": str(tmp_path), "min_free_space": 0, "deadline_s": 30.0}
    far = {"backend": "moody", **QUICK}
    halves = {"lower": (near, far), "upper": (far, near), "both": (far, far)}[away]
    keys = {"upper": halves[0], "lower": halves[1], "deadline_s": 60.0}
    with contextlib.closing(
        open_storage("tier", StorageContext(FINGERPRINT, keys, PAGE_BYTES, required=False))
    ) as store:
        assert store.is_joined
        assert all(put(store, keys_of(2))) is (away != "both")
        assert all(hits(store, keys_of(2))) is (away != "both")
        seen: list[Any] = []
        store.when_joined(seen.append)
        down.fault = None
        until(lambda: len(seen) == (3 if away == "both" else 2))
        half = "upper" if away == "upper" else "lower"
        until(lambda: bool(hits(store, keys_of(1))) and store.stats()[f"backend_{half}_joined"] == 1)
        assert all(put(store, keys_of(4))) and all(hits(store, keys_of(4)))
        assert down.made and sum(len(pages) for pages in down.places.values()) >= 2
    with pytest.raises(Unreachable, match=f"{'upper' if away == 'both' else away}: .*moody"):
        down.fault = ConnectionResetError()
        open_storage("tier", StorageContext(FINGERPRINT, keys, PAGE_BYTES))


class Node:
    """An engine whose near store is a folder of its own, and whose far one all share."""

    def __init__(self, folder: Path, weights: str, has_witness: bool):
        near = {"backend": "file", "file_storage_path": str(folder), "min_free_space": 0, "deadline_s": 30.0}
        keys = {"upper": near, "lower": {"backend": "moody", **QUICK}, "deadline_s": 60.0}
        trust = Trust(witness=witness_of(weights) if has_witness else None)
        stores = open_stores("tier", keys, COMPONENTS[:1], required=False)
        self.store = trusted_stores(stores, COMPONENTS[:1], trust)
        self.engine = Engine(weights, self.store)

    def serves(self) -> bool:
        return self.engine.found() == len(KEYS) and self.engine.reads_own()

    def wait_until_joined(self) -> None:
        until(lambda: self.store.ping() and self.store.stats()["backend_lower_joined"] == 1)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    opened: list[Node] = []

    def make(name: str, weights: str = "a", has_witness: bool = False) -> Node:
        opened.append(Node(tmp_path / name, weights, has_witness))
        return opened[-1]

    yield make
    for node in opened:
        node.store.close()


def num_records() -> int:
    (pages,) = world.places.values()
    return sum(name.endswith(record_key("", slot)) for name in pages for slot in range(NUM_SLOTS))


@pytest.mark.parametrize("has_witness", [False, True])
def test_trusted_pages_of_a_tier_whose_far_half_is_away(
    down: World, nodes: Callable[..., Node], has_witness: bool
) -> None:
    """The near half stores and serves them, and the far one once it is there, for others to find."""
    one = nodes("one", has_witness=has_witness)
    assert all(one.engine.put()) and one.serves()
    down.fault = None
    one.wait_until_joined()
    assert all(one.engine.put()) and one.serves() and num_records() == 1
    other = nodes("other", has_witness=has_witness)
    assert all(other.engine.put(KEYS[:1])) and other.serves() and num_records() == 1
    one.store.close()
    other.store.close()
    down.fault = ConnectionRefusedError(111, "again")
    again = nodes("one", has_witness=has_witness)
    assert has_witness or all(again.engine.put(KEYS[:1]))
    assert again.serves(), "what the near half had before"


@pytest.mark.parametrize("has_witness", [False, True])
@pytest.mark.parametrize("weights", ["a", "b"])
def test_what_a_far_half_has_is_compared_when_it_is_back(
    down: World, nodes: Callable[..., Node], has_witness: bool, weights: str
) -> None:
    """One generation of the same weights stays one; others get none of it."""
    fault, down.fault = down.fault, None
    first = nodes("first")
    assert all(first.engine.put())
    down.fault = fault
    late = nodes("late", weights, has_witness)
    for _ in range(COMPARED_PUTS + 1):
        assert all(late.engine.put(KEYS[:4]))
    down.fault = None
    late.wait_until_joined()
    assert all(late.engine.put(KEYS[:4])) and late.engine.reads_own(KEYS[:4])
    assert late.serves() is (weights == "a") and num_records() == (1 if weights == "a" else 2)
    more = [hashlib.sha256(b"more").hexdigest()]
    assert all(late.engine.put(more)) and first.engine.found(more) == (weights == "a")


class BotoConnectionError(Exception):
    """As libraries name theirs."""


@pytest.mark.parametrize(
    ("error", "is_away"),
    [
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (OSError(113, "No route to host"), True),
        (OSError(107, "Transport endpoint is not connected"), True),
        (OSError(116, "Stale file handle"), True),
        (StorageError("the lock is another's"), True),
        (BotoConnectionError("x"), True),
        (RuntimeError("failed to connect to 10.0.0.1:80"), True),
        (RuntimeError("request timed out"), True),
        (PermissionError(13, "Permission denied"), False),
        (NotADirectoryError(20, "Not a directory"), False),
        (ValueError("timeout must be positive"), False),
        (KeyError("connection"), False),
        (RuntimeError("bad block size"), False),
    ],
)
def test_which_errors_say_that_the_store_is_away(error: Exception, is_away: bool) -> None:
    assert is_unreachable(error) is is_away
    wrapped = RuntimeError("cannot be made")
    wrapped.__cause__ = error
    assert is_unreachable(wrapped) is is_away

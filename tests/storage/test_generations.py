"""Pages of a store are served where what the weights do says so, whatever the names say."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import (
    Batch,
    BreakerLimits,
    ComponentPages,
    GuardedStorage,
    GuardLimits,
    PageFingerprint,
    Stores,
    Trust,
    Witness,
    open_stores,
    trust_of,
    trusted_stores,
)
from hiradix.storage.generations import (
    COMPARED_PUTS,
    LOOK_AGAIN_PUTS,
    NUM_SLOTS,
    Generations,
    record_key,
    renamed,
)
from hiradix.storage.guard.calls import damaged_behind
from tests.storage.doubles import FakeClock, FaultyBackend, MemoryBackend, memory_context, raise_error

PAGE = 256
KEYS = [hashlib.sha256(b"%d" % n).hexdigest() for n in range(8)]
CANARY = hashlib.sha256(b"canary").hexdigest()
COMPONENTS = [
    ComponentPages(PageFingerprint("model"), PAGE),
    ComponentPages(PageFingerprint("model", component="window-8"), PAGE),
]


class Engine:
    """A model by its weights, on one of several stores in a folder. The bytes of a page are made of both."""

    def __init__(self, weights: str, store: Generations) -> None:
        self.weights, self.store = weights, store

    def page(self, key: str, component: int = 0, extra: str | None = None) -> bytes:
        return page_of(self.weights, key, component, extra)

    def put(self, keys: Sequence[str] = KEYS, component: int = 0, extra: str | None = None) -> list[bool]:
        pages = [[memoryview(self.page(key, component, extra))] for key in keys]
        return self.store.parts[component].put(Batch.of(keys, extra_key=extra), pages)

    def found(self, keys: Sequence[str] = KEYS, component: int = 0, extra: str | None = None) -> int:
        return self.store.parts[component].exists(Batch.of(keys, extra_key=extra))

    def read(
        self, keys: Sequence[str] = KEYS, component: int = 0, extra: str | None = None
    ) -> list[bytes | None]:
        into = [bytearray(PAGE) for _ in keys]
        batch = Batch.of(keys, extra_key=extra)
        ok = self.store.parts[component].get(batch, [[memoryview(page)] for page in into])
        return [bytes(page) if done else None for page, done in zip(into, ok, strict=True)]

    def reads_own(self, keys: Sequence[str] = KEYS, component: int = 0, extra: str | None = None) -> bool:
        """All of it is there, and as it would compute it."""
        return self.read(keys, component, extra) == [self.page(key, component, extra) for key in keys]


def page_of(weights: str, key: str, component: int = 0, extra: str | None = None) -> bytes:
    seed = hashlib.sha256(f"{weights} {key} {component} {extra}".encode()).digest()
    return (seed * (PAGE // 32 + 1))[:PAGE]


def witness_of(weights: str, num_components: int = 1) -> Witness:
    return Witness((CANARY,), tuple((page_of(weights, CANARY, c),) for c in range(num_components)))


class Deployments:
    """Engines of one claimed identity over one folder."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder, self.backend = folder, backend
        self.opened: list[Generations] = []

    def open(self, weights: str, num_components: int = 1, **trust: Any) -> Engine:
        keys = {f"{self.backend}_storage_path": str(self.folder), "deadline_s": 60, "min_free_space": 0}
        keys |= {"max_size": "256MiB" if PAGE > 1 << 20 else "16MiB"}
        pages = COMPONENTS[:num_components]
        asked = trust_of(self.backend, keys, Trust(**trust))
        stores = trusted_stores(open_stores(self.backend, keys, pages), pages, asked)
        self.opened.append(stores)
        return Engine(weights, stores)

    def asked(self, weights: str, num_components: int = 1, **trust: Any) -> Engine:
        """Of an engine that computes its canary."""
        return self.open(weights, num_components, witness=witness_of(weights, num_components), **trust)

    def restart(self) -> None:
        for store in self.opened:
            store.close()
        self.opened.clear()


@pytest.fixture(params=["file", "disk"])
def deployments(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deployments]:
    made = Deployments(tmp_path / "pages", request.param)
    yield made
    made.restart()


def state(engine: Engine) -> dict[str, float]:
    figures = engine.store.stats()
    return {name: figures[f"canary_{name}"] for name in ("adopted", "own", "unverified")}


# -- an engine that can be asked -------------------------------------------------------------


def test_the_same_weights_find_their_pages_after_a_restart(deployments: Deployments) -> None:
    assert deployments.asked("a").put() == [True] * 8
    deployments.restart()
    again = deployments.asked("a")
    assert again.found() == 8 and again.reads_own()
    assert state(again) == {"adopted": 1, "own": 0, "unverified": 0}


@pytest.mark.parametrize("num_bytes", [1, 40, 1000, 1 << 16, 3 << 20])
@pytest.mark.parametrize("elements", ["", "float32", "bfloat16"])
def test_pages_of_any_size_are_found_after_a_restart(
    deployments: Deployments, monkeypatch: pytest.MonkeyPatch, num_bytes: int, elements: str
) -> None:
    size = num_bytes * 4 if elements else num_bytes
    monkeypatch.setitem(globals(), "PAGE", size)
    pages = ComponentPages(PageFingerprint("model"), size, elements=elements)
    monkeypatch.setitem(globals(), "COMPONENTS", [pages])
    keys = KEYS[:1]
    assert deployments.asked("a").put(keys) == [True]
    deployments.restart()
    again = deployments.asked("a")
    assert again.found(keys) == 1 and state(again) == {"adopted": 1, "own": 0, "unverified": 0}


def test_other_weights_under_the_same_name_find_nothing_and_say_so(
    deployments: Deployments, caplog: pytest.LogCaptureFixture
) -> None:
    deployments.asked("a").put()
    deployments.restart()
    with caplog.at_level(logging.WARNING, "hiradix.storage"):
        other = deployments.asked("b")
    assert other.found() == 0 and other.read() == [None] * 8
    assert "other weights have computed" in caplog.text and "model" in caplog.text
    assert other.put() == [True] * 8 and other.reads_own()
    deployments.restart()
    for weights in "ab":
        engine = deployments.asked(weights)
        assert engine.reads_own(), f"each finds its own: {weights}"
        assert state(engine)["adopted"] == 1
        deployments.restart()


def test_without_a_canary_the_second_model_is_served_the_pages_of_the_first(deployments: Deployments) -> None:
    """The positive control: what a label, or a name alone, would have done."""
    deployments.open("a", identity="same").put()
    deployments.restart()
    other = deployments.open("b", identity="same")
    assert other.found() == 8 and other.read() == [page_of("a", key) for key in KEYS]


def test_a_label_keeps_its_pages_from_other_labels_and_from_generations(deployments: Deployments) -> None:
    deployments.open("a", identity="one").put()
    deployments.restart()
    for engine in (deployments.open("a", identity="two"), deployments.asked("a")):
        assert engine.found() == 0
        deployments.restart()


def test_a_record_that_was_evicted_costs_hits_and_serves_nothing_wrong(deployments: Deployments) -> None:
    deployments.asked("a").put()
    deployments.restart()
    plain = deployments.open("a", identity="x")
    for slot in range(NUM_SLOTS):
        assert plain.store.guards[0].delete([record_key("", slot)])
    deployments.restart()
    again = deployments.asked("a")
    assert again.found() == 0 and state(again)["own"] == 1
    assert again.put() == [True] * 8 and again.reads_own()


def test_a_server_that_runs_puts_its_record_again(deployments: Deployments) -> None:
    engine = deployments.asked("a")
    engine.put()
    assert engine.store.guards[0].delete([record_key("", 0)])
    for _ in range(LOOK_AGAIN_PUTS):
        engine.put(KEYS[:1])
    deployments.restart()
    assert deployments.asked("a").reads_own()


def test_a_store_that_was_cleared_is_of_use_again_at_once(deployments: Deployments) -> None:
    engine = deployments.asked("a")
    engine.put()
    assert engine.store.clear() and engine.found() == 0
    engine.put()
    assert engine.reads_own()
    deployments.restart()
    assert deployments.asked("a").reads_own()


@pytest.mark.parametrize("extra", [None, "adapter"])
def test_a_page_is_forgotten_by_an_engine_that_has_not_looked_yet(
    deployments: Deployments, extra: str | None
) -> None:
    deployments.asked("a").put(extra=extra)
    deployments.restart()
    again = deployments.open("a")
    assert again.store.parts[0].delete(Batch.of(KEYS[4:], extra_key=extra))
    again.put(KEYS[:1], extra=extra)  # compared with what is there: it trusts the first pages from here on
    assert again.found(extra=extra) == 4
    assert again.found(KEYS[4:], extra=extra) == 0


@pytest.mark.parametrize("deployments", ["file"], indirect=True)  # one process has a disk store's folder
def test_two_that_start_at_once_come_to_share(deployments: Deployments) -> None:
    one, two = deployments.asked("a"), deployments.asked("a")
    one.put(KEYS[:4])
    two.put(KEYS[4:])
    assert one.reads_own() and two.reads_own()


@pytest.mark.parametrize("deployments", ["file"], indirect=True)
def test_who_loses_a_race_for_a_slot_has_another_or_adopts(deployments: Deployments) -> None:
    """Both have looked before either has written."""
    first, second = deployments.open("a"), deployments.open("b")
    for engine in (first, second):
        with engine.store.scope_of(None).lock:
            engine.store._look(engine.store.scope_of(None))
    first.put()
    second.put()
    assert first.reads_own() and second.reads_own()
    deployments.restart()
    for weights in "ab":
        assert deployments.asked(weights).found() == 0, "no canary of theirs is there: not told"
        deployments.restart()


def test_more_generations_than_slots_cost_the_oldest_their_hits(deployments: Deployments) -> None:
    for number in range(NUM_SLOTS + 3):
        engine = deployments.asked(f"w{number}")
        engine.put(KEYS[:1])
        assert engine.reads_own(KEYS[:1])
        deployments.restart()
    for number in range(NUM_SLOTS + 3):
        engine = deployments.asked(f"w{number}")
        assert engine.read(KEYS[:1])[0] in (None, engine.page(KEYS[0]))
        deployments.restart()


def test_pages_stored_before_there_were_labels_are_not_found(deployments: Deployments) -> None:
    old = deployments.open("a", identity="x").store.guards[0]
    assert old.put(KEYS, [[memoryview(page_of("a", key))] for key in KEYS]) == [True] * 8
    deployments.restart()
    assert deployments.asked("a").found() == 0


def test_a_rank_that_only_compares_reads_what_another_puts(tmp_path: Path) -> None:
    ranks = Deployments(tmp_path, "file")
    reader = ranks.asked("a", stores=False)
    assert reader.found() == 0 and reader.put() == [True] * 8, "taken, and put by nobody"
    writer = ranks.asked("a")
    writer.put()
    assert reader.found() == 8 and reader.reads_own()
    stranger = ranks.asked("b", stores=False)
    assert stranger.found() == 0
    ranks.restart()


# -- an engine of which only requests compute --------------------------------------------------


def test_the_first_hit_is_computed_and_compared_before_anything_is_served(deployments: Deployments) -> None:
    first = deployments.open("a")
    first.put()
    assert first.found() == 8, "what was computed here needs no proof"
    deployments.restart()
    again = deployments.open("a")
    assert again.found() == 0 and again.read() == [None] * 8
    assert state(again) == {"adopted": 0, "own": 0, "unverified": 1}
    again.put(KEYS[:2])
    assert again.found() == 8 and again.reads_own()
    assert state(again) == {"adopted": 1, "own": 0, "unverified": 0}


def test_what_other_weights_computed_is_never_served(
    deployments: Deployments, caplog: pytest.LogCaptureFixture
) -> None:
    deployments.open("a").put()
    deployments.restart()
    other = deployments.open("b")
    assert other.found() == 0
    with caplog.at_level(logging.WARNING, "hiradix.storage"):
        assert other.put(KEYS[:2]) == [True] * 2
    assert "other weights have computed" in caplog.text
    assert other.found() == 2 and other.reads_own(KEYS[:2]) and other.read(KEYS[2:]) == [None] * 6


def test_what_was_adopted_is_known_when_the_store_is_opened_again(deployments: Deployments) -> None:
    deployments.open("a").put()
    deployments.restart()
    remembered: dict[Any, Any] = {}
    deployments.open("a", remembered=remembered).put(KEYS[:1])
    deployments.restart()
    assert deployments.open("a", remembered=remembered).reads_own()
    deployments.restart()
    remembered.clear()  # the weights have changed
    assert deployments.open("b", remembered=remembered).found() == 0


def test_the_deepest_page_is_compared_too(deployments: Deployments) -> None:
    """Weights that differ only far from the start, as ropes do."""
    deployments.open("a").put()
    deployments.restart()
    other = deployments.open("b")
    pages = [page_of("a", key) for key in KEYS[:7]] + [page_of("b", KEYS[7])]
    assert other.store.parts[0].put(KEYS, [[memoryview(page)] for page in pages]) == [True] * 8
    assert other.store.stats()["canary_generations_rejected"] == 1
    assert other.read(KEYS[7:]) == [page_of("b", KEYS[7])]


def test_pages_that_nothing_was_compared_with_are_kept_apart_until_something_is(
    deployments: Deployments,
) -> None:
    deployments.open("a").put(KEYS[:4])
    deployments.restart()
    again = deployments.open("a")
    again.put(KEYS[4:])
    assert again.found(KEYS[:4]) == 0, "nothing said yet whose those are"
    again.put(KEYS[:1])
    assert again.found() == 8 and again.reads_own(), "both generations are this model's"


def test_components_are_each_compared(deployments: Deployments) -> None:
    first = deployments.open("a", 2)
    for component in (0, 1):
        first.put(component=component)
    deployments.restart()
    again = deployments.open("a", 2)
    again.put(KEYS[:1])
    assert (again.found(), again.found(component=1)) == (8, 0)
    again.put(KEYS[:1], component=1)
    assert again.reads_own() and again.reads_own(component=1)
    deployments.restart()
    other = deployments.open("a", 2)
    other.put(KEYS[:1])
    assert other.found() == 8
    other.weights = "b"  # of the window layers alone
    other.put(KEYS[:1], component=1)
    assert other.found(KEYS[1:]) == 0 and other.found(KEYS[1:], component=1) == 0


def test_each_adapter_is_compared_for_itself(deployments: Deployments) -> None:
    first = deployments.open("a")
    first.put()
    first.put(extra="lora")
    deployments.restart()
    again = deployments.open("a")
    again.put(KEYS[:1])
    assert again.found() == 8 and again.found(extra="lora") == 0
    again.put(KEYS[:1], extra="lora")
    assert again.reads_own(extra="lora")
    deployments.restart()
    retrained = deployments.open("a")
    retrained.put(KEYS[:1])
    retrained.weights = "a, its adapter trained on"
    retrained.put(KEYS[:1], extra="lora")
    assert retrained.found(KEYS[1:], extra="lora") == 0
    retrained.weights = "a"
    assert retrained.reads_own()


def test_comparing_ends_after_a_number_of_puts(deployments: Deployments) -> None:
    deployments.open("b").put(KEYS[4:])
    deployments.restart()
    engine = deployments.open("a")
    for _ in range(COMPARED_PUTS):
        engine.put(KEYS[:1])
    compared = engine.store.stats()["canary_pages_compared"]
    engine.put(KEYS[4:])
    assert engine.store.stats()["canary_pages_compared"] == compared and engine.reads_own(KEYS[4:])


# -- parts -----------------------------------------------------------------------------------


def test_names_of_generations_do_not_meet() -> None:
    one, two = bytes(range(32)), bytes(32)[:-1] + b"\1"
    assert len({*renamed(KEYS, one), *renamed(KEYS, two), *KEYS}) == 24
    assert all(len(name) == 64 for name in renamed(KEYS, one))
    assert renamed(renamed(KEYS, one), one) == KEYS
    assert renamed(["short"], one) == [f"{one.hex()[:32]}-short"]
    odd = ["a" * 62, "b" * 66]  # as long together as two page hashes
    assert renamed(odd, one) == [f"{one.hex()[:32]}-{key}" for key in odd]
    assert renamed([*odd, KEYS[0]], one)[2:] == renamed(KEYS[:1], one), "whatever it is asked for with"
    assert renamed([], one) == [] and renamed(KEYS, bytes(32)) == KEYS
    each = [f"{int(key, 16) ^ int(one.hex(), 16):064x}" for key in KEYS]
    assert renamed(KEYS, one) == each


@pytest.mark.parametrize("content", [b"", b"\xff", bytes(range(256))])
def test_whatever_a_record_holds_is_no_fault(deployments: Deployments, content: bytes) -> None:
    plain = deployments.open("a", identity="x")
    page = (content * PAGE)[:PAGE] or bytes(PAGE)
    plain.store.guards[0].put([record_key("", 0)], [[memoryview(page)]])
    deployments.restart()
    engine = deployments.asked("a")
    assert engine.put() == [True] * 8 and engine.reads_own()
    deployments.restart()
    assert deployments.asked("a").reads_own()


# -- stores whose reads fail -----------------------------------------------------------------


class Shared:
    """A store in memory for engines of one claimed identity; `faulty.faults` is what its calls do."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.memory = MemoryBackend(memory_context(COMPONENTS[0].fingerprint, PAGE))
        self.faulty = FaultyBackend(self.memory)
        self.limits = GuardLimits(30.0, 1e12, breaker=BreakerLimits(3, 10.0, 10.0))

    def open(self, weights: str) -> Engine:
        guard = GuardedStorage(self.faulty, COMPONENTS[0].fingerprint, self.limits, self.clock)
        trust = Trust(witness=witness_of(weights))
        return Engine(weights, trusted_stores(Stores([guard]), COMPONENTS[:1], trust))

    def records(self) -> dict[str, bytes]:
        """What is under the reserved names."""
        names = tuple(record_key("", slot) for slot in range(NUM_SLOTS))
        return {name: page for name, page in self.memory.pages.items() if name.endswith(names)}


def test_records_that_cannot_be_read_are_not_taken_for_gone() -> None:
    """Else a store whose writes work and whose reads do not would lose all records to the one of ours."""
    world = Shared()
    world.open("a").put()
    world.open("b").put()
    before = world.records()
    assert len(before) == 2
    engine = world.open("a")
    world.faulty.faults["get"] = raise_error
    for _ in range(2 * LOOK_AGAIN_PUTS):
        engine.put(KEYS[:1])
    newcomer = world.open("c")
    assert newcomer.found() == 0 and newcomer.put() == [False] * 8
    assert world.records() == before
    world.faulty.faults.clear()
    world.clock.now_s += 10.1
    assert newcomer.put() == [True] * 8 and newcomer.reads_own() and len(world.records()) == 3


def test_pages_that_a_damaged_page_keeps_from_being_trusted_are_said_to_be_damaged() -> None:
    world = Shared()
    first = world.open("a")
    first.put()
    assert damaged_behind(first.found()) == 0
    label = first.store.scope_of(None).own
    assert label is not None
    (name,) = [name for name in world.memory.pages if name.endswith(renamed([CANARY], label)[0])]
    world.memory.pages[name] = bytes(len(world.memory.pages[name]))
    engine = world.open("a")
    assert (engine.found(), damaged_behind(engine.found())) == (0, 8)
    assert damaged_behind(engine.found([*KEYS[:3], CANARY[::-1]])) == 3
    assert engine.put(KEYS[:2]) == [True, True]
    assert (engine.found(), damaged_behind(engine.found())) == (8, 0), "another page was compared"


def test_nothing_is_said_to_be_forgotten_while_the_records_cannot_be_read() -> None:
    world = Shared()
    world.open("a").put()
    world.faulty.faults["get"] = raise_error
    part = world.open("a").store.parts[0]
    assert not part.delete(KEYS) and part.forget_behind(KEYS[:1]) is None
    world.faulty.faults.clear()
    world.clock.now_s += 10.1
    assert part.delete(KEYS) and world.open("a").found() == 0


def test_a_start_waits_for_one_read_that_hangs_and_lookups_for_few() -> None:
    """And what was stored is found with the first lookup after reads have healed, however many there were."""
    world = Shared()
    world.open("a").put()
    num_reads = 0

    def hang(call: Callable[..., Any], *args: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        world.clock.now_s += 31.0
        raise OSError("no answer")

    world.faulty.faults["get"] = hang
    engine = world.open("a")
    assert num_reads == 1
    for _ in range(1000):
        assert engine.found() == 0
        engine.put(KEYS[:1])
    assert num_reads == 3, "the breaker is open"
    world.faulty.faults.clear()
    world.clock.now_s += 10.1
    assert engine.found() == 8 and engine.reads_own()

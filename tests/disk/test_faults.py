"""Injected faults: none may be served as a page. 100,000 by default, HIRADIX_FAULTS=1000000 for more.

Every round damages most pages of a store, each in one way, and asks for all of them. What was not damaged
must come back, so that refusing everything does not pass.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hiradix.storage import Batch
from hiradix.storage.backends.disk import DiskBackend
from hiradix.storage.backends.disk.record import RECORD_BYTES
from tests.contracts.storage import FINGERPRINT, OTHER, keys_of
from tests.disk.places import log_file, open_disk, segment_files
from tests.seeds import is_enough, seeded, seeds

NUM_FAULTS = int(os.environ.get("HIRADIX_FAULTS", "100000"))
PAGE_BYTES, NUM_PAGES, SECTOR = 8192, 512, 512
CONFIG = {"max_size": 128 << 20, "segment_size": 8 << 20}
PAGE_FAULTS = ("bit flip", "truncation", "swapped pages", "stale page", "torn write", "wrong namespace")
LOG_FAULTS = ("bit flip", "cut", "swapped records", "doubled record", "older log", "record of another log")
KEYS, OLDER = keys_of(NUM_PAGES), keys_of(NUM_PAGES, 10_000)
SHARE_LEFT_ALONE = 8


def page(key: str, what: str) -> bytes:
    return random.Random(f"{key} {what}").randbytes(PAGE_BYTES)


class Lab:
    """A store with a past: each slot had another page first, and another namespace's pages lie beside."""

    def __init__(self, place: Path, seed: int):
        self.place = place
        self.rng = random.Random(seed)
        self.good = {key: page(key, "new") for key in KEYS}
        store, other = self.open(), open_disk(place, OTHER, page_bytes=PAGE_BYTES, **CONFIG)
        self.put(store, {key: page(key, "old") for key in OLDER})
        (self.segment,) = segment_files(place)
        self.old_bytes = self.segment.read_bytes()
        self.old_log = log_file(place).read_bytes()
        store.delete(OLDER)
        self.put(store, self.good)
        theirs = {key: page(key, "theirs") for key in KEYS[:128]}
        other.put(Batch.of(tuple(theirs)), [[memoryview(data)] for data in theirs.values()])
        self.places = {key: store._store.shelf.pages[key].place[1] for key in KEYS}
        self.their_slots = [other._store.shelf.pages[key].place[1] for key in theirs]
        store.close()
        other.close()
        self.bytes = self.segment.read_bytes()
        self.log = log_file(place).read_bytes()

    def open(self, **config: str) -> DiskBackend:
        return open_disk(self.place, FINGERPRINT, page_bytes=PAGE_BYTES, **CONFIG, **config)

    def put(self, store: DiskBackend, pages: dict[str, bytes]) -> None:
        assert all(store.put(Batch.of(tuple(pages)), [[memoryview(data)] for data in pages.values()]))

    def served(self, store: DiskBackend, keys: list[str] = KEYS) -> dict[str, bytes]:
        """What comes back for `keys`."""
        into = [memoryview(bytearray(PAGE_BYTES)) for _ in keys]
        answer = store.get(Batch.of(keys), [[view] for view in into])
        return {key: bytes(view) for key, view, ok in zip(keys, into, answer) if ok}

    def slot(self, data: bytes | bytearray, number: int) -> bytes:
        return bytes(data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES])

    def spoil_pages(self) -> tuple[bytes, dict[str, str]]:
        """The segment's bytes with faults, and which key has which."""
        data = bytearray(self.bytes)
        if not self.rng.randrange(4):
            first = self.rng.randrange(NUM_PAGES // 2, NUM_PAGES)
            cut = sorted(self.places.values())[first] * PAGE_BYTES + self.rng.randrange(PAGE_BYTES)
            behind = [key for key in KEYS if (self.places[key] + 1) * PAGE_BYTES > cut]
            return bytes(data[:cut]), dict.fromkeys(behind, "truncation")
        victims = [key for key in KEYS if self.rng.randrange(SHARE_LEFT_ALONE)]
        faults = {}
        for key in victims:
            number, kind = self.places[key], self.rng.choice(PAGE_FAULTS[:1] + PAGE_FAULTS[2:])
            start = number * PAGE_BYTES
            data[start : start + PAGE_BYTES] = self.spoiled(kind, number)
            faults[key] = kind
        return bytes(data), faults

    def spoiled(self, kind: str, number: int) -> bytes:
        """What is in slot `number` after a fault; never what belongs there."""
        rng, now = self.rng, self.slot(self.bytes, number)
        if kind == "bit flip":
            at = rng.randrange(PAGE_BYTES)
            return now[:at] + bytes([now[at] ^ (1 << rng.randrange(8))]) + now[at + 1 :]
        if kind == "swapped pages":
            return self.slot(self.bytes, rng.choice([n for n in self.places.values() if n != number]))
        if kind == "stale page":
            return self.slot(self.old_bytes, number)
        if kind == "torn write":
            at = rng.randrange(1, PAGE_BYTES // SECTOR) * SECTOR
            before = self.slot(self.old_bytes, number)
            return now[:at] + before[at:] if rng.randrange(2) else before[:at] + now[at:]
        return self.slot(self.bytes, rng.choice(self.their_slots))

    def spoil_log(self) -> tuple[bytes, str]:
        """The log with one fault."""
        rng, data, kind = self.rng, bytearray(self.log), self.rng.choice(LOG_FAULTS)
        records = len(data) // RECORD_BYTES
        one, two = (rng.randrange(1, records) * RECORD_BYTES for _ in range(2))
        if kind == "bit flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[rng.randrange(len(data)) :]
        elif kind == "swapped records":
            first, second = data[one : one + RECORD_BYTES], data[two : two + RECORD_BYTES]
            data[one : one + RECORD_BYTES], data[two : two + RECORD_BYTES] = second, first
        elif kind == "doubled record":
            data += data[one : one + RECORD_BYTES]
        elif kind == "older log":
            data = bytearray(self.old_log)
        else:
            data[two : two + RECORD_BYTES] = self.old_log[-RECORD_BYTES:]
        return bytes(data), kind

    def restore(self, segment: bytes, log: bytes) -> None:
        self.segment.write_bytes(segment)
        log_file(self.place).write_bytes(log)


def wrong(lab: Lab, served: dict[str, bytes]) -> list[str]:
    return [key for key, data in served.items() if data != lab.good[key]]


@seeded
@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("verify", ["recovered", "always"])
def test_no_damaged_page_is_served(
    tmp_path: Path, verify: str, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """A quarter of all faults in each of the four: restart, then read everything."""
    lab = Lab(tmp_path, seed + 2 * (verify == "always"))
    done: Counter[str] = Counter()
    while done.total() < NUM_FAULTS // 4:
        segment, faults = lab.spoil_pages()
        lab.restore(segment, lab.log)
        store = lab.open(verify=verify)
        served = lab.served(store)
        store.close()
        assert wrong(lab, served) == []
        assert not served.keys() & faults.keys(), "a fault that changes nothing"
        is_cut = "truncation" in faults.values()  # the segment is short, so it is dropped as a whole
        assert len(served) == (0 if is_cut else NUM_PAGES - len(faults))
        done.update(faults.values())
    assert is_enough(set(done) == set(PAGE_FAULTS) and min(done.values()) > NUM_FAULTS // 200)
    record_property("told", f"{done.total()} faults, none served: {dict(done)}")


def test_a_damaged_page_is_seen_beside_one_that_was_checked_before(tmp_path: Path) -> None:
    lab = Lab(tmp_path, 8)
    data = bytearray(lab.bytes)
    data[lab.places[KEYS[1]] * PAGE_BYTES] ^= 1
    lab.segment.write_bytes(data)
    store = lab.open(verify="recovered")
    assert lab.served(store, KEYS[:1]).keys() == {KEYS[0]}
    assert lab.served(store, [*KEYS[:2], KEYS[1]]).keys() == {KEYS[0]}
    assert store.stats()["read_damaged"] == 1
    store.close()


def test_damage_under_a_running_store_is_seen(tmp_path: Path) -> None:
    """By default: pages that this process has written, and that are in the page cache still."""
    lab = Lab(tmp_path, 7)
    store = lab.open()
    for _ in range(8):
        segment, faults = lab.spoil_pages()
        with open(lab.segment, "r+b") as file:
            file.write(segment)
            file.truncate(len(segment))
        served = lab.served(store)
        assert wrong(lab, served) == [] and served.keys() == lab.good.keys() - faults.keys()
        with open(lab.segment, "r+b") as file:
            file.truncate(len(lab.bytes))
        lab.put(store, {key: lab.good[key] for key in KEYS})
        assert lab.served(store) == lab.good
        lab.places = {key: store._store.shelf.pages[key].place[1] for key in KEYS}
        lab.bytes = lab.segment.read_bytes()
    store.close()


@pytest.mark.parametrize("verify", ["recovered", "off"])
def test_no_damaged_log_makes_a_wrong_page(tmp_path: Path, verify: str) -> None:
    """Without verification too, unless the log is put back to an earlier state: what slots hold now is not
    what they held then, and only checksums show it."""
    lab = Lab(tmp_path, 8)
    old = {key: page(key, "old") for key in OLDER}
    done: Counter[str] = Counter()
    while done.total() < min(80, NUM_FAULTS):
        log, kind = lab.spoil_log()
        if verify == "off" and kind in ("older log", "cut"):
            continue
        lab.restore(lab.bytes, log)
        store = lab.open(verify=verify)
        served, served_old = lab.served(store), lab.served(store, OLDER)
        store.close()
        assert wrong(lab, served) == [] and not any(served_old[k] != old[k] for k in served_old), kind
        done[kind] += 1
    assert len(done) >= len(LOG_FAULTS) - 2

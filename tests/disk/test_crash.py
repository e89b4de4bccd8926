"""SIGKILL at random moments, a hundred times: what was acknowledged comes back, and nothing else ever does.

What the store should hold is kept in this process, from what the writer says before and after each call.
HIRADIX_CRASH_RUNS=1000 for ten times as many.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hiradix.storage import Batch
from hiradix.storage.backends.disk import DiskBackend
from tests.contracts.storage import key_of
from tests.disk.crash_writer import BATCH, PAGE_BYTES, bytes_of_version
from tests.disk.places import bytes_on_disk, cap_of, open_disk

ROOT = Path(__file__).parents[2]
NUM_RUNS = int(os.environ.get("HIRADIX_CRASH_RUNS", "100")) // 2
TIMEOUT_S = 60.0
Model = dict[int, set[int | None]]
"""By key number: the versions it may have; None stands for absent."""


class Writer:
    """The writer process, and what its children said the store should hold."""

    def __init__(self, place: Path, max_size: int, num_keys: int):
        self.place, self.max_size, self.num_keys = place, max_size, num_keys
        self.model: Model = {number: {None} for number in range(num_keys)}
        self.order: list[int] = []  # numbers whose put ended, the latest last
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        arguments = [str(Path(__file__).with_name("crash_writer.py")), str(place), str(max_size)]
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def run_and_kill(self, seed: int, rng: random.Random) -> None:
        """One child's life. It dies at some moment after some number of lines."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed} {self.num_keys}\n")
        self.process.stdin.flush()
        word, pid = self._line().split()
        assert word == "pid"
        for _ in range(rng.randrange(1, 60)):
            self._note(self._line())
        for _ in range(rng.randrange(10_000)):
            pass
        os.kill(int(pid), signal.SIGKILL)
        while (line := self._line()) != "dead":
            self._note(line)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line and line != "failed", self.close()
        return line

    def _note(self, line: str) -> None:
        when, call, *rest = line.split()
        for word in rest:
            number, _, version = word.partition(":")
            after = int(version) if call == "put" else None
            states = self.model[int(number)]
            self.model[int(number)] = {after} if when == "end" else states | {after}
            if when == "end" and call == "put":
                self.order.append(int(number))
        assert bytes_on_disk(self.place) <= self.max_size

    def close(self) -> str:
        self.process.kill()
        return self.process.communicate(timeout=TIMEOUT_S)[1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Writer]]:
    made: list[Writer] = []

    class Here(Writer):
        def __init__(self, max_size: int, num_keys: int):
            super().__init__(tmp_path, max_size, num_keys)
            made.append(self)

    yield Here  # type: ignore[misc]
    for writer in made:
        writer.close()


def read_all(store: DiskBackend, num_keys: int) -> dict[int, bytes]:
    found = {}
    for start in range(0, num_keys, 64):
        numbers = range(start, min(start + 64, num_keys))
        into = [memoryview(bytearray(PAGE_BYTES)) for _ in numbers]
        answer = store.get(Batch.of([key_of(n) for n in numbers]), [[view] for view in into])
        found |= {n: bytes(view) for n, view, ok in zip(numbers, into, answer) if ok}
    return found


def wrong(model: Model, found: dict[int, bytes]) -> list[int]:
    """Pages that are no version their key may have."""
    return [
        number
        for number, data in found.items()
        if not any(v is not None and data == bytes_of_version(number, v) for v in model[number])
    ]


def test_acknowledged_pages_come_back(
    start: type[Writer], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A store with room for everything: all that was put and not deleted is there, all deleted is not."""
    num_keys = 400
    writer = start(cap_of(2 * num_keys, PAGE_BYTES), num_keys)  # type: ignore[call-arg, arg-type]
    rng, acknowledged, back, slowest_s = random.Random(1), 0, 0, 0.0
    for run in range(NUM_RUNS):
        writer.run_and_kill(run, rng)
        store = open_disk(tmp_path, page_bytes=PAGE_BYTES, max_size=writer.max_size)
        slowest_s = max(slowest_s, store.stats()["open_seconds"])
        found = read_all(store, num_keys)
        store.close()
        assert wrong(writer.model, found) == []
        surely = {number for number, states in writer.model.items() if None not in states}
        acknowledged += len(surely)
        back += len(surely & found.keys())
        for number, states in writer.model.items():  # what is there now is known
            data = found.get(number)
            versions = [v for v in states if v is not None and data == bytes_of_version(number, v)]
            writer.model[number] = {versions[0]} if versions else {None}
        assert bytes_on_disk(tmp_path) <= writer.max_size
    told = f"{NUM_RUNS} kills: {back} of {acknowledged} pages back, slowest opening {slowest_s:.3f} s"
    record_property("told", told)
    assert acknowledged > 10 * NUM_RUNS and back >= 0.99 * acknowledged


def test_killed_while_evicting(
    start: type[Writer], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A full store: the latest pages are there, nothing is wrong, and the cap holds all the time."""
    num_keys, cap_pages = 1000, 200
    writer = start(cap_of(cap_pages, PAGE_BYTES), num_keys)  # type: ignore[call-arg, arg-type]
    rng, expected, back = random.Random(2), 0, 0
    for run in range(NUM_RUNS):
        writer.run_and_kill(run, rng)
        store = open_disk(tmp_path, page_bytes=PAGE_BYTES, max_size=writer.max_size)
        latest = list(dict.fromkeys(reversed(writer.order)))[: cap_pages - 3 * BATCH]
        found = read_all(store, num_keys)
        store.close()
        assert wrong(writer.model, found) == []
        surely = {number for number in latest if None not in writer.model[number]}
        expected += len(surely)
        back += len(surely & found.keys())
        for number in writer.model.keys() - found.keys():
            writer.model[number] = {None}
        writer.order = [number for number in writer.order if number in found]
        assert len(found) <= cap_pages and bytes_on_disk(tmp_path) <= writer.max_size
    record_property("told", f"{NUM_RUNS} kills while evicting: {back} of the latest {expected} pages back")
    assert expected > 10 * NUM_RUNS and back >= 0.99 * expected

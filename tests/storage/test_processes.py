"""Several processes in one directory, and processes that are killed in the middle of writing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiradix.errors import StorageError
from hiradix.storage import Batch
from hiradix.storage.backends.file.backend import FileBackend
from hiradix.storage.backends.file.config import PATH_ENV
from hiradix.storage.backends.file.page_dir import footprint
from hiradix.storage.kit.seal import SEAL_BYTES
from tests.contracts.storage import blank, bytes_of, content, keys_of
from tests.storage.files import bytes_in_ledger, bytes_on_disk, open_file, page_files
from tests.storage.writer import BATCH, PAGE_BYTES

ROOT = Path(__file__).parents[2]
NUM_CRASHES = int(os.environ.get("HIRADIX_CRASH_RUNS", "10"))
FILE_BYTES = footprint(SEAL_BYTES + PAGE_BYTES)
TIMEOUT_S = 60.0
Process = subprocess.Popen[str]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawner]:
    spawner = Spawner(tmp_path)
    yield spawner
    for process in spawner.processes:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


class Spawner:
    """Starts writers in one folder."""

    def __init__(self, place: Path):
        self.place = place
        self.processes: list[Process] = []

    def __call__(self, mode: str, first: int, count: int, max_pages: int = 1000) -> Process:
        environment = {name: value for name, value in os.environ.items() if name != PATH_ENV}
        environment["PYTHONPATH"] = str(ROOT)
        arguments = [str(self.place), mode, str(first), str(count), str(max_pages * FILE_BYTES)]
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("writer.py")), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.processes.append(process)
        return process


def read_line(process: Process) -> str:
    """The writer's next line; pytest's own timeout bounds the wait."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.endswith("\n"), process.communicate(timeout=TIMEOUT_S)[1]
    return line.strip()


def wrong_and_right(store: FileBackend, keys: list[str]) -> tuple[int, int]:
    """How many pages came back wrong, and how many right; the rest are misses."""
    wrong = right = 0
    for start in range(0, len(keys), 16):
        batch = keys[start : start + 16]
        into = [blank(PAGE_BYTES) for _ in batch]
        for key, page, ok in zip(batch, into, store.get(Batch.of(batch), into)):
            same = content(page) == bytes_of(key, PAGE_BYTES)
            right += ok and same
            wrong += ok and not same
    return wrong, right


def test_killed_writers_leave_only_good_pages_and_no_litter(spawn: Spawner, tmp_path: Path) -> None:
    """SIGKILL at a random moment of writing, again and again in one directory. Acks are kept outside."""
    rng = random.Random(7)
    acknowledged: list[str] = []
    for run in range(NUM_CRASHES):
        writer = spawn("once", 1000 * run, 800)
        assert read_line(writer) == "ready"
        for _ in range(rng.randrange(1, 6)):
            acknowledged += read_line(writer).split()
        for _ in range(rng.randrange(20_000)):
            pass
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate(timeout=TIMEOUT_S)[0]
        acknowledged += [
            key for line in rest.splitlines(keepends=True) if line[-1] == "\n" for key in line.split()
        ]
        store = open_file(tmp_path, max_size=1000 * FILE_BYTES)
        wrong, right = wrong_and_right(store, acknowledged[-100:])
        assert (wrong, right) == (0, len(acknowledged[-100:]))
        started = keys_of(8 * BATCH, 1000 * run + rng.randrange(100))
        assert wrong_and_right(store, started)[0] == 0
        assert not list((tmp_path / "tmp").iterdir()), "a dead writer's temporary files"
        assert len(list((tmp_path / "writers").iterdir())) == 1
        assert bytes_in_ledger(tmp_path) == bytes_on_disk(tmp_path)
        store.close()


def test_killed_while_others_write(spawn: Spawner, tmp_path: Path) -> None:
    """A writer dies, the others and a newcomer go on; the count of bytes is never too low."""
    first, second = spawn("forever", 0, 40), spawn("forever", 20, 40)
    for writer in (first, second):
        assert read_line(writer) == "ready"
        read_line(writer)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=TIMEOUT_S)
    newcomer = open_file(tmp_path, max_size=1000 * FILE_BYTES)
    assert wrong_and_right(newcomer, keys_of(60))[0] == 0
    for _ in range(6):
        read_line(second)
    stop_outside_the_lock(second, newcomer)
    with newcomer._room.locked(TIMEOUT_S):
        in_ledger = newcomer._room._ledger.read()
        assert in_ledger is not None and in_ledger >= bytes_on_disk(tmp_path)
    newcomer.close()


def stop_outside_the_lock(writer: Process, store: FileBackend) -> None:
    """Halt a writer at a moment when it does not have the directory's lock."""
    while True:
        writer.send_signal(signal.SIGSTOP)
        try:
            with store._room.locked(0.05):
                return
        except StorageError:
            writer.send_signal(signal.SIGCONT)
            read_line(writer)


def test_same_keys_from_several_processes(spawn: Spawner, tmp_path: Path) -> None:
    writers = [spawn("forever", 0, 32) for _ in range(3)]
    reader = open_file(tmp_path, max_size=1000 * FILE_BYTES)
    for writer in writers:
        assert read_line(writer) == "ready"
    for _ in range(6):
        for writer in writers:
            assert len(read_line(writer).split()) == BATCH, "a put of another writer's key failed"
        assert wrong_and_right(reader, keys_of(32))[0] == 0
    for writer in writers:
        writer.kill()
        assert "wrong bytes" not in writer.communicate(timeout=TIMEOUT_S)[1]
    reader.close()
    again = open_file(tmp_path, max_size=1000 * FILE_BYTES)
    assert wrong_and_right(again, keys_of(32))[0] == 0
    assert bytes_in_ledger(tmp_path) == bytes_on_disk(tmp_path)
    again.close()


def test_cap_holds_over_several_processes(spawn: Spawner, tmp_path: Path) -> None:
    """Two writers of different pages, each with three times the cap; looked at under the lock all the time."""
    watcher = open_file(tmp_path, max_size=20 * FILE_BYTES)
    writers = [spawn("once", 1000 * number, 60, max_pages=20) for number in range(2)]
    num_looks = 0
    while any(writer.poll() is None for writer in writers) or num_looks == 0:
        with watcher._room.locked(TIMEOUT_S):
            assert bytes_on_disk(tmp_path) <= 20 * FILE_BYTES
            in_ledger = watcher._room._ledger.read()
            assert in_ledger is not None and bytes_on_disk(tmp_path) <= in_ledger <= 20 * FILE_BYTES
        num_looks += 1
    for writer in writers:
        assert writer.returncode == 0, writer.communicate(timeout=TIMEOUT_S)[1]
    assert 10 <= len(page_files(tmp_path)) <= 20
    assert bytes_in_ledger(tmp_path) == bytes_on_disk(tmp_path)
    watcher.close()

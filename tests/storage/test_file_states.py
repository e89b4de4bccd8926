"""The file backend against a dict: any mix of calls, restarts, second handles, damage and clearing."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from hiradix.storage.backends.file.backend import FileBackend
from tests.contracts.storage import FINGERPRINT, OTHER
from tests.storage.files import FILE_BYTES, bytes_in_ledger, bytes_on_disk, open_file, page_files
from tests.storage.states import CAP_PAGES, StoreStates, handles


class FileStates(StoreStates):
    """Three handles in one directory: two of one fingerprint, one of another."""

    SPACES = {"ours": "ours", "also ours": "ours", "theirs": "theirs"}

    @initialize()
    def start(self) -> None:
        self.begin()

    def _open(self, name: str) -> FileBackend:
        fingerprint = OTHER if name == "theirs" else FINGERPRINT
        return open_file(self.place, fingerprint, max_size=CAP_PAGES * FILE_BYTES)

    @rule(name=handles)
    def clear(self, name: str) -> None:
        others = {space for space, _ in self.model} - {self.SPACES[name]}
        count = {space: self._count(space) for space in others}
        self.handles[name].clear()
        assert self._count(self.SPACES[name]) == 0
        assert all(self._count(space) == count[space] for space in others)

    @rule(name=handles)
    def reopen(self, name: str) -> None:
        self.handles[name].close()
        self.handles[name] = self._open(name)

    @rule(seed=st.integers(0, 1000))
    def damage(self, seed: int) -> None:
        rng = random.Random(seed)
        paths = page_files(self.place)
        if paths:
            path = rng.choice(paths)
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)

    @rule(seed=st.integers(0, 1000))
    def cut_and_count_again(self, seed: int) -> None:
        """A truncated file is found, and space that vanished is only missing from the safe side."""
        paths = page_files(self.place)
        if paths:
            path = random.Random(seed).choice(paths)
            path.write_bytes(path.read_bytes()[:-1])

    @rule(seed=st.integers(0, 1000))
    def misplace(self, seed: int) -> None:
        """A page's file in another key's folder: nobody finds it, and it takes room until it goes."""
        rng = random.Random(seed)
        paths = page_files(self.place)
        if paths:
            path = rng.choice(paths)
            target = path.parents[2] / rng.choice("0123456789abcdef") / rng.choice("0123456789abcdef")
            target.mkdir(parents=True, exist_ok=True)
            if not (target / path.name).exists():
                path.rename(target / path.name)

    @invariant()
    def cap_holds_and_every_byte_is_counted(self) -> None:
        on_disk = bytes_on_disk(self.place)
        assert on_disk == bytes_in_ledger(self.place), "ledger"
        assert on_disk <= CAP_PAGES * FILE_BYTES, "cap"

    def _count(self, space: str) -> int:
        return len(page_files(self.place / self.handles[space]._folder.namespace))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)


TestFileStates = FileStates.TestCase
TestFileStates.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)

"""The file backend against a dict: any mix of calls, restarts, second handles, damage and clearing."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hiradix.storage.file import FileBackend
from tests.contracts.storage import FINGERPRINT, OTHER, blank, content, key_of
from tests.storage.files import FILE_BYTES, bytes_in_ledger, bytes_on_disk, open_file, page_files

CAP_PAGES = 6
KEYS = [key_of(number) for number in range(9)]
batches = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
handles = st.sampled_from(["ours", "also ours", "theirs"])


class FileStates(RuleBasedStateMachine):
    """Three handles in one directory: two of one fingerprint, one of another. The model: what was put last.
    """

    @initialize()
    def start(self) -> None:
        self.place = Path(tempfile.mkdtemp())
        self.model: dict[tuple[str, str], bytes] = {}
        self.version = 0
        self.handles = {name: self._open(name) for name in ("ours", "also ours", "theirs")}

    def _open(self, name: str) -> FileBackend:
        fingerprint = OTHER if name == "theirs" else FINGERPRINT
        return open_file(self.place, fingerprint, max_size=CAP_PAGES * FILE_BYTES)

    @rule(name=handles, keys=batches)
    def put(self, name: str, keys: list[str]) -> None:
        self.version += 1
        data = {key: random.Random(f"{key} {self.version} {name}").randbytes(6000) for key in keys}
        there = {key: self._read(name, key) for key in keys}
        ok = self.handles[name].put(keys, [[memoryview(data[key])] for key in keys])
        assert all(ok), "everything fits, and what is evicted is not of this batch"
        for key in keys:
            before = there[key]
            self.model[self._space(name), key] = data[key] if before is None else before
            assert self._read(name, key) == self.model[self._space(name), key]

    @rule(name=handles, keys=batches)
    def get(self, name: str, keys: list[str]) -> None:
        into = [blank() for _ in keys]
        for key, page, ok in zip(keys, into, self.handles[name].get(keys, into)):
            assert not ok or content(page) == self.model[self._space(name), key]

    @rule(name=handles, keys=batches)
    def exists(self, name: str, keys: list[str]) -> None:
        self.handles[name].get(keys, [blank() for _ in keys])  # so that it knows what is gone
        found = self.handles[name].exists(keys)
        assert all(self._read(name, key) is not None for key in keys[:found])
        assert found == len(keys) or self._read(name, keys[found]) is None

    @rule(name=handles, keys=batches)
    def delete(self, name: str, keys: list[str]) -> None:
        self.handles[name].delete(keys)
        assert all(self._read(name, key) is None for key in keys)

    @rule(name=handles)
    def clear(self, name: str) -> None:
        others = {space for space, _ in self.model} - {self._space(name)}
        count = {space: self._count(space) for space in others}
        self.handles[name].clear()
        assert self._count(self._space(name)) == 0
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

    @invariant()
    def cap_holds_and_every_byte_is_counted(self) -> None:
        on_disk = bytes_on_disk(self.place)
        assert on_disk == bytes_in_ledger(self.place), "ledger"
        assert on_disk <= CAP_PAGES * FILE_BYTES, "cap"

    def _space(self, name: str) -> str:
        return "theirs" if name == "theirs" else "ours"

    def _read(self, name: str, key: str) -> bytes | None:
        page = blank()
        return content(page) if self.handles[name].get([key], [page]) == [True] else None

    def _count(self, space: str) -> int:
        return len(page_files(self.place / self.handles[space]._folder.namespace))

    def teardown(self) -> None:
        for handle in self.handles.values():
            handle.close()
        shutil.rmtree(self.place)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)


TestFileStates = FileStates.TestCase
TestFileStates.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)

"""What a store on a disk does as a state machine against a dict; each backend adds restarts and damage."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hiradix.storage import StorageBackend
from tests.contracts.storage import PAGE_BYTES, blank, content

handles = st.runner().flatmap(lambda machine: st.sampled_from(list(machine.SPACES)))
batches = st.runner().flatmap(
    lambda machine: st.lists(st.sampled_from(machine.KEYS), min_size=1, max_size=4, unique=True)
)


class StoreStates(RuleBasedStateMachine):
    """Several handles in one directory. The model is what was put last, by space: handles that share pages.

    Subclasses say how a handle is opened, and what the answers of a put may be.
    """

    KEYS: Sequence[str]
    SPACES: Mapping[str, str]
    """By handle: its space."""
    PAGE_BYTES: Mapping[str, int] = {}
    """By handle, where it is not the contract's."""

    def begin(self) -> None:
        self.place = Path(tempfile.mkdtemp())
        self.model: dict[tuple[str, str], bytes] = {}
        self.version = 0
        self.handles: dict[str, Any] = {name: self._open(name) for name in self.SPACES}

    def _open(self, name: str) -> StorageBackend:
        raise NotImplementedError

    def _check_put(self, ok: list[bool], there: list[bytes | None]) -> None:
        """ok: the answers. there: what was stored before."""
        raise NotImplementedError

    @rule(name=handles, keys=batches)
    def put(self, name: str, keys: list[str]) -> None:
        self.version += 1
        size = self._page_bytes(name)
        data = {key: random.Random(f"{key} {self.version} {name}").randbytes(size) for key in keys}
        there = {key: self._read(name, key) for key in keys}
        ok = self.handles[name].put(keys, [[memoryview(data[key])] for key in keys])
        self._check_put(ok, list(there.values()))
        for key, stored in zip(keys, ok, strict=True):
            before = there[key]
            if stored:
                self.model[self.SPACES[name], key] = data[key] if before is None else before
                assert self._read(name, key) == self.model[self.SPACES[name], key]

    @rule(name=handles, keys=batches)
    def get(self, name: str, keys: list[str]) -> None:
        into = [blank(self._page_bytes(name)) for _ in keys]
        for key, page, ok in zip(keys, into, self.handles[name].get(keys, into)):
            assert not ok or content(page) == self.model[self.SPACES[name], key]

    @rule(name=handles, keys=batches)
    def exists(self, name: str, keys: list[str]) -> None:
        into = [blank(self._page_bytes(name)) for _ in keys]
        self.handles[name].get(keys, into)  # so that it knows what is gone
        found = self.handles[name].exists(keys)
        assert all(self._read(name, key) is not None for key in keys[:found])
        assert found == len(keys) or self._read(name, keys[found]) is None

    @rule(name=handles, keys=batches)
    def delete(self, name: str, keys: list[str]) -> None:
        self.handles[name].delete(keys)
        assert all(self._read(name, key) is None for key in keys)

    def _page_bytes(self, name: str) -> int:
        return self.PAGE_BYTES.get(name, PAGE_BYTES)

    def _read(self, name: str, key: str) -> bytes | None:
        page = blank(self._page_bytes(name))
        return content(page) if self.handles[name].get([key], [page]) == [True] else None

    def teardown(self) -> None:
        for handle in self.handles.values():
            handle.close()
        shutil.rmtree(self.place)

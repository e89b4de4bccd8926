"""What a store with a cap does as a state machine against a dict; each backend adds restarts and damage.

Keys are those of chains that part: a page's name depends on all before it, so it has one page in front of it.
What a store does with names that are no chain's is in `tests.contracts.chains`.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hiradix.storage import Batch, StorageBackend
from tests.contracts.chains import chain_keys, in_chain
from tests.contracts.storage import PAGE_BYTES, blank, content

CAP_PAGES = 6
CHAINS = [chain_keys(path) for path in ([0] * 8, [0, 1, 1, 1], [0, 0, 0, 1, 1])]
CHAINS.append([*chain_keys([1, 1]), "a.short-key"])
"""They part behind one page and behind three; the first is longer than the room, the last by itself."""
KEYS = list(dict.fromkeys(key for chain in CHAINS for key in chain))


@dataclass(frozen=True)
class Part:
    """Some pages of a chain. before: those in front of them, and whether the store is told."""

    keys: list[str]
    before: list[str]
    is_told: bool

    @property
    def front(self) -> str:
        return self.before[-1] if self.is_told and self.before else ""


@st.composite
def _parts(draw: st.DrawFn) -> Part:
    chain = draw(st.sampled_from(CHAINS))
    start = draw(st.integers(0, len(chain) - 1))
    end = draw(st.integers(start + 1, min(len(chain), start + 5)))
    return Part(chain[start:end], chain[:start], draw(st.booleans()))


handles = st.runner().flatmap(lambda machine: st.sampled_from(list(machine.SPACES)))
parts = _parts()


class StoreStates(RuleBasedStateMachine):
    """Several handles in one directory. The model is what was put last, by space: handles that share pages.

    Subclasses say how a handle is opened.
    """

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

    def _room(self, name: str) -> int:
        """How many pages a handle's store is sure to have room for, whatever else is in it."""
        return CAP_PAGES

    @rule(name=handles, part=parts)
    def put(self, name: str, part: Part) -> None:
        """All that is there stays. Of the rest the head is stored: as much as there is room for behind what
        is in front of it, since a chain longer than its room keeps its head."""
        keys = part.keys
        self.version += 1
        size = self._page_bytes(name)
        data = {key: random.Random(f"{key} {self.version} {name}").randbytes(size) for key in keys}
        there = {key: self._read(name, key) for key in keys}
        num_before = sum(self.handles[name].exists(Batch.of([key])) for key in part.before)
        is_behind, front = bool(part.front) and self._read(name, part.front) is not None, [part.front]

        def put(store: Any, batch: Batch) -> list[bool]:
            answer: list[bool] = store.put(batch, [[memoryview(data[key])] for key in batch])
            return answer

        ok = in_chain(put, self.handles[name], keys, part.front)
        assert all(stored for key, stored in zip(keys, ok, strict=True) if there[key] is not None)
        new = [stored for key, stored in zip(keys, ok) if there[key] is None]
        assert new == sorted(new, reverse=True), "a page behind one that was refused"
        assert ok.count(True) >= min(len(keys), self._room(name) - num_before), "there was room"
        assert not is_behind or self.handles[name].exists(Batch.of(front)), "the page in front left for it"
        for key, stored in zip(keys, ok, strict=True):
            before = there[key]
            if stored:
                self.model[self.SPACES[name], key] = data[key] if before is None else before
                assert self._read(name, key) == self.model[self.SPACES[name], key]

    @rule(name=handles, part=parts)
    def get(self, name: str, part: Part) -> None:
        into = [blank(self._page_bytes(name)) for _ in part.keys]
        got = in_chain(lambda store, batch: store.get(batch, into), self.handles[name], part.keys, part.front)
        for key, page, ok in zip(part.keys, into, got, strict=True):
            assert not ok or content(page) == self.model[self.SPACES[name], key]

    @rule(name=handles, part=parts)
    def exists(self, name: str, part: Part) -> None:
        keys = part.keys
        into = [blank(self._page_bytes(name)) for _ in keys]
        self.handles[name].get(Batch.of(keys), into)  # so that it knows what is gone
        found = self.handles[name].exists(Batch.of(keys))
        assert all(self._read(name, key) is not None for key in keys[:found])
        assert found == len(keys) or self._read(name, keys[found]) is None

    @rule(name=handles, part=parts)
    def delete(self, name: str, part: Part) -> None:
        self.handles[name].delete(part.keys)
        assert all(self._read(name, key) is None for key in part.keys)

    def _page_bytes(self, name: str) -> int:
        return self.PAGE_BYTES.get(name, PAGE_BYTES)

    def _read(self, name: str, key: str) -> bytes | None:
        page = blank(self._page_bytes(name))
        return content(page) if self.handles[name].get(Batch.of([key]), [page]) == [True] else None

    def teardown(self) -> None:
        for handle in self.handles.values():
            handle.close()
        shutil.rmtree(self.place)

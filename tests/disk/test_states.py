"""The disk backend against a dict: any mix of calls, handles, restarts, damage, new logs and clearing."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from hiradix.storage.backends.disk import DiskBackend
from tests.contracts.storage import FINGERPRINT, OTHER
from tests.disk.places import MODES, bytes_on_disk, cap_of, log_file, open_disk, segment_files
from tests.storage.states import CAP_PAGES, KEYS, StoreStates, handles


class DiskStates(StoreStates):
    """Four handles in one directory: two of one fingerprint, one of another, one with slots of another size.

    After damage pages may be missing, never wrong.
    """

    SPACES = {"ours": "ours", "also ours": "ours", "theirs": "theirs", "longer pages": "longer"}
    PAGE_BYTES = {"longer pages": 8192 + 512}

    @initialize(mode=st.sampled_from(sorted(MODES)))
    def start(self, mode: str) -> None:
        self.mode, self.is_mixed = MODES[mode], False
        self.begin()

    def _open(self, name: str) -> DiskBackend:
        fingerprint = FINGERPRINT if self.SPACES[name] == "ours" else OTHER
        config = self.mode | {"max_size": cap_of(CAP_PAGES), "touch_interval_s": 0.0}
        return open_disk(self.place, fingerprint, page_bytes=self._page_bytes(name), **config)

    def _room(self, name: str) -> int:
        """Slots of one length leave room for those of another only when they are cold, and in whole segments."""
        self.is_mixed = self.is_mixed or name == "longer pages"
        return 1 if self.is_mixed else CAP_PAGES

    @rule(name=handles)
    def clear(self, name: str) -> None:
        before = self._pages_of_others(name)
        self.handles[name].clear()
        assert all(self._read(name, key) is None for key in KEYS)
        assert self._pages_of_others(name) == before

    @rule(name=handles)
    def reopen(self, name: str) -> None:
        before = {key: self._read(name, key) for key in KEYS}
        self.handles[name].close()
        self.handles[name] = self._open(name)
        assert {key: self._read(name, key) for key in KEYS} == before

    @rule(name=handles)
    def rewrite_the_log(self, name: str) -> None:
        store = self.handles[name]._store
        before = {key: self._read(name, key) for key in KEYS}
        with store.locked(), store.mutex:
            store._log.rewrite()
        assert {key: self._read(name, key) for key in KEYS} == before

    @rule(seed=st.integers(0, 1000))
    def damage_pages_then_restart_all(self, seed: int) -> None:
        rng = random.Random(seed)
        for path in segment_files(self.place):
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        self._restart_all()

    @rule(seed=st.integers(0, 1000), kind=st.sampled_from(["flip", "cut", "garbage", "double"]))
    def damage_the_log_then_restart_all(self, seed: int, kind: str) -> None:
        rng = random.Random(seed)
        data = bytearray(log_file(self.place).read_bytes())
        if kind == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[rng.randrange(len(data)) :]
        elif kind == "garbage":
            data += rng.randbytes(rng.randrange(200))
        else:
            at = rng.randrange(len(data) // 96) * 96
            data += data[at : at + 96]
        log_file(self.place).write_bytes(data)
        self._restart_all()

    @rule(seed=st.integers(0, 1000))
    def lose_a_segment_then_restart_all(self, seed: int) -> None:
        paths = segment_files(self.place)
        if paths:
            path = random.Random(seed).choice(paths)
            if seed % 2:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:-1])
        self._restart_all()

    @invariant()
    def cap_holds(self) -> None:
        assert bytes_on_disk(self.place) <= cap_of(CAP_PAGES)

    @invariant()
    def all_handles_agree(self) -> None:
        """Every handle that has read the log knows the same pages in the same slots."""
        seen = []
        for handle in self.handles.values():
            with handle._store.mutex:
                handle._store.refresh()
                index = handle._store.index
                seen.append({place: entry.version for place, entry in index.by_place.items()})
                for slot_bytes, shelf in index.shelves.items():
                    segments = index.segments.items()
                    slots = sum(info.num_slots for _, info in segments if info.slot_bytes == slot_bytes)
                    assert len(shelf.pages) + len(shelf.free) == slots
                    assert shelf.labels == set(shelf.pages)
                    assert not shelf.free & index.by_place.keys()
        assert all(pages == seen[0] for pages in seen)

    def _restart_all(self) -> None:
        for name, handle in self.handles.items():
            handle._closed = True  # as if killed: nothing is written any more
            handle._store.close()
            handle._io.close()
            self.handles[name] = self._open(name)

    def _pages_of_others(self, name: str) -> int:
        store = self.handles[name]._store
        with store.mutex:
            store.refresh()
            own = store._namespace
            return sum(entry.namespace != own for entry in store.index.by_place.values())


TestDiskStates = DiskStates.TestCase
TestDiskStates.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

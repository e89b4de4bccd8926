"""The s3 backend over obstore's store in memory: what leaves when it is full, and any mix of calls."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

pytest.importorskip("obstore", reason="pip install 'hiradix[s3]'")

from obstore.store import MemoryStore

from hiradix.storage import PageFingerprint, StorageContext
from hiradix.storage.backends.s3 import backend as s3_backend
from hiradix.storage.backends.s3.backend import S3Backend
from tests.contracts.chains import ChainContract
from tests.contracts.storage import FINGERPRINT, OTHER, PAGE_BYTES, Make, hits, keys_of, put
from tests.storage.states import CAP_PAGES, StoreStates, handles


def open_in_memory(
    objects: MemoryStore, fingerprint: PageFingerprint = FINGERPRINT, **config: Any
) -> S3Backend:
    """A backend whose bucket is `objects`."""
    keys = {"url": "s3://bucket/x", "num_connections": 2} | config
    with mock.patch.object(s3_backend, "connect", lambda config: objects):
        return S3Backend(StorageContext(fingerprint, keys, PAGE_BYTES))


class TestChains(ChainContract):
    @pytest.fixture(autouse=True)
    def _bucket(self) -> None:
        self.objects = MemoryStore()

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> S3Backend:
        return open_in_memory(self.objects, fingerprint, **config)

    def bounded(self, make: Make, pages: int) -> Any:
        return make(max_size=pages * PAGE_BYTES)

    def used_pages(self, place: Path) -> int:
        return sum(len(part) for part in self.objects.list())


class S3States(StoreStates):
    """Two fingerprints in one bucket, each with a cap of its own and one process; objects vanish."""

    SPACES = {"ours": "ours", "theirs": "theirs"}

    @initialize()
    def start(self) -> None:
        self.objects = MemoryStore()
        self.begin()

    def _open(self, name: str) -> S3Backend:
        fingerprint = OTHER if name == "theirs" else FINGERPRINT
        return open_in_memory(self.objects, fingerprint, max_size=CAP_PAGES * PAGE_BYTES)

    @rule(name=handles)
    def clear(self, name: str) -> None:
        others = {other: self._count(other) for other in self.SPACES if other != name}
        self.handles[name].clear()
        assert self._count(name) == 0
        assert all(self._count(other) == count for other, count in others.items())

    @rule(name=handles)
    def reopen(self, name: str) -> None:
        self.handles[name].close()
        self.handles[name] = self._open(name)

    @rule(name=handles, seed=st.integers(0, 1000))
    def a_lifecycle_rule_takes_one(self, name: str, seed: int) -> None:
        """Or another process does: this one is not told."""
        found = sorted(entry["path"] for entry in self.handles[name]._list())
        if found:
            self.objects.delete(random.Random(seed).choice(found))

    @invariant()
    def cap_holds_and_every_object_is_counted(self) -> None:
        for name, handle in self.handles.items():
            assert self._count(name) <= min(CAP_PAGES, handle.stats()["files"])

    def _count(self, name: str) -> int:
        return len(self.handles[name]._list())


TestS3States = S3States.TestCase
TestS3States.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_an_object_that_vanished_takes_no_room_when_its_page_is_put_again() -> None:
    """Its own ghost was counted beside it, and could not leave since it is of the call."""
    objects = MemoryStore()
    store, keys = open_in_memory(objects, max_size=4 * PAGE_BYTES), keys_of(4)
    assert all(put(store, keys))
    objects.delete(store._path(keys[3]))
    assert put(store, keys) == [True] * 4 == hits(store, keys)
    assert store.stats()["used_bytes"] == 4 * PAGE_BYTES
    store.close()

"""The conformance suite on the disk backend: every way of doing I/O, every way of verifying, and guarded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import GuardedStorage, PageFingerprint, open_storage
from hiradix.storage.backends.disk import DiskBackend
from tests.contracts.chains import ChainContract
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    BoundedContract,
    Make,
    NamespaceContract,
    PersistentContract,
    SharedContract,
    SharedQuotaContract,
    StorageContract,
)
from tests.disk.places import MODES, cap_of, context, open_disk


class DiskStore:
    """What all of them share."""

    mode: dict[str, Any] = {}

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        return open_disk(place, fingerprint, **self.mode, **config)

    def bounded(self, make: Make, pages: int) -> Any:
        return make(max_size=cap_of(pages))

    def used_pages(self, place: Path) -> int:
        store = open_disk(place)
        num_pages = int(store.stats()["pages"])
        store.close()
        return num_pages


class TestUringDirect(
    DiskStore, StorageContract, PersistentContract, NamespaceContract, SharedContract, BoundedContract
):
    mode = MODES["io_uring, O_DIRECT"]


class TestUringAskingTheCache(
    DiskStore, StorageContract, PersistentContract, NamespaceContract, SharedContract, BoundedContract
):
    mode = MODES["io_uring, page cache asked"]


class TestThreadsDirect(DiskStore, StorageContract, PersistentContract, SharedContract):
    mode = MODES["threads, O_DIRECT"]


class TestThreadsBuffered(DiskStore, StorageContract, PersistentContract, SharedContract, BoundedContract):
    mode = MODES["threads, buffered"]


class TestUringBuffered(DiskStore, StorageContract, PersistentContract, SharedContract):
    mode = MODES["io_uring, buffered"]


class TestVerifyAlways(DiskStore, StorageContract, PersistentContract, SharedContract, BoundedContract):
    mode = {"verify": "always"}


class TestVerifyOff(
    DiskStore, StorageContract, PersistentContract, NamespaceContract, SharedContract, BoundedContract
):
    mode = {"verify": "off"}


class TestFsync(DiskStore, StorageContract, PersistentContract):
    mode = {"fsync": True}


class TestChains(DiskStore, ChainContract):
    mode = MODES["threads, buffered"]


class TestGuardedChains(DiskStore, ChainContract):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        keys = {"deadline_s": 30.0, "staging_size": 2 * PAGE_BYTES} | config
        return open_storage("disk", context(place, fingerprint, PAGE_BYTES, **keys))


class TestGuarded(
    DiskStore,
    StorageContract,
    PersistentContract,
    NamespaceContract,
    SharedContract,
    BoundedContract,
    SharedQuotaContract,
):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        return open_storage("disk", context(place, fingerprint, PAGE_BYTES, deadline_s=30.0, **config))


@pytest.mark.parametrize("name", MODES)
def test_the_mode_is_what_was_asked_for(name: str, tmp_path: Path) -> None:
    store = open_disk(tmp_path, **MODES[name])
    figures = store.stats()
    assert figures["io_uring"] == name.startswith("io_uring")
    assert figures["direct_io"] == (not name.endswith("buffered"))
    store.close()


def test_backend_is_known_by_name() -> None:
    from hiradix.storage import load_storage_backend

    assert load_storage_backend("disk") is DiskBackend

"""The conformance suite on the file backend, on memory, and on both behind their guard."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import GuardedStorage, GuardLimits, PageFingerprint, StorageContext, open_storage
from hiradix.storage.backends.file.backend import FileBackend
from hiradix.storage.backends.file.page_dir import footprint
from hiradix.storage.kit.seal import SEAL_BYTES
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
from tests.storage.doubles import FaultyBackend, InPlaceMemory, MemoryBackend

FILE_BYTES = footprint(SEAL_BYTES + PAGE_BYTES)
PATIENT = {"deadline_s": 30.0, "lock_timeout_s": 30.0}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)


def file_context(place: Path, fingerprint: PageFingerprint, config: dict[str, Any]) -> StorageContext:
    keys = {"file_storage_path": str(place / "store"), "min_free_space": 0, "lock_timeout_s": 30.0} | config
    return StorageContext(fingerprint, keys, PAGE_BYTES)


class FileBounds:
    def bounded(self, make: Make, pages: int) -> Any:
        return make(max_size=pages * FILE_BYTES)

    def used_pages(self, place: Path) -> int:
        return sum(1 for _ in (place / "store").rglob("*.page"))


class TestFile(
    FileBounds, StorageContract, PersistentContract, NamespaceContract, SharedContract, BoundedContract
):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> FileBackend:
        return FileBackend(file_context(place, fingerprint, config))


class TestFileChains(FileBounds, ChainContract):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> FileBackend:
        return FileBackend(file_context(place, fingerprint, config))


class TestGuardedFileChains(FileBounds, ChainContract):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        cut = {"staging_size": 2 * PAGE_BYTES}
        return open_storage("file", file_context(place, fingerprint, PATIENT | cut | config))


class TestGuardedFile(
    FileBounds,
    StorageContract,
    PersistentContract,
    NamespaceContract,
    SharedContract,
    BoundedContract,
    SharedQuotaContract,
):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        return open_storage("file", file_context(place, fingerprint, PATIENT | config))


class MemoryStore:
    """One dict of places for each test."""

    places: dict[str, OrderedDict[str, bytes]]

    @pytest.fixture(autouse=True)
    def _fresh(self) -> None:
        self.places = {}

    def bounded(self, make: Make, pages: int) -> Any:
        return make(max_pages=pages)

    def used_pages(self, place: Path) -> int:
        return len(self.places[str(place)])

    def backend(self, place: Path, fingerprint: PageFingerprint, config: dict[str, Any]) -> MemoryBackend:
        return MemoryBackend(
            StorageContext(fingerprint, {"place": str(place)} | config, PAGE_BYTES), self.places
        )


class TestMemory(
    MemoryStore, StorageContract, PersistentContract, NamespaceContract, SharedContract, BoundedContract
):
    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> MemoryBackend:
        return self.backend(place, fingerprint, {"own_prefix": True} | config)


class TestGuardedMemory(MemoryStore, StorageContract, PersistentContract, SharedContract, BoundedContract):
    """The guard separates fingerprints by key, and seals the pages. `clear` of such a backend takes all."""

    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        backend = FaultyBackend(self.backend(place, fingerprint, config))
        return GuardedStorage(backend, fingerprint, GuardLimits(deadline_s=30.0))


class TestGuardedLanding(MemoryStore, StorageContract, PersistentContract, SharedContract):
    """Pages that are filled in place."""

    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        context = StorageContext(fingerprint, {"place": str(place)} | config, PAGE_BYTES)
        return GuardedStorage(InPlaceMemory(context, self.places), fingerprint, GuardLimits(deadline_s=30.0))


class TestGuardedInPieces(MemoryStore, StorageContract):
    """Staging memory shorter than three pages: every batch passes in pieces."""

    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        limits = GuardLimits(deadline_s=30.0, staging_bytes=3 * PAGE_BYTES)
        return GuardedStorage(self.backend(place, fingerprint, config), fingerprint, limits)

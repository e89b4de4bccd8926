"""Opening the file backend in tests, and looking at its directory from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hiradix.storage import PageFingerprint, StorageContext
from hiradix.storage.backends.file.backend import FileBackend
from hiradix.storage.backends.file.ledger import Ledger
from hiradix.storage.backends.file.page_dir import footprint
from hiradix.storage.kit.seal import SEAL_BYTES
from tests.contracts.storage import FINGERPRINT, PAGE_BYTES

FILE_BYTES = footprint(SEAL_BYTES + PAGE_BYTES)
"""What one page of PAGE_BYTES counts for."""


def context(place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> StorageContext:
    keys = {"file_storage_path": str(place), "min_free_space": 0, "lock_timeout_s": 30.0} | config
    return StorageContext(fingerprint, keys, PAGE_BYTES)


def open_file(
    place: Path,
    fingerprint: PageFingerprint = FINGERPRINT,
    time_ns: Callable[[], int] | None = None,
    **config: Any,
) -> FileBackend:
    made = context(place, fingerprint, **config)
    return FileBackend(made) if time_ns is None else FileBackend(made, time_ns)


def page_files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.page"))


def path_of(place: Path, key: str) -> Path:
    (found,) = place.rglob(f"{key}.page")
    return found


def bytes_on_disk(place: Path) -> int:
    """What page and temporary files count for, as an outsider sees it."""
    files = [*page_files(place), *(place / "tmp").iterdir()]
    return sum(footprint(path.stat().st_size) for path in files)


def bytes_in_ledger(place: Path) -> int:
    ledger = Ledger(place / "hiradix.lock")
    with ledger.locked(30.0):
        num_bytes = ledger.read()
    ledger.close()
    assert num_bytes is not None, "no byte count"
    return num_bytes

"""Opening the disk backend in tests, and looking at its directory from outside."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hiradix.storage import PageFingerprint, StorageContext
from hiradix.storage.backends.disk import DiskBackend, size_for
from tests.contracts.storage import FINGERPRINT, PAGE_BYTES

MODES: dict[str, dict[str, Any]] = {
    "io_uring, O_DIRECT": {"io_engine": "io_uring", "direct_io": "on", "direct_writes": True},
    "io_uring, page cache asked": {"io_engine": "io_uring", "direct_io": "on"},
    "threads, O_DIRECT": {"io_engine": "threads", "direct_io": "on", "use_page_cache": False},
    "threads, buffered": {"io_engine": "threads", "direct_io": "off"},
    "io_uring, buffered": {"io_engine": "io_uring", "direct_io": "off"},
}


def context(
    place: Path, fingerprint: PageFingerprint = FINGERPRINT, page_bytes: int = PAGE_BYTES, **config: Any
) -> StorageContext:
    keys = {
        "disk_storage_path": str(place / "store"), "max_size": 16 << 20, "min_free_space": 0,
        "lock_timeout_s": 30.0,
    } | config  # fmt: skip
    return StorageContext(fingerprint, keys, page_bytes)


def open_disk(
    place: Path,
    fingerprint: PageFingerprint = FINGERPRINT,
    time_ns: Callable[[], int] | None = None,
    page_bytes: int = PAGE_BYTES,
    **config: Any,
) -> DiskBackend:
    made = context(place, fingerprint, page_bytes, **config)
    return DiskBackend(made) if time_ns is None else DiskBackend(made, time_ns)


def cap_of(num_pages: int, page_bytes: int = PAGE_BYTES) -> int:
    return size_for(num_pages, page_bytes)


def bytes_on_disk(place: Path) -> int:
    """What the directory takes, as the file system counts it; never less than the files' lengths."""
    total = 0
    for entry in os.scandir(place / "store"):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        total += max(status.st_blocks * 512, status.st_size)
    return total


def segment_files(place: Path) -> list[Path]:
    return sorted((place / "store").glob("segment-*.pages"))


def log_file(place: Path) -> Path:
    return place / "store" / "log"

"""Keys of the `disk` backend. `docs/storage-keys.md` lists them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiradix.errors import ConfigError
from hiradix.storage.backends.disk.log import RECORDS_PER_SLOT
from hiradix.storage.backends.disk.moves import ALIGNMENT
from hiradix.storage.backends.disk.record import RECORD_BYTES
from hiradix.storage.kit.options import MAX_TIMEOUT_S, Options, flag

PATH_KEY = "disk_storage_path"
VERIFY = ("always", "recovered", "off")
ENGINES = ("auto", "io_uring", "threads")
MAX_PAGE_BYTES = 1 << 30
MAX_SEGMENT_BYTES, MIN_SEGMENTS = 1 << 30, 16
OVERHEAD_BYTES = 512 << 10
"""Part of the cap for the lock, file system blocks of small files, and the log of an empty store."""
SLOT_OVERHEAD_BYTES = (RECORDS_PER_SLOT + 2) * RECORD_BYTES
"""Part of the cap for each slot's records: in the longest log, and in the new one beside it."""


def default_path() -> str:
    """The user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(base, "hiradix", "disk")


def slot_bytes(page_bytes: int) -> int:
    """What a page of `page_bytes` takes in a segment."""
    return -(-page_bytes // ALIGNMENT) * ALIGNMENT


def size_for(num_pages: int, page_bytes: int) -> int:
    """The `max_size` with room for exactly `num_pages` pages."""
    return OVERHEAD_BYTES + num_pages * (slot_bytes(page_bytes) + SLOT_OVERHEAD_BYTES)


@dataclass(frozen=True)
class DiskConfig:
    """Where pages go, how much room they may take, and how they are read.

    max_bytes: cap on everything below `path`, of all models and processes together. min_free_bytes: what
    must stay free on the file system. verify: when a page's checksum is computed on reading; `always`, or
    `recovered`: once for each page this process did not write itself. engine, direct: "auto" and None choose
    what works.
    """

    path: Path
    max_bytes: int = 32 << 30
    min_free_bytes: int = 1 << 30
    max_segment_bytes: int = MAX_SEGMENT_BYTES
    verify: str = "always"
    engine: str = "auto"
    direct: bool | None = None
    direct_writes: bool = False
    use_cache: bool = True
    num_threads: int = 4
    touch_interval_s: float = 60.0
    lock_timeout_s: float = 1.0
    fsync: bool = False

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> DiskConfig:
        """Reads and checks the keys; raises ConfigError naming the bad one."""
        options, default = Options(values), DiskConfig
        path = options.text(PATH_KEY, default_path())
        if not path:
            raise ConfigError(f"{flag(PATH_KEY)} is empty")
        direct = options.choice("direct_io", "auto", ("auto", "on", "off"))
        verify = options.choice("verify", default.verify, VERIFY)
        config = DiskConfig(
            path=Path(path).expanduser().absolute(),
            max_bytes=options.size("max_size", default.max_bytes),
            min_free_bytes=options.size("min_free_space", default.min_free_bytes),
            max_segment_bytes=options.size("segment_size", default.max_segment_bytes),
            verify=verify if options.boolean("checksum", True) else "off",
            engine=options.choice("io_engine", default.engine, ENGINES),
            direct=None if direct == "auto" else direct == "on",
            direct_writes=options.boolean("direct_writes", default.direct_writes),
            use_cache=options.boolean("use_page_cache", default.use_cache),
            num_threads=options.integer("io_threads", default.num_threads, 1),
            touch_interval_s=options.seconds("touch_interval_s", default.touch_interval_s),
            lock_timeout_s=options.seconds(
                "lock_timeout_s", default.lock_timeout_s, maximum=MAX_TIMEOUT_S
            ),
            fsync=options.boolean("fsync", default.fsync),
        )
        options.finish("disk")
        return config

    def check_page(self, page_bytes: int) -> None:
        """Raises ConfigError when pages of `page_bytes` are too long, or not even one fits under the cap."""
        if page_bytes > MAX_PAGE_BYTES:
            raise ConfigError(f"a page of {page_bytes} bytes is longer than {MAX_PAGE_BYTES}")
        needed = size_for(1, page_bytes)
        if needed > self.max_bytes:
            raise ConfigError(
                f"{flag('max_size')} {self.max_bytes} is less than one page with its overhead, {needed} bytes"
            )

    def segment_slots(self, slot_size: int) -> int:
        """Slots of a new segment: at least one, and at most a sixteenth of the cap."""
        return max(1, min(self.max_segment_bytes, self.max_bytes // MIN_SEGMENTS) // slot_size)

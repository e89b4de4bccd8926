"""Keys of the `disk` backend. `docs/storage-keys.md` lists them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hiradix.errors import ConfigError
from hiradix.settings import MAX_COUNT, MAX_TIMEOUT_S, OPEN, OverHttp, Type, setting
from hiradix.storage.backends.disk.log import RECORDS_PER_SLOT
from hiradix.storage.backends.disk.moves import ALIGNMENT
from hiradix.storage.backends.disk.record import RECORD_BYTES
from hiradix.storage.kit.options import CHECKSUM, flag, read_keys

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
    """Bytes of a slot for a page of `page_bytes`."""
    return -(-page_bytes // ALIGNMENT) * ALIGNMENT


def size_for(num_pages: int, page_bytes: int) -> int:
    """The `max_size` with room for exactly `num_pages` pages."""
    return OVERHEAD_BYTES + num_pages * (slot_bytes(page_bytes) + SLOT_OVERHEAD_BYTES)


def _checked_path(text: str) -> Path:
    if not text:
        raise ConfigError(f"{flag(PATH_KEY)} is empty")
    return Path(text).expanduser().absolute()


@dataclass(frozen=True)
class DiskConfig:
    """The folder of segments, its cap, and how pages are read.

    direct: None chooses what works.
    """

    ALSO: ClassVar = (CHECKSUM,)

    path: Path = setting(
        PATH_KEY,
        Type.FOLDER,
        default_path,
        "the directory; made if missing",
        to=_checked_path,
        default_text="`$XDG_CACHE_HOME/hiradix/disk`, else `~/.cache/hiradix/disk`",
        over_http=OPEN,
    )
    max_bytes: int = setting(
        "max_size",
        Type.SIZE,
        32 << 30,
        "cap on everything in the directory, the log and blocks not yet used included, of all models and "
        "processes together",
        over_http=OPEN,
    )
    min_free_bytes: int = setting(
        "min_free_space",
        Type.SIZE,
        1 << 30,
        "what must stay free on the file system: no segment is added that would take of it",
        over_http=OPEN,
    )
    max_segment_bytes: int = setting(
        "segment_size",
        Type.SIZE,
        MAX_SEGMENT_BYTES,
        "longest segment file; a segment is at most a sixteenth of `max_size`",
        over_http=OPEN,
    )
    verify: str = setting(
        "verify",
        Type.TEXT,
        "always",
        "when a page's checksum is computed on reading. `always`: each time, from the page cache too, since "
        "what is there can be overwritten as well; a thread of its own does it beside the next read. "
        "`recovered`: once for each page that this process has not written itself. `off`: no checksums "
        "at all",
        choices=VERIFY,
        over_http=OverHttp(refused=("recovered", "off")),
    )
    engine: str = setting(
        "io_engine",
        Type.TEXT,
        "auto",
        "`threads` are preadv and pwritev; `auto`: io_uring where the kernel allows it",
        choices=ENGINES,
        over_http=OPEN,
    )
    direct: bool | None = setting(
        "direct_io",
        Type.TEXT,
        "auto",
        "`auto`: O_DIRECT where the file system takes it",
        choices=("auto", "on", "off"),
        to={"auto": None, "on": True, "off": False}.get,
        over_http=OPEN,
    )
    direct_writes: bool = setting(
        "direct_writes",
        Type.BOOL,
        False,
        "write past the page cache too. Without it what was stored lately is read back at memory speed, for "
        "as long as the kernel has memory to spare",
        over_http=OPEN,
    )
    use_cache: bool = setting(
        "use_page_cache",
        Type.BOOL,
        True,
        "look for pages in the page cache before reading from disk (`cachestat`, Linux 6.5)",
        over_http=OPEN,
    )
    num_threads: int = setting(
        "io_threads",
        Type.INTEGER,
        4,
        "threads of the engine `threads`",
        minimum=1,
        maximum=MAX_COUNT,
        over_http=OverHttp(256),
    )
    touch_interval_s: float = setting(
        "touch_interval_s",
        Type.SECONDS,
        60.0,
        "a use is written to the log when the last one there is older: recency for other processes and after "
        "a restart",
        over_http=OPEN,
    )
    lock_timeout_s: float = setting(
        "lock_timeout_s",
        Type.SECONDS,
        1.0,
        "longest wait for the directory's lock; after it a put fails. Reads take no lock",
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )
    fsync: bool = setting(
        "fsync",
        Type.BOOL,
        False,
        "make log and pages survive a power failure before a put is acknowledged",
        over_http=OPEN,
    )

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> DiskConfig:
        """Reads and checks the keys; raises ConfigError naming the bad one."""
        config = read_keys(DiskConfig, values, "disk")
        checks = values.get(CHECKSUM.name)
        if checks is None or CHECKSUM.check(flag(CHECKSUM.name), checks):
            return config
        return dataclasses.replace(config, verify="off")

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

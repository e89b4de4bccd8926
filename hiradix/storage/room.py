"""Who gets space in the directory: reservations against the cap, and eviction of what was used longest ago.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from hiradix.storage.file_config import FileConfig
from hiradix.storage.ledger import Ledger
from hiradix.storage.lru import Entry, LruIndex
from hiradix.storage.page_dir import PageDir, remove

START_TIMEOUT_S = 30.0
SLACK_PAGES = 16  # evicted beyond the need, so that not every put evicts
DRIFT = 16  # the index may miss 1/DRIFT of the cap, written by other processes, before it is read anew


class Room:
    """The index of the directory's pages and the bytes they take. Thread-safe and safe between processes.

    Invariants, with the ledger's lock free:
    1. ledger >= bytes of all page and temporary files (equal unless a process was killed since the last
    recount).
    2. ledger <= cap, unless the cap was lowered; then nothing is written before it holds again.
    3. Who unlinks a file takes it out of the ledger; unlink succeeds for one process only.
    """

    def __init__(self, config: FileConfig, folder: PageDir, ledger: Ledger):
        self._config = config
        self._folder = folder
        self._ledger = ledger
        self._lock = threading.Lock()  # guards _index; taken inside the ledger's lock, never around it
        self._index = LruIndex()
        self.num_evicted = 0
        self.num_leftovers = 0

    def open(self) -> None:
        """Clean up after dead writers, read the directory, make the cap hold."""
        with self._ledger.locked(START_TIMEOUT_S):
            self.num_leftovers = self._folder.enter()
            usage = self._recount()
            if usage > self._config.max_bytes:
                self._evict(usage - self._config.max_bytes, ())

    # -- the index ----------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def use(self, name: str, num_bytes: int, used_ns: int) -> None:
        """`name` was read or written now."""
        with self._lock:
            self._index.use(name, Entry(num_bytes, used_ns))

    def forget(self, name: str) -> None:
        """`name` turned out to be gone."""
        with self._lock:
            self._index.drop(name)

    def figures(self) -> Mapping[str, float]:
        """For metrics; bytes are those of files this process knows of."""
        with self._lock:
            known = {"files": len(self._index), "used_bytes": self._index.num_bytes}
        return known | {"max_bytes": self._config.max_bytes, "evicted": self.num_evicted}

    # -- space --------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the directory."""
        with self._ledger.locked(self._config.lock_timeout_s):
            yield

    def reserve(self, num_bytes: int, keep: Collection[str]) -> bool:
        """Enter `num_bytes` into the ledger, evicting as needed but nothing of `keep`. Call within `locked`.
        """
        if num_bytes > self._config.max_bytes:
            return False
        usage = self._usage()
        short = max(usage + num_bytes - self._config.max_bytes, self._missing_free(num_bytes))
        if short > 0:
            known, drift = self._index.num_bytes, self._config.max_bytes // DRIFT
            if known < usage - drift:
                usage = self._recount()
            short -= self._evict(short, keep)
            if short > 0:
                return False
        self._ledger.write(self._usage() + num_bytes)
        return True

    def cancel(self, num_bytes: int) -> None:
        """Take a reservation, or a file that was unlinked, out of the ledger. Call within `locked`."""
        self._ledger.write(max(0, self._usage() - num_bytes))

    def unlink(self, name: str, num_bytes: int) -> None:
        """Remove a page file that counts for `num_bytes`. Call within `locked`."""
        self.forget(name)
        if remove(self._folder.path(name)):
            self.cancel(num_bytes)

    def unlink_paths(self, paths: Sequence[str], sizes: Sequence[int]) -> None:
        """Remove files by path. Call within `locked`; the index must be told by the caller."""
        self.cancel(sum(size for path, size in zip(paths, sizes) if remove(path)))

    # -- inside -------------------------------------------------------------------------

    def _usage(self) -> int:
        usage = self._ledger.read()
        return self._recount() if usage is None else usage

    def _recount(self) -> int:
        found = self._folder.scan()
        with self._lock:
            self._index.replace_all(found)
            usage = self._index.num_bytes + self._folder.temp_bytes()
        self._ledger.write(usage)
        return usage

    def _missing_free(self, num_bytes: int) -> int:
        status = os.statvfs(self._folder.root)
        return self._config.min_free_bytes + num_bytes - status.f_bavail * status.f_frsize

    def _evict(self, num_bytes: int, keep: Collection[str]) -> int:
        """Remove coldest pages until `num_bytes` are gone, and a few more; how many bytes went."""
        freed = num_extra = 0
        while num_extra < SLACK_PAGES:
            with self._lock:
                name = self._index.coldest()
                if name is None or name in keep:
                    break
                size = self._index.drop(name)
            if remove(self._folder.path(name)):
                self.num_evicted += 1
                freed += size
            num_extra += freed >= num_bytes
        self.cancel(freed)
        return freed

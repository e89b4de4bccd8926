"""Space in the directory: reservations against the cap, and eviction of what was used longest ago."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hiradix.errors import StorageError
from hiradix.storage.backends.file.config import FileConfig
from hiradix.storage.backends.file.ledger import Ledger
from hiradix.storage.backends.file.page_dir import PageDir, file_footprint, remove
from hiradix.storage.kit.lru import BEFORE_ALL_NS, LruEntry, LruIndex

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
LOCK_TRIES = 3
SLACK_BYTES = 64 << 20  # evicted beyond the need, so that not every put evicts; at most cap / SLACK_SHARE
SLACK_SHARE = 64
DRIFT = 16  # the index may miss 1/DRIFT of the cap, written by other processes, before it is read anew


@dataclass(frozen=True)
class Keep:
    """Pages that are not evicted: these, and those used at `since_ns` or later."""

    names: Collection[str] = ()
    since_ns: int = BEFORE_ALL_NS


class Room:
    """The index of the directory's pages and the bytes they take. Thread-safe and safe between processes.

    Invariants, with the ledger's lock free:
    1. ledger >= bytes of all page and temporary files (equal unless a process was killed since the last
    recount).
    2. ledger <= cap, unless the cap was lowered; then nothing is written before it holds again.
    3. Who unlinks a file takes it out of the ledger; unlink succeeds for one process only.
    """

    def __init__(self, config: FileConfig, folder: PageDir, ledger: Ledger, time_ns: Callable[[], int]):
        self._config = config
        self._folder = folder
        self._ledger = ledger
        self._time_ns = time_ns
        self._lock = threading.Lock()  # guards _index; taken inside the ledger's lock, never around it
        self._index = LruIndex()
        self.num_evicted = 0
        self.num_made_anew = 0
        self.num_leftovers = 0

    def open(self) -> None:
        """Clean up after dead writers, read the directory, make the cap hold."""
        if self._ledger.read_only:
            return self._index.replace_all(self._folder.scan(), self._time_ns())
        with self._ledger.locked(START_TIMEOUT_S):
            self.num_leftovers = self._folder.enter()
            usage = self._recount()
            if usage > self._config.max_bytes:
                self._evict(usage - self._config.max_bytes, Keep())

    # -- the index ----------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def use(self, name: str, num_bytes: int, used_ns: int, front: str) -> None:
        """`name` was read or written then, unless it is gone since: who removes it forgets it after that.

        front: the page in front of it in its chain, if that is known.
        """
        with self._lock:
            if os.path.exists(self._folder.path(name)):
                self._index.use(name, LruEntry(num_bytes, used_ns), front)

    def follow(self, name: str, used_ns: int) -> None:
        """Pages that follow `name` in its chain are about to be stored."""
        with self._lock:
            self._index.follow(name, used_ns)

    def now(self) -> int:
        """The time (ns) of a use that begins now, so that files written with it are in order, too."""
        with self._lock:
            return self._index.now(self._time_ns())

    def forget(self, name: str) -> None:
        """`name` turned out to be gone."""
        with self._lock:
            self._index.drop(name)

    def figures(self) -> Mapping[str, float]:
        """The figures for metrics; bytes are those of files this process knows of."""
        with self._lock:
            known = {"files": len(self._index), "used_bytes": self._index.num_bytes}
        more = {"evicted": self.num_evicted, "made_anew": self.num_made_anew}
        return known | {"max_bytes": self._config.max_bytes} | more

    # -- space --------------------------------------------------------------------------

    @contextmanager
    def locked(self, timeout_s: float | None = None) -> Iterator[None]:
        """Alone in the directory, which is made anew where it was removed.

        Raises StorageError when that takes longer than the lock's timeout, OSError where it cannot be made.
        """
        timeout_s = self._config.lock_timeout_s if timeout_s is None else timeout_s
        with self._ledger.locked(timeout_s):
            if not self._ledger.is_in_place():
                self._make_anew(timeout_s)
            yield

    def reserve(self, sizes: Sequence[int], keep: Keep) -> int:
        """Enter the leading `sizes` that there is room for into the ledger, evicting as needed but nothing of
        `keep`; how many. Call within `locked`."""
        if self._enter(sum(sizes), keep):
            return len(sizes)
        for count, num_bytes in enumerate(sizes):
            if not self._enter(num_bytes, keep):
                return count
        return len(sizes)

    def cancel(self, num_bytes: int) -> None:
        """Take a reservation, or a file that was unlinked, out of the ledger. Call within `locked`."""
        self._ledger.write(max(0, self._usage() - num_bytes))

    def unlink(self, name: str) -> None:
        """Remove a page file. Call within `locked`."""
        path = self._folder.path(name)
        size = file_footprint(path)
        if remove(path):
            self.cancel(size)
        self.forget(name)

    def unlink_same(self, name: str, status: os.stat_result) -> bool:
        """Remove a page file if it still is the one that `status` is of. Never raises; False: it stays."""
        try:
            with self.locked():
                found = os.lstat(self._folder.path(name))
                if (found.st_ino, found.st_dev) == (status.st_ino, status.st_dev):
                    self.unlink(name)
        except (OSError, StorageError):
            return False
        return True

    def unlink_paths(self, paths: Sequence[str]) -> None:
        """Remove page files by path. Call within `locked`; the caller tells the index."""
        sizes = [file_footprint(path) for path in paths]
        self.cancel(sum(size for path, size in zip(paths, sizes) if remove(path)))

    @property
    def is_lost(self) -> bool:
        """Whether the directory, or the lock in it, was removed, and nothing was stored since."""
        try:
            return not self._ledger.is_in_place()
        except OSError:  # closed or made anew just now
            return False

    # -- inside -------------------------------------------------------------------------

    def _make_anew(self, timeout_s: float) -> None:
        """The directory was removed, or others have made it again: begin with what is there. Locked."""
        for _ in range(LOCK_TRIES):
            self._folder.make()
            self._ledger.renew(timeout_s)
            if self._ledger.is_in_place():
                break
        else:
            raise StorageError(f"{self._config.path}: the lock file keeps vanishing")
        self._folder.leave()
        self._folder.enter()
        self._recount()
        self.num_made_anew += 1
        logger.warning(
            "%s had been removed with its pages: made anew, pages are stored again", self._config.path
        )

    def _enter(self, num_bytes: int, keep: Keep) -> bool:
        if num_bytes > self._config.max_bytes:
            return False
        unknown = self._usage() - self._index.num_bytes
        if unknown > self._config.max_bytes // DRIFT and self._short(num_bytes) > 0:
            self._recount()
        if not self._make_room(num_bytes, keep):
            self._recount()  # others may have written what the index lacks, or evicted what it has
            if not self._make_room(num_bytes, keep):
                return False
        self._ledger.write(self._usage() + num_bytes)
        return True

    def _usage(self) -> int:
        usage = self._ledger.read()
        return self._recount() if usage is None else usage

    def _recount(self) -> int:
        found = self._folder.scan()
        with self._lock:
            self._index.replace_all(found, self._time_ns())
            usage = self._index.num_bytes + self._folder.temp_bytes()
        self._ledger.write(usage)
        return usage

    def _short(self, num_bytes: int) -> int:
        """Bytes that must go before `num_bytes` may come: for the cap, or for what must stay free."""
        status = os.statvfs(self._folder.root)
        free = status.f_bavail * status.f_frsize - self._config.min_free_bytes
        return num_bytes - min(free, self._config.max_bytes - self._usage())

    def _make_room(self, num_bytes: int, keep: Keep) -> bool:
        short = self._short(num_bytes)
        return short <= 0 or self._evict(short, keep) >= short

    def _evict(self, num_bytes: int, keep: Keep) -> int:
        """Remove coldest pages until `num_bytes` are gone, and some slack; how many bytes went."""
        target = num_bytes + min(SLACK_BYTES, self._config.max_bytes // SLACK_SHARE)
        freed = 0
        while freed < target:
            with self._lock:
                name = self._index.coldest(keep.since_ns)
                if name is None or name in keep.names:
                    break
                if freed >= num_bytes and freed + self._index.size(name) > target:
                    break
                size = self._index.drop(name)
            if remove(self._folder.path(name)):
                self.num_evicted += 1
                freed += size
            self.forget(name)
        self.cancel(freed)
        return freed

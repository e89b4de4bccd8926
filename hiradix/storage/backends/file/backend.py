"""The `file` backend: one file per page, bounded, shared by any number of processes.

A page file is a seal (`seal`) and the page's bytes. It is written under a temporary name with its final
length and then renamed, so readers see it whole or not at all; nothing is read from it unless seal and
checksum agree. A file that does not agree is removed. Reads take no lock. Pages of a batch are in chain
order, and a batch's head is used later than its tail, so that eviction shortens prefixes instead of beheading
them.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hiradix.errors import ConfigError, StorageError, Unreachable
from hiradix.storage.backends.file.config import FileConfig
from hiradix.storage.backends.file.ledger import Ledger, NoLedger
from hiradix.storage.backends.file.page_dir import PageDir, footprint, remove
from hiradix.storage.backends.file.room import Keep, Room
from hiradix.storage.batch import Batch
from hiradix.storage.guard.calls import FlagsWithReason
from hiradix.storage.kit.damaged_keys import MAX_KEYS
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.kit.reach import is_unreachable
from hiradix.storage.kit.read_only import refusal, said_of
from hiradix.storage.kit.seal import DEFAULT_ALGORITHM, NONE, SEAL_BYTES, Sealer, Verdict
from hiradix.storage.kit.states import StoreStates
from hiradix.storage.kit.under_way import UnderWay
from hiradix.storage.kit.vectored import NO_ROOM, read_into, write_from
from hiradix.storage.protocol import Page, StorageBackend, StorageContext, Traits, check_keys, page_bytes

GROUP_BYTES, GROUP_PAGES = 64 << 20, 64
LOCK_NAME = "hiradix.lock"
PUBLISH_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 4.0
"""Longest wait of `close` for puts under way: less than the guard waits for `close`."""
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)


@dataclass
class FileWrite:
    """One page on its way: `fd` and `temp` while it is being written, `is_filled` when its bytes are."""

    index: int
    key: str
    path: str
    page: Page
    num_bytes: int
    used_ns: int
    temp: str = ""
    fd: int = -1
    is_filled: bool = False
    written: bool = False


@dataclass
class FileRead:
    """One page on its way back. `verdict` stays None where the file could not be read: `fault` says why."""

    index: int
    key: str
    page: Page
    used_ns: int
    fd: int
    status: os.stat_result
    verdict: Verdict | None = None
    fault: OSError | None = None


class FileBackend(StorageBackend):
    """Stores one file per page in a directory that processes share. Raises ConfigError naming the key when
    the directory cannot be used."""

    traits = Traits(verifies=True, namespaced=True)

    def __init__(self, context: StorageContext, time_ns: Callable[[], int] = time.time_ns):
        self.config = config = FileConfig.from_mapping(context.extra_config)
        config.check_page(footprint(SEAL_BYTES + context.page_bytes))
        digest = context.fingerprint.digest()
        self._sealer = Sealer(digest, DEFAULT_ALGORITHM if config.checksum else NONE, config.checksum)
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._bad: set[str] = set()  # damaged, in a folder that can only be read
        self._puts = UnderWay()
        self._states = StoreStates("file")
        self._closed = False
        self._is_refused = False  # the last write was, as the file system cannot be written any more
        ledger: Ledger | None = None
        try:
            self._read_only = refusal(config.path, (LOCK_NAME,))
            self._folder = PageDir(config.path, digest, self.read_only)
            self._ledger = ledger = (NoLedger if self.read_only else Ledger)(config.path / LOCK_NAME)
            self._room = Room(config, self._folder, ledger, time_ns)
            self._room.open()
            if self._read_only is not None:
                self._states.enter("read_only", said_of(config.path, self._read_only))
        except (OSError, StorageError) as error:
            if ledger is not None:  # whoever tries again begins anew
                self._folder.leave()
                ledger.close()
            kind = Unreachable if is_unreachable(error) else ConfigError
            raise kind(f"{config.path_source}: cannot use {config.path}: {error}") from error

    # -- the protocol -------------------------------------------------------------------

    def exists(self, batch: Batch) -> int:
        self._check(batch)
        for index, key in enumerate(batch):
            if key in self._bad or (key not in self._room and not os.path.exists(self._folder.path(key))):
                return index
        return len(batch)

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        self._check(batch)
        used_ns = batch.used_ns(self, self._room.now())
        ok = [False] * len(batch)
        faults: list[OSError] = []
        bad: list[int] = []
        wanted = list(zip(range(len(batch)), batch, into, used_ns))
        for start in range(0, len(batch), GROUP_PAGES):
            for index in self._load(wanted[start : start + GROUP_PAGES], faults, bad):
                ok[index] = True
        if faults:
            self._count("read_errors", len(faults))
            if not any(ok):
                raise StorageError(f"cannot read from {self.config.path}: {faults[0]}") from faults[0]
        self._use(batch, into, ok, used_ns)
        if not all(ok) and self._room.is_lost:
            self._states.enter("lost", f"{self.config.path} was removed, with its pages")
            return FlagsWithReason(ok, MissReason.LOST)
        if bad:
            return FlagsWithReason(ok, MissReason.DAMAGED, len(bad))
        self._states.leave("damaged")
        return ok

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        self._check(batch)
        with self._puts.call():
            return self._put(batch, pages)

    def _put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        used_ns = batch.used_ns(self, self._room.now())
        ok = [False] * len(batch)
        todo: list[FileWrite] = []
        for index, (key, page, at_ns) in enumerate(zip(batch, pages, used_ns, strict=True)):
            num_bytes, path = SEAL_BYTES + page_bytes(page), self._folder.path(key)
            ok[index] = key not in self._bad and _is_whole(_status(path), num_bytes)
            if not ok[index]:
                todo.append(FileWrite(index, key, path, page, num_bytes, at_ns))
        self._use(batch, pages, ok, used_ns)
        if self._read_only is not None:
            return ok if all(ok) else self._refuse(ok, self._read_only)
        first_ns = max(used_ns, default=0)
        self._room.follow(batch.after, first_ns)
        keep = Keep(frozenset(batch), first_ns + 1)  # by its time, what the use has had of the chain before
        refused: OSError | None = None
        while todo:
            group = self._next_group(todo)
            try:
                done = self._store(group, keep)
            except OSError as error:
                if error.errno != errno.EROFS:
                    raise
                refused = error
                break
            for write in done:
                ok[write.index] = True
            if len(done) < len(group):
                break  # no room: what follows in the chain would not be found without this
            todo = todo[len(group) :]
        self._use(batch, pages, ok, used_ns)
        if refused is not None:
            return self._refuse(ok, refused)
        if self._is_refused:
            self._is_refused = False
            self._states.leave("read_only")
        self._states.drop("lost")
        if not all(ok):
            self._states.enter("full", f"{self.config.path} has no room: pages are refused")
            return FlagsWithReason(ok, MissReason.FULL)
        self._states.leave("full")
        return ok

    def delete(self, keys: Sequence[str]) -> None:
        self._check(keys)
        with self._room.locked():
            for key in keys:
                self._room.unlink(key)

    def clear(self) -> None:
        self._check(())
        for folder in self._folder.own_folders():
            paths = self._folder.pages_in(folder)
            if paths:
                with self._room.locked():
                    self._room.unlink_paths(paths)
            for path in paths:
                self._room.forget(self._folder.name(folder, os.path.basename(path)))

    def close(self) -> None:
        """Waits for puts under way, at most `CLOSE_TIMEOUT_S`; a longer one fails and leaves no file."""
        if not self._closed:
            self._closed = True
            self._puts.close(CLOSE_TIMEOUT_S)
            self._folder.leave()
            self._ledger.close()

    def stats(self) -> Mapping[str, float]:
        with self._counts_lock:
            counts = dict(self._counts)
        more = {
            "leftovers_removed": self._room.num_leftovers,
            "read_only": float(self.read_only or self._is_refused),
        }
        return {**self._room.figures(), **more, **counts}

    @property
    def read_only(self) -> bool:
        """Whether the directory could not be written when it was opened: until it is opened anew."""
        return self._read_only is not None

    def ping(self) -> None:
        """Make and remove an empty file; in a folder that can only be read, look into it."""
        self._check(())
        if self._read_only is not None:
            os.stat(self.config.path)
            return
        temp, fd = self._folder.new_temp(0)
        os.close(fd)
        remove(temp)

    # -- inside -------------------------------------------------------------------------

    def _check(self, keys: Sequence[str]) -> None:
        if self._closed:
            raise StorageError("storage backend is closed")
        check_keys(keys)

    def _refuse(self, ok: Sequence[bool], why: OSError) -> list[bool]:
        """The answer to a put in a directory that cannot be written."""
        self._states.enter("read_only", said_of(self.config.path, why))
        self._is_refused = True
        self._count("put_read_only", ok.count(False))
        return FlagsWithReason(ok, MissReason.READ_ONLY)

    def _count(self, name: str, number: int = 1) -> None:
        with self._counts_lock:
            self._counts[name] += number

    def _use(self, batch: Batch, pages: Sequence[Page], ok: Sequence[bool], used_ns: Sequence[int]) -> None:
        """Note a use of the pages of a call that are there."""
        for key, page, good, at_ns, front in zip(batch, pages, ok, used_ns, batch.fronts()):
            if good:
                self._room.use(key, footprint(SEAL_BYTES + page_bytes(page)), at_ns, front)

    def _load(
        self, wanted: Sequence[tuple[int, str, Page, int]], faults: list[OSError], bad: list[int]
    ) -> list[int]:
        """Read some pages, each with its place in the call and when it counts as used; which are good.

        faults, bad: get what went wrong, and which pages are not what was stored.
        """
        reads: list[FileRead] = []
        try:
            for one in wanted:
                self._open(reads, *one, faults)
            self._read(reads)
            good = [read.index for read in reads if self._is_good(read, faults)]
            bad += [read.index for read in reads if read.verdict in (Verdict.DAMAGED, Verdict.FOREIGN)]
            return good
        finally:
            for read in reads:
                os.close(read.fd)

    def _open(
        self, reads: list[FileRead], index: int, key: str, page: Page, used_ns: int, faults: list[OSError]
    ) -> None:
        """Add a page's file to `reads` if it is there; one of the wrong kind or length is damaged already."""
        if key in self._bad:
            return
        try:
            fd = self._folder.open(key)
        except OSError as error:
            if error.errno not in _ABSENT:
                faults.append(error)
            else:
                self._room.forget(key)
            return
        read = FileRead(index, key, page, used_ns, fd, os.fstat(fd))
        if not stat.S_ISREG(read.status.st_mode) or read.status.st_size != SEAL_BYTES + page_bytes(page):
            read.verdict = Verdict.DAMAGED
        reads.append(read)

    def _read(self, reads: Sequence[FileRead]) -> None:
        """Fill the pages of those that have no verdict, and give it; or a fault."""
        for read in (read for read in reads if read.verdict is None):
            seal = bytearray(SEAL_BYTES)
            try:
                whole = read_into(read.fd, [seal, *read.page]) == read.status.st_size
            except OSError as error:
                read.fault = error
            else:
                read.verdict = self._sealer.check(seal, read.key, read.page) if whole else Verdict.DAMAGED

    def _is_good(self, read: FileRead, faults: list[OSError]) -> bool:
        """Whether the page is; a file that is bad is removed."""
        verdict = read.verdict
        if verdict is None:
            faults.append(read.fault or OSError(errno.EIO, "not read"))
        elif verdict is Verdict.UNKNOWN:
            self._count("unknown_checksum")
        elif verdict is not Verdict.GOOD:
            self._drop(read, verdict)
        elif abs(read.used_ns - read.status.st_mtime_ns) > self.config.touch_interval_s * 1e9:
            self._touch(read.fd, read.used_ns)
        return verdict is Verdict.GOOD

    def _drop(self, read: FileRead, verdict: Verdict) -> None:
        """A file that is bad goes; one that cannot be removed is looked at no more."""
        self._count(f"read_{verdict.value}")
        text = "has pages that are not what was stored, which are misses: the first is"
        self._states.enter("damaged", f"{self.config.path} {text} {self._folder.path(read.key)}")
        if self._read_only is None:
            self._room.unlink_same(read.key, read.status)
        elif len(self._bad) < MAX_KEYS:
            self._room.forget(read.key)
            self._bad.add(read.key)

    def _touch(self, fd: int, used_ns: int) -> None:
        if self._read_only is not None:
            return
        try:
            os.utime(fd, ns=(used_ns, used_ns))
        except OSError:  # a read-only or foreign-owned file can still be read; only its recency is lost
            self._count("touch_errors")

    def _next_group(self, todo: list[FileWrite]) -> list[FileWrite]:
        """The next pages to reserve and write at once: a share of the cap, so that a batch fills it in order."""
        limit = min(GROUP_BYTES, self.config.max_bytes // 8)
        total = 0
        for count, write in enumerate(todo):
            total += footprint(write.num_bytes)
            if count and (total > limit or count >= GROUP_PAGES):
                return todo[:count]
        return todo

    def _store(self, group: list[FileWrite], keep: Keep) -> list[FileWrite]:
        """Reserve, write and publish; the writes that are readable now.

        Having cleaned up, raises StorageError, or OSError where the file system cannot be written any more.
        """
        faults: list[OSError] = []
        try:
            self._begin(group, keep)
            try:
                self._write([write for write in group if write.temp])
            finally:
                for write in group:
                    if write.is_filled:
                        self._finish(write)
        except OSError as error:
            faults.append(error)
        done = self._publish(group, faults)
        for fault in faults:
            if fault.errno == errno.EROFS:
                raise fault
            if fault.errno not in NO_ROOM:
                raise StorageError(f"cannot write to {self.config.path}: {fault}") from fault
        if len(done) < len(group):
            self._count("put_no_room", len(group) - len(done))
        return done

    def _begin(self, group: list[FileWrite], keep: Keep) -> None:
        sizes = [footprint(write.num_bytes) for write in group]
        with self._room.locked():
            num_fitting = self._room.reserve(sizes, keep)
            for at, write in enumerate(group[:num_fitting]):
                try:
                    write.temp, write.fd = self._folder.new_temp(write.num_bytes)
                except OSError:
                    self._room.cancel(sum(sizes[at:num_fitting]))
                    raise

    def _write(self, writes: Sequence[FileWrite]) -> None:
        """Fill the temporary files, seals first. Raises OSError; `_publish` cleans up."""
        for write in writes:
            seal = self._sealer.seal(write.key, write.page)
            done = write_from(write.fd, [seal, *write.page])
            if done != write.num_bytes:
                raise OSError(errno.ENOSPC, f"wrote {done} of {write.num_bytes} bytes")
            write.is_filled = True

    def _finish(self, write: FileWrite) -> None:
        """The temporary file is whole: close it. Raises OSError."""
        os.utime(write.fd, ns=(write.used_ns, write.used_ns))
        if self.config.fsync:
            os.fsync(write.fd)
        fd, write.fd = write.fd, -1
        os.close(fd)
        write.written = True

    def _publish(self, group: list[FileWrite], faults: list[OSError]) -> list[FileWrite]:
        """Rename what was written; give back what was not, or what another writer published meanwhile."""
        started = [write for write in group if write.temp]
        for write in started:
            if write.fd >= 0:
                os.close(write.fd)
        try:
            with self._room.locked(PUBLISH_TIMEOUT_S):
                return [write for write in started if self._publish_one(write, faults)]
        except StorageError:  # no lock: the ledger stays too high, which is the safe side
            for write in started:
                remove(write.temp)
            raise

    def _publish_one(self, write: FileWrite, faults: list[OSError]) -> bool:
        try:
            if write.written and not _is_whole(old := _status(write.path), write.num_bytes):
                self._folder.publish(write.temp, write.path)
                if old is not None:  # a damaged file
                    self._room.cancel(footprint(old.st_size))
                return True
        except OSError as error:
            faults.append(error)
            write.written = False
        remove(write.temp)
        self._room.cancel(footprint(write.num_bytes))
        return write.written


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _is_whole(status: os.stat_result | None, num_bytes: int) -> bool:
    """Whether that is a page's file with its right length."""
    return status is not None and stat.S_ISREG(status.st_mode) and status.st_size == num_bytes

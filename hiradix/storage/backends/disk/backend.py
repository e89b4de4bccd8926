"""The `disk` backend: pages in preallocated slots, read and written in batches at the speed of the disk.

A page is its bytes and nothing else, so that it moves straight between the disk and the caller's memory; its
identity and checksum are in the log (`log`). A read is good if the page still is in its slot after it, by the
log, and if its checksum fits where `verify` asks for one. Reads take no lock of the directory.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hiradix.errors import ConfigError, StorageError, Unreachable
from hiradix.storage.backends.disk.bad_slots import FAILURES, LASTING, BadSlots
from hiradix.storage.backends.disk.chains import behind
from hiradix.storage.backends.disk.config import PATH_KEY, DiskConfig, slot_bytes
from hiradix.storage.backends.disk.entry import IndexEntry
from hiradix.storage.backends.disk.log import WrongFolder
from hiradix.storage.backends.disk.moves import Move
from hiradix.storage.backends.disk.probe import choose
from hiradix.storage.backends.disk.record import Name, name_of
from hiradix.storage.backends.disk.store import DiskStore, PageRecord, Place
from hiradix.storage.batch import Batch
from hiradix.storage.guard.calls import FlagsWithReason
from hiradix.storage.kit.meters import MissReason
from hiradix.storage.kit.options import flag
from hiradix.storage.kit.reach import is_unreachable
from hiradix.storage.kit.read_only import said_of
from hiradix.storage.kit.seal import CHECKSUMS, DEFAULT_ALGORITHM, NONE
from hiradix.storage.kit.states import StoreStates
from hiradix.storage.kit.vectored import NO_ROOM
from hiradix.storage.protocol import Page, StorageBackend, StorageContext, Traits, is_key, sizes_of

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = ADMIN_TIMEOUT_S = 30.0
DROP_TIMEOUT_S = 0.05
MAX_UNLOGGED_USES = 4096
KEPT_BEFORE = 1024
"""Pages of a use in front of a call that no page of the call takes the place of, whatever their names are; of
a chain none does that is in front of it."""
Uses = list[tuple[Name, int]]
"""Names and when they count as used (ns), coldest first."""
_Given = Mapping[Name, tuple[Page, int, Name | None]]
_Writes = list[tuple[PageRecord, Move]]


class DiskBackend(StorageBackend):
    """Stores pages in preallocated slots on a local disk. Raises ConfigError naming the key when the
    directory cannot be used."""

    traits = Traits(verifies=True, namespaced=True, direct=True, checks_keys=True)

    def __init__(self, context: StorageContext, time_ns: Callable[[], int] = time.time_ns):
        self.config = config = DiskConfig.from_mapping(context.extra_config)
        config.check_page(context.page_bytes)
        self._page_bytes = context.page_bytes
        self._time_ns = time_ns
        self._algorithm = NONE if config.verify == "off" else DEFAULT_ALGORITHM
        self._read: list[tuple[Sequence[Name], int]] = []  # names and when, in no order of use as yet
        self._num_read = 0
        self._used: dict[tuple[int, int], IndexEntry] = {}  # whose use the log does not know of
        self._damaged: dict[IndexEntry, None] = {}  # which the log still names
        self._unreadable: dict[IndexEntry, None] = {}  # likewise
        self._bad_slots = BadSlots()  # the mutex guards it
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._closed = False
        self._is_refused = False  # the last write was, as the file system cannot be written any more
        self._states = StoreStates("disk")
        started = time.perf_counter()
        store: DiskStore | None = None
        try:
            namespace = bytes.fromhex(context.fingerprint.digest())[:16]
            self._store = store = DiskStore(config, namespace, slot_bytes(context.page_bytes), time_ns)
            if store.read_only is None:
                with store.alone(OPEN_TIMEOUT_S):
                    self._abilities = choose(config)
                    store.open(self._abilities.direct)
            else:
                self._abilities = choose(config, read_only=True)
                store.open(self._abilities.direct)
                self._states.enter("read_only", said_of(config.path, store.read_only))
            self._io = self._abilities.io
        except (OSError, StorageError) as error:
            if store is not None:  # whoever tries again begins anew
                store.close()
            is_away = is_unreachable(error) and not isinstance(error, WrongFolder)
            kind = Unreachable if is_away else ConfigError
            raise kind(f"{flag(PATH_KEY)}: cannot use {config.path}: {error}") from error
        self._open_s = time.perf_counter() - started

    # -- the protocol -------------------------------------------------------------------

    def exists(self, batch: Batch) -> int:
        self._check_open()
        known = self._store.shelf.labels
        if known.issuperset(batch):
            return len(batch)
        index = next((index for index, key in enumerate(batch) if key not in known), len(batch))
        return index + self._exists_by_name(batch[index:])

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        self._check_open()
        reads = self._plan(batch, into)
        always = self.config.verify == "always"

        def check(index: int) -> bool:
            entry = reads.entries[index]
            return (entry.verified and not always) or _is_intact(entry, reads.moves[index][2])

        checked = self._must_check(reads.entries)
        whole, faults = self._io.read(reads.moves, self._page_bytes, check if checked else None)
        with self._store.mutex:
            self._store.refresh()
            all_read = len(whole) == len(batch) and False not in whole
            if all_read and not checked and reads.state == self._store.state:
                return whole
            ok = [False] * len(batch)
            still = reads.still_there(self._store)
            damaged: dict[IndexEntry, None] = {}
            failed = [at for at in _lasting(faults) if still[at]]
            for at, (index, entry, there) in enumerate(zip(reads.indices, reads.entries, still)):
                ok[index] = whole[at] and there
                if ok[index] and checked:
                    entry.verified = True
                if there and not whole[at] and at not in faults:
                    damaged[entry] = None
            unreadable = self._unreadable_of(reads, whole, failed)
        if damaged:
            self._drop_damaged(damaged)
        elif checked:
            self._states.leave("damaged")
        if unreadable:
            self._drop_unreadable(unreadable)
        if faults:
            self._count("read_errors", len(faults))
        if faults and not any(ok):
            fault = next(iter(faults.values()))
            raise StorageError(f"cannot read from {self.config.path}: {fault}") from fault
        reasons = {MissReason.DAMAGED: len(damaged), MissReason.ERROR: len(faults)}
        return FlagsWithReason(ok, reasons) if damaged or faults else ok

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        self._check_open()
        names = [name_of(key) for key in batch]
        _check_lengths(pages, self._page_bytes)
        uses = _uses(names, self._time_ns())
        if self._all_there(batch, names, uses):
            return [True] * len(batch)
        if self._store.read_only is not None:
            return self._refuse(names, self._store.read_only)
        backwards = zip(reversed(pages), reversed(_fronts(batch, names)), uses)
        given = {name: (page, used_ns, front) for page, front, (name, used_ns) in backwards}
        with self._store.locked():
            try:
                self._put_missing(batch, names, given, uses)
            except OSError as error:
                if error.errno == errno.EROFS:  # since it was opened: the system found a fault of the disk
                    return self._refuse(names, error)
                if error.errno not in NO_ROOM:  # not even for the log: what it names is read on
                    raise
            with self._store.mutex:
                there = self._store.shelf.pages
                ok = [name in there for name in names]
                num_refused = len(set(names).difference(there))
        if self._is_refused:
            self._is_refused = False
            self._states.leave("read_only")
        if not num_refused:
            self._states.leave("full")
            return ok
        self._count("put_no_room", num_refused)
        self._states.enter("full", f"{self.config.path} has no room: pages are refused")
        return FlagsWithReason(ok, MissReason.FULL)

    @property
    def read_only(self) -> bool:
        """Whether the directory could not be written when it was opened: until it is opened anew."""
        return self._store.read_only is not None

    def _refuse(self, names: Sequence[Name], why: OSError) -> list[bool]:
        """Enter the state "read_only" of a directory that cannot be written; flags of the pages that are
        there already."""
        self._states.enter("read_only", said_of(self.config.path, why))
        self._is_refused = True
        with self._store.mutex:
            there = self._store.shelf.pages
            ok = [name in there for name in names]
        self._count("put_read_only", ok.count(False))
        return FlagsWithReason(ok, MissReason.READ_ONLY)

    def _put_missing(self, batch: Batch, names: Sequence[Name], given: _Given, uses: Uses) -> None:
        """Store those pages that are not there, and log all as used. Locked, without the mutex."""
        with self._store.mutex:
            self._free_damaged()
            self._retire_unreadable()
            self._use([])
            there = self._store.shelf.pages
            todo = [name for name in dict.fromkeys(names) if name not in there]
            keep = {*names, *map(name_of, batch.earlier(KEPT_BEFORE))}
            writes = self._place(todo, given, keep, _front(batch))
        self._write(writes)
        with self._store.mutex:
            self._use(uses)
            self._log_uses()

    def delete(self, keys: Sequence[str]) -> None:
        self._check_open()
        names = [name_of(key) for key in keys]
        with self._store.locked(ADMIN_TIMEOUT_S), self._store.mutex:
            pages = self._store.shelf.pages
            self._store.free([pages[name] for name in dict.fromkeys(names) if name in pages])

    def forget_behind(self, batch: Batch) -> int:
        self._check_open()
        with self._store.locked(ADMIN_TIMEOUT_S), self._store.mutex:
            found = behind(self._store.shelf.pages, {name_of(key) for key in batch})
            self._store.free(found)
        return len(found)

    def scrub(self) -> None:
        self._check_open()
        with self._store.locked(ADMIN_TIMEOUT_S), self._store.mutex:
            self._store.scrub()

    def clear(self) -> None:
        self._check_open()
        with self._store.locked(ADMIN_TIMEOUT_S), self._store.mutex:
            self._store.clear()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._store.read_only is None:
                with self._store.locked(), self._store.mutex:
                    self._log_uses()
        except (OSError, StorageError):
            self._count("uses_not_logged", len(self._used))
        self._store.close()
        self._io.close()

    def stats(self) -> Mapping[str, float]:
        abilities = self._abilities
        with self._counts_lock:
            counts = dict(self._counts)
        return {
            **self._store.figures(),
            **self._io.counts,
            "io_uring": float(abilities.engine == "io_uring"),
            "direct_io": float(abilities.direct),
            "cachestat": float(abilities.cachestat),
            "read_only": float(self.read_only or self._is_refused),
            "open_seconds": self._open_s,
            **counts,
        }

    def ping(self) -> None:
        """Raise unless the directory still is the one that was opened."""
        self._check_open()
        self._store.check()

    # -- inside -------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("storage backend is closed")

    def _count(self, name: str, number: int = 1) -> None:
        with self._counts_lock:
            self._counts[name] += number

    def _exists_by_name(self, keys: Sequence[str]) -> int:
        """`exists` for keys that are no page hashes, or that another process may have put."""
        names = [name_of(key) for key in keys]
        with self._store.mutex:
            self._store.refresh()
            pages = self._store.shelf.pages
            return next((index for index, name in enumerate(names) if name not in pages), len(names))

    def _plan(self, batch: Batch, into: Sequence[Page]) -> _Reads:
        """The reads for the keys that are there; they count as used."""
        with self._store.mutex:
            names, entries = self._find(batch)
            self._store.shelf.link_all(names, lambda: _fronts(batch, names))
            _check_lengths(into, self._page_bytes)
            self._read.append((list(names), self._time_ns()))  # a batch keeps all of its chain in memory
            self._num_read += len(names)
            if self._num_read > MAX_UNLOGGED_USES:
                self._use([])
            reads = self._reads(entries, into)
        if len(self._used) > MAX_UNLOGGED_USES:
            self._try_locked(self._log_uses)
        return reads

    def _find(self, keys: Sequence[str]) -> tuple[Sequence[Name], list[IndexEntry | None]]:
        """The keys' names and pages; other processes' too, where one is missing. Needs the mutex."""
        entries = list(map(self._store.shelf.pages.get, keys))
        if None not in entries:
            return keys, entries
        names: list[Name] = [name_of(key) if entry is None else key for key, entry in zip(keys, entries)]
        self._store.refresh()
        return names, list(map(self._store.shelf.pages.get, names))

    def _reads(self, entries: Sequence[IndexEntry | None], into: Sequence[Page]) -> _Reads:
        """The places of the pages that are there. Needs the mutex."""
        num_bytes, size = self._page_bytes, self._store.slot_size
        there = [entry for entry in entries if entry is not None and entry.num_bytes == num_bytes]
        numbers = [entry.place[0] for entry in there]
        segments = {number: self._store.segment(number) for number in set(numbers)}
        found = {number: segment for number, segment in segments.items() if segment is not None}
        indices: Sequence[int] = range(len(entries))
        if len(there) < len(entries) or len(found) < len(segments):
            there = [entry for entry in there if entry.place[0] in found]
            numbers = [entry.place[0] for entry in there]
            good = set(map(id, there))
            indices = [index for index, entry in enumerate(entries) if id(entry) in good]
            into = [into[index] for index in indices]
        offsets = [entry.place[1] * size for entry in there]
        moves = list(zip([found[number] for number in numbers], offsets, into))
        return _Reads(self._store.state, indices, there, moves)

    def _all_there(self, batch: Batch, names: Sequence[Name], uses: Uses) -> bool:
        """Whether no page is missing; they count as used then. False if the log cannot tell just now."""
        with self._store.mutex:
            try:
                self._store.refresh()
            except (OSError, StorageError):
                return False
            pages = self._store.shelf.pages
            if self._damaged or self._unreadable or any(name not in pages for name in names):
                return False
            self._store.shelf.link_all(names, lambda: _fronts(batch, names))
            self._use(uses)
        return True

    def _use(self, uses: Uses) -> None:
        """Make those pages that are there the hottest, the first the coldest of them. Needs the mutex.

        What was read since the last time comes before them: so this goes before all that depends on order.
        """
        pages = self._store.shelf.pages
        interval_ns = int(self.config.touch_interval_s * 1e9)
        reads, self._read, self._num_read = self._read, [], 0
        for name, used_ns in [*(use for read in reads for use in _uses(*read)), *uses]:
            entry = pages.get(name)
            if entry is not None:
                pages.move_to_end(name)
                entry.used_ns = used_ns
                if abs(used_ns - entry.logged_ns) > interval_ns and self._store.read_only is None:
                    self._used[entry.place] = entry
                if entry.front is not None:
                    self._store.shelf.link(name, entry.front)

    def _log_uses(self) -> None:
        """Locked."""
        self._use([])
        used, self._used = self._used, {}
        self._store.touch(sorted(used.values(), key=lambda entry: entry.used_ns))

    def _must_check(self, entries: Sequence[IndexEntry]) -> bool:
        """Whether one of them is to be checked."""
        verify = self.config.verify
        return verify == "always" or (verify == "recovered" and not all([e.verified for e in entries]))

    def _place(
        self, names: Sequence[Name], given: _Given, keep: Collection[Name], before: Name | None
    ) -> _Writes:
        """Slots for new pages, the head of the batch first; fewer without room. Locked."""
        writes = []
        for name, place in zip(names, self._store.allocate(len(names), keep, before)):
            page, used_ns, front = given[name]
            segment = self._store.segment(place[0])
            if segment is None:
                raise StorageError(f"a segment file of {self.config.path} was removed")
            record = PageRecord(name, front, place, self._page_bytes, used_ns)
            writes.append((record, (segment, self._store.offset(place), page)))
        return writes

    def _write(self, writes: _Writes) -> None:
        """Fill the slots and make their pages known. Locked, without the mutex."""
        written, faults = self._io.write([move for _, move in writes], self._page_bytes)
        records = []
        for (record, move), good in zip(writes, written):
            if good:
                if self._algorithm != NONE:
                    record.algorithm = self._algorithm
                    record.checksum = CHECKSUMS[self._algorithm](move[2])
                records.append(record)
        if self.config.fsync:
            self._store.sync_segments({segment for _, (segment, _, _) in writes})
        with self._store.mutex:
            self._store.publish(records)
            for record in records:
                self._store.index.by_place[record.place].verified = True
            if faults:
                self._retire_unwritable(records, [writes[at][0].place for at in _lasting(faults)])
            elif records:
                self._bad_slots.written()
        if faults:
            self._count("write_errors", len(faults))
            for fault in faults.values():
                if fault.errno == errno.EROFS:
                    raise fault
            if any(fault.errno not in NO_ROOM for fault in faults.values()):
                fault = next(iter(faults.values()))
                raise StorageError(f"cannot write to {self.config.path}: {fault}") from fault

    def _drop_damaged(self, entries: Mapping[IndexEntry, None]) -> None:
        """Forget pages that are not what was stored; in the log at once, or before the next put."""
        self._count("read_damaged", len(entries))
        segment, slot = next(iter(entries)).place
        text = f"{self.config.path} has pages that are not what was stored, which are misses: the first is in"
        self._states.enter("damaged", f"{text} slot {slot} of segment {segment}")
        self._forget(entries, self._damaged, self._free_damaged)

    def _free_damaged(self) -> None:
        """Locked."""
        if self._damaged:
            self._store.free(list(self._damaged))
            self._damaged.clear()

    def _forget(
        self, entries: Mapping[IndexEntry, None], unlogged: dict[IndexEntry, None], log: Callable[[], None]
    ) -> None:
        """Have these pages be misses from here on. log: tells other processes so of all `unlogged`."""
        with self._store.mutex:
            self._store.forget(list(entries))
            if self._store.read_only is not None:
                return
            unlogged.update(entries)
        self._try_locked(log)

    # -- slots that the disk has lost ---------------------------------------------------

    def _unreadable_of(
        self, reads: _Reads, whole: Sequence[bool], failed: Sequence[int]
    ) -> dict[IndexEntry, None]:
        """Those of the pages that failed to be read whose slots are bad by now. Needs the mutex."""
        entries = reads.entries
        if any(whole):
            self._bad_slots.succeeded(_slot_of(entry) for entry, ok in zip(entries, whole) if ok)
        return {entries[at]: None for at in failed if self._bad_slots.failed(_slot_of(entries[at]))}

    def _drop_unreadable(self, entries: Mapping[IndexEntry, None]) -> None:
        """Forget pages whose slots cannot be read; in the log at once, or before the next put."""
        self._count("slots_unreadable", len(entries))
        segment, slot = next(iter(entries)).place
        logger.warning(
            "storage disk: %s cannot read slot %d of segment %d, which failed %d times: "
            "its page is a miss, and stored elsewhere when it is put again",
            self.config.path, slot, segment, FAILURES,
        )  # fmt: skip
        self._forget(entries, self._unreadable, self._retire_unreadable)

    def _retire_unreadable(self) -> None:
        """Locked."""
        unreadable = list(self._unreadable)
        self._unreadable.clear()
        current = self._store.index.by_place
        places = [e.place for e in unreadable if e.place not in current or e.is_same(current[e.place])]
        if places:
            self._store.retire(places)

    def _retire_unwritable(self, written: Sequence[PageRecord], failed: Sequence[Place]) -> None:
        """Have no page come again where one could not be written though others could, or too often: free
        slots are taken in order. Locked."""
        bad = self._bad_slots.unwritable(failed, bool(written))
        if bad:
            self._count("slots_unwritable", len(bad))
            self._store.retire(bad)
            logger.warning(
                "storage disk: %s cannot write slot %d of segment %d, nor %d more: no page comes there again",
                self.config.path, bad[0][1], bad[0][0], len(bad) - 1,
            )  # fmt: skip

    def _try_locked(self, work: Callable[[], None]) -> None:
        """Do `work` if the directory's lock is to be had soon; it is not worth more."""
        try:
            with self._store.locked(DROP_TIMEOUT_S), self._store.mutex:
                work()
        except (OSError, StorageError):
            self._count("lock_skipped")


@dataclass(slots=True)
class _Reads:
    """Pages on their way: which of the call's, what is known of them, and where they go.

    state: the store's when they were found.
    """

    state: tuple[int, int]
    indices: Sequence[int]
    entries: Sequence[IndexEntry]
    moves: Sequence[Move]

    def still_there(self, store: DiskStore) -> Sequence[bool]:
        """Flags: which pages the log still has at the places where they were read. Needs the mutex."""
        if store.state == self.state:
            return [True] * len(self.entries)
        current = store.index.by_place
        return [entry.is_same(current.get(entry.place)) for entry in self.entries]


def _lasting(faults: Mapping[int, OSError]) -> list[int]:
    """The pages that failed for a reason that lies in their slots."""
    return [at for at, fault in faults.items() if fault.errno in LASTING]


def _slot_of(entry: IndexEntry) -> tuple[int, int, int]:
    """A page's slot, as long as it is there."""
    return *entry.place, entry.version


def _uses(names: Sequence[Name], now_ns: int) -> Uses:
    """A call's pages as used now, each a little before the one in front of it."""
    return [(name, now_ns - at) for at, name in enumerate(names)][::-1]


def _front(batch: Batch) -> Name | None:
    """The page in front of a call's first one in the chain, None if it is not known."""
    return name_of(batch.after) if is_key(batch.after) else None


def _fronts(batch: Batch, names: Sequence[Name]) -> list[Name | None]:
    """The page in front of each of a call's in the chain, None where it is not known."""
    known = dict(zip(batch, names))
    return [known.get(front) or (name_of(front) if is_key(front) else None) for front in batch.fronts()]


def _is_intact(entry: IndexEntry, page: Page) -> bool:
    """Whether a page's bytes are those that were stored. One without a checksum is not: nobody knows."""
    checksum = CHECKSUMS.get(entry.algorithm)
    return checksum is not None and checksum(page) == entry.checksum


def _check_lengths(pages: Sequence[Page], expected: int) -> None:
    sizes = sizes_of(pages)
    if sizes.count(expected) != len(sizes):
        wrong = next(size for size in sizes if size != expected)
        raise StorageError(f"a page of {wrong} bytes, expected {expected}")

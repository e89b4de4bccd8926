"""The directory of the `disk` backend: its lock, its log and segment files, and room for more pages.

hiradix.lock               lock of the directory
log                        the log
segment-<number>.pages     slots of one size, all blocks allocated when it is made
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from hiradix.errors import StorageError
from hiradix.storage.backends.disk import kernel
from hiradix.storage.backends.disk.config import OVERHEAD_BYTES, SLOT_OVERHEAD_BYTES, DiskConfig
from hiradix.storage.backends.disk.entry import IndexEntry
from hiradix.storage.backends.disk.index import RETIRED_SHARE, Index, Shelf, follows_record
from hiradix.storage.backends.disk.log import NAME as LOG_NAME
from hiradix.storage.backends.disk.log import Log, require_own
from hiradix.storage.backends.disk.record import BEHIND_NEXT, Kind, Name, Record, packed_name
from hiradix.storage.backends.disk.segments import SegmentFile, SegmentFolder
from hiradix.storage.kit.dir_lock import DirLock
from hiradix.storage.kit.lru import SKEW_NS
from hiradix.storage.kit.read_only import refusal

LOCK_NAME = "hiradix.lock"
LOCK_TRIES = 3
EVICT_TOGETHER, EVICT_SHARE = 32, 64
Place = tuple[int, int]


class DiskStore:
    """Holds the directory's lock, log and segment files, and makes room for pages. `slot_size`: of our
    pages. `mutex` guards index and log of this process.

    Methods that say "locked" are for inside `locked` and the mutex; they may raise OSError and StorageError.
    read_only: why nothing can be written in the directory; then `locked` raises StorageError, and pages that
    were found damaged are forgotten by this process alone.
    """

    def __init__(self, config: DiskConfig, namespace: bytes, slot_size: int, time_ns: Callable[[], int]):
        self._config = config
        self._namespace = namespace
        self.slot_size = slot_size
        self.read_only = refusal(config.path, (LOCK_NAME, LOG_NAME))
        self._lock = None if self.read_only else self._new_lock()
        self._time_ns = time_ns
        self._log = Log(config.path, namespace, time_ns, self.read_only is not None)
        self._segments = SegmentFolder(config.path, False)
        self.mutex = threading.Lock()
        self.counts: Counter[str] = Counter()

    def open(self, direct: bool) -> None:
        """Recover what the directory holds. direct: open segments for O_DIRECT too. Call within `alone`, but
        not of a directory that is read-only."""
        self._segments = SegmentFolder(self._config.path, direct, self.read_only is not None)
        if self.read_only is not None:
            return self._look(self.read_only)
        with self.mutex:
            self._log.open()
            if self._log.num_damaged:
                self.counts["log_records_damaged"] += self._log.num_damaged
                if self._config.verify == "off":
                    self._drop(sorted(self.index.segments))
                self._log.rewrite()
            self._match_files()
            while self._allocated() > self._config.max_bytes and self.index.segments:
                self._drop([self._coldest_segment()])
            self.counts["pages_recovered"] = len(self.index.by_place)

    def _look(self, why: OSError) -> None:
        """`open` of a directory that is only read."""
        with self.mutex:
            try:
                self._log.look()
            except FileNotFoundError:
                text = os.strerror(why.errno or 0)
                raise StorageError(f"there is no store, and none can be made ({text})") from why
            self._after_reading()
            self.counts["pages_recovered"] = len(self.index.by_place)

    @property
    def index(self) -> Index:
        """The index. Another object after the log was replaced."""
        return self._log.index

    @property
    def shelf(self) -> Shelf:
        """Pages of our slot size."""
        return self._log.index.shelf(self.slot_size)

    @property
    def state(self) -> tuple[int, int]:
        """The log that was read, and how far: equal states mean an equal index. Needs the mutex."""
        return self._log.state

    @contextmanager
    def alone(self, timeout_s: float) -> Iterator[None]:
        """The directory's lock, as long as the directory is there: it is made again where it was removed."""
        if self._lock is None:
            raise StorageError(f"{self._config.path} cannot be written")
        for _ in range(LOCK_TRIES):
            with self._lock.locked(timeout_s):
                if self._lock.is_in_place():
                    yield
                    return
            self._lock.close()
            self._lock = self._new_lock()
        raise StorageError(f"{self._config.path}: the lock file keeps vanishing")

    @contextmanager
    def locked(self, timeout_s: float | None = None) -> Iterator[None]:
        """Alone in writing. Readers go on, so take the mutex too wherever index or log are used."""
        with self.alone(self._config.lock_timeout_s if timeout_s is None else timeout_s):
            with self.mutex:
                if self._log.is_in_place():
                    self._log.settle()
                else:
                    self._log.open()
                self._after_reading()
            yield

    def refresh(self) -> None:
        """Take in what others have done. Needs the mutex, no lock."""
        if self._log.refresh():
            self._after_reading()

    def segment(self, number: int) -> SegmentFile | None:
        """A segment's file; None when it is gone. Needs the mutex."""
        try:
            return self._segments.get(number)
        except FileNotFoundError:
            return None

    def offset(self, place: Place) -> int:
        """The offset of a slot in its file."""
        return place[1] * self.slot_size

    def allocate(self, count: int, keep: Collection[Name], front: Name | None = None) -> list[Place]:
        """Slots for `count` pages, fewer without room; nothing refers to them from here on. Locked.

        keep: names that are not evicted for it; nor is `front`, or what is in front of any of these in its
        chain.
        """
        while len(places := self.shelf.take_free(count)) < count and self._add_slots(keep, front):
            pass
        evicted: list[IndexEntry] = []
        if len(places) < count:
            if self.shelf.waiting.latest_ns > (now_ns := self._time_ns()) + SKEW_NS:  # the clock was set back
                self.index.sort(now_ns)
            together = min(EVICT_TOGETHER, self.index.num_slots // EVICT_SHARE)
            evicted = self.index.coldest(self.shelf, max(count - len(places), together), keep, front)
            self.counts["evicted"] += len(evicted)
            places = sorted([*places, *(entry.place for entry in evicted)])[:count]
        free = {*places, *(entry.place for entry in evicted)}
        self._log.append([Record(Kind.FREE, *place) for place in sorted(free)])
        if self._config.fsync:
            self._log.sync()
        return places

    def sync_segments(self, segments: Collection[SegmentFile]) -> None:
        """Make what was written to them survive a power failure."""
        for segment in segments:
            os.fdatasync(segment.fd)

    def publish(self, pages: Sequence[PageRecord]) -> None:
        """Pages that are in their slots can be found from here on, the last the coldest. Locked."""
        version, backwards, records = self.index.next_version, pages[::-1], []
        behind = []
        for i, (page, after) in enumerate(zip(backwards, [*backwards[1:], None])):
            is_next = after is not None and page.front == after.name
            records.append(page.record(self._namespace, version + i, BEHIND_NEXT if is_next else 0))
            if page.front is not None and not is_next:
                behind.append(follows_record(page.place, page.front))
        self._log.append(records + behind)
        if self._config.fsync:
            self._log.sync()

    def touch(self, entries: Sequence[IndexEntry]) -> None:
        """Let the log know when pages were used last. Locked."""
        alive = [entry for entry in entries if self.index.by_place.get(entry.place) is entry]
        self._log.append([Record(Kind.TOUCH, *entry.place, used_ns=entry.used_ns) for entry in alive])

    def free(self, entries: Sequence[IndexEntry]) -> None:
        """Forget pages, unless others are where they were. Locked."""
        current = self.index.by_place
        alive = [e for e in entries if e.place not in current or e.is_same(current[e.place])]
        self._log.append([Record(Kind.FREE, *entry.place) for entry in alive])

    def scrub(self) -> None:
        """Overwrite all slots of our size that have no page, and have the log name none that is gone. Locked."""
        touched: dict[int, SegmentFile] = {}
        for number, first, count in _runs(self.shelf.free):
            segment = self.segment(number)
            if segment is not None:
                touched[number] = segment
                kernel.clear_range(segment.fd, first * self.slot_size, count * self.slot_size)
        self.sync_segments(touched.values())
        self._log.rewrite()
        self._log.sync()

    def retire(self, places: Collection[Place]) -> None:
        """Slots that cannot be read or written lose their pages, and no page comes there. Locked."""
        room = max(1, self.index.num_slots // RETIRED_SHARE) - len(self.index.retired)
        free = [Record(Kind.FREE, *place) for place in sorted(places)]
        self._log.append(free + [Record(Kind.RETIRED, *place) for place in sorted(places)[: max(0, room)]])

    def forget(self, entries: Sequence[IndexEntry]) -> None:
        """The same in this process alone, without a record: until the log is read anew. Needs the mutex."""
        self.index.forget(entries)

    def clear(self) -> None:
        """Forget all pages of our namespace. Locked."""
        self._log.append([Record(Kind.CLEAR, namespace=self._namespace)])

    def check(self) -> None:
        """Raise StorageError if the directory was removed behind our back."""
        if not self._log.is_in_place():
            raise StorageError(f"{self._config.path}: the log was removed")

    def figures(self) -> dict[str, float]:
        """The figures for `stats`."""
        index = self.index
        return {
            "pages": len(index.by_place),
            "slots": index.num_slots,
            "segments": len(index.segments),
            "retired_slots": len(index.retired),
            "allocated_bytes": index.segment_bytes + self._log.num_bytes,
            "max_bytes": self._config.max_bytes,
            "log_rewrites": self._log.num_rewrites,
            **self.counts,
        }

    def close(self) -> None:
        """Let go of all files. Idempotent."""
        if self._lock is not None:
            self._lock.close()
        with self.mutex:
            self._log.close()
            self._segments.close()

    # -- inside -------------------------------------------------------------------------

    def _new_lock(self) -> DirLock:
        path = self._config.path / LOCK_NAME
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            require_own(path.parent)
        return DirLock(path)

    def _after_reading(self) -> None:
        if self._log.num_damaged and self._config.verify == "off":
            raise StorageError(f"{self._config.path}: the log is damaged, and pages are not verified")
        if self.read_only is not None:
            segments = self.index.segments
            self.index.forget_segments(
                [n for n, info in segments.items() if self._segments.size(n) < info.num_bytes]
            )
        self._forget_files()

    def _forget_files(self) -> None:
        dropped, self.index.dropped = self.index.dropped, []
        for number in dropped:
            self._segments.forget(number)

    def _match_files(self) -> None:
        """Drop segments whose file is gone or short, and files that no record names."""
        segments = self.index.segments
        self._drop([n for n, info in segments.items() if self._segments.size(n) < info.num_bytes])
        for number in self._segments.numbers():
            if number not in segments:
                self._segments.remove(number)
        for leftover in (*self._config.path.glob("probe-*"), *self._config.path.glob("log.new")):
            leftover.unlink(missing_ok=True)

    def _allocated(self) -> int:
        """Bytes that count against the cap: segments, and the most that lock and log can take."""
        index = self.index
        return OVERHEAD_BYTES + index.segment_bytes + SLOT_OVERHEAD_BYTES * index.num_slots

    def _add_slots(self, keep: Collection[Name], front: Name | None) -> bool:
        """Add a segment, or exchange one of another slot size that is colder than our coldest page."""
        if self._grow():
            return True
        coldest = self.index.coldest(self.shelf, 1, keep, front)
        other = self._colder_segment(coldest[0].used_ns if coldest else None)
        if other is None:
            return False
        self._drop([other])
        self._grow()
        return True

    def _grow(self) -> bool:
        """Add a segment if cap and disk have room for one slot at least."""
        config, slot = self._config, self.slot_size
        status = os.statvfs(config.path)
        free = status.f_bavail * status.f_frsize - config.min_free_bytes
        room = min(config.max_bytes - self._allocated(), free)
        num_slots = min(config.segment_slots(slot), room // (slot + SLOT_OVERHEAD_BYTES))
        if num_slots < 1:
            return False
        number = self.index.next_segment
        if not self._segments.create(number, num_slots * slot):
            return False
        self._log.append([Record(Kind.SEGMENT, number, num_slots, num_bytes=slot)])
        return True

    def _colder_segment(self, than_ns: int | None) -> int | None:
        """A segment of another slot size whose pages are not in use, or colder than `than_ns`."""
        index = self.index
        found: tuple[int, int] | None = None
        for slot_bytes, shelf in index.shelves.items():
            own = [n for n, info in index.segments.items() if info.slot_bytes == slot_bytes]
            if slot_bytes == self.slot_size or not own:
                continue
            first = next(iter(shelf.pages.values()), None)
            candidate = (0, own[0]) if first is None else (first.used_ns, first.place[0])
            found = candidate if found is None else min(found, candidate)
        if found is None or (than_ns is not None and found[0] >= than_ns):
            return None
        return found[1]

    def _coldest_segment(self) -> int:
        entries = self.index.by_place.values()
        used = dict.fromkeys(self.index.segments, 0)
        for entry in entries:
            used[entry.place[0]] = max(used[entry.place[0]], entry.used_ns)
        return min(used, key=lambda number: (used[number], number))

    def _drop(self, numbers: Sequence[int]) -> None:
        """Give segments back to the file system, with their pages."""
        before = len(self.index.by_place)
        self._log.append([Record(Kind.DROP, number) for number in numbers])
        self._forget_files()
        for number in numbers:
            self._segments.remove(number)
        self.counts["evicted"] += before - len(self.index.by_place)


def _runs(places: Collection[Place]) -> Iterator[tuple[int, int, int]]:
    """Slots that follow each other in a segment: (segment, first, how many)."""
    first: Place | None = None
    count = 0
    for place in sorted(places):
        if first is not None and place == (first[0], first[1] + count):
            count += 1
            continue
        if first is not None:
            yield *first, count
        first, count = place, 1
    if first is not None:
        yield *first, count


class PageRecord:
    """A page that was written, for `publish`. front: the one in front of it in its chain, where known."""

    __slots__ = ("algorithm", "checksum", "front", "name", "num_bytes", "place", "used_ns")

    def __init__(self, name: Name, front: Name | None, place: Place, num_bytes: int, used_ns: int):
        self.name = name
        self.front = front
        self.place = place
        self.num_bytes = num_bytes
        self.used_ns = used_ns
        self.algorithm = self.checksum = 0

    def record(self, namespace: bytes, version: int, more_flags: int) -> Record:
        """The PUT record of this page."""
        key, flags = packed_name(self.name)
        return Record(
            Kind.PUT, *self.place, version, namespace, key, self.num_bytes,
            self.algorithm, self.checksum, self.used_ns, flags | more_flags,
        )  # fmt: skip

"""The log's content in memory: which page is in which slot, which slots are free, who was used last.

Pages of one slot size share a shelf; own pages are filed under their names, those of other fingerprints with
their namespace before. Every change is a record, applied in `apply`: a process that writes one applies it
like all the others do that read it. Not thread-safe: the backend's lock guards it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hiradix.storage.backends.disk.chains import Waiting, coldest, link
from hiradix.storage.backends.disk.entry import IndexEntry
from hiradix.storage.backends.disk.record import BEHIND_NEXT, Kind, Name, Record, packed_name, unpacked_name
from hiradix.storage.kit.lru import believed

RETIRED_SHARE = 8
"""At most one slot in so many is retired: a disk of which more fails is not to be helped so."""


@dataclass
class Shelf:
    """Pages with slots of one size, coldest first, and the free slots among theirs.

    labels: those of `pages`. CPython looks a batch up in a set in a single call, and three times as fast.
    """

    slot_bytes: int
    pages: OrderedDict[Name, IndexEntry] = field(default_factory=OrderedDict)
    labels: set[Name] = field(default_factory=set)
    free: set[tuple[int, int]] = field(default_factory=set)
    heap: list[tuple[int, int]] = field(default_factory=list)  # of `free`, and of some no longer in it
    waiting: Waiting = field(default_factory=Waiting)

    def take_free(self, count: int) -> list[tuple[int, int]]:
        """At most `count` free slots, lowest first. They stay free until a record says otherwise."""
        taken: list[tuple[int, int]] = []
        while self.heap and len(taken) < count:
            place = heapq.heappop(self.heap)
            if place in self.free and (not taken or taken[-1] != place):
                taken.append(place)
        for place in taken:
            heapq.heappush(self.heap, place)
        return taken

    def link(self, label: Name, front: Name) -> None:
        """A page is used that has `front` in front of it in its chain."""
        link(self.pages, self.waiting, label, front)

    def link_all(self, labels: Sequence[Name], fronts: Callable[[], Sequence[Name | None]]) -> None:
        """The same of a call's pages, if that is not known of its last. fronts: says what is in front."""
        last = self.pages.get(labels[-1]) if labels else None
        if last is not None and last.front is None:
            for label, front in zip(labels, fronts()):
                if front is not None:
                    self.link(label, front)

    def tidy(self) -> None:
        """Give back the memory of slots that are no longer free."""
        self.free = set(self.free)
        self.heap = sorted(self.free)

    def give(self, place: tuple[int, int]) -> None:
        """A slot is free from now on."""
        if place not in self.free:
            self.free.add(place)
            heapq.heappush(self.heap, place)


@dataclass(frozen=True)
class SegmentInfo:
    """The layout of a segment file."""

    num_slots: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


class Index:
    """Holds in memory where each page is, which slots are free, and which page was used last.
    `namespace` is our own: 16 bytes."""

    def __init__(self, namespace: bytes):
        self._namespace = namespace
        self.shelves: dict[int, Shelf] = {}
        self.segments: dict[int, SegmentInfo] = {}
        self.by_place: dict[tuple[int, int], IndexEntry] = {}
        self.retired: set[tuple[int, int]] = set()  # slots that are not given out any more
        self.dropped: list[int] = []  # segments that went, for their files to be let go of
        self.next_segment = 0
        self.next_version = 1
        self._same: dict[Any, Any] = {}
        self._behind: tuple[Shelf, Name] | None = None  # what the next PUT's page is in front of

    @property
    def num_slots(self) -> int:
        """Slots of all segments."""
        return sum(segment.num_slots for segment in self.segments.values())

    @property
    def segment_bytes(self) -> int:
        """Length of all segment files."""
        return sum(segment.num_bytes for segment in self.segments.values())

    def shelf(self, slot_bytes: int) -> Shelf:
        """The shelf of that slot size, made when first asked for."""
        shelf = self.shelves.get(slot_bytes)
        if shelf is None:
            shelf = self.shelves[slot_bytes] = Shelf(slot_bytes)
        return shelf

    def label(self, namespace: bytes, name: Name) -> Name:
        """The label of a page on its shelf: its name, or for other fingerprints bytes of another
        length, so that a caller's key never is somebody else's label."""
        if namespace == self._namespace:
            return name
        key, flags = packed_name(name)
        return namespace + key + bytes([flags])

    def apply(self, record: Record) -> None:
        """Let a record happen. Records about what is not there are ignored."""
        kind = record.kind
        if kind == Kind.PUT:
            self._put(record)
        elif kind == Kind.FREE:
            self._free((record.segment, record.slot))
        elif kind == Kind.TOUCH:
            self._touch((record.segment, record.slot), record.used_ns)
        elif kind == Kind.FOLLOWS:
            self._follow((record.segment, record.slot), unpacked_name(record.key, record.flags))
        elif kind == Kind.SEGMENT:
            self._add_segment(record)
        elif kind == Kind.RETIRED:
            self._retire((record.segment, record.slot))
        elif kind == Kind.DROP:
            self._drop_segment(record.segment)
        elif kind == Kind.CLEAR:
            for entry in [e for e in self.by_place.values() if e.namespace == record.namespace]:
                self._free(entry.place)
        elif kind == Kind.HEADER:
            self.next_segment = record.segment
            self.next_version = record.checksum

    def use(self, entry: IndexEntry, used_ns: int) -> None:
        """The entry's page is its shelf's hottest now."""
        entry.used_ns = used_ns
        self._shelf_of(entry).pages.move_to_end(self.label(entry.namespace, entry.name))

    def coldest(
        self, shelf: Shelf, count: int, keep: Collection[Name], front: Name | None = None
    ) -> list[IndexEntry]:
        """At most `count` of a shelf's coldest pages: none of `keep`'s labels, nor `front`, nor what is in
        front of any of these."""
        return [shelf.pages[label] for label in coldest(shelf.pages, shelf.waiting, count, keep, front)]

    def snapshot(self) -> Iterator[Record]:
        """Records that make this index, its order included, in a new log. The header is the log's own."""
        for number, info in sorted(self.segments.items()):
            yield Record(Kind.SEGMENT, number, info.num_slots, num_bytes=info.slot_bytes)
        yield from (Record(Kind.RETIRED, *place) for place in sorted(self.retired))
        # and what is in front of them, where that is not next
        behind: list[tuple[IndexEntry, IndexEntry]] = []
        for shelf in self.shelves.values():
            entries = list(shelf.pages.values())
            for entry, after in zip(entries, [*entries[1:], None]):
                front = None if entry.front is None else shelf.pages.get(entry.front)
                yield put_record(entry, BEHIND_NEXT if front is not None and front is after else 0)
                if front is not None and front is not after:
                    behind.append((entry, front))
        for entry, front in behind:
            yield follows_record(entry.place, front.name)

    def forget(self, entries: Iterable[IndexEntry]) -> None:
        """Take pages out without a record: for a store that cannot write one."""
        for entry in entries:
            if entry.is_same(self.by_place.get(entry.place)):
                self._free(entry.place)

    def forget_segments(self, numbers: Iterable[int]) -> None:
        """The same of segments with their pages."""
        for number in numbers:
            self._drop_segment(number)

    def sort(self, now_ns: int) -> None:
        """Put all shelves in order of use, as far as that is believed, without what reading has left behind."""
        for entry in self.by_place.values():
            if entry.used_ns > now_ns:
                entry.used_ns = believed(entry.used_ns, now_ns)
        for shelf in self.shelves.values():
            shelf.tidy()
            shelf.waiting.end()
            times = [entry.used_ns for entry in shelf.pages.values()]
            if any(before > after for before, after in zip(times, times[1:])):
                order = sorted(shelf.pages.items(), key=lambda item: item[1].used_ns)
                shelf.pages = OrderedDict(order)

    def adopt(self, older: Index) -> None:
        """Keep what `older` knew of the same pages: that they were verified, and later uses."""
        for place, entry in self.by_place.items():
            before = older.by_place.get(place)
            if before is not None and entry.is_same(before):
                entry.verified = before.verified
                entry.front, entry.next = entry.front or before.front, entry.next or before.next
                entry.used_ns = max(entry.used_ns, before.used_ns)

    # -- records ------------------------------------------------------------------------

    def _shelf_of(self, entry: IndexEntry) -> Shelf:
        return self.shelves[self.segments[entry.place[0]].slot_bytes]

    def _put(self, record: Record) -> None:
        info = self.segments.get(record.segment)
        if info is None or record.slot >= info.num_slots or record.num_bytes > info.slot_bytes:
            return
        entry = IndexEntry(record, unpacked_name(record.key, record.flags), self._same)
        place, shelf = entry.place, self.shelf(info.slot_bytes)
        label = self.label(entry.namespace, entry.name)
        if place in self.by_place:
            self._free(place)
        before = shelf.pages.get(label)
        if before is not None:
            self._free(before.place)
        shelf.free.discard(place)
        self.retired.discard(place)  # by an older version, which knows of none
        shelf.pages[label] = entry
        shelf.labels.add(label)
        self.by_place[place] = entry
        self.next_version = max(self.next_version, record.version + 1)
        if self._behind is not None and self._behind[0] is shelf:
            shelf.link(self._behind[1], label)
        self._behind = (shelf, label) if record.flags & BEHIND_NEXT else None

    def _follow(self, place: tuple[int, int], front: Name) -> None:
        entry = self.by_place.get(place)
        if entry is not None:
            label, front = (self.label(entry.namespace, name) for name in (entry.name, front))
            self._shelf_of(entry).link(label, front)

    def _free(self, place: tuple[int, int]) -> None:
        entry = self.by_place.pop(place, None)
        if entry is not None:
            shelf = self._shelf_of(entry)
            label = self.label(entry.namespace, entry.name)
            del shelf.pages[label]
            shelf.labels.remove(label)
            shelf.waiting.drop(label, entry)
            if place not in self.retired:
                shelf.give(place)

    def _retire(self, place: tuple[int, int]) -> None:
        info = self.segments.get(place[0])
        if info is not None and place[1] < info.num_slots:
            self._free(place)
            self.retired.add(place)
            self.shelf(info.slot_bytes).free.discard(place)

    def _touch(self, place: tuple[int, int], used_ns: int) -> None:
        entry = self.by_place.get(place)
        if entry is not None:
            entry.logged_ns = used_ns
            self.use(entry, used_ns)

    def _add_segment(self, record: Record) -> None:
        if record.slot and record.num_bytes:
            self._drop_segment(record.segment)
            self.segments[record.segment] = SegmentInfo(record.slot, record.num_bytes)
            shelf = self.shelf(record.num_bytes)
            for slot in range(record.slot):
                shelf.give((record.segment, slot))
            self.next_segment = max(self.next_segment, record.segment + 1)

    def _drop_segment(self, number: int) -> None:
        info = self.segments.get(number)
        if info is None:
            return
        for slot in range(info.num_slots):
            self._free((number, slot))
        self.shelf(info.slot_bytes).free.difference_update((number, slot) for slot in range(info.num_slots))
        self.retired = {place for place in self.retired if place[0] != number}
        del self.segments[number]
        self._same.clear()
        self.dropped.append(number)


def put_record(entry: IndexEntry, more_flags: int) -> Record:
    """The PUT record of a page as it is now."""
    key, flags = packed_name(entry.name)
    return Record(
        Kind.PUT, *entry.place, entry.version, entry.namespace, key, entry.num_bytes,
        entry.algorithm, entry.checksum, entry.used_ns, flags | more_flags,
    )  # fmt: skip


def follows_record(place: tuple[int, int], front: Name) -> Record:
    """The log record that names the page in front of the one in a slot."""
    key, flags = packed_name(front)
    return Record(Kind.FOLLOWS, *place, key=key, flags=flags)

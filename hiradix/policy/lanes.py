"""Lanes: the leaves of one class in one tier, oldest first, and which of them goes next.

A leaf's worth depends on its age, so it changes while nobody touches it. A lane keeps its leaves sorted by
their last use, in which order all of them grow old; it finds the age with the least index that a leaf of it
has by search, and knows until when that stands. So leaves cost nothing while they age.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heappop, heappush
from typing import Final, TypeAlias

from hiradix.policy.ghd_tables import ClassTables
from hiradix.policy.ranks import BUCKETS, EDGE_LIST, ClassRanks
from hiradix.policy.uses import Note
from hiradix.tree.node import Residency

Item: TypeAlias = "tuple[int, int, int, Place]"  # last use, depth, serial number
NEVER: Final = 1 << 60
INFINITE: Final = 1e300  # beyond every index
FEW: Final = 64


class Place:
    """A leaf's place in a lane, or on its way there (lane None). entry None: void, to be skipped.

    start: where the leaf's node began when it was given the place.
    """

    __slots__ = ("entry", "note", "start", "lane")

    def __init__(self, entry: Residency, note: Note, start: int):
        self.entry: Residency | None = entry
        self.note = note
        self.start = start
        self.lane: Lane | None = None


class Lane:
    """See the module's docstring. Its leaves, and who of them goes first as far as that has been asked.

    head: who goes first, None if that is not known. rank: the head's index, or if there is none a lower bound
    of all leaves' (infinite: there is no leaf). until: the clock from which on head or rank may be wrong.
    watched: when who asks the lane will look at it again; his own.
    """

    __slots__ = (
        "class_id", "head", "rank", "until", "watched", "_bucket", "_item", "_items", "_most", "_ranks",
    )  # fmt: skip

    def __init__(self, class_id: int, ranks: ClassRanks):
        self.class_id = class_id
        self.head: Place | None = None
        self.rank = INFINITE
        self.until = self.watched = NEVER
        self._bucket = 0  # the head's
        self._item: Item | None = None  # the head's
        self._items: list[Item] = []
        self._most = FEW  # items, before those that are void are taken out
        self._ranks = ranks

    def enter(self, place: Place, depth: int, number: int, clock: int) -> bool:
        """Add `place`; whether `rank` or `until` is another. O(log n) and a move of what was used later."""
        items, used = self._items, place.note.clock
        item = (used, depth, number, place)
        place.lane = self
        if items and item < items[-1]:
            insort(items, item)
        else:
            items.append(item)
        if len(items) > self._most:
            self._sort_out()
        if self.head is not None:
            return self._compared(item, clock)
        if self.rank != INFINITE and items[0][3] is not place:
            return False  # the bound is of one that is older
        self.bound(clock)
        return True

    def _compared(self, item: Item, clock: int) -> bool:
        """Whether the head, which `item` may be from here on, has another `rank` or `until` for it."""
        used, ranks, rank, until = item[0], self._ranks, self.rank, self.until
        age, bucket = clock - used, self._bucket
        if EDGE_LIST[bucket] <= age and (age < EDGE_LIST[bucket + 1] or bucket == BUCKETS - 1):
            if self._item is not None and self._item < item:
                return False
        else:
            bucket = _bucket_of(age)
            index = ranks.index[bucket]
            if index > rank or (index == rank and bucket > self._bucket):
                entries = ranks.entries(self._bucket)
                at = bisect_right(entries, bucket)
                if at < len(entries):
                    self.until = min(until, used + EDGE_LIST[entries[at]])
                return self.until != until
            rank = index
        self.head, self._item, self._bucket, self.rank = item[3], item, bucket, rank
        self.until = min(until, _leaves(used, bucket))
        return True

    def left(self, place: Place, clock: int) -> bool:
        """`place` has become void; whether `rank` or `until` is another. O(log n)."""
        if place is not self.head:
            return False
        items = self._items
        following = self._first(0 if items and items[0][3] is place else place.note.clock)
        if following is not None and clock - following[0] >= EDGE_LIST[self._bucket]:  # nor is it older
            self.head, self._item = following[3], following
            return False
        self.bound(clock)
        return True

    def bound(self, clock: int, ranks: ClassRanks | None = None) -> None:
        """Forget the head; `rank` is a lower bound. ranks: if they are new. O(log n)."""
        if ranks is not None:
            self._ranks = ranks
        self.head, self._item, oldest = None, None, self._first(0)
        if oldest is None:
            self.rank, self.until = INFINITE, NEVER
            return
        bucket = _bucket_of(clock - oldest[0])
        falls = self._ranks.falls[bucket]
        self.rank = self._ranks.least[bucket]
        self.until = oldest[0] + EDGE_LIST[falls] if falls < BUCKETS else NEVER

    def choose(self, clock: int) -> None:
        """Find the head: of the age with the least index the oldest, of one path the deepest. O(64 log n)."""
        chosen, ranks = self._first(0), self._ranks
        if chosen is None:
            self.rank, self.until = INFINITE, NEVER
            return
        bucket = _bucket_of(clock - chosen[0])
        youngest = clock - self._items[-1][0]
        for younger in ranks.younger(bucket):
            if EDGE_LIST[younger + 1] <= youngest:
                continue
            found = self._first(clock - EDGE_LIST[younger + 1] + 1)
            if found is not None and found[0] <= clock - EDGE_LIST[younger]:
                bucket, chosen = younger, found
                break
        self.head, self._item, self.rank, self._bucket = chosen[3], chosen, ranks.index[bucket], bucket
        until = _leaves(chosen[0], bucket)
        for entry in ranks.entries(bucket):
            if EDGE_LIST[entry] <= youngest:
                continue
            following = self._first(clock - EDGE_LIST[entry] + 1)
            if following is not None:
                until = min(until, following[0] + EDGE_LIST[entry])
        self.until = until

    def _first(self, clock: int) -> Item | None:
        """The first leaf last used at `clock` or later. Drops the void ones it meets."""
        items = self._items
        at = end = bisect_left(items, (clock,)) if clock else 0
        count = len(items)
        while end < count:
            item = items[end]
            if not _is_void(item):
                if end > at:
                    break
                return item
            end += 1
        if end > at:
            del items[at:end]
        return items[at] if at < len(items) else None

    def _sort_out(self) -> None:
        """Take out the void ones: once as many as all there are have come, so O(1) for each."""
        self._items = [item for item in self._items if not _is_void(item)]
        self._most = 2 * len(self._items) + FEW


class Lanes:
    """One tier's lanes by class, and which of them has the leaf that goes next."""

    def __init__(self, tables: ClassTables):
        self._tables = tables
        self._lanes: dict[int, Lane] = {}
        self._least: Lane | None = None  # of the least rank, and of these the least class; None: not known
        self._rank = INFINITE  # its rank
        self._ends: list[tuple[int, int]] = []  # a heap: until when a lane's rank stands, and its class
        self._clock = 0  # for which they are right
        self._version = tables.version
        self._number = 0

    def settle(self, clock: int) -> None:
        """Bring the lanes up to `clock` and the tables' index."""
        if self._version != self._tables.version:
            self._reindex(clock)
        elif clock != self._clock:
            self._clock = clock
            if self._ends and self._ends[0][0] <= clock:
                self._grow_older(clock)

    def enter(self, place: Place, depth: int) -> None:
        """Add `place`; of those used at one time the least `depth` goes first."""
        class_id = place.note.class_id
        lane = self._lanes.get(class_id)
        if lane is None:
            lane = self._lanes[class_id] = Lane(class_id, self._tables.ranks(class_id))
        self._number += 1
        if lane.enter(place, depth, self._number, self._clock):
            self._looked_at(lane)

    def left(self, place: Place, lane: Lane) -> None:
        """`place`, which is in `lane`, has become void."""
        if lane.left(place, self._clock):
            self._looked_at(lane)

    def first(self) -> Place | None:
        """Who goes next; None: there is nobody. O(lanes) where another lane may have become the least."""
        while True:
            lane = self._least or self._found_least()
            if lane is None or lane.rank == INFINITE:
                return None
            if lane.head is not None:
                return lane.head
            lane.choose(self._clock)
            self._looked_at(lane)

    def _reindex(self, clock: int) -> None:
        """The index has changed."""
        self._version, self._clock = self._tables.version, clock
        self._least = None
        self._ends.clear()
        for class_id, lane in self._lanes.items():
            lane.watched = NEVER
            lane.bound(clock, self._tables.ranks(class_id))
            self._looked_at(lane)

    def _grow_older(self, clock: int) -> None:
        """Some lanes' ranks may have changed with time."""
        ends = self._ends
        while ends and ends[0][0] <= clock:
            end, class_id = heappop(ends)
            lane = self._lanes[class_id]
            if lane.watched == end:
                lane.watched = NEVER
                if lane.until <= clock:
                    lane.bound(clock)
                self._looked_at(lane)

    def _looked_at(self, lane: Lane) -> None:
        """`lane` may have another rank, which may stand until another time."""
        least, rank = self._least, lane.rank
        if least is lane:
            if rank > self._rank:
                self._least = None
            self._rank = rank
        elif least is not None:
            if rank < self._rank or (rank == self._rank and lane.class_id < least.class_id):
                self._least, self._rank = lane, rank
        if lane.until < lane.watched:
            lane.watched = lane.until
            heappush(self._ends, (lane.until, lane.class_id))

    def _found_least(self) -> Lane | None:
        least: Lane | None = None
        rank, number = INFINITE, NEVER
        for lane in self._lanes.values():
            if lane.rank < rank or (lane.rank == rank and lane.class_id < number):
                least, rank, number = lane, lane.rank, lane.class_id
        self._least, self._rank = least, rank
        return least


def _is_void(item: Item) -> bool:
    """Whether nobody is there any more, or his node was merged away."""
    entry = item[3].entry
    return entry is None or entry.node is None


def _bucket_of(age: int) -> int:
    return bisect_right(EDGE_LIST, age, 0, BUCKETS) - 1


def _leaves(used: int, bucket: int) -> int:
    """When a leaf leaves the bucket it is in."""
    return used + EDGE_LIST[bucket + 1] if bucket < BUCKETS - 1 else NEVER

"""Lanes: the leaves of one class in one tier, oldest first, and which of them goes next.

A leaf's worth depends on its age, so it changes while nobody touches it. A lane keeps its leaves sorted by
their last use, in which order all of them grow old; it finds the age with the least index that a leaf of it
has by search, and knows until when that stands. So leaves cost nothing while they age.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TypeAlias

from hiradix.policy.ghd_tables import BUCKETS, EDGE_LIST, ClassRanks
from hiradix.policy.uses import Note
from hiradix.tree.node import Residency

Item: TypeAlias = "tuple[int, int, int, Place]"  # last use, depth, serial number
NEVER = 1 << 62
INFINITE = float("inf")


class Place:
    """A leaf's place in a lane, or on its way there (lane None). entry None: void, to be skipped."""

    __slots__ = ("entry", "note", "lane")

    def __init__(self, entry: Residency, note: Note):
        self.entry: Residency | None = entry
        self.note = note
        self.lane: Lane | None = None


class Lane:
    """See the module's docstring. Its leaves, and who of them goes first as far as that has been asked.

    head: who goes first, None if that is not known. rank: the head's index, or if there is none a lower bound
    of all leaves' (infinite: there is no leaf). until: the clock from which on head or rank may be wrong.
    """

    __slots__ = ("class_id", "head", "rank", "until", "_bucket", "_items", "_num_void", "_ranks")

    def __init__(self, class_id: int, ranks: ClassRanks):
        self.class_id = class_id
        self.head: Place | None = None
        self.rank = INFINITE
        self.until = NEVER
        self._bucket = 0  # the head's
        self._items: list[Item] = []
        self._num_void = 0
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
        head, ranks = self.head, self._ranks
        if head is not None and used > head.note.clock:
            bucket = _bucket_of(clock - used)
            mine, other = ranks.index[bucket], self.rank
            if mine > other or (mine == other and bucket >= self._bucket):
                entries = ranks.entries(self._bucket)
                at = bisect_right(entries, bucket)
                if at == len(entries) or used + EDGE_LIST[entries[at]] >= self.until:
                    return False
                self.until = used + EDGE_LIST[entries[at]]
                return True
        elif head is None and self.rank != INFINITE and items[0][3] is not place:
            return False  # the bound is of one that is older
        self.bound(clock)
        return True

    def left(self, place: Place, clock: int) -> bool:
        """`place` has become void; whether `rank` or `until` is another. O(log n); half void, once, O(n)."""
        self._num_void += 1
        if 2 * self._num_void > len(self._items) + 64:
            self._items = [item for item in self._items if item[3].entry is not None]
            self._num_void = 0
        if place is not self.head:
            return False
        following = self._first(place.note.clock)
        if following is not None and _bucket_of(clock - following[0]) == self._bucket:
            self.head = following[3]
            return False
        self.bound(clock)
        return True

    def bound(self, clock: int, ranks: ClassRanks | None = None) -> None:
        """Forget the head; `rank` is a lower bound. ranks: if they are new. O(log n)."""
        if ranks is not None:
            self._ranks = ranks
        self.head, oldest = None, self._first(0)
        if oldest is None:
            self.rank, self.until = INFINITE, NEVER
            return
        bucket = _bucket_of(clock - oldest[0])
        self.rank, self.until = self._ranks.least[bucket], _leaves(oldest, bucket)

    def choose(self, clock: int) -> None:
        """Find the head: of the age with the least index the oldest, of one path the deepest. O(64 log n)."""
        chosen, ranks = self._first(0), self._ranks
        if chosen is None:
            self.rank, self.until = INFINITE, NEVER
            return
        bucket = _bucket_of(clock - chosen[0])
        for younger in ranks.younger(bucket):
            found = self._first(clock - EDGE_LIST[younger + 1] + 1)
            if found is not None and found[0] <= clock - EDGE_LIST[younger]:
                bucket, chosen = younger, found
                break
        self.head, self.rank, self._bucket = chosen[3], ranks.index[bucket], bucket
        until = _leaves(chosen, bucket)
        for entry in ranks.entries(bucket):
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
            if item[3].entry is not None:
                if end > at:
                    break
                return item
            end += 1
        if end > at:
            del items[at:end]
            self._num_void -= end - at
        return items[at] if at < len(items) else None


def _bucket_of(age: int) -> int:
    return bisect_right(EDGE_LIST, age, 0, BUCKETS) - 1


def _leaves(item: Item, bucket: int) -> int:
    """When a leaf leaves the bucket it is in."""
    return item[0] + EDGE_LIST[bucket + 1] if bucket < BUCKETS - 1 else NEVER

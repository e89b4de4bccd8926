"""The class queues in Python: `hiradix.policy.class_queues` without `_class_queues.c`, and its reference."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from typing import Final

from hiradix.errors import Misuse
from hiradix.policy.class_ranks import BUCKETS, EDGE_LIST, ClassRanks
from hiradix.policy.ghd_tables import ClassTables
from hiradix.policy.places import INFINITE, NEVER, Place

FEW: Final = 64


class ClassQueue:
    """The leaves of one class, and who of them goes first as far as that has been asked.

    head: who goes first, None if that is not known. rank: the head's index, or if there is none a lower bound
    of all leaves' (infinite: there is no leaf). until: the clock from which on head or rank may be wrong.
    watched: when who asks the queue will look at it again; his own.
    """

    __slots__ = (
        "class_id", "head", "rank", "until", "watched",
        "_begin", "_bucket", "_most", "_places", "_ranks", "_used",
    )  # fmt: skip

    def __init__(self, class_id: int, ranks: ClassRanks):
        self.class_id = class_id
        self.head: Place | None = None
        self.rank = INFINITE
        self.until = self.watched = NEVER
        self._bucket = 0  # the head's
        self._places: list[Place] = []  # by last use; of one use by depth, then as they came
        self._used: list[int] = []  # when each was used last
        self._begin = 0  # those before are void
        self._most = FEW  # places, before those that are void are taken out
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self._places) - self._begin

    def enter(self, place: Place, depth: int, clock: int) -> bool:
        """Add `place`; whether `rank` or `until` is another. O(log n) and a move of what was used later."""
        places, used = self._places, place.note.clock
        place.depth = depth
        at = len(places)
        if at > self._begin and self._used[-1] >= used:
            at = self._place_of(used, depth)
        places.insert(at, place)
        self._used.insert(at, used)
        if len(places) > self._most:
            self._sort_out()
        head = self.head
        if head is not None:
            return self._compared(head, place, clock)
        if self.rank != INFINITE and self._places[self._begin] is not place:
            return False  # the bound is of one that is older
        self.bound(clock)
        return True

    def _place_of(self, used: int, depth: int) -> int:
        """The index at which a new leaf is inserted: behind all that are alike."""
        begin = bisect_left(self._used, used, self._begin)
        end = bisect_right(self._used, used, begin)
        if begin == end or self._places[end - 1].depth <= depth:
            return end
        return bisect_right(self._places, depth, begin, end, key=_depth_of)

    def _compared(self, head: Place, place: Place, clock: int) -> bool:
        """Whether the head, which `place` may be from here on, has another `rank` or `until` for it."""
        used, ranks, rank, until = place.note.clock, self._ranks, self.rank, self.until
        age, bucket = clock - used, self._bucket
        if EDGE_LIST[bucket] <= age and (age < EDGE_LIST[bucket + 1] or bucket == BUCKETS - 1):
            first = head.note.clock
            if first < used or (first == used and head.depth <= place.depth):
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
        self.head, self._bucket, self.rank = place, bucket, rank
        self.until = min(until, _leaves(used, bucket))
        return True

    def left(self, place: Place, clock: int) -> bool:
        """`place` has become void; whether `rank` or `until` is another. O(log n)."""
        if place is not self.head:
            return False
        places, begin = self._places, self._begin
        is_oldest = begin < len(places) and places[begin] is place
        following = self._first(0 if is_oldest else place.note.clock)
        if following is not None:
            if clock - following.note.clock >= EDGE_LIST[self._bucket]:  # nor is it older
                self.head = following
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
        used = oldest.note.clock
        bucket = _bucket_of(clock - used)
        falls = self._ranks.falls[bucket]
        self.rank = self._ranks.least[bucket]
        self.until = used + EDGE_LIST[falls] if falls < BUCKETS else NEVER

    def choose(self, clock: int) -> None:
        """Find the head: of the age with the least index the oldest, of one path the deepest. O(64 log n)."""
        chosen, ranks = self._first(0), self._ranks
        if chosen is None:
            self.rank, self.until = INFINITE, NEVER
            return
        bucket = _bucket_of(clock - chosen.note.clock)
        youngest = clock - self._used[-1]
        for younger in ranks.younger(bucket):
            if EDGE_LIST[younger + 1] <= youngest:
                continue
            found = self._first(clock - EDGE_LIST[younger + 1] + 1)
            if found is not None and found.note.clock <= clock - EDGE_LIST[younger]:
                bucket, chosen = younger, found
                break
        self.head, self.rank, self._bucket = chosen, ranks.index[bucket], bucket
        until = _leaves(chosen.note.clock, bucket)
        for entry in ranks.entries(bucket):
            if EDGE_LIST[entry] <= youngest:
                continue
            following = self._first(clock - EDGE_LIST[entry] + 1)
            if following is not None:
                until = min(until, following.note.clock + EDGE_LIST[entry])
        self.until = until

    def _first(self, clock: int) -> Place | None:
        """The first leaf last used at `clock` or later. Drops the void ones it meets."""
        places, begin = self._places, self._begin
        at = end = bisect_left(self._used, clock, begin) if clock else begin
        count = len(places)
        while end < count and _is_void(places[end]):
            end += 1
        found = places[end] if end < count else None
        if at == begin:
            self._begin = end
            if 2 * end > count + FEW:
                self._sort_out()
        elif end > at:
            del places[at:end], self._used[at:end]
        return found

    def _sort_out(self) -> None:
        """Take out the void ones: once as many as all there are have come, so O(1) for each."""
        self._places = [place for place in self._places if not _is_void(place)]
        self._used = [place.note.clock for place in self._places]
        self._begin = 0
        self._most = 2 * len(self._places) + FEW


class ClassQueues:
    """Keeps the leaves of a tier by class, oldest first, and finds the one of least index."""

    def __init__(self, tables: ClassTables):
        self._tables = tables
        self._queues: dict[int, ClassQueue] = {}
        self._least: ClassQueue | None = (
            None  # of the least rank, and of these the least class; None: not known
        )
        self._rank = INFINITE  # its rank
        self._ends: list[tuple[int, int]] = []  # a heap: until when a queue's rank stands, and its class
        self._clock = 0  # for which they are right
        self._version = tables.version

    def settle(self, clock: int) -> None:
        if self._version != self._tables.version:
            self._reindex(clock)
        elif clock != self._clock:
            self._clock = clock
            if self._ends and self._ends[0][0] <= clock:
                self._grow_older(clock)

    def enter(self, place: Place, class_id: int, used: int, depth: int) -> ClassQueue:
        queue = self._queues.get(class_id)
        if queue is None:
            queue = self._queues[class_id] = ClassQueue(class_id, self._tables.ranks(class_id))
        if used != place.note.clock:
            raise Misuse(f"last used at {place.note.clock}, not at {used}")
        if queue.enter(place, depth, self._clock):
            self._looked_at(queue)
        return queue

    def left(self, place: Place, queue: ClassQueue) -> None:
        if queue.left(place, self._clock):
            self._looked_at(queue)

    def first(self, clock: int) -> Place | None:
        self.settle(clock)
        while True:
            queue = self._least or self._found_least()
            if queue is None or queue.rank == INFINITE:
                return None
            if queue.head is not None:
                return queue.head
            queue.choose(self._clock)
            self._looked_at(queue)

    @property
    def rank(self) -> float:
        return self._rank

    def __len__(self) -> int:
        """Places, and of the void those that have not been taken out."""
        return sum(len(queue) for queue in self._queues.values())

    def _reindex(self, clock: int) -> None:
        """The index has changed."""
        self._version, self._clock = self._tables.version, clock
        self._least = None
        self._ends.clear()
        for class_id, queue in self._queues.items():
            queue.watched = NEVER
            queue.bound(clock, self._tables.ranks(class_id))
            self._looked_at(queue)

    def _grow_older(self, clock: int) -> None:
        """Some queues' ranks may have changed with time."""
        ends = self._ends
        while ends and ends[0][0] <= clock:
            end, class_id = heappop(ends)
            queue = self._queues[class_id]
            if queue.watched == end:
                queue.watched = NEVER
                if queue.until <= clock:
                    queue.bound(clock)
                self._looked_at(queue)

    def _looked_at(self, queue: ClassQueue) -> None:
        """`queue` may have another rank, which may stand until another time."""
        least, rank = self._least, queue.rank
        if least is queue:
            if rank > self._rank:
                self._least = None
            self._rank = rank
        elif least is not None:
            if rank < self._rank or (rank == self._rank and queue.class_id < least.class_id):
                self._least, self._rank = queue, rank
        if queue.until < queue.watched:
            queue.watched = queue.until
            heappush(self._ends, (queue.until, queue.class_id))

    def _found_least(self) -> ClassQueue | None:
        least: ClassQueue | None = None
        rank, number = INFINITE, NEVER
        for queue in self._queues.values():
            if queue.rank < rank or (queue.rank == rank and queue.class_id < number):
                least, rank, number = queue, queue.rank, queue.class_id
        self._least, self._rank = least, rank
        return least


def _is_void(place: Place) -> bool:
    """Whether nobody is there any more, or his node was merged away."""
    entry = place.entry
    return entry is None or entry.node is None


def _depth_of(place: Place) -> int:
    return place.depth


def _bucket_of(age: int) -> int:
    return bisect_right(EDGE_LIST, age, 0, BUCKETS) - 1


def _leaves(used: int, bucket: int) -> int:
    """The time at which a leaf leaves the age bucket that it is in."""
    return used + EDGE_LIST[bucket + 1] if bucket < BUCKETS - 1 else NEVER

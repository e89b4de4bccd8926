"""GHD's order of one tier: the leaf with the least index goes first; leaves wait in a lane per class.

What becomes a leaf is put into its lane when somebody must leave, so that a path that is locked and unlocked
again costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from hiradix.policy.ghd_tables import CONVERSATION, MAX_CLASSES, ClassTables
from hiradix.policy.ghosts import EMPTY
from hiradix.policy.lanes import INFINITE, NEVER, Lane, Place
from hiradix.policy.leaves import NONE_GONE, exposed_parent, is_blocked
from hiradix.policy.uses import Note, Use, UseLog
from hiradix.tree import Node, OrderContext, Tier
from hiradix.tree.node import Residency

_NOBODY = Use(0, 0, EMPTY)


class LaneOrder:
    """See the module's docstring. O(log n) per leaf that may have to leave, O(classes) per victim.

    An entry's rank is its place, None if its node is no leaf.
    """

    def __init__(self, context: OrderContext, log: UseLog, tables: ClassTables):
        self.num_pages = 0
        self._most_pages = log.pages_remembered
        self._context = context
        self._is_plain = context.backbone and context.tier == Tier.DEVICE
        self.tier = context.tier
        self._log = log
        self._tables = tables
        self._live: set[Residency] = set()
        self._fresh: list[Place] = []  # on their way to a lane
        self._lanes: dict[int, Lane] = {}
        self._least = np.full(MAX_CLASSES, INFINITE)  # each lane's rank
        self._until = np.full(MAX_CLASSES, NEVER)  # and how long it stands
        self._ranks, self._ends = self._least[:1], self._until[:1]  # up to the last lane
        self._asked = 0  # the clock for which they are right
        self._version = tables.version
        self._number = 0
        self._newborn = Note(_NOBODY, 0, CONVERSATION, 0)

    def __iter__(self) -> Iterator[Residency]:
        return iter(self._live)

    def push(self, entries: Iterable[Residency]) -> None:
        if not isinstance(entries, list):
            entries = list(entries)
        self._live.update(entries)
        # A plain order's are a path, deepest first: what follows has a child.
        for entry in entries[:1] if self._is_plain else entries:
            if not is_blocked(self._context, entry):
                self._seat(entry)
        self.num_pages += self._pages_of(entries)
        if self.num_pages > self._most_pages:
            self._most_pages = self.num_pages
            self._log.grow(self.num_pages)

    def remove(self, entries: Iterable[Residency]) -> None:
        if not isinstance(entries, list):
            entries = list(entries)
        self._live.difference_update(entries)
        for entry in entries:
            if entry.rank is not None:
                self._unseat(entry)
        self.num_pages -= self._pages_of(entries)

    def _pages_of(self, entries: list[Residency]) -> int:
        """Pages of what is pushed or removed at once; in a plain order a path without gaps, either way up."""
        if self._is_plain and entries:
            first, last = entries[0].node, entries[-1].node
            assert first is not None and last is not None
            return first.end - last.start if first.end > last.start else last.end - first.start
        count = 0
        for entry in entries:
            count += len(entry.pages)  # type: ignore[arg-type]
        return count

    def touched(self, entries: Iterable[Residency]) -> None:
        """As `remove` and `push` of them, but that a place stands for as long as its note does."""
        for entry in entries:
            place: Place | None = entry.rank
            if place is None:
                if not is_blocked(self._context, entry):
                    self._seat(entry)
            elif place.note is not entry.node.note:  # type: ignore[union-attr]
                self._unseat(entry)
                if not is_blocked(self._context, entry):
                    self._seat(entry)

    def dropped(self, entry: Residency) -> None:
        self._live.remove(entry)
        self.num_pages -= len(entry.pages)  # type: ignore[arg-type]
        if entry.rank is not None:
            self._unseat(entry)
        if self._context.backbone:
            self._log.left(entry)

    # -- places -----------------------------------------------------------------------------

    def _seat(self, entry: Residency, known: Note | None = None) -> None:
        """A leaf is on its way to the lane of its class."""
        entry.rank = place = Place(entry, entry.node.note or known or self._unused())  # type: ignore[union-attr]
        fresh = self._fresh
        fresh.append(place)
        if len(fresh) > 64 and len(fresh) > 2 * len(self._live) + 64:
            self._fresh = [p for p in fresh if p.entry is not None]

    def _unused(self) -> Note:
        """The note of what no finished request has used: as if used just now."""
        if self._newborn.clock != self._log.clock:
            self._newborn = Note(_NOBODY, self._log.clock, CONVERSATION, 0)
        return self._newborn

    def _unseat(self, entry: Residency) -> None:
        place: Place = entry.rank
        entry.rank = place.entry = None
        lane = place.lane
        if lane is not None and lane.left(place, self._asked):
            self._looked_at(lane)

    def _looked_at(self, lane: Lane) -> None:
        self._least[lane.class_id], self._until[lane.class_id] = lane.rank, lane.until

    def _reseat(self, entry: Residency) -> None:
        note = entry.rank.note
        self._unseat(entry)
        self._seat(entry, note)

    def renoted(self, node: Node) -> None:
        """The note of `node` has changed while it may have a place here."""
        entry = node.residency(0, self.tier)
        if self._context.backbone and entry.rank is not None:
            self._reseat(entry)

    # -- choosing ---------------------------------------------------------------------------

    def _settle(self) -> None:
        """Bring the lanes up to date: who has come, and what has grown older."""
        clock = self._log.clock
        if self._version != self._tables.version:
            self._reindex(clock)
        elif clock != self._asked:
            self._asked = clock
            for class_id in (self._ends <= clock).nonzero()[0].tolist():
                lane = self._lanes[class_id]
                lane.bound(clock)
                self._looked_at(lane)
        if self._fresh:
            self._enter_fresh()

    def _reindex(self, clock: int) -> None:
        """The index has changed."""
        self._version, self._asked = self._tables.version, clock
        for class_id, lane in self._lanes.items():
            lane.bound(clock, self._tables.ranks(class_id))
            self._looked_at(lane)

    def _enter_fresh(self) -> None:
        lanes, sign = self._lanes, -1 if self._context.backbone else 1
        for place in self._fresh:
            entry = place.entry
            if entry is None:
                continue
            lane = lanes.get(place.note.class_id) or self._new_lane(place.note.class_id)
            self._number += 1
            if lane.enter(place, sign * entry.node.start, self._number, self._asked):  # type: ignore[union-attr]
                self._looked_at(lane)
        self._fresh.clear()

    def _new_lane(self, class_id: int) -> Lane:
        lane = self._lanes[class_id] = Lane(class_id, self._tables.ranks(class_id))
        count = max(self._lanes) + 1
        self._ranks, self._ends = self._least[:count], self._until[:count]
        return lane

    def coldest(self) -> Residency | None:
        return self._best(NONE_GONE)

    def _best(self, gone: Mapping[int, int]) -> Residency | None:
        """The leaf to go next; leaves that are none any more lose their place on the way."""
        while True:
            self._settle()
            lane = self._lanes.get(int(self._ranks.argmin()))
            if lane is None or lane.rank == INFINITE:
                return None
            if lane.head is None:
                lane.choose(self._asked)
                self._looked_at(lane)
                continue
            place, entry = lane.head, lane.head.entry
            assert entry is not None and entry.node is not None, "the head of a lane has left"
            if is_blocked(self._context, entry, gone):
                self._unseat(entry)
            elif (entry.node.note or place.note) is not place.note:
                self._reseat(entry)  # its class may be another
            else:
                return entry

    def victims(self, num_pages: int) -> list[Residency]:
        return self._foretell(num_pages, INFINITE)

    def colder_pages(self, note: Note | None, num_pages: int) -> int:
        """Pages, at most `num_pages` and a node, worth less than what was just used as `note`."""
        limit = float(self._tables.index[CONVERSATION if note is None else note.class_id, 0])
        return sum(len(entry.pages) for entry in self._foretell(num_pages, limit) if entry.pages is not None)

    def _foretell(self, num_pages: int, limit: float) -> list[Residency]:
        """Evicts as it would, up to an index of `limit`, exposing parents, and puts everything back."""
        gone: dict[int, int] = {}
        found: dict[Residency, Note] = {}
        while num_pages > 0 and (entry := self._best(gone)) is not None:
            place: Place = entry.rank
            assert entry.node is not None and entry.pages is not None and place.lane is not None
            if place.lane.rank >= limit:
                break
            found[entry] = place.note
            num_pages -= len(entry.pages)
            if num_pages <= 0:
                break  # nobody asks who follows: it may keep its place
            self._unseat(entry)
            above = exposed_parent(self._context, entry.node, gone)
            if above is not None and above not in found:  # a mirror goes before what is below it
                self.expose(above)
        for entry, note in found.items():
            if entry.rank is None:
                self._seat(entry, note)
        return list(found)

    # -- the tree changes -------------------------------------------------------------------

    def split(self, entry: Residency, upper: Residency) -> None:
        self._live.add(upper)
        if entry.rank is not None:
            self._reseat(entry)  # it begins deeper
        if not is_blocked(self._context, upper):
            self._seat(upper)

    def expose(self, entry: Residency) -> None:
        if entry.rank is None and entry in self._live:
            self._seat(entry)

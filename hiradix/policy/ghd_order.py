"""GHD's order of one tier: the leaf with the least index goes first; leaves wait in a queue per class.

What becomes a leaf is put into its queue when somebody must leave, and keeps its place there while it is
locked, so that a path that is locked and unlocked again costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from hiradix.errors import Misuse
from hiradix.policy.class_queues import ClassQueues
from hiradix.policy.ghd_tables import CONVERSATION, ClassTables
from hiradix.policy.ghosts import EMPTY
from hiradix.policy.leaves import exposed_parent, is_blocked
from hiradix.policy.places import INFINITE, Place
from hiradix.policy.uses import LastUse, RequestUse, UseLog
from hiradix.tree import LruOrder, Node, OrderContext, Tier
from hiradix.tree.node import WASTE, Residency

_NOBODY = RequestUse(0, 0, 0, EMPTY)


class GhdOrder:
    """Orders the leaves of one tier by GHD's index. O(log n) per leaf that may have to leave, O(classes) per
    victim or less.

    An entry's rank is its place. It keeps that while it is locked, and while its node is no leaf, for as long
    as nobody comes across it: so a place is good only if its entry is in the order and a leaf, and stands for
    the note that its node has. limit: what is worth as much is not to be had.

    On the host all that is on the device too counts as a leaf. There a place covers the parent of its entry's
    node too, and that one's and so on, as long as they have the same note: they would follow it.
    """

    path_moves_once: ClassVar[bool] = True

    def __init__(self, context: OrderContext, log: UseLog, tables: ClassTables):
        self.num_pages = 0
        self.limit = INFINITE
        self._most_pages = log.pages_remembered
        self._context = context
        self._is_plain = context.backbone and context.tier == Tier.DEVICE
        self._covers = context.backbone and context.tier == Tier.HOST
        self.tier = context.tier
        self.waste = 1 if self._is_plain else WASTE  # on the device what is not wanted stays
        self._log = log
        self._tables = tables
        self._members = LruOrder(context)  # by when they came: only who is one is asked of it
        self._fresh: list[Place] = []  # on their way to a queue
        self._most_fresh = 64  # before those that are void are taken out
        self._queues = ClassQueues(tables)
        self._newborn = LastUse(_NOBODY, 0, CONVERSATION, 0)

    def __iter__(self) -> Iterator[Residency]:
        return iter(self._members)

    def push(self, entries: Iterable[Residency]) -> None:
        if not isinstance(entries, list):
            entries = list(entries)
        members = self._members
        members.push(entries)
        self.num_pages = num_pages = members.num_pages
        if not self._is_plain:
            self.touched(entries)
        elif entries:
            self._came(entries[0])  # a path without gaps, deepest first: what follows has a child
        if num_pages > self._most_pages:
            self._most_pages = num_pages
            self._log.grow(num_pages)

    def remove(self, entries: Iterable[Residency]) -> None:
        if not isinstance(entries, list):
            entries = list(entries)
        self._members.remove(entries)
        self.num_pages = self._members.num_pages

    def touched(self, entries: Iterable[Residency]) -> None:
        """Move entries as `remove` and `push` would, but an entry keeps its place as long as its note stands."""
        if not self._covers:
            for entry in entries:
                self._came(entry)
            return
        covering: Node | None = None  # its parent, if that has its note
        for entry in entries:
            node = entry.node
            if node is None:
                raise Misuse("an entry of no node")
            if covering is None or covering.parent is not node or covering.note is not node.note:
                self._came(entry)
                covering = None if entry.rank is None or node.note is None else node
            else:
                covering = node

    def dropped(self, entry: Residency) -> None:
        self._members.dropped(entry)
        self.num_pages = self._members.num_pages
        is_inherited = self._context.backbone and entry.rank is not None and self._inherited(entry)
        if entry.rank is not None:
            self._unseat(entry)
        if self._context.backbone:
            self._log.left(entry)
            if self._covers and not is_inherited:
                self._uncover(entry)

    # -- places -----------------------------------------------------------------------------

    def _came(self, entry: Residency, gone: dict[int, int] | None = None) -> None:
        """`entry`, which is in the order, may be a leaf or have another note: see that its place is right."""
        place: Place | None = entry.rank
        if place is not None:
            if not self._is_stale(place, entry.node):  # type: ignore[arg-type]
                return
            self._unseat(entry)
        if not is_blocked(self._context, entry, gone):
            self._seat(entry)

    def _inherited(self, entry: Residency) -> bool:
        """Whether the place of `entry`, which leaves, has gone to its parent's: one with the same note, which
        is to be a leaf now. It would get one right behind."""
        node = entry.node
        place: Place = entry.rank
        parent = None if node is None else node.parent
        if parent is None or parent.note is not place.note:
            return False
        above = parent.host if self._covers else parent.device
        if above.hotter is None or not (self._covers or parent.num_device_children == 1):
            return False
        own: Place | None = above.rank
        if own is not None:
            if own.note is place.note and own.start == parent.start:
                return False
            self._unseat(above)
        above.rank, entry.rank = place, None
        place.entry, place.start = above, parent.start
        return True

    def _uncover(self, entry: Residency, gone: dict[int, int] | None = None) -> None:
        """`entry` has no place any more, or one by another note: its parent's may need one."""
        node = entry.node
        parent = None if node is None else node.parent or node.successor
        while parent is not None and parent.host.hotter is not None:
            self._came(parent.host, gone)
            above = parent.parent
            if parent.host.rank is not None or above is None or above.note is not parent.note:
                break  # one that may not leave covers nobody either
            parent = above

    def _is_stale(self, place: Place, node: Node) -> bool:
        """Whether a place is not what its entry would get."""
        note: LastUse | None = node.note
        if place.note is not note and (note is not None or place.note.clock != self._log.clock):
            return True
        return place.start != node.start

    def _seat(self, entry: Residency, known: LastUse | None = None) -> None:
        """A leaf is on its way to the queue of its class."""
        node = entry.node
        if node is None:
            raise Misuse("an entry of no node")
        entry.rank = place = Place(entry, node.note or known or self._unused(), node.start)
        fresh = self._fresh
        fresh.append(place)
        if len(fresh) > self._most_fresh:
            self._fresh = fresh = [p for p in fresh if p.entry is not None and p.entry.node is not None]
            self._most_fresh = 2 * len(fresh) + 64

    def _unused(self) -> LastUse:
        """The note of what no finished request has used: as if used just now."""
        if self._newborn.clock != self._log.clock:
            self._newborn = LastUse(_NOBODY, self._log.clock, CONVERSATION, 0)
        return self._newborn

    def _unseat(self, entry: Residency) -> None:
        place: Place = entry.rank
        entry.rank = place.entry = None
        if place.seat is not None:
            self._queues.left(place, place.seat)
            place.seat = None

    def _reseat(self, entry: Residency) -> None:
        place: Place = entry.rank
        self._unseat(entry)
        self._seat(entry, place.note)

    def renoted(self, node: Node) -> None:
        """The note of `node` has changed while it may have a place here."""
        entry = node.residency(0, self.tier)
        if self._context.backbone and entry.rank is not None:
            self._reseat(entry)
        if self._covers:
            self._uncover(entry)

    def _enter_fresh(self, gone: dict[int, int] | None = None) -> None:
        """Give the leaves that have come to their queues, as far as they still are some."""
        sign = -1 if self._context.backbone else 1
        queues = self._queues
        queues.settle(self._log.clock)
        while fresh := self._fresh:
            left: list[Residency] = []
            for place in fresh:
                entry = place.entry
                if entry is None:
                    continue
                if entry.hotter is None or is_blocked(self._context, entry, gone):
                    self._unseat(entry)
                    left.append(entry)
                else:
                    note = place.note
                    place.seat = queues.enter(place, note.class_id, note.clock, sign * place.start)
            fresh.clear()
            if self._covers:
                for entry in left:
                    self._uncover(entry, gone)

    # -- choosing ---------------------------------------------------------------------------

    def coldest(self) -> Residency | None:
        self._log.settle()
        return self.peek()

    def peek(self) -> Residency | None:
        """The next victim by what has been counted so far: `coldest` without learning."""
        entry = self._best(None)
        return None if self.limit != INFINITE and self._queues.rank >= self.limit else entry

    def _best(self, gone: dict[int, int] | None) -> Residency | None:
        """The leaf to go next; what is none, or not in the order, loses its place on the way."""
        while True:
            if self._fresh:
                self._enter_fresh(gone)
            place: Place | None = self._queues.first(self._log.clock)
            if place is None:
                return None
            entry = place.entry
            if entry is None:
                raise Misuse("the head of a queue has left")
            if entry.node is None or entry.hotter is None or is_blocked(self._context, entry, gone):
                self._unseat(entry)
                if self._covers:
                    self._uncover(entry, gone)
            elif (entry.node.note or place.note) is not place.note:
                self._reseat(entry)  # its class may be another
                if self._covers:
                    self._uncover(entry, gone)
            else:
                return entry

    def victims(self, num_pages: int) -> list[Residency]:
        """Evicts as it would, exposing parents, and puts everything back."""
        self._log.settle()
        gone: dict[int, int] = {}
        found: dict[Residency, LastUse] = {}
        while num_pages > 0 and (entry := self._best(gone)) is not None:
            assert entry.node is not None and entry.pages is not None
            found[entry] = entry.rank.note
            num_pages -= len(entry.pages)
            if num_pages <= 0:
                break  # nobody asks who follows: it may keep its place
            self._unseat(entry)
            above = exposed_parent(self._context, entry.node, gone)
            if above is not None and above.hotter is not None and above not in found:
                # a mirror goes before what is below it
                self._came(above, gone)
        for entry, note in found.items():
            if entry.rank is None:
                self._seat(entry, note)
        return list(found)

    def worth(self, note: LastUse | None) -> float:
        """The index of what has just been used as `note`."""
        return self._tables.index.item(CONVERSATION if note is None else note.class_id, 0)

    # -- the tree changes -------------------------------------------------------------------

    def split(self, entry: Residency, upper: Residency) -> None:
        self._members.split(entry, upper)
        if entry.rank is not None:
            self._reseat(entry)  # it begins deeper
        is_covered = self._covers and upper.node is not None and upper.node.note is not None
        if not is_covered and not is_blocked(self._context, upper):
            self._seat(upper)

    def expose(self, entry: Residency) -> None:
        if entry.hotter is not None:
            before = entry.rank
            self._came(entry)
            if self._covers and before is not None and before is not entry.rank:
                self._uncover(entry)

"""GHD's order of one tier: leaves in cells of one class and one age, the cell with the least index first.

Inside a cell the oldest leaf goes first, and of one path the deepest. Time moves leaves from cell to cell:
each has one entry in a heap of what is due next, and is moved about five times while its age grows fourfold.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hiradix.policy.ghd_tables import BUCKETS, EDGE_LIST, MAX_CLASSES
from hiradix.policy.uses import Note
from hiradix.tree import Node, OrderContext, Tier
from hiradix.tree.node import Residency

if TYPE_CHECKING:
    from hiradix.policy.ghd import GhdLearner

Cell = tuple[int, int]  # class, bucket
_NOWHERE: Cell = (-1, -1)


class _Place:
    """An entry's place. In no cell: it is no leaf. entry None: void, to be skipped where it is met."""

    __slots__ = ("entry", "note", "cell", "number")

    def __init__(self, entry: Residency, note: Note):
        self.entry: Residency | None = entry
        self.note = note
        self.cell = _NOWHERE
        self.number = 0


class CellOrder:
    """See the module's docstring. O(log n) per change; a victim costs a pass over classes x 64 numbers."""

    def __init__(self, context: OrderContext, learner: GhdLearner):
        self.num_pages = 0
        self._context = context
        self.tier = context.tier
        self._learner = learner
        self._places: dict[int, _Place] = {}
        self._cells: dict[Cell, list[tuple[int, int, int, _Place]]] = {}
        self._due: list[tuple[int, int, _Place]] = []
        self._count = np.zeros((MAX_CLASSES, BUCKETS), np.int64)
        self._rank = np.full((MAX_CLASSES, BUCKETS), np.inf)  # index of each cell that has a leaf
        self._numbers = 0

    def __iter__(self) -> Iterator[Residency]:
        return iter([place.entry for place in self._places.values() if place.entry is not None])

    def push(self, entries: Iterable[Residency]) -> None:
        for entry in entries:
            assert entry.node is not None and entry.pages is not None
            self._add(entry)
            self.num_pages += len(entry.pages)
        self._learner.grow(self.num_pages)

    def _add(self, entry: Residency) -> None:
        assert entry.node is not None
        note = entry.node.note or self._learner.newborn
        entry.rank = self._places[id(entry)] = place = _Place(entry, note)
        if not self._is_blocked(entry, {}):
            self._seat(place)

    def remove(self, entries: Iterable[Residency]) -> None:
        for entry in entries:
            assert entry.pages is not None
            self._take_out(entry)
            self.num_pages -= len(entry.pages)

    def dropped(self, entry: Residency) -> None:
        self.remove((entry,))
        if self._context.backbone:
            self._learner.left(entry)

    def _take_out(self, entry: Residency) -> None:
        place = self._places.pop(id(entry))
        self._unseat(place)
        place.entry = entry.rank = None

    # -- cells ------------------------------------------------------------------------------

    def _seat(self, place: _Place) -> None:
        """Put a leaf into the cell of its age now, and note when it is due for the next."""
        note, entry = place.note, place.entry
        assert entry is not None and entry.node is not None
        age = self._learner.clock - note.clock
        bucket = min(bisect_right(EDGE_LIST, age) - 1, BUCKETS - 1) if age > 0 else 0
        cell = place.cell = (note.class_id, bucket)
        self._numbers += 1
        place.number = self._numbers
        depth = -entry.node.start if self._context.backbone else entry.node.start
        heap = self._cells.get(cell)
        if heap is None:
            heap = self._cells[cell] = []
        heapq.heappush(heap, (note.clock, depth, place.number, place))
        self._count[cell] += 1
        if self._count[cell] == 1:
            self._rank[cell] = self._learner.tables.index[cell]
        if bucket < BUCKETS - 1:
            heapq.heappush(self._due, (note.clock + EDGE_LIST[bucket + 1], place.number, place))
            if len(self._due) > 2 * len(self._places) + 64:
                self._drop_void()

    def _unseat(self, place: _Place) -> None:
        cell = place.cell
        if cell is _NOWHERE:
            return
        place.cell = _NOWHERE
        self._count[cell] -= 1
        if not self._count[cell]:
            self._rank[cell] = np.inf
            self._cells[cell].clear()

    def _drop_void(self) -> None:
        """Forget entries of what has left or moved. O(all), each time it has doubled."""
        self._due = [due for due in self._due if due[2].number == due[1] and due[2].cell is not _NOWHERE]
        heapq.heapify(self._due)
        for heap in self._cells.values():
            heap[:] = [item for item in heap if item[3].number == item[2] and item[3].cell is not _NOWHERE]
            heapq.heapify(heap)

    def _age(self) -> None:
        """Move what is due. A leaf whose node was used since (in another tier) moves to where it belongs."""
        due, clock = self._due, self._learner.clock
        while due and due[0][0] <= clock:
            _, number, place = heapq.heappop(due)
            if place.number == number and place.cell is not _NOWHERE:
                self._reseat(place)

    def _reseat(self, place: _Place) -> None:
        entry = place.entry
        assert entry is not None and entry.node is not None
        place.note = entry.node.note or place.note
        self._unseat(place)
        self._seat(place)

    def renoted(self, node: Node) -> None:
        """The note of `node` has changed without its being used."""
        place = node.residency(0, self._context.tier).rank if self._context.backbone else None
        if place is not None and place.cell is not _NOWHERE:
            self._reseat(place)

    def reindex(self) -> None:
        """The index has changed."""
        index = self._learner.tables.index
        np.copyto(self._rank, np.where(self._count > 0, index, np.inf))

    # -- choosing ---------------------------------------------------------------------------

    def coldest(self) -> Residency | None:
        self._age()
        place = self._best({})
        return None if place is None else place.entry

    def _best(self, gone: Mapping[int, int]) -> _Place | None:
        """The leaf to go next; leaves that are none any more lose their seat on the way."""
        classes = len(self._learner.tables)
        rank = self._rank[:classes]
        while True:
            at = int(rank.argmin())
            cell = divmod(at, BUCKETS)
            if not self._count[cell]:
                return None
            heap = self._cells[cell]
            while heap:
                place, number = heap[0][3], heap[0][2]
                entry = place.entry
                if entry is None or place.number != number or place.cell is _NOWHERE:
                    heapq.heappop(heap)
                elif self._is_blocked(entry, gone):
                    self._unseat(place)
                elif entry.node is not None and (entry.node.note or place.note) is not place.note:
                    heapq.heappop(heap)
                    self._reseat(place)
                    break  # its cell may be another
                else:
                    return place

    def victims(self, num_pages: int) -> list[Residency]:
        return self._foretell(num_pages, np.inf)

    def colder_pages(self, note: Note | None, num_pages: int) -> int:
        """Pages, at most `num_pages` and a node, worth less than what was just used as `note`."""
        class_id = (note or self._learner.newborn).class_id
        limit = float(self._learner.tables.index[class_id, 0])
        return sum(len(entry.pages) for entry in self._foretell(num_pages, limit) if entry.pages is not None)

    def _foretell(self, num_pages: int, limit: float) -> list[Residency]:
        """Evicts as it would, up to an index of `limit`, exposing parents, and puts everything back."""
        self._age()
        gone: dict[int, int] = {}
        found: dict[int, _Place] = {}  # by id of their entry
        while num_pages > 0 and (place := self._best(gone)) is not None:
            entry = place.entry
            assert entry is not None and entry.node is not None and entry.pages is not None
            if self._rank[place.cell] >= limit:
                break
            self._unseat(place)
            found[id(entry)] = place
            num_pages -= len(entry.pages)
            above = self._exposed(entry.node, gone)
            if above is not None and id(above) not in found:  # a mirror goes before what is below it
                self.expose(above)
        for place in found.values():
            self._seat(place)
        return [place.entry for place in found.values() if place.entry is not None]

    def _exposed(self, node: Node, gone: dict[int, int]) -> Residency | None:
        """The parent's entry, if it would be a leaf with `node` gone too."""
        parent = node.parent
        if not self._context.backbone or parent is None or parent.parent is None:
            return None
        gone[id(parent)] = gone.get(id(parent), 0) + 1
        above = parent.residency(0, self._context.tier)
        return None if self._is_blocked(above, gone) else above

    def _is_blocked(self, entry: Residency, gone: Mapping[int, int]) -> bool:
        """Whether something in the tree depends on the entry; `gone` counts children as if they had left."""
        node = entry.node
        if not self._context.backbone or node is None:
            return False
        left = gone.get(id(node), 0)
        if self._context.tier == Tier.DEVICE:
            return node.num_device_children > left
        return node.device.pages is None and len(node.children) > left

    # -- the tree changes -------------------------------------------------------------------

    def split(self, entry: Residency, upper: Residency) -> None:
        self._take_out(entry)
        for half in (entry, upper):
            self._add(half)

    def expose(self, entry: Residency) -> None:
        place: _Place | None = entry.rank
        if place is not None and place.cell is _NOWHERE:
            place.note = (entry.node.note if entry.node is not None else None) or place.note
            self._seat(place)

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
from hiradix.policy.leaves import NONE_GONE, exposed_parent, is_blocked
from hiradix.policy.uses import Note
from hiradix.tree import Node, OrderContext, Tier
from hiradix.tree.node import Residency

if TYPE_CHECKING:
    from hiradix.policy.ghd import GhdLearner

Cell = tuple[int, int]  # class, bucket


class _Place:
    """A leaf's place in a cell. entry None: void, to be skipped where it is met."""

    __slots__ = ("entry", "note", "cell")

    def __init__(self, entry: Residency, note: Note, cell: Cell):
        self.entry: Residency | None = entry
        self.note = note
        self.cell = cell


class CellOrder:
    """See the module's docstring. O(log n) per change; a victim costs a pass over classes x 64 numbers.

    An entry's rank is its place, None if its node is no leaf.
    """

    def __init__(self, context: OrderContext, learner: GhdLearner):
        self.num_pages = 0
        self._context = context
        self.tier = context.tier
        self._learner = learner
        self._live: dict[int, Residency] = {}
        self._cells: dict[Cell, list[tuple[int, int, int, _Place]]] = {}
        self._due: list[tuple[int, int, _Place]] = []
        self._count = np.zeros((MAX_CLASSES, BUCKETS), np.int64)
        self._rank = np.full((MAX_CLASSES, BUCKETS), np.inf)  # index of each cell that has a leaf
        self._number = 0

    def __iter__(self) -> Iterator[Residency]:
        return iter(list(self._live.values()))

    def push(self, entries: Iterable[Residency]) -> None:
        live, count, is_plain = self._live, 0, self._context.backbone and self.tier == Tier.DEVICE
        for entry in entries:
            live[id(entry)] = entry
            count += len(entry.pages)  # type: ignore[arg-type]
            if is_plain and entry.node.num_device_children:  # type: ignore[union-attr]
                continue
            if not is_blocked(self._context, entry):
                self._seat(entry)
        self.num_pages += count
        self._learner.grow(self.num_pages)

    def remove(self, entries: Iterable[Residency]) -> None:
        live, count = self._live, 0
        for entry in entries:
            del live[id(entry)]
            count += len(entry.pages)  # type: ignore[arg-type]
            if entry.rank is not None:
                self._unseat(entry)
        self.num_pages -= count

    def dropped(self, entry: Residency) -> None:
        self.remove((entry,))
        if self._context.backbone:
            self._learner.left(entry)

    # -- cells ------------------------------------------------------------------------------

    def _seat(self, entry: Residency, known: Note | None = None) -> None:
        """Put a leaf into the cell of its age now, and note when it is due for the next."""
        node = entry.node
        assert node is not None
        note = node.note or known or self._learner.newborn
        age = self._learner.clock - note.clock
        bucket = min(bisect_right(EDGE_LIST, age) - 1, BUCKETS - 1) if age > 0 else 0
        cell = (note.class_id, bucket)
        entry.rank = place = _Place(entry, note, cell)
        self._number += 1
        depth = -node.start if self._context.backbone else node.start
        heap = self._cells.get(cell)
        if heap is None:
            heap = self._cells[cell] = []
        heapq.heappush(heap, (note.clock, depth, self._number, place))
        self._count[cell] = count = self._count[cell] + 1
        if count == 1:
            self._rank[cell] = self._learner.tables.index[cell]
        if bucket < BUCKETS - 1:
            heapq.heappush(self._due, (note.clock + EDGE_LIST[bucket + 1], self._number, place))
            if len(self._due) > 2 * len(self._live) + 64:
                self._drop_void()

    def _unseat(self, entry: Residency) -> None:
        place: _Place = entry.rank
        entry.rank = place.entry = None
        cell = place.cell
        self._count[cell] = count = self._count[cell] - 1
        if not count:
            self._rank[cell] = np.inf
            self._cells[cell].clear()

    def _drop_void(self) -> None:
        """Forget places of what has left or moved. O(all), each time it has doubled."""
        self._due[:] = [due for due in self._due if due[2].entry is not None]
        heapq.heapify(self._due)
        for heap in self._cells.values():
            heap[:] = [item for item in heap if item[3].entry is not None]
            heapq.heapify(heap)

    def _age(self) -> None:
        """Move what is due. A leaf whose node was used since (in another tier) moves to where it belongs."""
        due, clock = self._due, self._learner.clock
        while due and due[0][0] <= clock:
            place = heapq.heappop(due)[2]
            if place.entry is not None:
                self._reseat(place.entry)

    def _reseat(self, entry: Residency) -> None:
        note = entry.rank.note
        self._unseat(entry)
        self._seat(entry, note)

    def renoted(self, node: Node) -> None:
        """The note of `node` has changed without its being used."""
        entry = node.residency(0, self.tier)
        if self._context.backbone and entry.rank is not None:
            self._reseat(entry)

    def reindex(self) -> None:
        """The index has changed."""
        index = self._learner.tables.index
        np.copyto(self._rank, np.where(self._count > 0, index, np.inf))

    # -- choosing ---------------------------------------------------------------------------

    def coldest(self) -> Residency | None:
        self._age()
        return self._best(NONE_GONE)

    def _best(self, gone: Mapping[int, int]) -> Residency | None:
        """The leaf to go next; leaves that are none any more lose their seat on the way."""
        rank = self._rank[: len(self._learner.tables)]
        while True:
            cell = divmod(int(rank.argmin()), BUCKETS)
            if not self._count[cell]:
                return None
            heap = self._cells[cell]
            while heap:
                place = heap[0][3]
                entry = place.entry
                if entry is None:
                    heapq.heappop(heap)
                elif is_blocked(self._context, entry, gone):
                    self._unseat(entry)
                elif entry.node is not None and (entry.node.note or place.note) is not place.note:
                    self._reseat(entry)
                    break  # its cell may be another
                else:
                    return entry

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
        found: dict[int, tuple[Residency, Note]] = {}
        while num_pages > 0 and (entry := self._best(gone)) is not None:
            place: _Place = entry.rank
            assert entry.node is not None and entry.pages is not None
            if self._rank[place.cell] >= limit:
                break
            self._unseat(entry)
            found[id(entry)] = (entry, place.note)
            num_pages -= len(entry.pages)
            above = exposed_parent(self._context, entry.node, gone)
            if above is not None and id(above) not in found:  # a mirror goes before what is below it
                self.expose(above)
        for entry, note in found.values():
            self._seat(entry, note)
        return [entry for entry, _ in found.values()]

    # -- the tree changes -------------------------------------------------------------------

    def split(self, entry: Residency, upper: Residency) -> None:
        self._live[id(upper)] = upper
        if entry.rank is not None:
            self._reseat(entry)  # it begins deeper
        if not is_blocked(self._context, upper):
            self._seat(upper)

    def expose(self, entry: Residency) -> None:
        if entry.rank is None and id(entry) in self._live:
            self._seat(entry)

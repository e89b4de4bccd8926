"""Transfers under way: which host pages each ticket owns or reads, and what to do with its result.

A ticket has one completion path. After `orphan_all` (reset) a result does nothing but give its pages
back, so work of an earlier epoch can never touch the tree of a later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from hiradix.cache.pages import BACKBONE, NO_PAGES, Pages, PagesOf
from hiradix.errors import Misuse
from hiradix.transfer import JobKind, Result, Ticket

NOTHING: Final[PagesOf] = MappingProxyType({})


class Flight:
    """One submitted job.

    owns: host pages that are this job's alone (a destination) until its result is applied.
    reads: host pages of the tree that the job reads; a lock protects them, except after a reset.
    Both by component.
    """

    __slots__ = ("kind", "on_result", "orphaned", "owns", "reads")

    def __init__(
        self,
        kind: JobKind,
        on_result: Callable[[Result], None],
        owns: PagesOf = NOTHING,
        reads: PagesOf = NOTHING,
    ):
        self.kind = kind
        self.on_result = on_result
        self.owns = owns
        self.reads = reads
        self.orphaned = False

    @property
    def num_pages(self) -> int:
        """Host pages it uses; as long as it is no orphan, those of a result that is whole."""
        return sum(map(len, self.owns.values())) + sum(map(len, self.reads.values()))


class Flights:
    """The table of tickets. Scheduler thread only. num_owned: host pages of flights, by component."""

    def __init__(self, free_host: Callable[[PagesOf], None]):
        self._free_host = free_host
        self._lanes: dict[JobKind, dict[Ticket, Flight]] = {kind: {} for kind in JobKind}
        self.num_owned: defaultdict[int, int] = defaultdict(int)

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __contains__(self, ticket: Ticket) -> bool:
        for lane in self._lanes.values():
            if ticket in lane:
                return True
        return False

    def add(self, ticket: Ticket, flight: Flight) -> None:
        if ticket in self:
            raise Misuse(f"ticket {ticket} used twice")
        self._lanes[flight.kind][ticket] = flight
        for component, pages in flight.owns.items():
            self.num_owned[component] += len(pages)

    def lane(self, kind: JobKind) -> Mapping[Ticket, Flight]:
        """The flights of one kind, oldest first."""
        return self._lanes[kind]

    def apply(self, result: Result) -> None:
        """Run a result's one completion path. An unknown ticket is a bug."""
        flight = self._lanes[result.kind].pop(result.ticket)
        for component, pages in flight.owns.items():
            self.num_owned[component] -= len(pages)
        if flight.orphaned:
            self._free_host(flight.owns)
        else:
            flight.on_result(result)

    def orphan_all(self) -> None:
        """Cut every present flight off from the tree. The host pages it used are its own meanwhile.

        Those that several read are the last one's: where more than one is left, results come in order.
        """
        taken: dict[int, Pages] = {}
        for flight in reversed(list(self._all())):
            if not flight.orphaned:
                owns, reads = flight.owns, flight.reads
                flight.owns = {
                    c: np.setdiff1d(
                        np.union1d(owns.get(c, NO_PAGES), reads.get(c, NO_PAGES)), taken.get(c, NO_PAGES)
                    ).astype(np.int32)
                    for c in {*owns, *reads}
                }
                flight.orphaned = True
                for c, pages in flight.owns.items():
                    taken[c] = np.concatenate([taken.get(c, NO_PAGES), pages])
                    self.num_owned[c] += len(pages) - len(owns.get(c, NO_PAGES))

    def owned(self, component: int = BACKBONE) -> Pages:
        """Host pages owned by flights, for conservation: each is in no other place."""
        pages = (flight.owns.get(component, NO_PAGES) for flight in self._all())
        return np.concatenate([NO_PAGES, *pages])

    def tickets(self, *kinds: JobKind) -> list[Ticket]:
        """Tickets of these kinds, oldest first; of every kind when none is named."""
        return sorted(ticket for kind in kinds or JobKind for ticket in self._lanes[kind])

    def _all(self) -> Iterator[Flight]:
        return (flight for lane in self._lanes.values() for flight in lane.values())

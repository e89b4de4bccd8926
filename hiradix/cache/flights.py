"""Transfers under way: which host pages each ticket owns or reads, and what to do with its result.

A ticket has one completion path. After `orphan_all` (reset) a result does nothing but give its pages
back, so work of an earlier epoch can never touch the tree of a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hiradix.cache.pages import NO_PAGES, Pages
from hiradix.transfer import JobKind, Result, Ticket


@dataclass(slots=True)
class Flight:
    """One submitted job.

    owns: host pages that are this job's alone (a destination) until its result is applied.
    reads: host pages of the tree that the job reads; a lock protects them, except after a reset.
    """

    kind: JobKind
    on_result: Callable[[Result], None]
    owns: Pages = field(default_factory=lambda: NO_PAGES)
    reads: Pages = field(default_factory=lambda: NO_PAGES)
    orphaned: bool = False


class Flights:
    """The table of tickets. Scheduler thread only."""

    def __init__(self, free_host: Callable[[Pages], None]):
        self._free_host = free_host
        self._lanes: dict[JobKind, dict[Ticket, Flight]] = {kind: {} for kind in JobKind}

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __contains__(self, ticket: Ticket) -> bool:
        return any(ticket in lane for lane in self._lanes.values())

    def add(self, ticket: Ticket, flight: Flight) -> None:
        assert ticket not in self, f"ticket {ticket} used twice"
        self._lanes[flight.kind][ticket] = flight

    def lane(self, kind: JobKind) -> Mapping[Ticket, Flight]:
        """The flights of one kind, oldest first."""
        return self._lanes[kind]

    def apply(self, result: Result) -> None:
        """Run a result's one completion path. An unknown ticket is a bug."""
        flight = self._lanes[result.kind].pop(result.ticket)
        if flight.orphaned:
            self._free_host(flight.owns)
        else:
            flight.on_result(result)

    def orphan_all(self) -> Pages:
        """Cut every present flight off from the tree. Returns the host pages they keep meanwhile."""
        for flight in self._all():
            if not flight.orphaned:
                flight.owns = np.union1d(flight.owns, flight.reads).astype(np.int32)
                flight.orphaned = True
        return self.owned()

    def owned(self) -> Pages:
        """Host pages owned by flights, for conservation: each is in no other place."""
        pages = [flight.owns for flight in self._all()]
        return np.concatenate(pages) if pages else NO_PAGES

    def tickets(self, *kinds: JobKind) -> list[Ticket]:
        """Tickets of these kinds, oldest first; of every kind when none is named."""
        return sorted(ticket for kind in kinds or JobKind for ticket in self._lanes[kind])

    def _all(self) -> Iterator[Flight]:
        return (flight for lane in self._lanes.values() for flight in lane.values())

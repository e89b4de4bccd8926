"""Transfers under way: which host pages each ticket owns or reads, and what to do with its result.

A ticket has one completion path. After `orphan_all` (reset) a result does nothing but give its pages
back, so work of an earlier epoch can never touch the tree of a later one.
"""

from __future__ import annotations

from collections.abc import Callable
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
        self._flights: dict[Ticket, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._flights

    def add(self, ticket: Ticket, flight: Flight) -> None:
        assert ticket not in self._flights, f"ticket {ticket} used twice"
        self._flights[ticket] = flight

    def apply(self, result: Result) -> None:
        """Run a result's one completion path. An unknown ticket is a bug."""
        flight = self._flights.pop(result.ticket)
        if flight.orphaned:
            self._free_host(flight.owns)
        else:
            flight.on_result(result)

    def orphan_all(self) -> Pages:
        """Cut every present flight off from the tree. Returns the host pages they keep meanwhile."""
        for flight in self._flights.values():
            if not flight.orphaned:
                flight.owns = np.union1d(flight.owns, flight.reads).astype(np.int32)
                flight.orphaned = True
        return self.owned()

    def owned(self) -> Pages:
        """Host pages owned by flights, for conservation: each is in no other place."""
        pages = [flight.owns for flight in self._flights.values()]
        return np.concatenate(pages) if pages else NO_PAGES

    def tickets(self, *kinds: JobKind) -> list[Ticket]:
        """Tickets of these kinds, oldest first; of every kind when none is named."""
        return [ticket for ticket, flight in self._flights.items() if not kinds or flight.kind in kinds]

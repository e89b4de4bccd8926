"""Transfers under way: a record for each ticket, with the host pages it owns or reads.

    order (a record of its kind is made, submitted and `add`ed) -> Result -> `apply` -> record.book(result)

A record keeps what the planner needs when the result comes, and its `book` calls the step that follows:

    WriteThroughCopy  WriteThrough.written              StorageQuery   Prefetcher.found
    LoadBackCopy      LoadBack.loaded                   BatchRead      Reads.arrived
    PathBackup        StorageBackup.stored_path         BoundaryQuery  BoundaryReads.found_on_the_way
    BoundaryBackup    StorageBackup.stored_boundary     BoundaryRead   BoundaryReads.arrived

After `orphan_all` (reset) a result does nothing but give its pages back, so work of an earlier epoch can
never touch the tree of a later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from hiradix.cache.pages import BACKBONE, NO_PAGES, Pages, PagesOf
from hiradix.errors import Misuse
from hiradix.transfer import JobKind, Result, Ticket
from hiradix.tree import Node
from hiradix.tree.native import mypyc_attr

NOTHING: Final[PagesOf] = {}  # of all jobs that own, or read, no host pages: never written
NO_TICKET: Final = Ticket(-1)


@mypyc_attr(allow_interpreted_subclasses=True)
class InFlightJob:
    """One submitted job.

    owns: host pages by component that the job fills; nobody else may use them until its result is applied.
    reads: host pages by component that belong to the tree and that the job reads. A lock protects them, except
        after a reset.
    num_pages: of both together; a result with as many pages is complete.
    ticket: NO_TICKET until the job is in the table.
    orphaned: a reset has cut it off from the tree; its result only gives pages back.
    """

    __slots__ = ("kind", "num_pages", "orphaned", "owns", "reads", "ticket")

    def __init__(self, kind: JobKind, owns: PagesOf = NOTHING, reads: PagesOf = NOTHING):
        self.kind = kind
        self.owns = owns
        self.reads = reads
        self.num_pages = count_of(owns) + count_of(reads)
        self.ticket = NO_TICKET
        self.orphaned = False

    @property
    def copied(self) -> Node | None:
        """The end of the path of which it copies pages one tier down; None: it does not."""
        return None

    def book(self, result: Result) -> None:
        """Apply the result to the tree and the counters. Called once, by `InFlightJobs.apply`; not for
        orphans."""


def count_of(pages: PagesOf) -> int:
    count = 0
    for own in pages.values():
        count += len(own)
    return count


class InFlightJobs:
    """The table of tickets. Scheduler thread only. num_owned: host pages of jobs in flight, by component."""

    def __init__(self, free_host: Callable[[PagesOf], None]):
        self._free_host = free_host
        self._by_kind: dict[JobKind, dict[Ticket, InFlightJob]] = {kind: {} for kind in JobKind}
        self.num_owned: defaultdict[int, int] = defaultdict(int)

    def __len__(self) -> int:
        return sum(map(len, self._by_kind.values()))

    def add(self, ticket: Ticket, job: InFlightJob) -> None:
        jobs = self._by_kind[job.kind]
        if ticket in jobs:
            raise Misuse(f"ticket {ticket} used twice")
        job.ticket = ticket
        jobs[ticket] = job
        for component, pages in job.owns.items():
            self.num_owned[component] += len(pages)

    def of_kind(self, kind: JobKind) -> Mapping[Ticket, InFlightJob]:
        """The jobs in flight of one kind, oldest first."""
        return self._by_kind[kind]

    def apply(self, result: Result) -> None:
        """Book a result, or free what an orphan owns. Misuse for a ticket that is not in the table."""
        job = self._by_kind[result.kind].pop(result.ticket, None)
        if job is None:
            raise Misuse(f"a result for {result.kind.value} ticket {result.ticket}, which is not in flight")
        for component, pages in job.owns.items():
            self.num_owned[component] -= len(pages)
        if job.orphaned:
            self._free_host(job.owns)
        else:
            job.book(result)

    def orphan_all(self) -> None:
        """Cut every present job off from the tree: it now owns the host pages that it reads, too.

        A page that several jobs read goes to the last of them: results come in order, so it is freed when no job
        reads it any more.
        """
        taken: dict[int, Pages] = {}
        for job in reversed(list(self._all())):
            if not job.orphaned:
                owns, reads = job.owns, job.reads
                job.owns = {
                    c: np.setdiff1d(
                        np.union1d(owns.get(c, NO_PAGES), reads.get(c, NO_PAGES)), taken.get(c, NO_PAGES)
                    ).astype(np.int32)
                    for c in {*owns, *reads}
                }
                job.orphaned = True
                for c, pages in job.owns.items():
                    taken[c] = np.concatenate([taken.get(c, NO_PAGES), pages])
                    self.num_owned[c] += len(pages) - len(owns.get(c, NO_PAGES))

    def owned(self, component: int = BACKBONE) -> Pages:
        """Host pages of a component that jobs in flight own; none of them is free or in the tree."""
        pages = (job.owns.get(component, NO_PAGES) for job in self._all())
        return np.concatenate([NO_PAGES, *pages])

    def tickets(self, *kinds: JobKind) -> list[Ticket]:
        """Tickets of these kinds, oldest first; of every kind when none is named."""
        return sorted(ticket for kind in kinds or JobKind for ticket in self._by_kind[kind])

    def _all(self) -> Iterator[InFlightJob]:
        return (job for jobs in self._by_kind.values() for job in jobs.values())

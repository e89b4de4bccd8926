"""The executor whose workers are other processes: orders travel with an engine's steps.

    submit -> ticket -> `take`: the orders of one step, for every worker -> outcomes, steps later -> `answer`
    -> `poll`: one Result for all workers, once the last has answered

Orders carry the payloads that worker threads get (`hiradix.transfer.jobs`), so that a worker hands them to its
own `HiCacheController` as they are. A Result is the least of all workers': the
fewest pages that any did, and the longest that any took. Results of a kind come in the order of submission,
but for jobs that were cancelled before any worker heard of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from hiradix.transfer.jobs import (
    Chain,
    Copies,
    DeletePayload,
    FailReason,
    JobKind,
    PageIds,
    QueryPayload,
    ReadPayload,
    Result,
    StorePayload,
    Ticket,
    TrailingPages,
    TrailingWindow,
    as_trailing_pages,
)
from hiradix.transfer.runtime import TransferLimits
from hiradix.tree.hashing import PageRows

StoragePayload = QueryPayload | ReadPayload | StorePayload | DeletePayload


@dataclass(frozen=True, eq=False)
class StorageJob:
    """A lookup, a read, a write or a deletion in storage. Pools are numbered by pair, as in each worker's
    controller."""

    ticket: Ticket
    payload: StoragePayload

    @property
    def kind(self) -> JobKind:
        return _KINDS[type(self.payload)]


_KINDS = {
    QueryPayload: JobKind.QUERY,
    ReadPayload: JobKind.READ,
    StorePayload: JobKind.STORE,
    DeletePayload: JobKind.DELETE,
}


@dataclass(frozen=True, eq=False)
class SaveOrder:
    """A copy from device to host, behind the step's forward; before it (`before_forward`) if the step writes to
    its blocks.

    store: the put that follows in the worker once the pages are on the host, also when the engine makes no
    further step; its ticket is answered whether the copy succeeds or not.
    """

    ticket: Ticket
    copies: Copies
    store: StorageJob | None = None
    before_forward: bool = False


@dataclass(frozen=True, eq=False)
class LoadOrder:
    """A copy from host to device, for the forward of this step (`in_step`), or beside it for a waiting request.

    error: why nothing can be loaded; the copies have no host pages then, and the load is one that failed.
    """

    ticket: Ticket
    request_id: str
    copies: Copies
    in_step: bool
    error: str | None = None


@dataclass(frozen=True, eq=False)
class StepJobs:
    """The jobs ordered since the last step. cancels: tickets of storage jobs that nobody waits for."""

    saves: tuple[SaveOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    storage_jobs: tuple[StorageJob, ...] = ()
    cancels: tuple[Ticket, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.saves or self.loads or self.storage_jobs or self.cancels)


NO_JOBS = StepJobs()


class Quorum:
    """Collects the outcomes of tickets that not all workers have answered yet."""

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._open: dict[Ticket, tuple[int, Result]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, outcome: Result) -> Result | None:
        """The least of all workers' outcomes once this is the last one's, else None."""
        if self._num_workers == 1:
            return outcome
        seen, so_far = self._open.pop(outcome.ticket, (0, outcome))
        num_pages = min(outcome.num_pages, so_far.num_pages)
        there = max(so_far.num_pages, so_far.damaged_end)
        damaged_end = min(max(outcome.num_pages, outcome.damaged_end), there)
        least = outcome._replace(
            num_pages=num_pages,
            hashes=outcome.hashes or so_far.hashes,
            error=so_far.error or outcome.error,
            reason=so_far.reason or outcome.reason,
            duration_s=max(outcome.duration_s, so_far.duration_s),
            num_adopted=min(outcome.num_adopted, so_far.num_adopted),
            damaged_end=damaged_end if damaged_end > num_pages else 0,
        )
        if seen + 1 == self._num_workers:
            return least
        self._open[outcome.ticket] = (seen + 1, least)
        return None


class StepExecutor:
    """Takes orders for all workers of an engine, and returns their Results. Scheduler thread only.

    limits: only `batch_pages`, the pages of one read, counts here. page_bytes: of a host page, per component,
    once the workers have said so (`open`).
    """

    def __init__(self, num_workers: int, limits: TransferLimits | None = None):
        self.limits = limits or TransferLimits()
        self.page_bytes: tuple[int, ...] = ()
        self.storage_attached = False
        self.num_adopted = 0  # as `HiCacheController.num_adopted`: by all workers, as far as they have said
        self.num_asked = self.num_found = 0  # pages of lookups since start, and those that storage had
        self.loads: list[LoadOrder] = []  # since `take`
        self._saves: list[SaveOrder] = []
        self._storage_jobs: dict[Ticket, StorageJob] = {}
        self._cancels: dict[Ticket, None] = {}
        self._known: dict[Ticket, int] = {}  # pages of a lookup that storage was not asked for, if any
        self._tickets = count(1)
        self._num_attached = 0
        self._num_failed = {JobKind.QUERY: 0, JobKind.READ: 0}
        self._quorum = Quorum(num_workers)
        self._results: list[Result] = []

    def open(self, page_bytes: Sequence[int]) -> None:
        """Take note of the workers' pools: bytes of a host page, per component."""
        self.page_bytes = tuple(page_bytes)

    def new_ticket(self) -> Ticket:
        """A ticket for an order of another kind, such as to attach storage."""
        return Ticket(next(self._tickets))

    # -- storage ------------------------------------------------------------------------

    def attach(self) -> None:
        """Accept storage jobs from now on: every worker has storage, another than before."""
        self.storage_attached = True
        self.num_adopted = 0
        self._num_attached += 1

    def detach(self) -> None:
        """Note that not every worker has storage any more."""
        self.storage_attached = False

    @property
    def storage_troubles(self) -> tuple[int, int, int]:
        """Counters of the workers' storage: attaches, lookups that failed, reads that failed. A failure is an
        outcome with a fault of storage; state changes of the workers' own breakers do not show here."""
        return self._num_attached, self._num_failed[JobKind.QUERY], self._num_failed[JobKind.READ]

    def query(
        self,
        rows: PageRows,
        num_pages: int | None = None,
        windows: Sequence[TrailingWindow] = (),
        known: int = 0,
    ) -> Ticket:
        """Order a lookup of the last `num_pages` (None: all) of `rows`; its Result counts the leading ones
        that storage has. `known` of them are in a tier already, so that storage need not have their backbone."""
        asked = len(rows) if num_pages is None else num_pages
        ticket = self._order(QueryPayload(rows, asked, tuple(windows), known))
        self.num_asked += asked - known
        if known:
            self._known[ticket] = known
        return ticket

    def read(
        self,
        hashes: Sequence[bytes],
        host_pages: PageIds,
        chain: Chain = None,
        others: Iterable[TrailingPages] = (),
        extra_key: str | None = None,
        tenant: str = "",
        after: bytes = b"",
    ) -> Ticket:
        """Order a read of named pages into host pages, which belong to the job until its Result. `chain` is
        not sent to the workers: it may be a long prompt's, once for each batch."""
        trailing = as_trailing_pages(host_pages, others)
        return self._order(ReadPayload(tuple(hashes), trailing, None, extra_key, tenant, after))

    def write_storage(
        self, rows: PageRows, host_pages: PageIds, others: Iterable[TrailingPages] = (), store: str = ""
    ) -> Ticket:
        """Order a backup of host pages, which must stay as they are until its Result. store: the name of
        another store, "" for the attached one."""
        return self._order(StorePayload(rows, as_trailing_pages(host_pages, others), store))

    def delete(self, payload: DeletePayload) -> Ticket:
        """Order a deletion from storage."""
        return self._order(payload)

    def cancel(self, ticket: Ticket) -> None:
        """Have a storage job end early. Its Result comes all the same: with the next `poll` if no step took
        it."""
        job = self._storage_jobs.pop(ticket, None)
        if job is None:
            self._cancels[ticket] = None
        else:
            self._known.pop(ticket, None)
            self._results.append(Result(ticket, job.kind, 0, error="cancelled", reason=FailReason.CANCELLED))

    def _order(self, payload: StoragePayload) -> Ticket:
        job = StorageJob(self.new_ticket(), payload)
        self._storage_jobs[job.ticket] = job
        return job.ticket

    # -- the device ---------------------------------------------------------------------

    def save(
        self, copies: Copies, store: StorePayload | None = None, before_forward: bool = False
    ) -> tuple[Ticket, Ticket | None]:
        """Copy device pages to host pages, and put them into storage then. The tickets of both."""
        ticket = self.new_ticket()
        follows = None if store is None else StorageJob(self.new_ticket(), store)
        self._saves.append(SaveOrder(ticket, copies, follows, before_forward))
        return ticket, None if follows is None else follows.ticket

    def load(self, request_id: str, copies: Copies, in_step: bool, error: str | None = None) -> Ticket:
        """Copy host pages to device pages. error: there is nothing to copy, and the load has failed."""
        order = LoadOrder(self.new_ticket(), request_id, copies, in_step, error)
        self.loads.append(order)
        return order.ticket

    # -- steps --------------------------------------------------------------------------

    def take(self) -> StepJobs:
        """Hand over the jobs ordered since the last call. Every worker must get them, in the order of the
        calls."""
        if not (self._saves or self.loads or self._storage_jobs or self._cancels):
            return NO_JOBS
        jobs = StepJobs(
            tuple(self._saves), tuple(self.loads), tuple(self._storage_jobs.values()), tuple(self._cancels)
        )
        self._saves, self.loads, self._storage_jobs, self._cancels = [], [], {}, {}
        return jobs

    def answer(self, outcome: Result) -> None:
        """Take one worker's outcome of a ticket; the last worker's makes it a Result for `poll`."""
        whole = self._quorum.add(outcome)
        if whole is None:
            return
        if whole.reason is FailReason.BACKEND and whole.kind in self._num_failed:
            self._num_failed[whole.kind] += 1
        self.num_adopted = max(self.num_adopted, whole.num_adopted)
        if whole.kind is JobKind.QUERY:
            self.num_found += max(0, whole.num_pages - self._known.pop(whole.ticket, 0))
        self._results.append(whole)

    def poll(self) -> list[Result]:
        """Results that have come, oldest first."""
        if not self._results:
            return self._results
        results, self._results = self._results, []
        return results

    @property
    def is_idle(self) -> bool:
        """Whether no worker is left to answer a ticket that another one has, and nothing waits for `take` or
        `poll`. Tickets that no worker has answered yet are in their owner's table."""
        return not (
            self._quorum or self._results or self._saves or self.loads or self._storage_jobs or self._cancels
        )

"""The reads of a prefetch for models with full attention alone: each batch enters the tree as it arrives, and a
prefix may end at any page."""

from __future__ import annotations

from collections.abc import Callable

from hiradix.cache.in_flight import InFlightJob, InFlightJobs
from hiradix.cache.pages import BACKBONE, Pages
from hiradix.cache.prefetch_state import Arrivals, Prefetch, StorageHit
from hiradix.policy.no_regret import NoRegret
from hiradix.transfer import JobKind, Result, StorageExecutor, TrailingWindow
from hiradix.tree import Node, RadixKey


class BatchRead(InFlightJob):
    """One batch of a prefetch's hit, on its way into the host pages that the job owns."""

    __slots__ = ("found", "p", "submitter")

    def __init__(self, submitter: Reads, p: Prefetch, found: StorageHit, pages: Pages):
        super().__init__(JobKind.READ, owns={BACKBONE: pages})
        self.submitter = submitter
        self.p = p
        self.found = found

    def book(self, result: Result) -> None:
        self.submitter.arrived(self, result)


class Reads:
    """Submits reads and gives the tree what they bring.

    finish(p): called once no more will arrive for `p`. no_regret: hears how long reads took.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        executor: StorageExecutor,
        in_flight: InFlightJobs,
        finish: Callable[[Prefetch], None],
        no_regret: NoRegret,
    ):
        self.no_regret = no_regret
        self._arrivals = arrivals
        self._supply = arrivals.supply
        self._executor = executor
        self._in_flight = in_flight
        self._finish = finish

    def most(self, key: RadixKey, node: Node) -> int:
        """The most pages of `key` behind `node` that storage may be asked for: all of them."""
        return key.num_pages(self._arrivals.tree.page_size) - node.end

    def num_known(self, p: Prefetch) -> int:
        """The number of pages behind the anchor whose backbone is in a tier, so that storage is not asked for
        it."""
        return 0

    def knows(self, p: Prefetch, hit: StorageHit) -> bool:
        """Whether backbone pages that storage was not asked for are still there: it was asked for all."""
        return True

    def coming(self, p: Prefetch, node: Node, end: int) -> list[int]:
        """Host pages per component that reads must fill to get from a match at `node` to one at page `end`."""
        return [end - node.end]

    def kept(self, p: Prefetch, node: Node, end: int) -> Node:
        """The node up to which resident backbone pages must be kept until then: `node` itself."""
        return node

    def hold(self, p: Prefetch, node: Node) -> None:
        """Lock the path to `node`, which `kept` gave: nothing to do, as the anchor of `p` is locked."""

    def windows(self) -> list[TrailingWindow]:
        """The trailing windows of further components that storage must have where a hit ends: none."""
        return []

    def submit(self, p: Prefetch, found: StorageHit) -> bool:
        """Submit reads for the pages of `found`, as far as the host has room; False if it has none."""
        batch_pages, at = self._executor.limits.batch_pages, found.start
        while at < found.end:
            num_pages = min(batch_pages, found.end - at, self._supply.host_room())
            host_pages = self._supply.alloc_host(num_pages) if num_pages else None
            if host_pages is None:
                self._supply.counters.miss("host_capacity", found.end - at)
                break
            self._submit_batch(p, found.part(at, at + num_pages), host_pages)
            at += num_pages
        return at > found.start

    def _submit_batch(self, p: Prefetch, batch: StorageHit, host_pages: Pages) -> None:
        p.unread_pages += len(host_pages)
        ticket = self._executor.read(
            batch.hashes,
            host_pages,
            batch.chain,
            extra_key=p.key.extra_key,
            tenant=p.key.space.tenant,
            after=batch.after,
        )
        p.tickets.add(ticket)
        self._in_flight.add(ticket, BatchRead(self, p, batch, host_pages))

    def arrived(self, read: BatchRead, result: Result) -> None:
        """Apply a read's result: pages that continue the prefetch without a gap enter the tree, the rest are
        freed, and after a gap the reads behind it are cancelled."""
        p, batch, host_pages = read.p, read.found, read.owns[BACKBONE]
        start, count = batch.start, len(host_pages)
        p.ended(read.ticket, count, result.num_pages, result.duration_s)
        if p.is_measured:
            self.no_regret.fetched(count, result.num_pages, result.duration_s)
        usable = result.num_pages if start < p.end_page else 0
        if usable:
            self._arrivals.adopt(p, batch.part(start, start + usable), {BACKBONE: host_pages[:usable]})
        if usable < count:
            self._supply.free_host(host_pages[usable:])
            if start < p.end_page:
                p.end_page, p.has_failed = start + usable, result.error is not None
                for behind in p.tickets:
                    self._executor.cancel(behind)
            if p.has_failed:  # pages behind a missing one count as lost, too
                p.lost(count - usable, self._supply.counters)
        if not p.tickets:
            p.report_to(self.no_regret)
            self._finish(p)

"""The reads of a prefetch of full attention alone: each batch is adopted as it arrives, and a match may end
in any of its pages."""

from __future__ import annotations

from collections.abc import Callable

from hiradix.cache.in_flight import InFlightJob, InFlightJobs
from hiradix.cache.pages import BACKBONE, Pages
from hiradix.cache.prefetch_state import Arrivals, Prefetch, StorageHit
from hiradix.policy.no_regret import NoRegret
from hiradix.transfer import JobKind, Result, StorageExecutor, TrailingWindow
from hiradix.tree import Node, RadixKey


class BatchRead(InFlightJob):
    """A batch of a prefetch's hits on its way into the host pages that it owns."""

    __slots__ = ("found", "p", "submitter")

    def __init__(self, submitter: Reads, p: Prefetch, found: StorageHit, pages: Pages):
        super().__init__(JobKind.READ, owns={BACKBONE: pages})
        self.submitter = submitter
        self.p = p
        self.found = found

    def book(self, result: Result) -> None:
        self.submitter.arrived(self, result)


class Reads:
    """Submits reads and adopts what they bring.

    finish(p): nothing more will arrive for `p`. no_regret: which reads are worth their time.
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
        """How many of `key`'s pages behind `node` may be asked for."""
        return key.num_pages(self._arrivals.tree.page_size) - node.end

    def num_known(self, p: Prefetch) -> int:
        """Of how many pages behind the anchor storage need not be asked for the backbone."""
        return 0

    def knows(self, p: Prefetch, hit: StorageHit) -> bool:
        """Whether what storage was not asked for, as a tier had it, is still there: it was asked for all."""
        return True

    def coming(self, p: Prefetch, node: Node, end: int) -> list[int]:
        """Pages of each component that are read for a match at page `end` where one at `node` can be had."""
        return [end - node.end]

    def kept(self, p: Prefetch, node: Node, end: int) -> Node:
        """Where what is kept for that match meanwhile ends: at `node`."""
        return node

    def hold(self, p: Prefetch, node: Node) -> None:
        """Keep what the tiers have up to `node`, of `kept`: nothing, as the anchor of `p` is locked."""

    def windows(self) -> list[TrailingWindow]:
        """What storage must have of further components where hits end."""
        return []

    def submit(self, p: Prefetch, found: StorageHit) -> bool:
        """Submit reads for what was found, as far as the host can take it; False if it can take nothing."""
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
        """A read has ended: what continues the prefetch without a gap enters the tree, the rest is freed."""
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
            if p.has_failed:  # also what came behind a page that did not is of no use
                p.lost(count - usable, self._supply.counters)
        if not p.tickets:
            p.report_to(self.no_regret)
            self._finish(p)

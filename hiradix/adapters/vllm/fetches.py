"""Storage to host, the scheduler's half: asked when a request arrives, read while it waits in vLLM's queue.

    query (each worker hashes and asks) -> the least any worker found -> host pages -> read -> the tree

How long a request is told to ask again is the prefetch policy's decision. Shortly before its deadline a read
is told to end with the batch it is in, so that what has arrived is there in time; what arrives later still
enters the tree. A read that nobody wants any more ends likewise. Host pages are taken only when the hit
length is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hiradix.adapters.vllm.index import READY, HostIndex
from hiradix.adapters.vllm.orders import OrderOutcome, QueryOrder, ReadOrder, Ticket
from hiradix.adapters.vllm.requests import Tracked
from hiradix.errors import Misuse
from hiradix.policy.no_regret import Drought, worth_s
from hiradix.policy.prefetch_policy import PrefetchPolicy
from hiradix.tree import BACKBONE, Lock, Pages, RadixKey, Tier

CUT_SHARE, CUT_S = (
    0.25,
    0.5,
)  # how long before its deadline a read is cut short: that share of it, at most so long


@dataclass(eq=False)
class Fetch:
    """One request's prefetch: what a boundary up to `num_pages` behind page `floor` of `key` needs and
    the host has not.

    The host's own boundary is at `floor`, its backbone ends at page `start`; `anchors` lock both. host: pages
    for what is read, per component, all of which end at page `end`.
    """

    key: RadixKey
    floor: int
    start: int
    num_pages: int
    anchors: tuple[Lock, ...]
    started_s: float
    owner: Tracked | None
    hashes: tuple[bytes, ...] = ()
    host: tuple[Pages, ...] = ()
    end: int = 0
    first_hash: int = 0
    is_cut: bool = False  # told to end with what it has
    is_given_up: bool = False  # before its time: nobody wanted it any more
    is_orphan: bool = False  # the index was cleared since


@dataclass
class FetchCounters:
    """Pages since start."""

    asked: int = 0
    found: int = 0
    read: int = 0
    late: int = 0  # came after their request had gone on
    left_out: int = 0  # not read, as reads before brought less than they took


class FetchTracker:
    """All prefetches under way. One thread. groups: the KV cache group of each of the index's components."""

    def __init__(
        self,
        index: HostIndex,
        policy: PrefetchPolicy,
        clock: Callable[[], float],
        ticket: Callable[[], Ticket],
        groups: Sequence[int] = (0,),
    ) -> None:
        self.index = index
        self.groups = groups
        kinds = zip(groups[1:], index.tree.components[1:], strict=True)
        self._windows = tuple((group, component.reach) for group, component in kinds)
        self.policy = policy
        self.figures = FetchCounters()
        self.in_flight: dict[Ticket, Fetch] = {}
        self.queries: list[QueryOrder] = []
        self.reads: list[ReadOrder] = []
        self.cancels: list[Ticket] = []
        self._clock = clock
        self._ticket = ticket
        self._drought = Drought()

    @property
    def pages_in_flight(self) -> int:
        return sum(fetch.num_pages for fetch in self.in_flight.values())

    def start(self, tracked: Tracked, num_pages: int) -> None:
        """Ask storage for what the host lacks of a request's first `num_pages` pages, if that is worth it."""
        index = self.index
        key = tracked.key(num_pages, index.page_size)
        boundary, node = index.ends(key)
        floor, start = boundary.end, node.end
        asked = num_pages - floor
        if asked <= 0 or not self.policy.worth_asking(asked):
            return
        if not self.policy.has_capacity(self.pages_in_flight, asked, index.num_pages):
            return
        ends = (node,) if node is boundary else (boundary, node)
        anchors = tuple(index.tree.lock(end, Tier.HOST) for end in ends)
        rows = index.tree.rows(key, node, floor, num_pages)
        ticket = self._ticket()
        fetch = Fetch(key, floor, start, asked, anchors, self._clock(), tracked, first_hash=rows.start)
        self.in_flight[ticket] = fetch
        tracked.fetch = ticket
        self.queries.append(QueryOrder(ticket, rows, asked, self._windows))
        self.figures.asked += asked

    def is_awaited(self, tracked: Tracked) -> bool:
        """Whether a request should ask again: its prefetch runs and may still hold it."""
        if tracked.fetch is None:
            return False
        fetch = self.in_flight[tracked.fetch]
        waited_s, limit_s = self._clock() - fetch.started_s, self.policy.wait_limit_s(fetch.num_pages)
        if waited_s < limit_s:
            if fetch.host and waited_s >= limit_s - min(CUT_S, CUT_SHARE * limit_s):
                self._cut(tracked.fetch)
            return True
        if not fetch.host:
            self._cut(tracked.fetch)
        tracked.fetch, fetch.owner = None, None
        return False

    def abandon(self, tracked: Tracked) -> None:
        """Nobody wants it any more. What has been read so far still enters the tree."""
        if tracked.fetch is None:
            return
        self.in_flight[tracked.fetch].is_given_up = True
        self._cut(tracked.fetch)
        self.in_flight[tracked.fetch].owner = None
        tracked.fetch = None

    def _cut(self, ticket: Ticket) -> None:
        fetch = self.in_flight[ticket]
        if not fetch.is_cut:
            fetch.is_cut = True
            self.cancels.append(ticket)

    def take(self) -> tuple[tuple[QueryOrder, ...], tuple[ReadOrder, ...], tuple[Ticket, ...]]:
        """Queries, reads and cancels ordered since the last call."""
        if not (self.queries or self.reads or self.cancels):
            return (), (), ()
        orders = tuple(self.queries), tuple(self.reads), tuple(self.cancels)
        self.queries, self.reads, self.cancels = [], [], []
        return orders

    def attached(self) -> None:
        """Other storage is there: what fetches brought says nothing of it."""
        self._drought.forget()

    # -- outcomes, the least of all workers' --------------------------------------------------

    def found(self, outcome: OrderOutcome) -> None:
        """With what storage has a prefix could end at the first `num_pages` of what was asked for."""
        fetch = self.in_flight[outcome.ticket]
        self.figures.found += outcome.num_pages
        is_wanted = not fetch.is_orphan and fetch.owner is not None
        is_worth_it = is_wanted and self.policy.worth_reading(outcome.num_pages)
        if is_worth_it and self._drought.refuses():
            self.figures.left_out += outcome.num_pages
        elif is_worth_it:
            fetch.hashes = outcome.hashes
            read = self._read(outcome.ticket, fetch, fetch.floor + outcome.num_pages)
            if read is not None:
                self.reads.append(read)
                return
        self._finish(outcome.ticket)

    def _read(self, ticket: Ticket, fetch: Fetch, end: int) -> ReadOrder | None:
        """What a boundary at `end` lacks, with host pages for it; None where those are in use.

        Of the backbone as much as there are pages for, unless windows, which end where it does, come along.
        What they need before `floor` the host has.
        """
        index = self.index
        begins = [min(fetch.start, end), *(max(fetch.floor, end - reach) for _, reach in self._windows)]
        host = tuple(index.alloc(end - begin, component) for component, begin in enumerate(begins))
        is_short = any(len(pages) < end - begin for pages, begin in zip(host, begins, strict=True))
        if is_short and self._windows:
            for component, pages in enumerate(host):
                index.free(pages, component)
            return None
        fetch.end, fetch.host = end if self._windows else fetch.start + len(host[BACKBONE]), host
        fetch.num_pages = fetch.end - fetch.floor
        targets = tuple((group, pages) for group, pages in zip(self.groups, host, strict=True) if len(pages))
        if not targets:
            return None
        last = fetch.end - fetch.first_hash
        hashes = fetch.hashes[last - max(len(pages) for _, pages in targets) : last]
        return ReadOrder(ticket, hashes, targets, fetch.key.extra_key)

    def arrived(self, outcome: OrderOutcome) -> Pages:
        """The first `num_pages` of a read are on the host of every worker. The backbone's that the tree took.

        Where windows come along, what has not come whole is given back.
        """
        fetch, index = self.in_flight[outcome.ticket], self.index
        if not fetch.host:
            raise Misuse(f"a read of ticket {outcome.ticket}, which asked only")
        backbone, others = fetch.host[BACKBONE], fetch.host[1:]
        total = sum(len(pages) for pages in fetch.host)
        if not (fetch.is_given_up or fetch.is_orphan):
            num_tokens = fetch.num_pages * index.page_size
            self._drought.ended(outcome.seconds, worth_s(total, outcome.num_pages, num_tokens))
        count = 0 if fetch.is_orphan or (others and outcome.num_pages < total) else outcome.num_pages
        index.free(backbone[count:])
        taken = backbone[:0]
        if count:
            taken = self._enter(fetch, fetch.end - (total - count), (backbone[:count], *others))
        else:
            for component, pages in enumerate(others, 1):
                index.free(pages, component)
        self._finish(outcome.ticket)
        return taken

    def _enter(self, fetch: Fetch, end: int, host: tuple[Pages, ...]) -> Pages:
        """Give what was read to the tree. The backbone's pages, if it took them all."""
        lock, taken = self.index.insert(fetch.key.head(end, self.index.page_size), host, READY)
        self.index.tree.set_hashes(lock.node, fetch.first_hash, fetch.hashes[: end - fetch.first_hash])
        count = len(host[BACKBONE])
        self.figures.read += count
        if fetch.owner is None:
            self.figures.late += count
            self.index.unlock(lock)
        else:
            fetch.owner.hold = lock
        return taken[BACKBONE] if len(taken[BACKBONE]) == count else host[BACKBONE][:0]

    def _finish(self, ticket: Ticket) -> None:
        fetch = self.in_flight.pop(ticket)
        if fetch.owner is not None:
            fetch.owner.fetch = None
        for anchor in fetch.anchors:
            self.index.unlock(anchor)

    def forget_all(self) -> None:
        """The index was cleared: nothing under way may enter it, and gives its pages back when it ends."""
        for fetch in self.in_flight.values():
            fetch.is_orphan = True
            if fetch.owner is not None:
                self.abandon(fetch.owner)

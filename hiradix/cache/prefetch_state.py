"""The state of one prefetch, the pages that storage has for it, and how pages that arrive enter the tree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum

from hiradix.cache.pages import BACKBONE, CacheCounters, PagesOf, PageSupply
from hiradix.explain import Reason
from hiradix.policy.no_regret import NoRegret
from hiradix.transfer import Ticket
from hiradix.transfer.jobs import Chain
from hiradix.tree import HOST, Lock, Node, RadixKey, RadixTree


class PrefetchPhase(Enum):
    QUERY = "query"
    FOUND = "found"  # storage has pages of it, which wait for host room
    READ = "read"
    JOINED = "joined"  # waits for another prefetch that brings the same pages
    DONE = "done"


@dataclass(slots=True, eq=False)
class Prefetch:
    """One request's prefetch.

    anchor: the deepest host node reached so far. lock: on it, from when the prefetch has room until its request
    runs or ends. beside: a second lock, on resident pages behind `anchor` that end in no boundary.
    """

    handle: Hashable
    key: RadixKey
    asked_pages: int  # from `start_page` on
    start_page: int
    started_s: float
    limit_s: float  # the longest its request waits for storage
    anchor: Node
    lock: Lock | None = None
    beside: Lock | None = None
    phase: PrefetchPhase = PrefetchPhase.QUERY
    tickets: set[Ticket] = field(default_factory=set)
    unread_pages: int = 0  # of reads in flight
    end_page: int = sys.maxsize  # the first page that did not come; pages behind it cannot be used
    has_failed: bool = False  # reading that page failed; False: storage no longer has it
    storage_epoch: int = 0  # the tree's when storage was asked
    found_nothing: bool = False  # storage does not have the first page
    is_wanted: bool = True  # its own request waits for it
    timed_out: bool = False  # its request has waited as long as it may
    stopped: bool = False  # no request waits for it, its own or one that joined it
    loaded_pages: int = 0
    loaded_end: int = 0  # the page behind the last loaded one
    primary: Prefetch | None = None  # the prefetch that it has joined
    gained_nothing: bool = False  # the last prefetch that it had joined brought it no page
    num_asked: int = 0  # pages asked for by the reads not yet reported to the gate
    num_came: int = 0  # of these, pages that came
    read_s: float = 0.0  # seconds that these reads took
    tries: int = 0  # boundaries that storage reported and that did not arrive
    again_end: int = 0  # the page up to which the next boundary is looked for
    hit: StorageHit | None = None  # the pages that storage has for it, once it has answered
    goal: int = 0  # the page where the reads in flight end
    coming: list[int] = field(default_factory=list)  # pages of each component that it was given room to read
    apart_pages: int = 0  # of what was asked for, beyond what it has in common with the one it joined
    wants_hold: bool = False  # nothing is to be read: what is on the host is to be held
    had_end: int = 0  # where on the host ended what was there or came for it
    num_queries: int = 0
    num_adopted: float = 0.0  # generations that storage had adopted when it was asked
    num_rooms: int = 0  # how often it was given room to read
    has_waited: bool = False  # for room
    is_reported: bool = False  # its request has heard that it may run
    goes_on: bool = False  # its request has waited long enough: nothing is fetched for it any more
    room_since_s: float = -1.0  # when its request was first asked for and had no room; before: less than 0
    room_limit_s: float = 0.0  # the longest it waits for that
    withheld: tuple[int, Reason] | None = None  # up to which page it did not come, and why

    @property
    def has_room(self) -> bool:
        """Whether host pages are held or being filled for it."""
        return self.lock is not None or self.phase is PrefetchPhase.READ

    @property
    def waits_with(self) -> Prefetch:
        """The prefetch that brings its pages: itself, or the one it has joined."""
        p = self
        while p.phase is PrefetchPhase.JOINED and p.primary is not None:
            p = p.primary
        return p

    @property
    def coming_pages(self) -> int:
        """Host pages that its reads fill, which are not in the tree yet."""
        if self.phase is not PrefetchPhase.READ:
            return 0
        end = self.anchor.end
        if self.beside is not None:
            end = max(end, self.beside.node.end)
        return max(0, self.goal - end)

    def asked_from(self, node: Node) -> None:
        """Ask for pages from the end of `node` on, up to the same end as before."""
        end = self.start_page + self.asked_pages
        self.anchor, self.start_page, self.asked_pages = node, node.end, max(0, end - node.end)

    def begins_at(self, end: int) -> None:
        """Read from page `end` on: pages that had come behind it were evicted."""
        kept = max(0, min(self.loaded_end, end) - (self.loaded_end - self.loaded_pages))
        self.loaded_pages, self.loaded_end = kept, end if kept else 0
        self.end_page, self.has_failed, self.again_end = sys.maxsize, False, 0

    def withhold(self, end: int, reason: Reason) -> None:
        """Pages up to `end` do not come, for `reason`; of several, that of the longest counts."""
        if self.withheld is None or end >= self.withheld[0]:
            self.withheld = end, reason

    @property
    def is_measured(self) -> bool:
        """Whether its time says something of storage: it was not cancelled before its request had waited its
        time."""
        return not self.stopped or self.timed_out

    def ended(self, ticket: Ticket, num_asked: int, num_came: int, duration_s: float) -> None:
        """Account for a read that has ended."""
        self.tickets.discard(ticket)
        self.unread_pages -= num_asked
        self.num_asked += num_asked
        self.num_came += num_came
        self.read_s += duration_s

    def report_to(self, gate: NoRegret) -> None:
        """All reads are back: report to the gate how many pages were asked for, came, and how long that took."""
        if self.is_measured:
            gate.ended(self.num_asked, self.num_came, self.read_s)
        self.num_asked, self.num_came, self.read_s = 0, 0, 0.0

    def lost(self, num_pages: int, counters: CacheCounters) -> None:
        """Count pages that did not come; no fault of storage where no request waits for them any more."""
        if not self.stopped:
            counters.miss("storage_transfer", num_pages)
        elif not self.timed_out:
            counters.miss("dropped", num_pages)


@dataclass(frozen=True)
class StorageHit:
    """The pages [start, end) of a prefetch's key that storage has, by their hashes.

    chain: the key's hashes from its first page on, where they are known. after: the hash of the page before
    `start`; b"" at the key's start. known: leading pages whose backbone a tier has; storage was not asked for
    it.
    """

    start: int
    hashes: tuple[bytes, ...]
    chain: Chain
    after: bytes
    known: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)

    def part(self, first: int, end: int) -> StorageHit:
        """Pages [first, end) of the key."""
        at = first - self.start
        hashes, after = self.hashes[at : end - self.start], self.hashes[at - 1] if at else self.after
        return StorageHit(first, hashes, self.chain, after, max(0, self.start + self.known - first))


class Arrivals:
    """Gives pages that reads have brought to the tree."""

    def __init__(
        self, supply: PageSupply, on_entered: Callable[[Hashable, int, Node], None] | None = None
    ) -> None:
        self.supply = supply
        self.on_entered = on_entered
        self.tree: RadixTree = supply.tree
        self.others = list(enumerate(supply.tree.components))[1:]

    def adopt(self, p: Prefetch, found: StorageHit, pages: PagesOf) -> None:
        """Insert `pages`, of each component the last ones of `found`, into the host tier, and move the anchor to
        their end."""
        start, count, tree = found.start, len(found.hashes), self.tree
        key = p.key.head(found.end, tree.page_size)
        usable = tree.match(key).loadable_node.end if self.others else start
        at = max((lock for lock in (p.lock, p.beside) if lock), key=lambda lock: lock.node.end, default=None)
        done = tree.insert(key, HOST, [pages[c] for c in range(len(tree.components))], at=at)
        for component, duplicates in enumerate(done.duplicates):
            self.supply.free_host(duplicates, component)
        tree.set_hashes(done.lock.node, found.start, found.hashes)
        if p.storage_epoch == tree.storage_epoch:
            self._mark_stored(done.lock.node, found)
        if p.lock is not None:
            tree.unlock(p.lock)
        before, p.anchor, p.lock = p.anchor, done.lock.node, done.lock
        if self.others:
            is_all_new = not start or all(kind.reach <= count for _, kind in self.others)
            if p.storage_epoch == tree.storage_epoch:
                p.anchor.boundary_stored = is_all_new or before.boundary_stored
            gained = found.end - max(start, usable)  # what ended in no match is of use by this only
        else:
            gained = count - len(done.duplicates[BACKBONE])
        p.loaded_pages += gained
        p.loaded_end = found.end
        self.supply.counters.prefetched += gained
        if p.stopped:
            self.supply.counters.prefetched_late += gained
        if self.on_entered is not None:
            self.on_entered(p.handle, found.start, p.anchor)

    def _mark_stored(self, node: Node, found: StorageHit) -> None:
        """Note that storage has the pages that it was asked for."""
        first = found.start + found.known
        for n in self.tree.path(node, first):
            n.stored = True
        if self.tree.watch is not None:
            self.tree.watch.backed_up(node, first, found.end)

"""Storage to host, while a request waits in the queue.

    query (worker hashes and asks the backend) -> host pages for what is there -> reads (see `reads`), adopted
    into the tree as they arrive -> done

The request is told when to go on by the prefetch policy; what arrives after that still enters the tree.
Host pages are allocated only when the hit length is known. Every path ends in `_finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from hiradix.cache.agreement import Agree, least
from hiradix.cache.boundaries import BoundaryReads, Ends, pages_of_a_step
from hiradix.cache.in_flight import InFlightJob, InFlightJobs
from hiradix.cache.pages import PageSupply
from hiradix.cache.prefetch_state import Arrivals, Prefetch, PrefetchPhase, StorageHit
from hiradix.cache.reads import Reads
from hiradix.errors import Misuse
from hiradix.policy.no_regret import NoRegret
from hiradix.policy.prefetch_policy import PrefetchPolicy
from hiradix.transfer import JobKind, Result, StorageExecutor
from hiradix.tree import Node, RadixKey, RadixTree, Tier


class StorageQuery(InFlightJob):
    """What storage has of a prefetch is being asked: `asked` pages behind its anchor.

    start: the first of those. first_hashed: the page whose hash is the first of those that come back, prior:
    the hash in front of that one. known: so many of the pages were not asked for in the backbone.
    """

    __slots__ = ("asked", "first_hashed", "known", "p", "prefetcher", "prior", "start")

    def __init__(self, prefetcher: Prefetcher, p: Prefetch, first_hashed: int, prior: bytes, known: int):
        super().__init__(JobKind.QUERY)
        self.prefetcher = prefetcher
        self.p = p
        self.start = p.anchor.end
        self.first_hashed = first_hashed
        self.prior = prior
        self.asked = p.asked_pages
        self.known = known

    def book(self, result: Result) -> None:
        self.prefetcher.found(self, result)


class Prefetcher:
    """All prefetches under way, by request handle."""

    def __init__(
        self,
        supply: PageSupply,
        executor: StorageExecutor,
        in_flight: InFlightJobs,
        policy: PrefetchPolicy,
        clock: Callable[[], float],
        no_regret: NoRegret,
        agree: Agree | None = None,
    ):
        self.policy = policy
        self._tree: RadixTree = supply.tree
        self._supply = supply
        self._executor = executor
        self._in_flight = in_flight
        self._clock = clock
        self.reads = self._make_reads(no_regret, agree)
        self._active: dict[Hashable, Prefetch] = {}
        self._running: list[Prefetch] = []  # not DONE; outlives the handle of an aborted request
        self._loaded: dict[Hashable, tuple[int, int]] = {}  # first page, pages

    def _make_reads(self, no_regret: NoRegret, agree: Agree | None) -> Reads | BoundaryReads:
        arrivals, executor = Arrivals(self._supply), self._executor
        if not arrivals.others:
            return Reads(arrivals, executor, self._in_flight, self._finish, no_regret)
        step_pages = pages_of_a_step(self._tree.components, executor.page_bytes, executor.limits.batch_pages)
        if agree is not None:
            step_pages = -least(agree, -step_pages)[0]  # the most that any rank would read at once
        ends = Ends(self._finish, self._ask_again)
        return BoundaryReads(arrivals, executor, self._in_flight, ends, step_pages, no_regret)

    def __len__(self) -> int:
        return len(self._running)

    def clear(self) -> None:
        """Forget everything (after a reset; the jobs in flight are orphans now)."""
        for p in self._running:
            p.phase, p.lock, p.beside = PrefetchPhase.DONE, None, None
        self._active.clear()
        self._running.clear()
        self._loaded.clear()

    # -- the request's side -------------------------------------------------------------

    def start(self, handle: Hashable, key: RadixKey, node: Node) -> bool:
        """Ask storage for what follows `node` (the deepest loadable node of `key`). False: not worth it."""
        self.abort(handle)
        asked = key.num_pages(self._tree.page_size) - node.end
        if asked <= 0 or not self._executor.storage_attached or not self.policy.worth_asking(asked):
            return False
        asked = self.reads.most(key, node)
        if not self.policy.worth_asking(asked):
            return False
        primary, in_flight = self._same_pages(key, node), self.pages_in_flight()
        if primary is None and not self.policy.has_capacity(in_flight, asked, self._host_pages()):
            self._supply.counters.miss("host_capacity", asked)
            return False
        limit_s = self.policy.wait_limit_s(asked)
        if limit_s and not self.reads.no_regret.asks(asked):
            return False
        p = Prefetch(key, asked, node.end, self._clock(), limit_s, node)
        self._active[handle] = p
        self._running.append(p)
        if primary is not None:
            p.phase, p.primary = PrefetchPhase.JOINED, primary
        else:
            self._query(p)
        return True

    def progress(self, handle: Hashable) -> bool:
        """True when the request should go on to be scheduled, with whatever is in the tree by now."""
        p = self._active.get(handle)
        if p is None:
            return True
        done = p.phase is PrefetchPhase.DONE
        if not done and not self.policy.should_stop(self._clock() - p.started_s, p.asked_pages):
            return False
        if not done:
            p.is_late = True
            self._supply.counters.miss("deadline", p.unread_pages)
        self._release(handle)
        return True

    def is_done(self, handle: Hashable) -> bool:
        """Whether nothing more will arrive for `handle`: then `progress` will say so, too."""
        p = self._active.get(handle)
        return p is None or p.phase is PrefetchPhase.DONE

    def pop_loaded_pages(self, handle: Hashable) -> int:
        """Pages that `handle`'s prefetch brought to the host. Reading resets it."""
        return self.pop_loaded_span(handle)[1]

    def pop_loaded_span(self, handle: Hashable) -> tuple[int, int]:
        """Where those pages begin in the request's prompt, and how many they are. Reading resets it.

        What others had put into the tree in the meantime lies before them.
        """
        return self._loaded.pop(handle, (0, 0))

    def stop(self, handle: Hashable) -> None:
        """Stop waiting for `handle`'s prefetch; what arrives later still enters the tree."""
        if handle in self._active:
            self._release(handle)

    def abort(self, handle: Hashable) -> None:
        """Stop for a request that ended. Its pages come back when the running read does."""
        self.stop(handle)
        self._loaded.pop(handle, None)

    def stop_all(self) -> None:
        """Stop every prefetch (before a detach)."""
        for handle in list(self._active):
            self._release(handle)

    def disown(self) -> None:
        """Stop every prefetch, and let nothing of theirs enter the tree any more: as after a reset that
        could not clear it, since it is in use."""
        self.stop_all()
        for p in self._running:
            p.end_page = -1

    def pages_in_flight(self) -> int:
        """Pages that storage is being asked for, or that are being read; what has joined asks for none."""
        return sum(p.asked_pages for p in self._running if p.phase is not PrefetchPhase.JOINED)

    def _host_pages(self) -> int:
        return 0 if self._supply.host is None else self._supply.host.num_pages

    def _release(self, handle: Hashable) -> None:
        p = self._active.pop(handle)
        self._loaded[handle] = p.loaded_end - p.loaded_pages, p.loaded_pages
        p.is_wanted = False
        primary = p.primary
        if p.phase is PrefetchPhase.JOINED:
            self._finish(p)
        for left in (p, primary):
            if left is not None and left.phase is not PrefetchPhase.DONE and not self._is_wanted(left):
                left.stopped = True
                for ticket in left.tickets:
                    self._executor.cancel(ticket)

    def _is_wanted(self, p: Prefetch) -> bool:
        """Whether a request waits for `p`, its own or one that joined it."""
        return p.is_wanted or any(q.primary is p for q in self._running)

    # -- the transfer's side ------------------------------------------------------------

    def _same_pages(self, key: RadixKey, node: Node, num_pages: int = 1) -> Prefetch | None:
        """A running prefetch that will bring the first `num_pages` of `key` behind `node`."""
        size, end = self._tree.page_size, node.end + num_pages
        rows = [key.row(page, size) for page in range(node.end, end)]
        for p in self._running:
            is_open = p.phase in (PrefetchPhase.QUERY, PrefetchPhase.READ) and not p.stopped
            if is_open and p.anchor is node and p.key.num_pages(size) >= end:
                if rows == [p.key.row(page, size) for page in range(node.end, end)]:
                    return p
        return None

    def _query(self, p: Prefetch) -> None:
        p.phase, p.primary = PrefetchPhase.QUERY, None
        p.storage_epoch = self._tree.storage_epoch
        if p.lock is None:
            p.lock = self._tree.lock(p.anchor, Tier.HOST)
        start = p.anchor.end
        rows = self._tree.rows(p.key, p.anchor, start, start + p.asked_pages)
        query = StorageQuery(self, p, rows.start, rows.prior if rows.start else b"", self.reads.hold(p))
        ticket = self._executor.query(rows, p.asked_pages, self.reads.windows(), query.known)
        p.tickets.add(ticket)
        self._in_flight.add(ticket, query)

    def found(self, query: StorageQuery, result: Result) -> None:
        """Storage has answered: what it has is read."""
        p, skip = query.p, query.start - query.first_hashed  # pages of which the hash was not known
        p.tickets.discard(query.ticket)
        if skip and result.hashes:
            self._tree.set_hashes(p.anchor, query.first_hashed, result.hashes[:skip])
        if result.error is not None and not p.stopped:
            self._supply.counters.miss("storage_transfer", p.asked_pages)
        p.nothing_there = result.error is None and result.num_pages == 0
        chain = None if query.first_hashed else result.hashes
        names = result.hashes[skip : skip + result.num_pages]
        after = result.hashes[skip - 1] if skip and result.hashes else query.prior
        is_read = self._read(p, StorageHit(query.start, names, chain, after, query.known))
        if p.is_measured:
            num_read = result.num_pages if is_read else 0
            self.reads.no_regret.answered(query.asked, num_read, result.duration_s)

    def _read(self, p: Prefetch, found: StorageHit) -> bool:
        """Submit reads for the hits, if somebody still wants them; False: there are none."""
        count = len(found.hashes)
        if p.stopped or not self.policy.worth_reading(count):
            self._supply.counters.miss("dropped" if p.stopped else "below_threshold", count)
            self._finish(p)
            return False
        p.phase = PrefetchPhase.READ
        if self.reads.submit(p, found):
            return True
        self._finish(p)
        return False

    def _ask_again(self, p: Prefetch, num_pages: int) -> None:
        """Look for an earlier boundary, among the first `num_pages` pages asked for."""
        p.asked_pages = num_pages
        if self.policy.worth_asking(num_pages) and self._executor.storage_attached:
            self._query(p)
        else:
            self._finish(p)

    def _finish(self, p: Prefetch) -> None:
        """The one end of every prefetch: unlock, and let those who joined it look again."""
        if p.tickets or p.unread_pages != 0:
            raise Misuse(f"a prefetch ends with tickets {p.tickets} and {p.unread_pages} pages unread")
        p.phase = PrefetchPhase.DONE
        self._running.remove(p)
        for lock in (p.lock, p.beside):
            if lock is not None:
                self._tree.unlock(lock)
        p.lock = p.beside = None
        for joined in [q for q in self._running if q.primary is p]:
            self._retry(joined, p)

    def _retry(self, p: Prefetch, primary: Prefetch) -> None:
        """A joined prefetch goes on for what the primary did not bring: with another one that will bring as
        much as is worth reading, else alone. What brought it nothing twice is not tried again."""
        p.primary = None
        node = self._tree.match(p.key).loadable_node
        gained = max(0, node.end - p.start_page)
        p.loaded_pages += gained
        p.loaded_end = node.end
        p.asked_pages -= gained
        p.start_page += gained
        p.anchor = node
        may_gain = gained or not (primary.nothing_there or p.gained_nothing)
        p.gained_nothing = not gained
        if not (
            may_gain
            and p.asked_pages > 0
            and self.policy.worth_asking(p.asked_pages)
            and self._executor.storage_attached
        ):
            self._finish(p)
            return
        least_pages = min(p.asked_pages, max(1, self.policy.limits.threshold_pages))
        p.primary = self._same_pages(p.key, node, least_pages)
        if p.primary is not None:
            return
        if self.policy.has_capacity(self.pages_in_flight(), p.asked_pages, self._host_pages()):
            self._query(p)
        else:
            self._supply.counters.miss("host_capacity", p.asked_pages)
            self._finish(p)

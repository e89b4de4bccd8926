"""Storage to host, while a request waits in the queue.

    query (worker hashes and asks the backend; it holds nothing) -> room for what is there, nearest to its turn
    first (see `reserved_room`) -> reads (see `reads`), adopted into the tree as they arrive -> held on the
    host until the request runs or ends

The request is told when to go on by the prefetch policy; what arrives after that still enters the tree. Who
has no room yet is given it later by itself, and so is who had to let go of what was fetched for it. Host
pages are allocated only when the hit length is known. Every path ends in `_finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

import numpy as np

from hiradix.cache.agreement import Agree, least
from hiradix.cache.boundaries import BoundaryReads, Ends, pages_of_a_step
from hiradix.cache.in_flight import InFlightJob, InFlightJobs
from hiradix.cache.pages import BACKBONE, PageSupply
from hiradix.cache.prefetch_state import Arrivals, Prefetch, PrefetchPhase, StorageHit
from hiradix.cache.reads import Reads
from hiradix.cache.reserved_room import ReservedRoom, Wish, on_device_only
from hiradix.cache.waiting import WaitingOrder
from hiradix.errors import Misuse
from hiradix.policy.no_regret import GatedTransfer, NoRegret
from hiradix.policy.prefetch_policy import PrefetchPolicy
from hiradix.transfer import JobKind, Result, StorageExecutor
from hiradix.tree import Node, RadixKey, RadixTree

MAX_QUERIES: Final = 4  # of one request, where what was on the host when it was asked for has gone since


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
    """All prefetches under way, by request handle. `room` is the host room of requests that wait.

    What is decided here follows from requests, agreed results and the common clock, so ranks decide alike.
    on_entered(handle, first, node): the pages of `handle` from page `first` to the end of `node` were read for
    it and are on the host.
    num_adopted: how often storage has found that what others stored is of these weights, agreed as well.
    """

    def __init__(
        self,
        supply: PageSupply,
        executor: StorageExecutor,
        in_flight: InFlightJobs,
        policy: PrefetchPolicy,
        clock: Callable[[], float],
        no_regret: NoRegret,
        agree: Agree | None = None,
        on_entered: Callable[[Hashable, int, Node], None] | None = None,
        num_adopted: Callable[[], float] = lambda: 0.0,
    ):
        self.policy = policy
        self._tree: RadixTree = supply.tree
        self._supply = supply
        self._executor = executor
        self._in_flight = in_flight
        self._clock = clock
        self._num_adopted = num_adopted
        self.reads = self._make_reads(Arrivals(supply, on_entered), no_regret, agree)
        self._waiting = WaitingOrder()
        self._running: list[Prefetch] = []  # not DONE; outlives the handle of an aborted request
        self._loaded: dict[Hashable, tuple[int, int]] = {}  # first page, pages
        self.room = ReservedRoom(
            supply, self._waiting, self._running, lambda: self.caps, self._want, self._begin
        )

    def _make_reads(
        self, arrivals: Arrivals, no_regret: NoRegret, agree: Agree | None
    ) -> Reads | BoundaryReads:
        executor = self._executor
        if not arrivals.others:
            return Reads(arrivals, executor, self._in_flight, self._finish, no_regret)
        step_pages = pages_of_a_step(self._tree.components, executor.page_bytes, executor.limits.batch_pages)
        if agree is not None:
            step_pages = -least(agree, -step_pages)[0]  # the most that any rank would read at once
        ends = Ends(self._finish, self._ask_again)
        return BoundaryReads(arrivals, executor, self._in_flight, ends, step_pages, no_regret)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def caps(self) -> list[int]:
        """Pages of each component that are held for those who wait, at most."""
        return [self.policy.limits.capacity_pages(pool.num_pages) for pool in self._supply.host_pools]

    def state(self) -> tuple[int, ...]:
        """What is the same on all ranks: prefetches under way, requests that wait, those without room."""
        return len(self._running), len(self._waiting), self.room.num_short

    def clear(self) -> None:
        """Forget everything (after a reset; the jobs in flight are orphans now)."""
        for p in (*self._running, *self._waiting):
            p.phase, p.lock, p.beside = PrefetchPhase.DONE, None, None
        self._waiting.clear()
        self._running.clear()
        self._loaded.clear()
        self.room.clear()

    # -- the request's side -------------------------------------------------------------

    def start(self, handle: Hashable, key: RadixKey, node: Node) -> bool:
        """A request waits: storage is asked for what follows `node` (the deepest loadable node of `key`), and
        what the host has of it is held when there is room. False: storage is not asked."""
        self.abort(handle)
        if not self._executor.storage_attached:
            return False
        asked = self._worth(key, node)
        limit_s = self.policy.wait_limit_s(asked)
        if asked and limit_s and not self.reads.no_regret.asks(asked):
            asked = 0
        if not asked and not node.end:
            return False
        p = Prefetch(handle, key, asked, node.end, self._clock(), limit_s, node, had_end=node.end)
        p.num_adopted = self._num_adopted()
        self._waiting.add(p)
        self.room.is_stale = True
        if not asked:
            p.phase, p.wants_hold = PrefetchPhase.DONE, True
            return False
        self._running.append(p)
        if not self._join(p, node):
            self._query(p)
        return True

    def _worth(self, key: RadixKey, node: Node) -> int:
        """How many pages of `key` behind `node` storage is asked for; 0: it is not worth it."""
        asked = key.num_pages(self._tree.page_size) - node.end
        if asked <= 0 or not self.policy.worth_asking(asked):
            return 0
        asked = min(asked, self.reads.most(key, node) + self.room.num_held)
        return asked if self.policy.worth_asking(asked) else 0

    def in_order(self, handles: Sequence[Hashable]) -> None:
        """The order in which requests that wait will run, next first; those not named are behind. Until this
        is called, it is the order in which `progress` asks for them, else that of their arrival."""
        if self._waiting.set_order(handles):
            self.room.is_stale = True

    def progress(self, handle: Hashable) -> bool:
        """True when the request should go on to be scheduled, with whatever is in the tree by now."""
        p = self._waiting.get(handle)
        if p is None:
            return True
        self._waiting.asked(p)
        if not p.goes_on:
            self._look_again(p)
        if p.goes_on or p.phase is PrefetchPhase.DONE or self._has_all(p):
            self._report(p)
            return True
        if not self._is_over_time(p) and self._takes_what_there_is(p):
            return False
        self._report(p)
        self._go_on(p)
        return True

    def is_done(self, handle: Hashable) -> bool:
        """Whether nothing more will arrive for `handle`: then `progress` will say so, too."""
        p = self._waiting.get(handle)
        return p is None or p.goes_on or p.phase is PrefetchPhase.DONE

    def fetching_pages(self, handle: Hashable) -> int:
        """Pages that storage has for it, as far as it has said so, and which are not on the host yet."""
        p = self._waiting.get(handle)
        if p is None or p.goes_on:
            return 0
        p = p.waits_with
        if p.phase is PrefetchPhase.READ:
            return p.coming_pages
        if p.phase is PrefetchPhase.FOUND and p.hit is not None:
            return max(0, p.hit.end - self._tree.match(p.key).loadable_node.end)
        return 0

    def pop_loaded_pages(self, handle: Hashable) -> int:
        """Pages that `handle`'s prefetch brought to the host. Reading resets it."""
        return self.pop_loaded_span(handle)[1]

    def pop_loaded_span(self, handle: Hashable) -> tuple[int, int]:
        """Where those pages begin in the request's prompt, and how many they are. Reading resets it.

        What others had put into the tree in the meantime lies before them.
        """
        p = self._waiting.get(handle)
        if p is not None and self.is_done(handle):
            self._report(p)
        return self._loaded.pop(handle, (0, 0))

    def stop(self, handle: Hashable) -> None:
        """`handle` waits no more: nothing is held or fetched for it. What arrives later still enters the
        tree."""
        p = self._waiting.get(handle)
        if p is None:
            return
        self._report(p)
        self._waiting.remove(p)
        self.room.is_stale = True
        if p.phase is PrefetchPhase.DONE:
            self.room.release(p)
        else:
            self._go_on(p)

    def abort(self, handle: Hashable) -> None:
        """Stop for a request that runs or has ended. Its pages come back when the running read does."""
        self.stop(handle)
        self._loaded.pop(handle, None)

    def stop_all(self) -> None:
        """Stop every prefetch (before a detach)."""
        for handle in self._waiting.handles():
            self.stop(handle)

    def disown(self) -> None:
        """Stop every prefetch, and let nothing of theirs enter the tree any more: as after a reset that
        could not clear it, since it is in use."""
        self.stop_all()
        for p in self._running:
            p.end_page = -1

    def forget(self, covers: Callable[[RadixKey], bool]) -> None:
        """Stop every prefetch of a key of which `covers` says so, and let nothing of it enter the tree."""
        for p in [*self._waiting, *self._running]:
            if covers(p.key):
                self.stop(p.handle)
                p.end_page = -1

    def _report(self, p: Prefetch) -> None:
        """Its request hears that it may run, or waits no more: what was brought for it is reported once."""
        if not p.is_reported:
            p.is_reported = True
            if p.loaded_pages:
                self._loaded[p.handle] = p.loaded_end - p.loaded_pages, p.loaded_pages

    def _look_again(self, p: Prefetch) -> None:
        """The engine asks for one that has ended: what the host had of it may have gone, where it is not held,
        and storage may serve by now what it had to leave unserved before it was compared."""
        is_served = p.phase is PrefetchPhase.DONE and self._num_adopted() > p.num_adopted
        if not (is_served or p.wants_hold):
            return
        node = self._tree.match(p.key).loadable_node
        if node.end < p.had_end or is_served:
            p.num_adopted = self._num_adopted()
            if self._query_again(p, node) and not p.loaded_pages:
                p.is_reported = False

    def _has_all(self, p: Prefetch) -> bool:
        """Whether what storage has of `p`, which waits for room to read it, is on the host after all."""
        if p.phase is not PrefetchPhase.FOUND or p.hit is None:
            return False
        return self._tree.match(p.key).loadable_node.end >= p.hit.end

    def _is_over_time(self, p: Prefetch) -> bool:
        """Whether the request of `p` goes on without what has not come."""
        began_s, waits_with = p.started_s, p
        while waits_with.phase is PrefetchPhase.JOINED and waits_with.primary is not None:
            waits_with = waits_with.primary
            began_s = max(began_s, waits_with.started_s)
        if waits_with.phase is not PrefetchPhase.FOUND:
            return self.policy.should_stop(self._clock() - began_s, p.asked_pages)
        if p.room_since_s < 0:
            p.room_since_s = self._clock()
            ahead = self._waiting.pages_ahead(p, self.caps[BACKBONE])
            p.room_limit_s = self.policy.room_wait_s(ahead, p.asked_pages)
        return self._clock() - p.room_since_s >= p.room_limit_s

    def _takes_what_there_is(self, p: Prefetch) -> bool:
        """Where the host has not the pages for `p`, which could run, read as much as it has pages for: those
        that are being written, or that others use, are not waited for. False: `p` has nothing to wait for."""
        other = p.waits_with
        if other is not self.room.lacking or other.phase is not PrefetchPhase.FOUND:
            return True
        self.room.lacking, self.room.is_stale = None, True
        wish = self._want(other)
        return (wish is None or self._begin(other, wish, is_part=True)) and p.phase is not PrefetchPhase.DONE

    def _go_on(self, p: Prefetch) -> None:
        """The request of `p` waits no more for what has not come: it has ended, or has had its time."""
        if self._waiting.has(p):
            p.goes_on = p.timed_out = True
            reason = "host_capacity" if p.phase is PrefetchPhase.FOUND else "deadline"
            found = 0 if p.hit is None else len(p.hit.hashes)
            self._supply.counters.miss(reason, found if p.phase is PrefetchPhase.FOUND else p.unread_pages)
        p.is_wanted, self.room.is_stale = False, True
        self._drop_unwanted(p)

    def _drop_unwanted(self, p: Prefetch) -> None:
        """End `p` if nobody waits for it any more, and then what it has joined, likewise."""
        if p.stopped or p.phase is PrefetchPhase.DONE or self._is_wanted(p):
            return
        p.stopped, primary = True, p.primary
        for ticket in p.tickets:
            self._executor.cancel(ticket)
        if p.phase in (PrefetchPhase.FOUND, PrefetchPhase.JOINED):
            self._finish(p)
        if primary is not None:
            self._drop_unwanted(primary)

    def _is_wanted(self, p: Prefetch) -> bool:
        """Whether a request waits for `p`, its own or one that joined it."""
        return p.is_wanted or any(q.primary is p for q in self._running)

    # -- room for what storage has ----------------------------------------------------------

    def _want(self, p: Prefetch) -> Wish | None:
        """What room `p` needs now, which has none; None if none: it asks storage again, or has joined another,
        or the host has nothing of it."""
        node = self._tree.match(p.key).loadable_node
        if p.phase is PrefetchPhase.FOUND and p.hit is not None:
            hit = p.hit
            if node.end >= hit.end:
                return Wish(node, node, [0] * len(self._tree.components))
            if not (hit.start <= node.end and self.reads.knows(p, hit)):
                if not self._query_again(p, node):
                    self._finish(p)
                return None
            if self._join(p, node):
                return None
            return Wish(node, self.reads.kept(p, node, hit.end), self.reads.coming(p, node, hit.end))
        if not p.wants_hold or (node.end < p.had_end and self._query_again(p, node)):
            return None
        if not node.end or on_device_only(self._tree, node):
            p.wants_hold = False
            return None
        return Wish(node, node, [0] * len(self._tree.components))

    def _query_again(self, p: Prefetch, node: Node) -> bool:
        """Storage is asked for what the host has not of `p`, if that is worth it."""
        asked = 0 if p.goes_on or p.num_queries >= MAX_QUERIES else self._worth(p.key, node)
        if not asked or not self._executor.storage_attached:
            return False
        if p.phase is PrefetchPhase.DONE:
            self._running.append(p)
            self.room.release(p)
        p.asked_pages, p.start_page, p.anchor, p.hit = asked, node.end, node, None
        p.wants_hold, p.started_s = False, self._clock()
        p.begins_at(node.end)
        if not self._join(p, node):
            self._query(p)
        return True

    def _begin(self, p: Prefetch, wish: Wish, is_part: bool = False) -> bool:
        """Hold what the host has of `p`, and read the rest. False: the host has no pages for it, as others
        than those who wait have them.

        is_part: as many as there are pages for are enough.
        """
        if not self.room.take(p, wish, is_part):
            return False
        if p.phase is PrefetchPhase.DONE:
            p.wants_hold = False
            self.room.keep(p)
        elif p.hit is None or wish.node.end >= p.hit.end:
            self._finish(p)
        else:
            self._read(p, p.hit, wish)
        return True

    def _read(self, p: Prefetch, hit: StorageHit, wish: Wish) -> None:
        if p.num_rooms:
            self._supply.counters.refetched += max(0, p.had_end - wish.node.end)
        p.num_rooms += 1
        p.phase, p.goal, p.coming = PrefetchPhase.READ, hit.end, wish.coming
        p.begins_at(wish.node.end)
        if p.has_waited:
            p.started_s = self._clock()
        self.reads.hold(p, wish.beside)
        if not self.reads.submit(p, hit.part(wish.node.end, hit.end)):
            self._finish(p)

    # -- the transfer's side ------------------------------------------------------------

    def _join(self, p: Prefetch, node: Node, num_pages: int = 1) -> bool:
        """Have `p` wait for a running prefetch that will bring the first `num_pages` behind `node`; False if
        there is none."""
        primary = self._same_pages(p, node, num_pages)
        if primary is None:
            return False
        p.phase, p.primary, p.num_adopted = PrefetchPhase.JOINED, primary, primary.num_adopted
        p.asked_from(node)
        num_own = p.key.num_pages(self._tree.page_size) - _common_pages(
            p.key, primary.key, self._tree.page_size
        )
        p.apart_pages = min(p.asked_pages, num_own)
        return True

    def _same_pages(self, p: Prefetch, node: Node, num_pages: int) -> Prefetch | None:
        """A running prefetch that will bring the first `num_pages` of `p` behind `node`."""
        size, end = self._tree.page_size, node.end + num_pages
        rows = [p.key.row(page, size) for page in range(node.end, end)]
        for q in self._running:
            is_open = q.phase in (PrefetchPhase.QUERY, PrefetchPhase.READ) and not q.stopped
            if is_open and q is not p and q.anchor is node and q.key.num_pages(size) >= end:
                if rows == [q.key.row(page, size) for page in range(node.end, end)]:
                    return q
        return None

    def _query(self, p: Prefetch) -> None:
        """Ask storage what it has behind the anchor. Nothing is held meanwhile."""
        p.phase, p.primary = PrefetchPhase.QUERY, None
        p.num_queries += 1
        p.num_adopted = self._num_adopted()
        p.storage_epoch = self._tree.storage_epoch
        start = p.start_page = p.anchor.end
        rows = self._tree.rows(p.key, p.anchor, start, start + p.asked_pages)
        prior = rows.prior if rows.start else b""
        query = StorageQuery(self, p, rows.start, prior, self.reads.num_known(p))
        ticket = self._executor.query(rows, p.asked_pages, self.reads.windows(), query.known)
        p.tickets.add(ticket)
        self._in_flight.add(ticket, query)

    def found(self, query: StorageQuery, result: Result) -> None:
        """Storage has answered: what it has is read as soon as there is room for it."""
        p, skip = query.p, query.start - query.first_hashed  # pages of which the hash was not known
        p.tickets.discard(query.ticket)
        anchor = self._tree.current(p.anchor) if skip and result.hashes else None
        if anchor is not None:
            self._tree.set_hashes(anchor, query.first_hashed, result.hashes[:skip])
        if result.error is not None and not p.stopped:
            self._supply.counters.miss("storage_transfer", p.asked_pages)
        p.found_nothing = result.error is None and result.num_pages == 0
        chain = None if query.first_hashed else result.hashes
        names = result.hashes[skip : skip + result.num_pages]
        after = result.hashes[skip - 1] if skip and result.hashes else query.prior
        hit = StorageHit(query.start, names, chain, after, query.known)
        is_read = self._is_worth_reading(p, len(names))
        if p.is_measured:
            self.reads.no_regret.answered(query.asked, len(names) if is_read else 0, result.duration_s)
        if is_read:
            p.hit, p.phase, self.room.is_stale = hit, PrefetchPhase.FOUND, True
        else:
            self._finish(p)

    def _is_worth_reading(self, p: Prefetch, count: int) -> bool:
        """Whether what storage has of `p`, so many pages, is read: somebody still wants them, and they are
        worth their time."""
        if p.stopped or not self.policy.worth_reading(count):
            self._supply.counters.miss("dropped" if p.stopped else "below_threshold", count)
            return False
        if not self.reads.no_regret.takes(GatedTransfer.FETCH, count):
            self._supply.counters.miss("slower_than_compute", count)
            return False
        return True

    def _ask_again(self, p: Prefetch, num_pages: int) -> None:
        """Look for an earlier boundary, among the first `num_pages` pages asked for."""
        p.asked_pages, p.hit = num_pages, None
        if self.policy.worth_asking(num_pages) and self._executor.storage_attached:
            self.room.release(p)
            self._query(p)
        else:
            self._finish(p)

    def _finish(self, p: Prefetch) -> None:
        """The one end of every prefetch: what has come is held if its request waits, and those who joined it
        look again."""
        if p.tickets or p.unread_pages != 0:
            raise Misuse(f"a prefetch ends with tickets {p.tickets} and {p.unread_pages} pages unread")
        p.phase, self.room.is_stale = PrefetchPhase.DONE, True
        self._running.remove(p)
        if not self._waiting.has(p):
            self.room.release(p)
        elif p.lock is None:
            p.wants_hold = True
        else:
            self.room.keep(p)
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
        p.asked_from(node)
        p.had_end = max(p.had_end, node.end)
        if p.hit is not None and p.hit.start <= node.end < p.hit.end:
            p.phase, self.room.is_stale = PrefetchPhase.FOUND, True
            return
        was_tried = not primary.stopped or primary.num_rooms > 0
        may_gain = gained or not was_tried or not (primary.found_nothing or p.gained_nothing)
        p.gained_nothing = was_tried and not gained
        if not (
            may_gain
            and p.asked_pages > 0
            and self.policy.worth_asking(p.asked_pages)
            and self._executor.storage_attached
        ):
            self._finish(p)
            return
        least_pages = min(p.asked_pages, max(1, self.policy.limits.threshold_pages))
        if not self._join(p, node, least_pages):
            self._query(p)


def _common_pages(key: RadixKey, other: RadixKey, page_size: int) -> int:
    """How many first pages of two keys of a namespace have the same tokens."""
    count = min(key.num_pages(page_size), other.num_pages(page_size))
    differ = key.tokens[: count * page_size] != other.tokens[: count * page_size]
    return int(np.argmax(differ)) // page_size if differ.any() else count

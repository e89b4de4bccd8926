"""Prefetch: storage to host, while a request waits in the queue.

    query     a worker hashes the tokens and asks the backend; no page is held meanwhile
    room      host pages for the hit, the request nearest to its turn first (`reserved_room`)
    reads     batches, adopted into the tree as they arrive (`reads`, `boundaries`)
    held      the pages are locked on the host until the request runs or ends

The prefetch policy decides how long the request waits; pages that arrive later still enter the tree. A request
that got no room, or had to let go of its pages for one nearer to its turn, is given room later without asking.
Every path ends in `_finish`.
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
from hiradix.explain import Reason
from hiradix.policy.no_regret import GatedTransfer, NoRegret
from hiradix.policy.prefetch_policy import PrefetchPolicy
from hiradix.transfer import JobKind, Result, StorageExecutor
from hiradix.tree import Node, RadixKey, RadixTree

MAX_QUERIES: Final = 4  # of one request: storage is asked again when pages it had on the host were evicted


class StorageQuery(InFlightJob):
    """A lookup in flight: how many of `asked` pages behind the anchor storage has.

    start: the first of these pages. first_hashed: the page that the first hash of the result belongs to. prior:
    the hash of the page before it. known: leading pages whose backbone a tier has, so that storage is not asked
    for it.
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
    """All prefetches under way, by request handle.

    Decisions follow from requests, agreed results and the agreed clock alone, so that all ranks decide alike.
    on_entered(handle, first, node): called when pages read for `handle`, from page `first` to the end of `node`,
        are on the host.
    num_adopted: an agreed count of how often storage has adopted pages of others as of these weights.
    room: the host pages of waiting requests.

    _waiting: prefetches whose request waits, in the order in which they will run. _running: those not DONE, with
    or without a request. _loaded: (first page, pages) brought for a request, until it asks for the number.
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
        self._running: list[Prefetch] = []
        self._loaded: dict[Hashable, tuple[int, int]] = {}
        self._withheld: dict[Hashable, tuple[int, Reason, float]] = {}
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
        """The most pages per component that may be held for waiting requests."""
        return [self.policy.limits.capacity_pages(pool.num_pages) for pool in self._supply.host_pools]

    def state(self) -> tuple[int, ...]:
        """Counts that are equal on all ranks: prefetches under way, waiting requests, those without room."""
        return len(self._running), len(self._waiting), self.room.num_short

    def clear(self) -> None:
        """Forget everything (after a reset; the jobs in flight are orphans now)."""
        for p in (*self._running, *self._waiting):
            p.phase, p.lock, p.beside = PrefetchPhase.DONE, None, None
        self._waiting.clear()
        self._running.clear()
        self._loaded.clear()
        self._withheld.clear()
        self.room.clear()

    # -- the request's side -------------------------------------------------------------

    def start(self, handle: Hashable, key: RadixKey, node: Node) -> bool:
        """A request waits: ask storage for the pages behind `node`, the deepest loadable node of `key`, and hold
        its host pages once there is room. False: storage is not asked."""
        self.abort(handle)
        if not self._executor.storage_attached:
            return False
        asked, withheld = self._worth(key, node), None
        limit_s = self.policy.wait_limit_s(asked)
        num_pages = key.num_pages(self._tree.page_size)
        if not asked and num_pages > node.end:
            is_long = self.policy.worth_asking(num_pages - node.end)
            withheld = (num_pages, Reason.NO_ROOM if is_long else Reason.BELOW_THRESHOLD)
        elif asked and limit_s and not self.reads.no_regret.asks(asked):
            asked, withheld = 0, (num_pages, Reason.PREDICTED_SLOWER)
        if not asked and not node.end:
            if withheld is not None:
                self._withheld[handle] = (*withheld, 0.0)
            return False
        p = Prefetch(handle, key, asked, node.end, self._clock(), limit_s, node, had_end=node.end)
        p.withheld = withheld
        self._waiting.add(p)
        self.room.may_have_changed()
        if not asked:
            p.num_adopted = self._num_adopted()
            p.phase, p.wants_hold = PrefetchPhase.DONE, True
            return False
        self._running.append(p)
        if not self._join(p, node):
            self._query(p)
        return True

    def _worth(self, key: RadixKey, node: Node) -> int:
        """The number of pages of `key` behind `node` to ask storage for; 0: not worth a lookup."""
        asked = key.num_pages(self._tree.page_size) - node.end
        if asked <= 0 or not self.policy.worth_asking(asked):
            return 0
        asked = min(asked, self.reads.most(key, node) + self.room.num_held)
        return asked if self.policy.worth_asking(asked) else 0

    def in_order(self, handles: Sequence[Hashable]) -> None:
        """Set the order in which waiting requests will run, next first; those not named stand behind. Until the
        first call it is the order in which `progress` asks for them, else that of arrival."""
        if self._waiting.set_order(handles):
            self.room.may_have_changed()

    def progress(self, handle: Hashable) -> bool:
        """Whether the request may be scheduled, with whatever is in the tree by now."""
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
        p.withhold(*self._late(p))
        self._report(p)
        self._go_on(p)
        return True

    def is_done(self, handle: Hashable) -> bool:
        """Whether no more pages will arrive for `handle`; `progress` is True then. Changes nothing."""
        p = self._waiting.get(handle)
        return p is None or p.goes_on or p.phase is PrefetchPhase.DONE

    def fetching_pages(self, handle: Hashable) -> int:
        """Pages of the request's hit in storage that are not on the host yet; 0 until storage has answered."""
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
        """The number of pages the prefetch brought to the host; resets it."""
        return self.pop_loaded_span(handle)[1]

    def pop_loaded_span(self, handle: Hashable) -> tuple[int, int]:
        """(first page in the prompt, pages) that the prefetch brought; resets both. Pages that other requests
        put into the tree in the meantime lie before the first."""
        self._report_if_done(handle)
        return self._loaded.pop(handle, (0, 0))

    def pop_withheld(self, handle: Hashable) -> tuple[int, Reason, float] | None:
        """Up to which page storage has `handle`'s prompt, or may have it, why it did not bring that, and how
        long the request waited. None: all that storage has came. Reading resets it."""
        self._report_if_done(handle)
        return self._withheld.pop(handle, None)

    def stop(self, handle: Hashable) -> None:
        """The request waits no more: hold and fetch nothing for it. Pages in flight still enter the tree."""
        p = self._waiting.get(handle)
        if p is None:
            return
        self._report(p)
        self._waiting.remove(p)
        self.room.may_have_changed()
        if p.phase is PrefetchPhase.DONE:
            self.room.release(p)
        else:
            self._go_on(p)

    def abort(self, handle: Hashable) -> None:
        """`stop` for a request that runs or has ended, and forget the number of pages brought for it."""
        self.stop(handle)
        self._loaded.pop(handle, None)
        self._withheld.pop(handle, None)

    def stop_all(self) -> None:
        """Stop every prefetch (before a detach)."""
        for handle in self._waiting.handles():
            self.stop(handle)

    def disown(self) -> None:
        """Stop every prefetch and let none of their pages enter the tree: for a reset of a tree that is in
        use."""
        self.stop_all()
        for p in self._running:
            p.end_page = -1

    def forget(self, covers: Callable[[RadixKey], bool]) -> None:
        """Stop every prefetch of a key of which `covers` says so, and let nothing of it enter the tree."""
        for p in [*self._waiting, *self._running]:
            if covers(p.key):
                if self._waiting.has(p):
                    self.stop(p.handle)
                p.end_page = -1
                self._cancel(p)  # those who joined it ask for their own

    def _report_if_done(self, handle: Hashable) -> None:
        p = self._waiting.get(handle)
        if p is not None and self.is_done(handle):
            self._report(p)

    def _report(self, p: Prefetch) -> None:
        """Note, once, how many pages were brought: its request may run, or waits no more."""
        if not p.is_reported:
            p.is_reported = True
            if p.loaded_pages:
                self._loaded[p.handle] = p.loaded_end - p.loaded_pages, p.loaded_pages
            if p.withheld is not None:
                self._withheld[p.handle] = (*p.withheld, self._clock() - p.started_s)

    def _look_again(self, p: Prefetch) -> None:
        """Ask storage again for a prefetch that has ended, if its unheld host pages were evicted, or if storage
        has adopted pages since that it did not serve before."""
        is_served = p.phase is PrefetchPhase.DONE and self._num_adopted() > p.num_adopted
        if not (is_served or p.wants_hold):
            return
        node = self._tree.match(p.key).loadable_node
        if node.end < p.had_end or is_served:
            p.num_adopted = self._num_adopted()
            if self._query_again(p, node) and not p.loaded_pages:
                p.is_reported = False

    def _has_all(self, p: Prefetch) -> bool:
        """Whether all pages of a hit that waits for room are on the host by now."""
        if p.phase is not PrefetchPhase.FOUND or p.hit is None:
            return False
        return self._tree.match(p.key).loadable_node.end >= p.hit.end

    def _late(self, p: Prefetch) -> tuple[int, Reason]:
        """The page up to which the request of `p` goes on without prefetched pages, and why they have not
        come."""
        waits_with = p.waits_with
        if waits_with.phase is PrefetchPhase.FOUND and waits_with.hit is not None:
            return waits_with.hit.end, Reason.NO_ROOM
        end = p.start_page + p.asked_pages
        return (end if p.hit is None else p.hit.end), Reason.DEADLINE

    def _is_over_time(self, p: Prefetch) -> bool:
        """Whether the request has waited as long as it may, for its pages or for room."""
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
        """The request could run, there is room for it, but not enough host pages are free or evictable: read as
        many as there are, and do not wait for pages that are being written. False: it has nothing to wait
        for."""
        other = p.waits_with
        if other is not self.room.lacking or other.phase is not PrefetchPhase.FOUND:
            return True
        self.room.try_again()
        wish = self._want(other)
        return (wish is None or self._begin(other, wish, is_part=True)) and p.phase is not PrefetchPhase.DONE

    def _go_on(self, p: Prefetch) -> None:
        """The request stops waiting, as it has ended or has had its time. Counts the pages that did not come."""
        if self._waiting.has(p):
            p.goes_on = p.timed_out = True
            reason = "host_capacity" if p.phase is PrefetchPhase.FOUND else "deadline"
            found = 0 if p.hit is None else len(p.hit.hashes)
            self._supply.counters.miss(reason, found if p.phase is PrefetchPhase.FOUND else p.unread_pages)
        p.is_wanted = False
        self.room.may_have_changed()
        self._drop_unwanted(p)

    def _drop_unwanted(self, p: Prefetch) -> None:
        """Cancel `p` if no request waits for it any more, then the prefetch that it joined, likewise."""
        if not self._is_wanted(p):
            self._cancel(p)

    def _cancel(self, p: Prefetch) -> None:
        """Cancel `p`, and the prefetch that it joined where no request waits for that any more."""
        if p.stopped or p.phase is PrefetchPhase.DONE:
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
        """The room that `p`, which has none, needs now. None: none, as it asks storage again, joins another
        prefetch, or has nothing on the host."""
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
        """Ask storage again for the pages of `p` that the host lacks; False if that is not worth it."""
        asked = 0 if p.goes_on or p.num_queries >= MAX_QUERIES else self._worth(p.key, node)
        if not asked or not self._executor.storage_attached:
            return False
        if p.phase is PrefetchPhase.DONE:
            self._running.append(p)
            self.room.release(p)
        p.asked_pages, p.start_page, p.anchor, p.hit = asked, node.end, node, None
        p.withheld = None
        self._withheld.pop(p.handle, None)
        p.wants_hold, p.started_s = False, self._clock()
        p.begins_at(node.end)
        if not self._join(p, node):
            self._query(p)
        return True

    def _begin(self, p: Prefetch, wish: Wish, is_part: bool = False) -> bool:
        """Hold the host pages of `p`, and read the rest. False: the host has no pages for that, as running
        requests and transfers use them. is_part: read as many as there are pages for.
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
            p.withhold(hit.end, Reason.NO_ROOM)
            self._finish(p)

    # -- the transfer's side ------------------------------------------------------------

    def _join(self, p: Prefetch, node: Node, num_pages: int = 1) -> bool:
        """Let `p` wait for another prefetch that will bring the first `num_pages` behind `node`; False if there
        is none."""
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
        size, pages = self._tree.page_size, range(node.end, node.end + num_pages)
        for q in self._running:
            is_open = q.phase in (PrefetchPhase.QUERY, PrefetchPhase.READ) and not q.stopped
            if is_open and q is not p and q.anchor is node and q.key.num_pages(size) >= pages.stop:
                if all(p.key.row(page, size) == q.key.row(page, size) for page in pages):
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
        """Apply the answer to a lookup: the hit is read as soon as there is room for it."""
        p, skip = query.p, query.start - query.first_hashed  # pages of which the hash was not known
        p.tickets.discard(query.ticket)
        anchor = self._tree.current(p.anchor) if skip and result.hashes else None
        if anchor is not None:
            self._tree.set_hashes(anchor, query.first_hashed, result.hashes[:skip])
        if result.error is not None and not p.stopped:
            self._supply.counters.miss("storage_transfer", p.asked_pages)
            p.withhold(query.start + query.asked, Reason.STORAGE_FAILED)
        if result.damaged_end > result.num_pages:
            p.withhold(query.start + result.damaged_end, Reason.DAMAGED)
        p.found_nothing = result.error is None and result.num_pages == 0
        chain = None if query.first_hashed else result.hashes
        names = result.hashes[skip : skip + result.num_pages]
        after = result.hashes[skip - 1] if skip and result.hashes else query.prior
        hit = StorageHit(query.start, names, chain, after, query.known)
        is_read = self._is_worth_reading(p, len(names))
        if p.is_measured:
            self.reads.no_regret.answered(query.asked, len(names) if is_read else 0, result.duration_s)
        if is_read:
            p.hit, p.phase = hit, PrefetchPhase.FOUND
            self.room.may_have_changed()
        else:
            self._finish(p)

    def _is_worth_reading(self, p: Prefetch, count: int) -> bool:
        """Whether to read a hit of `count` pages: a request still waits for it, it is long enough, and the gate
        takes it. Counts the pages as missed if not."""
        if p.stopped or not self.policy.worth_reading(count):
            self._supply.counters.miss("dropped" if p.stopped else "below_threshold", count)
            if count:
                p.withhold(p.start_page + count, Reason.BELOW_THRESHOLD)
            return False
        if not self.reads.no_regret.takes(GatedTransfer.FETCH, count):
            self._supply.counters.miss("slower_than_compute", count)
            p.withhold(p.start_page + count, Reason.PREDICTED_SLOWER)
            return False
        return True

    def _ask_again(self, p: Prefetch, num_pages: int) -> None:
        """Look for an earlier boundary, among the first `num_pages` pages asked for."""
        if p.hit is not None and p.anchor.end + num_pages < p.hit.end:
            p.withhold(p.hit.end, Reason.DAMAGED)
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
        if p.phase is PrefetchPhase.READ and p.hit is not None:
            if p.end_page < p.hit.end:
                p.withhold(p.hit.end, Reason.STORAGE_FAILED if p.has_failed else Reason.DAMAGED)
            elif p.loaded_end < p.hit.end:
                p.withhold(p.hit.end, Reason.NO_ROOM)
        p.phase = PrefetchPhase.DONE
        self.room.may_have_changed()
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
            p.phase = PrefetchPhase.FOUND
            self.room.may_have_changed()
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

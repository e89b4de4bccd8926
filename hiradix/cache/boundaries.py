"""The reads of a prefetch for models with windows or recurrent states, where a prefix can only end at a
boundary.

    query (the last boundary storage has) -> queries for boundaries on the way -> one read for each -> tree

All pages that one boundary needs and no tier has are one read, adopted as a whole or not at all. A long prompt
is read in several steps, each up to a boundary on the way, so that a request that stops waiting early can use
the boundaries that have arrived. Each step costs the reading of a window or record more, so there are at most
MAX_STEPS, and none where the whole is predicted to arrive in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hiradix.cache.in_flight import InFlightJob, InFlightJobs
from hiradix.cache.pages import BACKBONE, PagesOf
from hiradix.cache.prefetch_state import Arrivals, Prefetch, StorageHit
from hiradix.errors import Misuse
from hiradix.policy.no_regret import GatedTransfer, NoRegret
from hiradix.transfer import JobKind, Result, StorageExecutor, TrailingPages, TrailingWindow
from hiradix.tree import HOST, Component, Node, RadixKey, RadixTree, Tier
from hiradix.tree.hashing import PageRows

MAX_TRIES = 3  # boundaries of one prompt that are tried, when pages that storage reported did not arrive
MAX_STEPS = 8  # boundaries that one prefetch reads
WINDOWS_SHARE = 8  # windows and records of boundaries on the way are at most 1/8 of the backbone's bytes


class Ends(NamedTuple):
    """The two ways to go on after a prefetch's reads. finish(p): nothing more will arrive for it. again(p,
    num_pages): pages that storage reported were gone; look for a boundary among the first `num_pages` behind
    its anchor."""

    finish: Callable[[Prefetch], None]
    again: Callable[[Prefetch, int], None]


class BoundariesAsked:
    """The lookups for boundaries on the way of one prefetch, and `ends`, the pages where storage has one."""

    __slots__ = ("ends", "found", "p")

    def __init__(self, p: Prefetch, found: StorageHit):
        self.p = p
        self.found = found
        self.ends: list[int] = []


class BoundaryQuery(InFlightJob):
    """One of these lookups: storage is asked for the pages from `low` on; a boundary behind page `before` is
    new."""

    __slots__ = ("asked", "before", "low", "submitter")

    def __init__(self, submitter: BoundaryReads, asked: BoundariesAsked, low: int, before: int):
        super().__init__(JobKind.QUERY)
        self.submitter = submitter
        self.asked = asked
        self.low = low
        self.before = before

    def book(self, result: Result) -> None:
        self.submitter.found_on_the_way(self, result)


class BoundaryRead(InFlightJob):
    """The pages that one boundary lacks, on their way into the host pages that the job owns: of each component
    the last `len(owns[component])` pages of `found`. goal: the page where the prefetch's whole hit ends."""

    __slots__ = ("found", "goal", "p", "submitter")

    def __init__(self, submitter: BoundaryReads, p: Prefetch, found: StorageHit, goal: int, pages: PagesOf):
        super().__init__(JobKind.READ, owns=pages)
        self.submitter = submitter
        self.p = p
        self.found = found
        self.goal = goal

    def book(self, result: Result) -> None:
        self.submitter.arrived(self, result)

    def gap(self, done: int) -> tuple[int, int]:
        """The first missing page, where the first `done` have come: (component, page of the key). Pages come one
        component after the other."""
        for component, pages in self.owns.items():
            if done < len(pages):
                return component, self.found.end - len(pages) + done
            done -= len(pages)
        raise Misuse(f"all of ticket {self.ticket} came")


class BoundaryReads:
    """Submits reads and adopts what they bring. no_regret: which reads are worth their time.

    step_pages: see `pages_of_a_step`; of all ranks the same.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        executor: StorageExecutor,
        in_flight: InFlightJobs,
        ends: Ends,
        step_pages: int,
        no_regret: NoRegret,
    ):
        self.no_regret = no_regret
        self.step_pages = step_pages
        self._arrivals = arrivals
        self._supply = arrivals.supply
        self._tree = arrivals.tree
        self._executor = executor
        self._in_flight = in_flight
        self._ends = ends
        self._windows = [TrailingWindow(component, kind.reach) for component, kind in arrivals.others]

    def most(self, key: RadixKey, node: Node) -> int:
        """The most pages of `key` behind `node` that storage may be asked for: as many as the host has room
        for."""
        num_pages, resident = key.num_pages(self._tree.page_size), _resident_end(self._tree, key)
        lock = self._tree.lock(resident, HOST)
        room = self._supply.host_room()
        self._tree.unlock(lock)
        return min(num_pages, resident.end + room) - node.end

    def num_known(self, p: Prefetch) -> int:
        """The number of pages behind the anchor whose backbone is in a tier, so that storage is not asked for
        it."""
        return min(p.asked_pages, _resident_end(self._tree, p.key).end - p.anchor.end)

    def knows(self, p: Prefetch, hit: StorageHit) -> bool:
        """Whether backbone pages that storage was not asked for, as a tier had them, are still there."""
        return not hit.known or _resident_end(self._tree, p.key).end >= hit.start + hit.known

    def coming(self, p: Prefetch, node: Node, end: int) -> list[int]:
        """Host pages per component that reads must fill to get from the boundary at `node` to one at page
        `end`."""
        resident = _resident_end(self._tree, p.key.head(end, self._tree.page_size))
        return [end - page for page in lacking(self._tree, resident, node.end, end)]

    def kept(self, p: Prefetch, node: Node, end: int) -> Node:
        """The node up to which resident backbone pages must be kept until then."""
        return _resident_end(self._tree, p.key.head(end, self._tree.page_size))

    def hold(self, p: Prefetch, node: Node) -> None:
        """Lock the path to `node`, which `kept` gave, until the reads are back."""
        self._keep(p, node)

    def windows(self) -> list[TrailingWindow]:
        """The trailing windows of further components that storage must have where a hit ends."""
        return self._windows

    def submit(self, p: Prefetch, found: StorageHit) -> bool:
        """Submit reads for the pages of `found`; False if none is submitted, for want of host room or because no
        page is missing. Where there may be boundaries on the way, storage is asked for these first."""
        limits = self._limits(p, found)
        if not limits:
            return self._submit_steps(p, found, [])
        self._ask_on_the_way(p, found, limits)
        return True

    def _keep(self, p: Prefetch, node: Node) -> None:
        """Lock `node` in place of the node that was locked beside the anchor before."""
        before, p.beside = p.beside, self._tree.lock(node, HOST)
        if before is not None:
            self._tree.unlock(before)

    # -- boundaries on the way ------------------------------------------------------------

    def _limits(self, p: Prefetch, found: StorageHit) -> list[int]:
        """Up to which pages to look for a boundary on the way: one step apart; [] where the whole is predicted
        to arrive within half of the time that the request may wait."""
        predicted_s = self.no_regret.predicted_s(GatedTransfer.FETCH, len(found.hashes))
        if p.tries or p.limit_s == math.inf or 0 < 2 * predicted_s < p.limit_s:
            return []
        first = found.start + found.known
        step = max(self.step_pages, -(-(found.end - first) // MAX_STEPS))
        return list(range(first + step, found.end - step // 2, step))

    def _ask_on_the_way(self, p: Prefetch, found: StorageHit, limits: Sequence[int]) -> None:
        """Ask storage for the last boundary between each limit and the one before it; reads follow the
        answers."""
        before, asked = found.start + found.known, BoundariesAsked(p, found)
        for limit in limits:
            low = max(found.start, before - max(window.reach for window in self._windows))
            rows, num_pages = self._rows(p, found, low, limit), limit - low
            ticket = self._executor.query(rows, num_pages, self._windows, num_pages)
            p.tickets.add(ticket)
            self._in_flight.add(ticket, BoundaryQuery(self, asked, low, before))
            before = limit

    def found_on_the_way(self, query: BoundaryQuery, result: Result) -> None:
        """Apply the answer to one lookup; after the last one the reads are submitted."""
        asked, p = query.asked, query.asked.p
        p.tickets.discard(result.ticket)
        if (end := query.low + result.num_pages) > query.before:
            asked.ends.append(end)
        if not p.tickets:
            self._go_on(p, asked.found, asked.ends)

    def _rows(self, p: Prefetch, found: StorageHit, first: int, end: int) -> PageRows:
        """Rows of pages [first, end) of the key, and of those before whose hashes are needed."""
        if first == found.start:
            return self._tree.rows(p.key, p.anchor, first, end)
        return self._tree.rows_behind(p.key, found.hashes[first - 1 - found.start], first, end)

    def _go_on(self, p: Prefetch, found: StorageHit, ends: Sequence[int]) -> None:
        if p.stopped:
            self._supply.counters.miss("dropped", len(found.hashes))
        elif self._submit_steps(p, found, ends):
            return
        self._ends.finish(p)

    # -- reading --------------------------------------------------------------------------

    def _submit_steps(self, p: Prefetch, found: StorageHit, ends: Sequence[int]) -> bool:
        steps = list(self._steps(p, found, ends))
        totals = {c: sum(counts[c] for _, counts in steps) for c in range(len(self._tree.components))}
        if not any(totals.values()):
            return False
        pages = self._supply.alloc_all_host(totals)
        if pages is None and ends:
            return self._submit_steps(p, found, [])
        if pages is None:
            self._supply.counters.miss("host_capacity", len(found.hashes))
            return False
        p.end_page, at = found.end, dict.fromkeys(totals, 0)
        for part, counts in steps:
            own = {c: pages[c][at[c] : at[c] + count] for c, count in counts.items()}
            at = {c: at[c] + count for c, count in counts.items()}
            self._submit_read(BoundaryRead(self, p, part, found.end, own))
        return True

    def _steps(
        self, p: Prefetch, found: StorageHit, ends: Sequence[int]
    ) -> Iterator[tuple[StorageHit, dict[int, int]]]:
        """Yield, for each boundary, the part of the hit that leads to it, and how many of that part's last
        pages are read of each component. Locks the resident pages that the first one needs."""
        start = found.start
        for end in (*ends, found.end):
            part = found.part(start, end)
            node = None
            if start == found.start:
                node = _resident_end(self._tree, p.key.head(end, self._tree.page_size))
                self._keep(p, node)
            first = lacking(self._tree, node, start, end)
            yield part, {c: end - page for c, page in enumerate(first)}
            start = end

    def _submit_read(self, read: BoundaryRead) -> None:
        p, found, pages = read.p, read.found, read.owns
        count = len(found.hashes)
        p.unread_pages += count
        wanted = found.part(found.end - max(map(len, pages.values())), found.end)
        trailing = [TrailingPages(own, c) for c, own in pages.items() if c != BACKBONE]
        ticket = self._executor.read(
            wanted.hashes,
            pages[BACKBONE],
            wanted.chain,
            trailing,
            p.key.extra_key,
            p.key.space.tenant,
            wanted.after,
        )
        p.tickets.add(ticket)
        self._in_flight.add(ticket, read)

    def arrived(self, read: BoundaryRead, result: Result) -> None:
        """Apply a read's result: it enters the tree if it is complete and no page before it is missing; else its
        pages are freed."""
        p, found, count = read.p, read.found, len(read.found.hashes)
        is_whole = result.num_pages == read.num_pages
        came = count if is_whole else 0
        p.ended(read.ticket, count, came, result.duration_s)
        if len(read.owns[BACKBONE]) == count and p.is_measured:  # else it cost less than these pages do
            self.no_regret.fetched(count, came, result.duration_s)
        is_next = found.start < p.end_page
        if is_whole and is_next:
            self._arrivals.adopt(p, found, read.owns)
        else:
            self._supply.free_all_host(read.owns)
        if is_next and not is_whole:
            self._note_failed(read, result)
        self._end(p)

    def _note_failed(self, read: BoundaryRead, result: Result) -> None:
        """A read did not come whole, so reads behind it are of no use: cancel them, and note up to which page an
        earlier boundary may still be had."""
        p, found = read.p, read.found
        p.end_page, p.has_failed = found.start, result.error is not None
        for ticket in p.tickets:
            self._executor.cancel(ticket)
        p.tries += 1
        if result.error is not None:
            p.lost(read.goal - found.start, self._supply.counters)
        else:
            component, page = read.gap(result.num_pages)
            is_on_the_way = component != BACKBONE and found.end < read.goal
            p.again_end = read.goal if is_on_the_way else page

    def _end(self, p: Prefetch) -> None:
        """Once no read is in flight: look for another boundary, or finish."""
        if p.tickets:
            return
        p.report_to(self.no_regret)
        num_pages, p.again_end = p.again_end - p.anchor.end, 0
        if num_pages > 0 and p.tries < MAX_TRIES and not p.stopped:
            self._ends.again(p, num_pages)
        else:
            self._ends.finish(p)


def _resident_end(tree: RadixTree, key: RadixKey) -> Node:
    """The deepest node on `key` whose backbone is in some tier."""
    tree.match(key)  # splits it where the key leaves
    return tree.find(key)


def lacking(tree: RadixTree, node: Node | None, floor: int, end: int) -> list[int]:
    """Per component the first page that must be read for a boundary at page `end`; `end` where none must be.

    node: where the resident backbone ends, at page `end` at most; None: it ends at `floor`, where a boundary is
    or will be. Pages of further components lie beside host pages of the backbone only, so backbone pages that
    are on the device alone are read as well.
    """
    path = [] if node is None else list(tree.path(node, floor))
    first = [floor if node is None else node.end]
    for component, kind in list(enumerate(tree.components))[1:]:
        begin = max(floor, end - (kind.reach if kind.per_page else 1))
        first.append(_first_gap(path, component, begin))
    for n in path:
        if n.end > min(first[1:]) and not n.resident(HOST):
            first[BACKBONE] = max(n.start, min(first[1:]))
    return first


def _first_gap(path: Sequence[Node], component: int, at: int) -> int:
    """The first page from page `at` on, along a path given deepest first, that no tier has of a component."""
    for n in reversed(path):
        if n.start <= at < n.end and any(n.resident(tier, component) for tier in Tier):
            at = n.end
    return at


def pages_of_a_step(components: Sequence[Component], page_bytes: Sequence[int], batch_pages: int) -> int:
    """The distance in pages between boundaries on the way: one storage call's pages, or more, so that windows
    and records add at most a `WINDOWS_SHARE`th to the backbone's bytes."""
    others = zip(components[1:], page_bytes[1:], strict=True)
    beside = sum(num_bytes * (kind.reach if kind.per_page else 1) for kind, num_bytes in others)
    return max(batch_pages, -(-WINDOWS_SHARE * beside // page_bytes[BACKBONE]))

"""The reads of a prefetch where a match ends in boundaries only, where each component has what that takes.

    query (the last boundary storage has) -> queries for boundaries on the way -> one read for each -> tree

What one boundary needs and no tier has is one read, adopted whole or not at all; what a tier has is not read
again. A request that is let go before all of it came has what came of the boundaries on its way. They cost
the reading of their windows, so there are few of them, and none where the time surely suffices.
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

MAX_TRIES = 3  # boundaries of one prompt that are read for, when what storage said it had did not arrive
MAX_STEPS = 8  # boundaries that one prefetch reads
WINDOWS_SHARE = 8  # what boundaries on the way cost is at most such a part of the backbone's bytes


class Ends(NamedTuple):
    """finish(p): nothing more will arrive for `p`. again(p, num_pages): what had been found for it was gone,
    and only boundaries among the first `num_pages` behind its anchor may still be had."""

    finish: Callable[[Prefetch], None]
    again: Callable[[Prefetch, int], None]


class BoundariesAsked:
    """The lookups for boundaries on the way of one prefetch. ends: where those that storage has are."""

    __slots__ = ("ends", "found", "p")

    def __init__(self, p: Prefetch, found: StorageHit):
        self.p = p
        self.found = found
        self.ends: list[int] = []


class BoundaryQuery(InFlightJob):
    """One of those lookups: is there a boundary behind page `before`, among the pages from `low` on?"""

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
    """What one boundary lacks on its way into the host pages that it owns: the last pages of `found`, so many
    of each component. goal: the page where all that was found for the prefetch ends."""

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
        """Of pages that come one component after the other, the first `done` came: the component and the page
        of the next."""
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
        """How many of `key`'s pages behind `node` may be asked for: as many as the host has room for."""
        num_pages, resident = key.num_pages(self._tree.page_size), _resident_end(self._tree, key)
        lock = self._tree.lock(resident, HOST)
        room = self._supply.host_room()
        self._tree.unlock(lock)
        return min(num_pages, resident.end + room) - node.end

    def num_known(self, p: Prefetch) -> int:
        """How much of the backbone the tiers have behind the anchor; storage need not be asked for it."""
        return min(p.asked_pages, _resident_end(self._tree, p.key).end - p.anchor.end)

    def knows(self, p: Prefetch, hit: StorageHit) -> bool:
        """Whether what storage was not asked for, as a tier had it, is still there."""
        return not hit.known or _resident_end(self._tree, p.key).end >= hit.start + hit.known

    def coming(self, p: Prefetch, node: Node, end: int) -> list[int]:
        """Pages of each component that are read for a boundary at page `end` where one at `node` is there."""
        resident = _resident_end(self._tree, p.key.head(end, self._tree.page_size))
        return [end - page for page in lacking(self._tree, resident, node.end, end)]

    def kept(self, p: Prefetch, node: Node, end: int) -> Node:
        """Where what is kept for that boundary meanwhile ends: what the tiers have of its backbone."""
        return _resident_end(self._tree, p.key.head(end, self._tree.page_size))

    def hold(self, p: Prefetch, node: Node) -> None:
        """Keep what the tiers have up to `node`, of `kept`."""
        self._keep(p, node)

    def windows(self) -> list[TrailingWindow]:
        """What storage must have of further components where hits end."""
        return self._windows

    def submit(self, p: Prefetch, found: StorageHit) -> bool:
        """Submit reads for what was found; False if there are none: the host has no room, or nothing is
        lacking."""
        limits = self._limits(p, found)
        if not limits:
            return self._submit_steps(p, found, [])
        self._ask_on_the_way(p, found, limits)
        return True

    def _keep(self, p: Prefetch, node: Node) -> None:
        """Lock `node`, and no more what was locked beside the anchor before."""
        before, p.beside = p.beside, self._tree.lock(node, HOST)
        if before is not None:
            self._tree.unlock(before)

    # -- boundaries on the way ------------------------------------------------------------

    def _limits(self, p: Prefetch, found: StorageHit) -> list[int]:
        """Pages of the key that boundaries on the way may end at, at most."""
        predicted_s = self.no_regret.predicted_s(GatedTransfer.FETCH, len(found.hashes))
        if p.tries or p.limit_s == math.inf or 0 < 2 * predicted_s < p.limit_s:
            return []
        first = found.start + found.known
        step = max(self.step_pages, -(-(found.end - first) // MAX_STEPS))
        return list(range(first + step, found.end - step // 2, step))

    def _ask_on_the_way(self, p: Prefetch, found: StorageHit, limits: Sequence[int]) -> None:
        """Ask for the last boundary up to each limit and behind the one before, then read."""
        before, asked = found.start + found.known, BoundariesAsked(p, found)
        for limit in limits:
            low = max(found.start, before - max(window.reach for window in self._windows))
            rows, num_pages = self._rows(p, found, low, limit), limit - low
            ticket = self._executor.query(rows, num_pages, self._windows, num_pages)
            p.tickets.add(ticket)
            self._in_flight.add(ticket, BoundaryQuery(self, asked, low, before))
            before = limit

    def found_on_the_way(self, query: BoundaryQuery, result: Result) -> None:
        """Storage has answered one of them; after the last the reads go on."""
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
        """What is read for each boundary: the last pages of a part, so many of each component. What the tiers
        have of the first is kept for it."""
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
        """A read has ended: what came enters the tree if it is whole and nothing before it is lacking."""
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
        """What `read` was for has not come whole, nothing behind it is of use: what may be had instead."""
        p, found = read.p, read.found
        p.end_page = found.start
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
        """Where nothing is being read any more: look for another boundary, or finish."""
        if p.tickets:
            return
        p.report_to(self.no_regret)
        num_pages, p.again_end = p.again_end - p.anchor.end, 0
        if num_pages > 0 and p.tries < MAX_TRIES and not p.stopped:
            self._ends.again(p, num_pages)
        else:
            self._ends.finish(p)


def _resident_end(tree: RadixTree, key: RadixKey) -> Node:
    """The deepest node on `key` that some tier has the backbone of."""
    tree.match(key)  # splits it where the key leaves
    return tree.find(key)


def lacking(tree: RadixTree, node: Node | None, floor: int, end: int) -> list[int]:
    """Of each component the first page that is read for a boundary at `end`; `end` where none is.

    node: where the tiers' backbone ends, at `end` at most; None: at `floor`, where a boundary is or will be.
    A further component's pages lie on the host beside backbone pages only, so these are read where only the
    device has them.
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
    """The first page from `at` on that a component has in no tier, of a path given deepest first."""
    for n in reversed(path):
        if n.start <= at < n.end and any(n.resident(tier, component) for tier in Tier):
            at = n.end
    return at


def pages_of_a_step(components: Sequence[Component], page_bytes: Sequence[int], batch_pages: int) -> int:
    """How far apart boundaries on the way are: a storage call's pages, or so many that what is read for them
    beside the backbone is a `WINDOWS_SHARE`th of it."""
    others = zip(components[1:], page_bytes[1:], strict=True)
    beside = sum(num_bytes * (kind.reach if kind.per_page else 1) for kind, num_bytes in others)
    return max(batch_pages, -(-WINDOWS_SHARE * beside // page_bytes[BACKBONE]))

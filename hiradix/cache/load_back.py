"""Load back: host to device, all promised pages or none.

The one exception to "nothing is visible before its copy is done": the device pages of a load back enter the tree
at once, because the layer gate orders every reader behind the copy. Until the result is applied the path stays
locked in both tiers. If the copy fails, the pages leave the tree as soon as nobody locks them, and until then no
match reaches them (`usable`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from hiradix.cache.in_flight import InFlightJob, InFlightJobs
from hiradix.cache.pages import (
    BACKBONE,
    NO_PAGES,
    CacheCounters,
    Pages,
    PagesOf,
    PageSupply,
    Share,
    gathered,
    shared_out,
    sizes,
)
from hiradix.explain import Reason
from hiradix.policy.no_regret import GatedTransfer, NoRegret
from hiradix.transfer import Copy, HiCacheController, JobKind, Result, Ticket
from hiradix.tree import DEVICE, HOST, Lock, Match, Node, NodePages, RadixKey, RadixTree

NOT_STARTED: Final = -1


class Filled(NamedTuple):
    """Pages of a further component, from page `start` to the end of `node`, that a failed load was to fill."""

    node: Node
    component: int
    start: int


class LoadBackCopy(InFlightJob):
    """One load back: the backbone's pages [start, node.end) of a path, and `others`, segments of further
    components. reads: the host pages of all of it.

    locks: on the path in host and device tier, until the result is applied.
    slot: of the layer gate; NOT_STARTED until `start_loading` launches it.
    batch_pages: pages of all loads launched with it, which the gate takes as one batch.
    has_failed: it failed after it was launched, so a forward pass may wait for it.
    """

    __slots__ = (
        "batch_pages", "has_ended", "has_failed", "load_back", "locks", "node", "others", "slot", "start",
    )  # fmt: skip

    def __init__(
        self,
        load_back: LoadBack,
        node: Node,
        start: int,
        others: list[NodePages],
        host: PagesOf,
        locks: tuple[Lock, Lock],
    ):
        super().__init__(JobKind.LOAD, reads=host)
        self.load_back = load_back
        self.node = node
        self.start = start
        self.others = others
        self.locks = locks
        self.slot = NOT_STARTED
        self.batch_pages = self.num_pages
        self.has_ended = self.has_failed = False

    def book(self, result: Result) -> None:
        self.load_back.loaded(self, result)


class LoadBack:
    """Brings nodes that are on the host alone back to the device.

    make_room(n, component): evicts until n device pages are free.
    share: see `hiradix.cache.agreement`.

    _queued: copies that wait for `start_loading`. _started: launched copies by gate slot, until all of a slot
    have ended and no failed page of it is in the tree. _failed: (device lock on the last node, first page) of
    each failed copy whose pages are still in the tree. _failed_others: the same of further components.
    """

    def __init__(
        self,
        supply: PageSupply,
        controller: HiCacheController,
        in_flight: InFlightJobs,
        make_room: Callable[[int, int], int],
        share: Share,
        no_regret: NoRegret,
    ):
        self._tree: RadixTree = supply.tree
        self._supply = supply
        self._counters: CacheCounters = supply.counters
        self._controller = controller
        self._in_flight = in_flight
        self._is_plain = len(supply.device_pools) == 1
        self._make_room = make_room
        self._failed: list[tuple[Lock, int]] = []
        self._failed_others: list[Filled] = []
        self._queued: list[LoadBackCopy] = []
        self._started: dict[int, list[LoadBackCopy]] = {}
        self._no_regret = no_regret
        self._max_queued: int = controller.limits.queued_jobs
        self.refusal: Reason | None = None  # why the last load that was asked for was not made
        self._first_failed_slot = share(self._find_failed_slot)

    def clear(self) -> None:
        self._failed.clear()
        self._failed_others.clear()
        self._queued.clear()
        self._started.clear()

    def asked_for_nothing(self) -> None:
        """Another request is looked up, which has asked for no load yet: no refusal is its."""
        self.refusal = None

    def running(self) -> list[Ticket]:
        """Loads that were started and whose results are not applied yet."""
        queued = {copy.ticket for copy in self._queued}
        return [ticket for ticket in self._in_flight.tickets(JobKind.LOAD) if ticket not in queued]

    def load(self, node: Node, quota_pages: int | None = None) -> int | None:
        """Queue the copies that make `node` usable on the device. Returns their number of pages.

        None, with nothing changed: the device cannot hold all of them, they are more than `quota_pages`, or
        computing them is predicted to be faster. The copies start with the next `start_loading`; until their
        result is applied the path stays locked.
        """
        self.refusal = None
        start, num_pages = self._tree.absent_from(node, DEVICE), {BACKBONE: 0}
        if not self._is_plain:
            num_pages = sizes(self._others(node))
        asked = num_pages[BACKBONE] = node.end - start
        total = asked if self._is_plain else sum(num_pages.values())
        if not total:
            return 0
        is_full = len(self._queued) >= self._max_queued
        if is_full or (quota_pages is not None and asked > quota_pages):
            self._counters.load_refused += asked
            self.refusal = Reason.NO_ROOM
            return None
        if not self._no_regret.takes(GatedTransfer.LOAD, total):
            self._counters.load_too_slow += asked
            self.refusal = Reason.PREDICTED_SLOWER
            return None
        locks = (self._tree.lock(node, HOST), self._tree.lock(node, DEVICE))
        pages = self._alloc(num_pages)
        if pages is None:
            self._counters.load_refused += asked
            self.refusal = Reason.NO_ROOM
            self._unlock(locks)
            return None
        # making room may have applied results, which may have split nodes
        self._submit(node, start, pages, locks)
        return total

    def _others(self, node: Node) -> list[NodePages]:
        """Segments of further components that a boundary at `node` lacks on the device."""
        missing = self._tree.missing(node, HOST, DEVICE)
        return [segment for segment in missing if segment.component != BACKBONE]

    def _alloc(self, num_pages: Mapping[int, int]) -> PagesOf | None:
        """Device pages of each component, all or none."""
        supply = self._supply
        for component, count in num_pages.items():
            if count > supply.device_room(component):
                return None
        found: dict[int, Pages] = {}
        for component, count in num_pages.items():
            if count:
                self._make_room(count, component)
            pages = supply.device_pools[component].alloc(count) if count else NO_PAGES
            if pages is None:
                for other, own in found.items():
                    supply.device_pools[other].free(own)
                return None
            found[component] = pages
        return found

    def _submit(self, node: Node, start: int, pages: PagesOf, locks: tuple[Lock, Lock]) -> None:
        """Queue one copy of all of it. The tree takes the device `pages` over at once."""
        host: dict[int, Pages] = {BACKBONE: self._tree.pages(node, HOST, start)}
        segments = [] if self._is_plain else self._others(node)
        others: list[Copy] = []
        self._supply.take_path(node, pages[BACKBONE])
        if segments:
            host |= gathered(segments, (component for component in pages if component != BACKBONE))
            others = [Copy(own, pages[c], c) for c, own in host.items() if c != BACKBONE]
            for segment, own in shared_out(pages, segments):
                self._supply.take_beside(segment, own)
        copy = LoadBackCopy(self, node, start, segments, host, locks)
        self._in_flight.add(self._controller.load(host[BACKBONE], pages[BACKBONE], others), copy)
        self._queued.append(copy)

    def loaded(self, copy: LoadBackCopy, result: Result) -> None:
        """Apply a load's result. Complete: the pages stay. Else they leave the tree again (`drop_failed`)."""
        copy.has_ended, num_pages = True, len(copy.reads[BACKBONE])
        if result.num_pages == copy.num_pages:
            self._no_regret.moved(GatedTransfer.LOAD, copy.batch_pages, result.duration_s)
            self._counters.loaded += num_pages
            self._unlock(copy.locks)
        else:
            self._counters.load_failed += num_pages
            copy.has_failed = copy.slot != NOT_STARTED
            self._fail(copy)

    def _unlock(self, locks: tuple[Lock, Lock]) -> None:
        for lock in reversed(locks):
            self._tree.unlock(lock)

    def _fail(self, copy: LoadBackCopy) -> None:
        """Note the pages of a failed copy. On backbone pages our device lock stays until they leave the tree."""
        self._failed_others += [Filled(s.node, s.component, s.start) for s in copy.others]
        if copy.start < copy.node.end:
            self._failed.append((copy.locks[1], copy.start))
            self._tree.unlock(copy.locks[0])
        else:
            self._unlock(copy.locks)

    def start_loading(self) -> int:
        """Launch the queued loads. Returns the gate slot that the next forward pass waits on, -1 if there is
        none.

        Waiting on it covers every load whose pages a match may reach. While a request may still read pages of a
        failed load, that load's slot is returned: waiting on it raises LoadFailed.
        """
        self.drop_failed()
        slot = self._controller.start_loading()
        if slot >= 0:
            self._start(slot)
        elif not self._started:
            return -1
        failed = self._drop_ended()
        self._controller.layer_done_counter.set_readable(self._started)
        latest = -1
        for other in self._started:
            latest = max(latest, other)
        return failed[0] if failed else latest

    def _start(self, slot: int) -> None:
        """All queued loads become one batch behind gate slot `slot`."""
        batch, self._queued = self._queued, []
        num_pages = 0
        for copy in batch:
            num_pages += 0 if copy.has_ended else copy.num_pages
        for copy in batch:
            copy.slot, copy.batch_pages = slot, num_pages
        self._started[slot] = batch

    def _drop_ended(self) -> list[int]:
        """Forget started slots that no reader can meet any more. Returns the failed ones of the rest, oldest
        first."""
        first = self._first_failed_slot()
        failed, ended = [], []
        for slot, copies in self._started.items():
            has_failed, is_under_way = slot == first, False
            for copy in copies:
                has_failed |= copy.has_failed
                is_under_way |= not copy.has_ended
            if not is_under_way and not (has_failed and self._has_garbage):
                ended.append(slot)
            elif has_failed:
                failed.append(slot)
        for slot in ended:
            del self._started[slot]
        return failed

    def _find_failed_slot(self) -> float:
        """The oldest launched slot with a failed copy, as the worker reports it, before its result is applied;
        inf if there is none."""
        gate = self._controller.layer_done_counter
        for slot in self._started:
            if gate.error(slot) is not None:
                return slot
        return math.inf

    # -- failure ------------------------------------------------------------------------

    @property
    def _has_garbage(self) -> bool:
        return bool(self._failed or self._failed_others)

    def _garbage(self) -> set[Node]:
        """Nodes with pages of a failed load, with those that a split has made of them since."""
        ends = [(lock.node, start) for lock, start in self._failed]
        ends += [(filled.node, filled.start) for filled in self._failed_others]
        return {n for node, start in ends for n in self._tree.path(node, start)}

    def usable(self, match: Match) -> Match:
        """`match`, cut above the first node with pages of a failed load."""
        if not self._failed and not self._failed_others:
            return match
        cut = self._topmost_garbage(match.loadable_node)
        if cut is None:
            return match
        assert cut.parent is not None
        device_node = self._tree.boundaries(cut.parent).device_node
        return Match(device_node, device_node)

    def has_failed(self, node: Node) -> bool:
        """Whether a failed load has filled `node`."""
        return self._has_garbage and node in self._garbage()

    def has_failed_on(self, node: Node) -> bool:
        """Whether a failed load has filled any of the path of `node`."""
        return self._has_garbage and self._topmost_garbage(node) is not None

    def _topmost_garbage(self, node: Node) -> Node | None:
        garbage, found = self._garbage(), None
        for n in self._tree.path(node):
            if n in garbage:
                found = n
        return found

    def blocks(self, key: RadixKey) -> bool:
        """Whether the path of `key` contains pages of a failed load that somebody still locks."""
        if not self._failed and not self._failed_others:
            return False
        self.drop_failed()
        if not self._failed and not self._failed_others:
            return False
        self._tree.match(key)  # splits the node it ends in
        return self._topmost_garbage(self._tree.find(key)) is not None

    def drop_failed(self) -> None:
        """Drop the pages of failed loads from the device, as far as nobody else locks them.

        The others keep our own lock, so that they are never evicted piecemeal without being noticed here.
        """
        if not self._failed and not self._failed_others:
            return
        failed, self._failed = self._failed, []
        for lock, _ in failed:
            self._tree.unlock(lock)  # all of them first: failed loads of one path would keep each other there
        for lock, start in failed:
            self._tree.cut(lock.node, start)
        for nodes, start in [(list(self._tree.path(lock.node, start)), start) for lock, start in failed]:
            for n in nodes:
                freed = self._tree.drop_device(n)
                if freed is None:  # and so are all above it
                    self._failed.append((self._tree.lock(n, DEVICE), start))
                    break
                self._supply.release(freed)
        others, self._failed_others = self._failed_others, []
        for node, component, start in others:
            for n in list(self._tree.path(node, start)):  # none if it has left the tree
                if n.residency(component, DEVICE).lock_ref:
                    self._failed_others.append(Filled(n, component, n.start))
                else:
                    self._supply.release(self._tree.drop_other(n, component, DEVICE))

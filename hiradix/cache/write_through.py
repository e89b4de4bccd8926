"""Copies from device to host: write-through and write-back. Pages that arrive are then offered to storage
(`storage_backup`).

A copy has two phases. When it is submitted, the path is locked and host pages are allocated, which the job owns.
When its result is applied, the tree adopts them, and the locks are given back. The path's nodes may be split in
between: `adopt` addresses pages by the page where the node ends, so a split changes nothing.

A copy that failed, or that found no room, is not queued again. The next use of its path looks at the whole path
and copies every run of nodes that is not on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hiradix.cache.in_flight import InFlightJob, InFlightJobs
from hiradix.cache.pages import (
    BACKBONE,
    NO_PAGES,
    CacheCounters,
    Pages,
    PagesOf,
    PageSupply,
    gathered,
    shared_out,
    sizes,
)
from hiradix.cache.storage_backup import StorageBackup
from hiradix.errors import Misuse
from hiradix.policy.learning import learner_of
from hiradix.policy.write_policy import WritePolicy
from hiradix.transfer import Copy, HiCacheController, JobKind, Result
from hiradix.tree import DEVICE, HOST, Lock, Node, NodePages, RadixTree, ids


class WriteThroughCopy(InFlightJob):
    """One copy to the host: the backbone's pages [start, node.end) of a path, and `others`, segments of further
    components.

    source: the backbone's device pages. owns: the host pages of all of it, the segments' in their order.
    locks: on the path; given back when the result is applied.
    """

    __slots__ = ("locks", "node", "others", "source", "start", "write_through")

    def __init__(
        self,
        write_through: WriteThrough,
        node: Node,
        start: int,
        source: Pages,
        others: list[NodePages],
        host: PagesOf,
        locks: list[Lock],
    ):
        super().__init__(JobKind.WRITE, owns=host)
        self.write_through = write_through
        self.node = node
        self.start = start
        self.source = source
        self.others = others
        self.locks = locks

    def copies(self) -> list[Copy]:
        """The copies of further components, as the controller takes them."""
        source = gathered(self.others, (c for c in self.owns if c != BACKBONE))
        return [Copy(pages, self.owns[c], c) for c, pages in source.items()]

    @property
    def copied(self) -> Node:
        return self.node

    def book(self, result: Result) -> None:
        self.write_through.written(self, result)


class WriteThrough:
    """Copies device pages to the host where the write policy says so.

    _writing: per component a mask over device page ids; True while a copy of the page is in flight, so that no
        page is copied twice. Set and cleared by `_mark` alone.
    _is_plain: the model has full attention alone, so that a path is all a boundary needs.
    """

    def __init__(
        self, supply: PageSupply, controller: HiCacheController, in_flight: InFlightJobs, policy: WritePolicy
    ):
        self.policy = policy
        self._tree: RadixTree = supply.tree
        self._learner = learner_of(supply.tree.order_factory)
        self._supply = supply
        self._counters: CacheCounters = supply.counters
        self._controller = controller
        self._in_flight = in_flight
        self.storage_backup = StorageBackup(supply, controller, in_flight)
        self._is_plain = len(supply.device_pools) == 1
        self._writing = [np.zeros(pool.num_pages + 1, np.bool_) for pool in supply.device_pools]

    def clear(self) -> None:
        """Forget what is being copied (after a reset)."""
        for writing in self._writing:
            writing[:] = False
        self.storage_backup.clear()

    def on_insert(self, node: Node) -> None:
        """Copy to the host whatever is due on the path of `node`, which was just inserted or used again."""
        if self.policy.writes_on_insert:
            for last, start in self._uncopied(node):
                self._submit(last, start)
                if self._learner is not None and not self._is_plain:
                    self._submit_inner(last, start)
            if not self._is_plain and (others := self._others(node, node.end)):
                self._submit(node, node.end, others)  # further components that its boundary needs
        self.storage_backup.store(node)

    def copy_down(self, node: Node) -> bool:
        """Copy down what the host lacks of the path to `node`, whatever the policy says of it, and what a
        boundary there needs. False: the host has not got the room for all of it."""
        for last, start in self._uncopied(node, is_wished=True):
            copy = self._submit(last, start, is_wished=True)
            if copy is None or copy.node.end < last.end:
                return False
        others = [] if self._is_plain else self._others(node, node.end)
        return not others or self._submit(node, node.end, others, is_wished=True) is not None

    def _submit_inner(self, node: Node, start: int) -> None:
        """Copy the further components of the boundaries between page `start` of the path and `node`. Earlier
        inserts ended there, and their backbone is copied only now."""
        at = node
        while at.parent is not None:
            at = self._tree.boundaries(at.parent).device_node
            if at.end <= start:
                return
            others = self._others(at, at.end)
            if others:
                self._submit(at, at.end, others)

    # -- device to host -----------------------------------------------------------------

    def _uncopied(self, node: Node, is_wished: bool = False) -> list[tuple[Node, int]]:
        """The runs of nodes on the path that have neither a host copy nor one in flight, root first: (last node,
        first page) of each. Ends above the first node that the policy does not write yet, unless somebody wished
        for the copies; then parts of the path may be on the host alone."""
        runs: list[tuple[Node, int]] = []
        last: Node | None = None  # of the run that the walk is in
        at = self._tree.current(node)
        while at is not None and (parent := at.parent) is not None:
            device = at.device.pages
            if device is None and not is_wished:
                raise Misuse(f"{at} is above an inserted node but not on the device")
            if at.host.pages is not None or device is None:
                last = None
            elif not is_wished and not self._is_due(at):
                runs, last = [], None  # a child's copy would be unreachable without its parent's
            elif at.host.lock_ref and self._writing[BACKBONE][device[0]]:  # a copy in flight holds a lock
                last = None
            elif last is None:
                last = at
                runs.append((last, at.start))
            else:
                runs[-1] = (last, at.start)
            at = parent
        runs.reverse()
        return runs

    def _is_due(self, node: Node) -> bool:
        """Whether the policy writes `node` by now."""
        is_new = self._learner is not None and node.note is None  # nothing is known before it is used
        return not is_new and self.policy.is_due(node.hit_count)

    def _submit(
        self,
        node: Node,
        start: int,
        others: list[NodePages] | None = None,
        is_new: bool = True,
        is_wished: bool = False,
    ) -> WriteThroughCopy | None:
        """Submit one copy of the path from page `start` to `node`, as far as the host pool can take it. Returns
        the job, or None if nothing could be copied.

        others: segments of further components to copy along; None: those that the boundary at the copy's end
        lacks. is_new: written through, not written back on eviction. Then the pages must be worth their room,
        unless they were wished for (`is_wished`), and the path is locked in both tiers first, so that making
        room evicts no host copy above it (see `write_back`).
        """
        locks = self._locked(node) if is_new or not self._is_plain else []
        wanted, last = self._affordable(node, start, is_new and not is_wished)
        target = node if last is None else last
        if locks and target is not node and not self._is_plain:  # its window is another one
            longer, locks = locks, self._locked(target)
            self._unlock(longer)
        host, others = None, self._others(target, start) if others is None and not self._is_plain else others
        if last is not None or start == node.end:
            host = self._host_pages(target.end - start, others)
        self._counters.write_dropped += wanted - (start if host is None else target.end)
        if host is None:
            self._unlock(locks)
            return None
        return self._write(target, start, others or [], host, locks)

    def _affordable(self, node: Node, start: int, is_new: bool) -> tuple[int, Node | None]:
        """The part of the path from page `start` to `node` to copy: (the page where the part worth its room
        ends, the last node that the host has room for, or None). With storage attached every page is worth
        it, as pages reach storage only by way of the host."""
        learns = is_new and self._learner is not None and not self._controller.storage_attached
        refused = self._refused(node, node.end - start) if learns else 0
        if refused <= 0 and (learns or node.end - start <= self._supply.host_room()):
            return node.end, node
        nodes = self._admitted(node, start, node.end - refused)
        fitting = self._fitting(nodes)
        return nodes[-1].end if nodes else start, fitting[-1] if fitting else None

    def _fitting(self, nodes: list[Node]) -> list[Node]:
        """The first nodes of a root-first run that the host has room for. A node that could never fit, as its
        path is longer than the host pool, is cut."""
        host, room = self._supply.host, self._supply.host_room()
        for i, n in enumerate(nodes):
            if n.num_pages > room:
                if room == 0 or host is None or n.end <= host.num_pages:
                    return nodes[:i]
                self._tree.cut(n, n.start + room)
                assert n.parent is not None
                return [*nodes[:i], n.parent]
            room -= n.num_pages
        return nodes

    def _refused(self, node: Node, num_pages: int) -> int:
        """The number of last pages of the path, of `num_pages`, that are worth no more than the host pages
        that would be evicted for them. For the rest these are evicted at once."""
        assert self._supply.host is not None
        short = num_pages - self._supply.host.available
        if short <= 0:
            return 0
        refused = max(short - self._evict_for(node, short), 0)
        self._counters.write_refused += refused
        return refused

    def _admitted(self, node: Node, start: int, end: int) -> list[Node]:
        """The path of `node` from page `start` up to `end`, cut there if need be, root first."""
        if end < node.end:
            self._tree.cut(node, end)
        nodes = [n for n in self._tree.path(node, start) if n.end <= end]
        nodes.reverse()
        return nodes

    def _evict_for(self, node: Node, num_pages: int) -> int:
        """Evict host pages that are worth less than `node`, about `num_pages` at most. Returns how many."""
        assert self._learner is not None and self._supply.host is not None
        before = self._supply.host.available
        self._learner.make_way(HOST, node)
        self._supply.evict(HOST, num_pages)
        self._learner.make_way(HOST, None)
        return self._supply.host.available - before

    def _others(self, node: Node, start: int) -> list[NodePages]:
        """Segments of further components that a boundary at `node` lacks on the host. Only beside backbone pages
        that are there, in flight, or copied along: those from page `start` on."""
        if self._is_plain:
            return []
        found = []
        for segment in self._tree.missing(node, DEVICE, HOST):
            n, component = segment.node, segment.component
            if component == BACKBONE or self._writing[component][segment.pages[0]]:
                continue
            if n.device.pages is None:
                raise Misuse(f"{n} has component {component} on the device, no backbone")
            if n.start >= start or n.host.pages is not None or self._writing[BACKBONE][n.device.pages[0]]:
                found.append(segment)
        return found

    def _host_pages(self, num_pages: int, others: list[NodePages] | None) -> PagesOf | None:
        """Host pages for `num_pages` of the backbone and for `others`; None if not all can be had."""
        if not others:
            pages = self._supply.alloc_host(num_pages) if num_pages else NO_PAGES
            return None if pages is None else {BACKBONE: pages}
        counts = sizes(others)
        counts[BACKBONE] = num_pages
        return self._supply.alloc_all_host(counts)

    def _write(
        self, node: Node, start: int, others: list[NodePages], host: PagesOf, locks: list[Lock]
    ) -> WriteThroughCopy:
        """Submit one copy to the pages `host`, which the job owns from here on, as it does `locks`."""
        source = self._tree.pages(node, DEVICE, start=start) if start < node.end else NO_PAGES
        copy = WriteThroughCopy(self, node, start, source, others, host, locks)
        self._mark(copy, True)
        further = copy.copies() if others else ()
        self._in_flight.add(self._controller.defer_write(source, host[BACKBONE], further), copy)
        return copy

    def _mark(self, copy: WriteThroughCopy, is_written: bool) -> None:
        """Note that the copy of these device pages is in flight, or has ended."""
        ids.mark(self._writing[BACKBONE], copy.source, is_written)
        for segment in copy.others:
            ids.mark(self._writing[segment.component], segment.pages, is_written)

    def written(self, copy: WriteThroughCopy, result: Result) -> None:
        """Apply a copy's result. Complete: the tree adopts its host pages, and storage is offered them. Else
        they are freed."""
        self._mark(copy, False)
        ok = result.num_pages == copy.num_pages
        if ok:
            self._counters.written += len(copy.source)
            self._adopt(copy)
        else:
            self._counters.write_failed += len(copy.source)
            self._supply.free_all_host(copy.owns)
        self._unlock(copy.locks)
        if ok:
            self.storage_backup.store(copy.node)
            if self.policy.writes_on_evict:
                self.storage_backup.store_below(copy.node)

    def _adopt(self, copy: WriteThroughCopy) -> None:
        """Give the tree the host pages of a copy that is done."""
        refused = self._tree.adopt(copy.node, BACKBONE, HOST, copy.owns[BACKBONE])
        if len(refused):
            self._supply.free_host(refused)
        if copy.others:
            for segment, pages in shared_out(copy.owns, copy.others):
                refused = self._tree.adopt(segment.node, segment.component, HOST, pages)
                self._supply.free_host(refused, segment.component)

    def _locked(self, node: Node) -> list[Lock]:
        """Locks that keep the path's pages until they are copied: one in the host tier, which also keeps device
        pages without a host copy. With further components a second one on the device, as a copy may take more of
        them than a boundary at `node` needs."""
        if self._is_plain:
            return [self._tree.lock(node, HOST)]
        return [self._tree.lock(node, HOST), self._tree.lock(node, DEVICE)]

    def _unlock(self, locks: Sequence[Lock]) -> None:
        for lock in reversed(locks):
            self._tree.unlock(lock)

    def write_back(
        self, num_pages: int, component: int = BACKBONE
    ) -> tuple[list[Node], list[WriteThroughCopy]]:
        """Start copies of what a device eviction of `num_pages` would drop: (the victims, the copies).

        With one component these copies hold no lock: giving a lock back counts as a use, which would make the
        victims' ancestors the hottest of all. So the caller waits for their end before anything else touches the
        tree, or else locks them by `keep`. With several components making room for one copy may evict the source
        of another, so each holds its locks from the start.
        """
        victims = self._tree.coldest(component, DEVICE, num_pages)
        copies = []
        for node in victims:
            if self._tree.current(node) is None:
                continue
            start = node.end if node.resident(HOST) else node.start
            others = self._lost_with(node) if component else None
            if component and not others:
                continue
            if others is None and start == node.end and not self._others(node, start):
                continue
            copy = self._submit(node, start, others, is_new=False)
            if copy is not None:
                copies.append(copy)
        return victims, copies

    def _lost_with(self, node: Node) -> list[NodePages]:
        """Segments of further components at `node` that are on the device alone and that a boundary at or below
        it needs. Of a state that is every record; of a window only pages near enough to a leaf or a branch.
        """
        found = []
        for component in range(1, len(self._writing)):
            pages = node.residency(component, DEVICE).pages
            if pages is None or node.resident(HOST, component) or self._writing[component][pages[0]]:
                continue
            kind = self._tree.components[component]
            below, at = 0, node
            while kind.per_page and len(at.children) == 1 and below < kind.reach:
                (at,) = at.children.values()
                below += at.num_pages
            if below < kind.reach:
                found.append(NodePages(node, component, node.start, node.end, pages))
        return found

    def keep(self, copies: Iterable[WriteThroughCopy]) -> None:
        """Lock the paths of these copies until their results are applied."""
        for copy in copies:
            copy.locks.extend(self._locked(copy.node))

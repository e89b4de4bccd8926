"""Backup: host to storage.

The backbone is put in runs of nodes, from the root on. The further components that a boundary needs (a trailing
window, a state record) follow in one job, once all of them are on the host: without them no prefix can end
there, however much of the backbone storage has.

A backup that failed is not queued again. The next use of its path looks at the whole path and puts every run of
nodes that storage lacks (`Node.stored`, `Node.boundary_stored`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hiradix.cache.in_flight import InFlightJob, InFlightJobs
from hiradix.cache.pages import BACKBONE, NO_PAGES, CacheCounters, Pages, PagesOf, PageSupply
from hiradix.errors import Misuse
from hiradix.transfer import JobKind, Result, StorageExecutor, TrailingPages
from hiradix.tree import HOST, UNBOUNDED, Lock, Node, RadixTree
from hiradix.tree.tree import extended

OFFER_AGAIN_USES: Final = 64  # after so many uses a node is put again, as storage may have evicted it


class PathBackup(InFlightJob):
    """Backbone pages on their way to storage: those from page `start` to the end of `node`.

    first_hashed: the page that the first hash of the result belongs to. lock: on the path in the host tier,
    until the result is applied. storage_epoch: the tree's when the job was submitted; if storage was cleared or
    replaced since, the result says nothing of it.
    """

    __slots__ = ("backup", "first_hashed", "lock", "node", "start", "storage_epoch")

    def __init__(
        self,
        backup: StorageBackup,
        node: Node,
        start: int,
        first_hashed: int,
        pages: Pages,
        lock: Lock,
        storage_epoch: int,
    ):
        super().__init__(JobKind.STORE, reads={BACKBONE: pages})
        self.backup = backup
        self.node = node
        self.start = start
        self.first_hashed = first_hashed
        self.lock = lock
        self.storage_epoch = storage_epoch

    @property
    def copied(self) -> Node:
        return self.node

    def book(self, result: Result) -> None:
        self.backup.stored_path(self, result)


class BoundaryBackup(InFlightJob):
    """The further components of the boundary at `node` on their way to storage. Fields as of `PathBackup`."""

    __slots__ = ("backup", "first_hashed", "lock", "node", "storage_epoch")

    def __init__(
        self,
        backup: StorageBackup,
        node: Node,
        first_hashed: int,
        pages: PagesOf,
        lock: Lock,
        storage_epoch: int,
    ):
        super().__init__(JobKind.STORE, reads=pages)
        self.backup = backup
        self.node = node
        self.first_hashed = first_hashed
        self.lock = lock
        self.storage_epoch = storage_epoch

    @property
    def copied(self) -> Node:
        return self.node

    def book(self, result: Result) -> None:
        self.backup.stored_boundary(self, result)


class StorageBackup:
    """Puts host pages into storage, where one is attached. _ending: nodes whose boundary is in flight."""

    def __init__(self, supply: PageSupply, executor: StorageExecutor, in_flight: InFlightJobs):
        self._tree: RadixTree = supply.tree
        self._counters: CacheCounters = supply.counters
        self._executor = executor
        self._in_flight = in_flight
        self._others = list(enumerate(supply.tree.components))[1:]
        self._ending: set[Node] = set()

    def clear(self) -> None:
        """Forget the boundaries in flight (after a reset)."""
        self._ending.clear()

    def offer_again(self, node: Node) -> None:
        """Mark nodes on the path to `node` as not stored, each once in OFFER_AGAIN_USES uses; the next `store`
        puts them again. Call it after the uses were counted."""
        if self._executor.storage_attached:
            at = self._tree.current(node)
            while at is not None and at.parent is not None:
                if at.hit_count % OFFER_AGAIN_USES == 0:
                    at.stored = at.boundary_stored = False
                at = at.parent

    def store(self, node: Node) -> None:
        """Put every part of the path to `node` that storage lacks, root first.

        Nothing below a node that is neither in storage nor on the host: no lookup could reach it.
        """
        if not self._executor.storage_attached:
            return
        path: list[Node] = []
        at, is_lacking = self._tree.current(node), bool(self._others)
        while at is not None and at.parent is not None:
            path.append(at)
            if not at.stored:
                is_lacking = True
                if at.host.pages is None:
                    path.clear()
            at = at.parent
        if not path or not is_lacking:
            return
        path.reverse()
        boundaries = self._lacking_boundaries(path) if self._others else []
        last: Node | None = None  # of the run of nodes that storage lacks
        start = 0
        for n in path:
            if not n.stored:
                start, last = n.start if last is None else start, n
            elif last is not None:
                self._submit(last, start)
                last = None
        if last is not None:
            self._submit(last, start)
        for n, known in boundaries:
            self._submit_boundary(n, known)

    def store_below(self, node: Node) -> None:
        """Put descendants that were copied to the host before `node` was, as write-back copies leaves first:
        only now can a lookup reach them."""
        if not self._executor.storage_attached:
            return
        at = self._tree.current(node)
        below = [] if at is None else list(at.children.values())
        while below:
            child = below.pop()
            if child.host.pages is not None and not child.stored:
                self.store(child)
                below.extend(child.children.values())

    def _submit(self, node: Node, start: int) -> None:
        """Submit the backbone's host pages from page `start` to the end of `node`."""
        lock = self._tree.lock(node, HOST)
        host_pages = self._tree.pages(node, HOST, start=start)
        rows = self._tree.page_rows(node, start)
        self._mark_stored(node, start, True)  # so that no second job is submitted; undone if the put fails
        epoch = self._tree.storage_epoch
        record = PathBackup(self, node, start, rows.start, host_pages, lock, epoch)
        self._in_flight.add(self._executor.write_storage(rows, host_pages), record)

    def stored_path(self, record: PathBackup, result: Result) -> None:
        """Apply a result: storage has the first `result.num_pages` of the pages."""
        node, start, num_pages = record.node, record.start, record.num_pages
        if result.hashes:
            self._tree.set_hashes(node, record.first_hashed, result.hashes)
        self._counters.backed_up += result.num_pages
        is_current = record.storage_epoch == self._tree.storage_epoch
        if self._tree.watch is not None and result.num_pages and is_current:
            self._tree.watch.backed_up(node, start, start + result.num_pages)
        if result.num_pages < num_pages:
            self._counters.backup_failed += num_pages - result.num_pages
            self._mark_stored(node, start, False)
        self._tree.unlock(record.lock)

    def _mark_stored(self, node: Node, start: int, stored: bool) -> None:
        for n in self._tree.path(node, start):
            n.stored = stored

    # -- further components ---------------------------------------------------------------

    def _lacking_boundaries(self, path: Sequence[Node]) -> list[tuple[Node, int]]:
        """Nodes of a root-first path whose boundaries are on the host and not in storage, each with the page
        where the last boundary above it ends that storage has (0: none). O(path)."""
        found, known, runs = [], 0, [UNBOUNDED] * len(self._others)
        for n in path:
            for i, (component, _) in enumerate(self._others):
                runs[i] = extended(runs[i], n, n.resident(HOST, component))
            if n.boundary_stored:
                known = n.end
            elif n not in self._ending and all(r >= kind.reach for r, (_, kind) in zip(runs, self._others)):
                found.append((n, known))
        return found

    def _submit_boundary(self, node: Node, known: int) -> None:
        """Submit the further components of the boundary at `node`, without pages before `known`, which storage
        has."""
        lock = self._tree.lock(node, HOST)
        start = node.end
        pages: dict[int, Pages] = {}
        for component, kind in self._others:
            first = max(0, node.end - kind.reach)
            if kind.per_page:
                first = max(first, known)
                pages[component] = self._tree.pages(node, HOST, first, component)
            else:
                pages[component] = _record(node, component)
            start = min(start, first)
        rows = self._tree.page_rows(node, start)
        self._ending.add(node)
        trailing = [TrailingPages(own, c) for c, own in pages.items()]
        epoch = self._tree.storage_epoch
        record = BoundaryBackup(self, node, rows.start, pages, lock, epoch)
        self._in_flight.add(self._executor.write_storage(rows, NO_PAGES, trailing), record)

    def stored_boundary(self, record: BoundaryBackup, result: Result) -> None:
        """Apply a result: storage has the boundary if it took all pages of it."""
        node = record.node
        if result.hashes:
            self._tree.set_hashes(node, record.first_hashed, result.hashes)
        self._ending.discard(node)
        if record.storage_epoch == self._tree.storage_epoch:
            node.boundary_stored = result.num_pages == record.num_pages
        self._tree.unlock(record.lock)


def _record(node: Node, component: int) -> Pages:
    pages = node.residency(component, HOST).pages
    if pages is None:
        raise Misuse(f"component {component} of {node} is not on the host")
    return pages

"""Host to storage: what it lacks of a path, and of the boundaries on it.

The backbone goes in runs of nodes, from the root on. What further components a boundary needs, its trailing
window or its record, follows it whole, once all of it is on the host: without that, storage has no boundary
there, whatever it has of the backbone.

What failed, or was forgotten by storage, is tried again with the next use of its path: each use looks at the
whole path and takes every run of nodes that storage lacks.
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

OFFER_AGAIN_USES: Final = 64  # a node used that often is offered to storage again, which may have lost it


class PathBackup(InFlightJob):
    """The backbone's host pages of the path from page `start` to the end of `node`, on their way to storage.

    first_hashed: the page whose hash is the first of those that come back. lock: on the path, meanwhile.
    storage_epoch: the tree's when it was put; what storage has forgotten since is not there any more.
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

    def book(self, result: Result) -> None:
        self.backup.stored_path(self, result)


class BoundaryBackup(InFlightJob):
    """What the boundary at `node` needs of further components, on its way to storage. As `PathBackup`."""

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

    def book(self, result: Result) -> None:
        self.backup.stored_boundary(self, result)


class StorageBackup:
    """Brings host pages to storage, where one is attached."""

    def __init__(self, supply: PageSupply, executor: StorageExecutor, in_flight: InFlightJobs):
        self._tree: RadixTree = supply.tree
        self._counters: CacheCounters = supply.counters
        self._executor = executor
        self._in_flight = in_flight
        self._others = list(enumerate(supply.tree.components))[1:]
        self._ending: set[Node] = set()  # whose boundaries are being stored

    def clear(self) -> None:
        """Forget what is being stored (after a reset)."""
        self._ending.clear()

    def offer_again(self, node: Node) -> None:
        """A request runs on the path to `node`, counted already: now and then forget that storage has it."""
        if self._executor.storage_attached:
            at = self._tree.current(node)
            while at is not None and at.parent is not None:
                if at.hit_count % OFFER_AGAIN_USES == 0:
                    at.stored = at.boundary_stored = False
                at = at.parent

    def store(self, node: Node) -> None:
        """Store what is lacking of the path to `node`, root first.

        Not what is below a node that is neither there nor on the host: nobody could reach it.
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
        """Store what went down before `node`, as evicted leaves do: it can be reached now."""
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
        """Store the backbone's host pages of the path from page `start` to the end of `node`."""
        lock = self._tree.lock(node, HOST)
        host_pages = self._tree.pages(node, HOST, start=start)
        rows = self._tree.page_rows(node, start)
        self._mark_stored(node, start, True)  # optimistic; taken back if the backend says no
        epoch = self._tree.storage_epoch
        record = PathBackup(self, node, start, rows.start, host_pages, lock, epoch)
        self._in_flight.add(self._executor.write_storage(rows, host_pages), record)

    def stored_path(self, record: PathBackup, result: Result) -> None:
        """Storage has the first `result.num_pages` of what was put."""
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
        """Nodes of a root-first path whose boundaries storage lacks and the host has; and for each, where the
        last one above it ends that storage is known to have. O(path)."""
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
        """Store what a boundary at `node` needs of further components, but for pages before `known`."""
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
        """Storage has the boundary if it took all that this needs."""
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

"""Copies between the host tier and device pages that are an engine's own, such as vLLM's blocks.

Blocks are never allocated, evicted or freed here: the engine owns them and frees them when it likes. A save is
ordered while its blocks hold the data, and is in flight until every worker has copied them. If the engine gives
one of these blocks to another request before that, the step that writes to it carries a fence: its workers wait
for that one copy first. So no request is held back from ending, and no block is read after it was overwritten.
Components take turns with a block's bytes, so a fence names the block alone.

A recurrent state is not in a block table: the caller of `save` says which block holds the state at the key's
end.

Host pages that a load reads are locked until every worker has loaded them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from hiradix.cache.host_index import HostIndex
from hiradix.cache.in_flight import InFlightJob
from hiradix.cache.pages import BACKBONE, NO_PAGES, PagesOf
from hiradix.cache.storage_backup import StorageBackup
from hiradix.errors import Misuse
from hiradix.policy.no_regret import GatedTransfer, NoRegret
from hiradix.transfer import Copy, JobKind, Result, Ticket, TrailingPages
from hiradix.transfer.jobs import Copies, StorePayload
from hiradix.transfer.step_executor import StepExecutor
from hiradix.tree import Lock, Node, Pages, RadixKey, Tier

NULL_BLOCK: Final = 0  # the id for "no block here": a sliding window has gone past it
BlockTables = Sequence[Sequence[int]]  # of one request: block ids of each component, page by page
StateBlocks = Mapping[int, int]  # by component: the block that holds the state where a key ends
NO_STATES: Final[StateBlocks] = {}


class BlockOwner(Protocol):
    """The request whose blocks a copy reads or fills.

    num_saved: leading pages of its tables that are saved, being saved, or need not be. loads: tickets of its
    loads in flight.
    """

    num_saved: int
    loads: set[Ticket]


class BlockSave(InFlightJob):
    """One save in flight: the pages of `key` from page `start` on that the tree took.

    lock: on their path. locks: `lock` and those of window pages that it does not keep. store: the ticket of the
    backup that follows the save and then gives the locks back; None: the save gives them back.
    """

    __slots__ = ("blocks", "device", "key", "lock", "locks", "owner", "start", "store")

    def __init__(
        self,
        device: ForeignDevice,
        owner: BlockOwner,
        key: RadixKey,
        start: int,
        locks: list[Lock],
        pages: PagesOf,
    ):
        super().__init__(JobKind.WRITE, reads=pages)
        self.device = device
        self.owner = owner
        self.key = key
        self.start = start
        self.lock = locks[0]
        self.locks = locks
        self.blocks: list[int] = []
        self.store: Ticket | None = None

    @property
    def copied(self) -> Node:
        return self.lock.node

    def book(self, result: Result) -> None:
        self.device.saved(self, result)


class PageBackup(InFlightJob):
    """The backup of saved pages in flight. Fields as of `PathBackup` and `BlockSave`."""

    __slots__ = ("device", "first_hashed", "lock", "locks", "start", "storage_epoch")

    def __init__(
        self,
        device: ForeignDevice,
        start: int,
        first_hashed: int,
        locks: list[Lock],
        pages: PagesOf,
        storage_epoch: int,
    ):
        super().__init__(JobKind.STORE, reads=pages)
        self.device = device
        self.start = start
        self.storage_epoch = storage_epoch
        self.first_hashed = first_hashed
        self.lock = locks[0]
        self.locks = locks

    @property
    def copied(self) -> Node:
        return self.lock.node

    def book(self, result: Result) -> None:
        self.device.stored(self, result)


class BlockLoad(InFlightJob):
    """One load in flight. lock: None where the promised pages are gone; every worker then reports a failure.
    batch_pages: pages of all loads of its step, which the gate takes as one batch."""

    __slots__ = ("batch_pages", "device", "lock", "num_backbone", "owner")

    def __init__(
        self, device: ForeignDevice, owner: BlockOwner, lock: Lock | None, num_backbone: int, pages: PagesOf
    ):
        super().__init__(JobKind.LOAD, reads=pages)
        self.device = device
        self.owner = owner
        self.lock = lock
        self.num_backbone = num_backbone
        self.batch_pages = 0

    def book(self, result: Result) -> None:
        self.device.loaded(self, result)


class ForeignDevice:
    """Orders saves and loads between the host tier and an engine's blocks, and applies their results.

    on_saved(owner, start, pages): called when host pages hold the owner's pages from page `start` on.
    loads_async: loads run beside other requests' steps.
    _reading: the save in flight that reads a block, by block id; fences come from it.
    """

    def __init__(
        self,
        index: HostIndex,
        executor: StepExecutor,
        no_regret: NoRegret,
        loads_async: bool,
        on_saved: Callable[[BlockOwner, int, Pages], None],
    ):
        self._index = index
        self._executor = executor
        self._no_regret = no_regret
        self._loads_async = loads_async
        self._on_saved = on_saved
        self._reading: dict[int, BlockSave] = {}
        self._new_loads: list[BlockLoad] = []
        self._backup = StorageBackup(index.supply, executor, index.in_flight)
        kinds = list(enumerate(index.tree.components))
        self._states = [component for component, kind in kinds if not kind.per_page]

    @property
    def backup(self) -> StorageBackup:
        """The backup of host pages to storage that runs beside the saves."""
        return self._backup

    @property
    def is_reading(self) -> bool:
        """Whether some worker may still read a block."""
        return bool(self._reading)

    # -- device to host -----------------------------------------------------------------

    def save(
        self,
        owner: BlockOwner,
        key: RadixKey,
        tables: BlockTables,
        before_forward: bool = False,
        states: StateBlocks = NO_STATES,
    ) -> None:
        """Order copies of the pages of `key`, which are in these blocks, that the host lacks, and their backup.

        Saves leading pages, as many as have blocks without a gap and as there are host pages for. states: the
        blocks with the recurrent states at the end of `key`; saved if all pages and all states can be.
        """
        index, num_pages = self._index, key.num_pages(self._index.page_size)
        if index.removals and index.removals.cover(key):
            return
        node = index.resident_end(key)
        owner.num_saved = num_pages
        start, end = node.end, _unbroken(tables[BACKBONE], node.end, num_pages)
        lacking = self._lacking_states(node, num_pages, states) if end == num_pages else NO_STATES
        if end <= start and not lacking:
            self._use_again(node)
            return
        path = index.tree.lock(node, Tier.HOST)
        pages = index.alloc(end - start)
        index.counters.write_dropped += end - start - len(pages)
        end = start + len(pages)
        records = self._records_for(lacking) if end == num_pages else {}
        if end == start and not records:
            index.unlock(path)
            return
        parts, sources = [pages], [_as_pages(tables[BACKBONE][start:end])]
        for component in range(1, len(tables)):
            if component in self._states:
                parts.append(records.get(component, NO_PAGES))
                sources.append(_as_pages([lacking[component]] if component in records else []))
                continue
            begin = self._lacking(node, component, start, end)
            blocks = _trailing_blocks(tables[component], begin, end)
            own = index.alloc(len(blocks), component)
            parts.append(own)
            sources.append(blocks[len(blocks) - len(own) :])
        key = key.head(end, index.page_size)
        lock, taken = index.insert(key, parts)
        locks = index.lock_windows(lock, end - max(map(len, parts)))
        index.unlock(path)
        if any(len(taken[component]) != len(own) for component, own in enumerate(parts)):
            raise Misuse(f"pages {parts} went to {taken}")
        copies = tuple(
            Copy(source, taken[component], component)
            for component, source in enumerate(sources)
            if len(source)
        )
        self._order_save(BlockSave(self, owner, key, start, locks, taken), copies, before_forward)

    def _lacking_states(self, node: Node, num_pages: int, states: StateBlocks) -> StateBlocks:
        """The states that a boundary at page `num_pages`, at `node` or below it, lacks; none if one of them is
        in no block."""
        is_here = node.end == num_pages
        lacking = [c for c in self._states if not (is_here and node.resident(Tier.HOST, c))]
        if any(states.get(component, NULL_BLOCK) == NULL_BLOCK for component in lacking):
            return NO_STATES
        return {component: states[component] for component in lacking}

    def _records_for(self, lacking: StateBlocks) -> dict[int, Pages]:
        """A host record for each of these; none at all where one cannot be had."""
        records = {component: self._index.alloc(1, component) for component in lacking}
        if all(len(record) for record in records.values()):
            return records
        self._index.supply.free_all_host(records)
        return {}

    def _use_again(self, node: Node) -> None:
        """Count a use of pages that need no save. Those that storage lacks, as a put failed or storage was
        attached later, are put again once no copy of them is in flight."""
        self._index.touch(node)
        if self._executor.storage_attached and self._index.is_ready(node):
            self._backup.store(node)

    def _lacking(self, node: Node, component: int, start: int, end: int) -> int:
        """The page from which on the host lacks window pages that a boundary at page `end` needs."""
        floor = max(0, end - self._index.tree.components[component].reach)
        for at in self._index.tree.path(node, min(floor, start)):
            if start <= floor or at.resident(Tier.HOST, component):
                break
            start = at.start
        return start

    def _order_save(self, job: BlockSave, copies: Copies, before_forward: bool) -> None:
        store = self._store_of(job) if self._executor.storage_attached else None
        ticket, job.store = self._executor.save(copies, store, before_forward)
        self._index.in_flight.add(ticket, job)
        if store is not None and job.store is not None:
            epoch = self._index.tree.storage_epoch
            follows = PageBackup(self, job.start, store.rows.start, job.locks, job.reads, epoch)
            self._index.in_flight.add(job.store, follows)
            self._mark_stored(follows, True)  # so that it is not put twice; undone if the put fails
        job.blocks = [block for copy in copies for block in copy.source.tolist()]
        self._reading.update(dict.fromkeys(job.blocks, job))

    def _store_of(self, job: BlockSave) -> StorePayload:
        """The backup of a save's pages, with the token rows that their hashes are made of."""
        node, longest = job.lock.node, max(len(pages) for pages in job.reads.values())
        trailing = tuple(
            TrailingPages(pages, c) for c, pages in job.reads.items() if c == BACKBONE or len(pages)
        )
        return StorePayload(self._index.tree.page_rows(node, node.end - longest), trailing)

    def fences(self, written: Iterable[int]) -> tuple[Ticket, ...]:
        """Tickets of the saves in flight that read any of these blocks."""
        if not self._reading:
            return ()
        return tuple(sorted({self._reading[at].ticket for at in written if at in self._reading}))

    def saved(self, job: BlockSave, result: Result) -> None:
        """Apply a save's result: no worker reads its blocks any more; the pages are ready or lost."""
        index, pages = self._index, job.reads[BACKBONE]
        for block in job.blocks:
            if self._reading.get(block) is job:
                del self._reading[block]
        if result.error is None:
            index.counters.written += len(pages)
            index.arrived(job.reads)
            self._on_saved(job.owner, job.start, pages)
        else:
            index.counters.write_failed += len(pages)
            job.owner.num_saved = 0
            longest = max(map(len, job.reads.values()))  # a window may begin before `start`
            index.lose(job.key, job.lock.node.end - longest, job.reads)
        if job.store is None:
            self._unlock(job.locks)

    def stored(self, job: PageBackup, result: Result) -> None:
        """Apply a backup's result: storage has the first `result.num_pages`, backbone pages before others."""
        index, node = self._index, job.lock.node
        count = len(job.reads[BACKBONE])
        came = min(result.num_pages, count)
        index.counters.backed_up += came
        index.counters.backup_failed += count - came
        if result.hashes:
            index.tree.set_hashes(node, job.first_hashed, result.hashes)
        if came < count:
            self._mark_stored(job, False)
        elif result.num_pages == job.num_pages and job.storage_epoch == index.tree.storage_epoch:
            node.boundary_stored = len(index.tree.components) > 1
        self._unlock(job.locks)

    def _unlock(self, locks: Iterable[Lock]) -> None:
        for lock in locks:
            self._index.unlock(lock)

    def _mark_stored(self, job: PageBackup, stored: bool) -> None:
        for node in self._index.tree.path(job.lock.node, job.start):
            node.stored = stored

    # -- host to device -----------------------------------------------------------------

    def takes(self, num_pages: int) -> bool:
        """Whether loading `num_pages` of the backbone is predicted to take no longer than computing them."""
        if self._no_regret.takes(GatedTransfer.LOAD, num_pages):
            return True
        self._index.counters.load_too_slow += num_pages
        return False

    def load(
        self, owner: BlockOwner, request_id: str, key: RadixKey | None, tables: BlockTables, start: int
    ) -> bool:
        """Order a load of the pages of `key` from page `start` on into these blocks.

        False: the promised pages were evicted in the meantime, as nothing locks them before the engine accepts
        the promise, or are being forgotten, or `key` is None. Then a load that fails is ordered, and the engine
        computes the tokens again.
        """
        is_there = key is not None and not self._index.removals.cover(key)
        lock = self._index.lock(key) if is_there and key is not None else None
        copies = None if lock is None else self._copies(lock, tables, start)
        if copies is None and lock is not None:
            self._index.unlock(lock)
            lock = None
        error = None if copies is not None else "its pages have left the host"
        if copies is None:
            copies = tuple(Copy(NO_PAGES, _filled(table[start:]), pair) for pair, table in enumerate(tables))
        count = 0 if lock is None else lock.node.end - start
        job = BlockLoad(
            self, owner, lock, count, {copy.pair: copy.source for copy in copies if error is None}
        )
        ticket = self._executor.load(request_id, copies, not self._loads_async, error)
        self._index.in_flight.add(ticket, job)
        owner.loads.add(ticket)
        self._new_loads.append(job)
        return error is None

    def _copies(self, lock: Lock, tables: BlockTables, start: int) -> Copies | None:
        """The copies into the blocks from page `start` on; None if a page is not ready or a state has no
        block."""
        copies = []
        for component, table in enumerate(tables):
            first, pages = self._index.loadable(lock, component, start)
            blocks = _as_pages(table[first : lock.node.end])
            if len(blocks) != len(pages):
                raise Misuse(f"{len(blocks)} blocks for {len(pages)} pages of component {component}")
            if not self._index.are_ready(component, pages):
                return None
            there = blocks != NULL_BLOCK
            if component in self._states and not there.all():
                return None
            if there.any():
                copies.append(Copy(pages[there], blocks[there], component))
        return tuple(copies)

    def start_loading(self) -> set[int]:
        """Make one batch of the loads ordered since the last call. Returns the blocks that they write to."""
        if not self._new_loads:
            return set()
        total = sum(job.num_pages for job in self._new_loads)
        for job in self._new_loads:
            job.batch_pages = total
        self._new_loads = []
        return {
            block for load in self._executor.loads for copy in load.copies for block in copy.target.tolist()
        }

    def loaded(self, job: BlockLoad, result: Result) -> None:
        """Apply a load's result. If it failed, its host pages are marked lost."""
        index = self._index
        job.owner.loads.discard(job.ticket)
        if result.error is None:
            index.counters.loaded += job.num_backbone
            self._no_regret.moved(GatedTransfer.LOAD, job.batch_pages, result.duration_s)
        else:
            index.counters.load_failed += 1
            job.owner.num_saved = 0
        if job.lock is not None:
            if result.error is not None:
                index.lose_path(job.lock)
            index.unlock(job.lock)


def _as_pages(blocks: Sequence[int]) -> Pages:
    return np.array(blocks, np.int32)


def _unbroken(table: Sequence[int], start: int, end: int) -> int:
    """The end of the run of blocks in `table[start:end]` that has no gap."""
    end = min(end, len(table))
    for page in range(start, end):
        if table[page] == NULL_BLOCK:
            return page
    return end


def _trailing_blocks(table: Sequence[int], start: int, end: int) -> Pages:
    """The blocks of the longest run without a gap that ends at page `end`."""
    first = end
    while first > start and first <= len(table) and table[first - 1] != NULL_BLOCK:
        first -= 1
    return _as_pages(table[first:end])


def _filled(table: Sequence[int]) -> Pages:
    """The blocks of a table, without those that a window has gone past."""
    return _as_pages([block for block in table if block != NULL_BLOCK])

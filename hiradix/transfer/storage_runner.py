"""The steps of storage jobs, as generators: one `next` is at most one call of the backend.

A page of tokens has one name and a page of bytes per component. Storage has a part for each: what a job says
of pages it says of each component's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from hiradix.errors import Misuse, StorageError
from hiradix.storage import PageStore, Stores
from hiradix.storage.batch import ChainUse, LazyKeys
from hiradix.storage.guard.calls import damaged_behind, has_failed, reasons_of
from hiradix.transfer.jobs import (
    BACKBONE_PAIR,
    DeletePayload,
    FailReason,
    JobKind,
    QueryPayload,
    ReadPayload,
    StorePayload,
    TrailingPages,
    TrailingWindow,
)
from hiradix.transfer.runtime import Runtime
from hiradix.transfer.worker import Steps, Stopped, Task
from hiradix.tree.hashing import PageRows

if TYPE_CHECKING:
    from hiradix.memory.pools import HostPool

MAX_LOOKS = 256
"""Calls a query makes to find where its hits end in all components, before it says that they do nowhere."""


class StorageRunner:
    """QUERY, READ, STORE and DELETE against the attached backend, at most `batch_pages` pages per call.

    `parts`: a guarded store for each host pool, none when no storage is attached. Set by attach and detach,
    never while a job runs.
    """

    def __init__(self, hosts: Sequence[HostPool], runtime: Runtime):
        self.parts: tuple[PageStore, ...] = ()
        self.others: dict[str, Stores] = {}  # by name: stores beside the attached one
        self._hosts = tuple(hosts)
        self._hash_pages = runtime.hash_pages
        self._batch_pages = runtime.limits.batch_pages
        self.jobs: dict[JobKind, Steps] = {
            JobKind.QUERY: self.query,
            JobKind.READ: self.read,
            JobKind.STORE: self.store,
            JobKind.DELETE: self.delete,
        }

    def introduce(self, storage: Stores) -> None:
        """Tell each part of `storage` of its pool's memory, if that is one piece. Any thread."""
        for part, host in zip(storage.parts, self._hosts):
            memory = getattr(host, "memory", None)
            if memory is not None:
                part.register(memory)

    def use(self, storage: Stores) -> None:
        """Serve jobs with the parts of `storage`, introduced here if that was not done."""
        if len(storage.parts) != len(self._hosts):
            raise StorageError(f"storage for {len(storage.parts)} components of {len(self._hosts)}")
        self.introduce(storage)
        self.parts = storage.parts

    def release(self) -> None:
        """Serve no storage any more."""
        self.parts = ()

    def use_other(self, name: str, storage: Stores) -> None:
        """Store in `storage`, too, where a job names it."""
        if len(storage.parts) != len(self._hosts):
            raise StorageError(f"storage for {len(storage.parts)} components of {len(self._hosts)}")
        self.introduce(storage)
        self.others = {**self.others, name: storage}

    def release_other(self, name: str) -> Stores | None:
        """Store in that one no more."""
        found = self.others.get(name)
        self.others = {other: storage for other, storage in self.others.items() if other != name}
        return found

    @property
    def wants_computed(self) -> bool:
        """Whether pages are to be put although another rank stores them: storage compares them."""
        return any([part.wants_computed for part in self.parts])

    # -- jobs -----------------------------------------------------------------------------

    def query(self, task: Task) -> Iterator[None]:
        """Hash the rows, then count the leading pages storage has; stops at the first batch with a miss that is
        none for damage.

        With windows it looks from there on backwards for where they end, and nothing counts before it knows.
        """
        query = task.payload
        assert isinstance(query, QueryPayload)
        self._hash(task, query.rows)
        yield
        use, found = _use_of_query(task, query, BACKBONE_PAIR), query.known
        at = found  # pages [found, at) are damaged
        while at < query.num_pages:
            task.check()
            batch = range(at, min(at + self._batch_pages, query.num_pages))
            count = self._count(use, batch)
            if found == batch.start:
                found += count
            at += count + damaged_behind(count)
            if not query.windows:
                task.num_pages = found
            if at < batch.stop:
                break
            yield
        task.damaged_end = at if at > found else 0
        if query.windows:
            task.num_pages = yield from self._boundary(task, query, found)

    def read(self, task: Task) -> Iterator[None]:
        """Fill host pages; stops at the first page that does not arrive."""
        read = task.payload
        assert isinstance(read, ReadPayload)
        for pages_of_pair in read.trailing:
            use = _use_of_read(read, pages_of_pair)
            storage = self._part(pages_of_pair.pair)
            for start in range(0, len(pages_of_pair.pages), self._batch_pages):
                task.check()
                batch = use.part(start, start + self._batch_pages)
                if not _all_done(task, storage.get(batch, self._views(pages_of_pair, start))):
                    return
                yield

    def store(self, task: Task) -> Iterator[None]:
        """Hash the rows, then put the pages; stops at the first page the backend does not take."""
        store = task.payload
        assert isinstance(store, StorePayload)
        self._hash(task, store.rows)
        yield
        for pages_of_pair in store.trailing:
            first = len(store.rows) - len(pages_of_pair.pages)
            use = _use_of_rows(task.hashes, store.rows, first, pages_of_pair.pair)
            storage = self._part(pages_of_pair.pair, store.store)
            for start in range(0, len(pages_of_pair.pages), self._batch_pages):
                task.check()
                batch = use.part(start, start + self._batch_pages)
                if not _all_done(task, storage.put(batch, self._views(pages_of_pair, start))):
                    return
                yield

    def delete(self, task: Task) -> Iterator[None]:
        """Have all components' stores forget pages by name, or all of a tenant's, or all of the model's."""
        payload = task.payload
        assert isinstance(payload, DeletePayload)
        if payload.is_all:
            for pair in range(len(self.parts)):
                _done(self._part(pair).clear())
                yield
        elif payload.tenant is not None:
            for pair in reversed(range(len(self.parts))):
                task.num_pages = _listed(self._part(pair).forget_tenant(payload.tenant))
                yield
        else:
            yield from self._delete_named(task, payload)
        for pair in range(len(self.parts) if payload.is_last else 0):
            _done(self._part(pair).scrub())
            yield

    def _delete_named(self, task: Task, payload: DeletePayload) -> Iterator[None]:
        self._hash(task, payload.rows)
        yield
        first, is_unlisted = len(payload.rows) - payload.num_pages, False
        for pair in reversed(range(len(self.parts))):
            use, storage = _use_of_rows(task.hashes, payload.rows, first, pair), self._part(pair)
            behind = 0
            if payload.continues and payload.num_pages:
                found = storage.forget_behind(use.part(payload.num_pages - 1, payload.num_pages))
                is_unlisted, behind = is_unlisted or found is None, found or 0
                yield
            task.num_pages = behind
            for start in range(0, payload.num_pages, self._batch_pages):
                batch = use.part(start, start + self._batch_pages)
                _done(storage.delete(batch))
                task.num_pages += len(batch)
                yield
        if is_unlisted:
            raise Stopped(FailReason.UNLISTED)

    # -- where hits end -------------------------------------------------------------------

    def _boundary(self, task: Task, query: QueryPayload, end: int) -> Generator[None, None, int]:
        """The most of `end` leading pages that end in all that `query.windows` ask for."""
        looks, found = iter(range(MAX_LOOKS)), 0  # windows in a row that end where the search is
        for window in itertools.cycle(query.windows):
            before = end
            end = yield from self._window_end(task, query, window, before, looks)
            found = found + 1 if end == before else 1
            if found == len(query.windows) or not end:
                break
        return end

    def _window_end(
        self, task: Task, query: QueryPayload, window: TrailingWindow, end: int, looks: Iterator[int]
    ) -> Generator[None, None, int]:
        """The most of `end` leading pages whose last `reach` are all there. Asks for no page twice.

        The first page that is missing of a window ends every longer run of pages too, so the search goes on
        there.
        """
        use, known = _use_of_query(task, query, window.pair), end  # pages [known, end) are there
        for _ in looks:
            first = at = max(0, end - window.reach)
            if known <= first:
                return end
            is_whole = True
            while is_whole and at < known:
                task.check()
                batch = range(at, min(known, at + self._batch_pages))
                at += self._count(use, batch)
                is_whole = at == batch.stop
                yield
            end, known = (end if is_whole else at), first
        return 0

    def _count(self, use: ChainUse, batch: range) -> int:
        """The number of leading pages of a batch, numbered from the first asked for, that a component's store
        has."""
        return self._part(use.component).exists(use.part(batch.start, batch.stop))

    # -- inside -----------------------------------------------------------------------------

    def _part(self, pair: int, store: str = "") -> PageStore:
        if store:
            other = self.others.get(store)
            if other is None:
                raise StorageError(f"no store {store!r} is open")
            return other.parts[pair]
        if not self.parts:
            raise Misuse("a storage job is running with no storage attached")
        return self.parts[pair]

    def _hash(self, task: Task, rows: PageRows) -> None:
        """The digests of `rows` go into the task."""
        hashes = tuple(self._hash_pages(rows))
        if len(hashes) != len(rows):
            raise Misuse(f"{len(hashes)} digests for {len(rows)} rows")
        task.hashes = hashes

    def _views(self, pages_of_pair: TrailingPages, start: int) -> list[list[memoryview]]:
        """The host memory of one batch of a pair's trailing pages, from `start` on."""
        page_views = self._hosts[pages_of_pair.pair].page_views
        return [page_views(page) for page in pages_of_pair.pages[start : start + self._batch_pages].tolist()]


def _use_of_rows(hashes: Sequence[bytes], rows: PageRows, first: int, pair: int) -> ChainUse:
    """A job's use of pages of `rows` from `first` on, in one component."""
    before = None if rows.start else LazyKeys(hashes[:first], _names)
    after = hashes[first - 1].hex() if first else rows.prior.hex() if rows.start else ""
    return ChainUse(LazyKeys(hashes[first:], _names), before, after, rows.tenant, rows.extra_key, pair)


def _use_of_query(task: Task, query: QueryPayload, pair: int) -> ChainUse:
    """The same of the pages that a query asks for, which takes as long as the chain is."""
    return _use_of_rows(task.hashes, query.rows, len(query.rows) - query.num_pages, pair)


def _use_of_read(read: ReadPayload, pages_of_pair: TrailingPages) -> ChainUse:
    """The same of the pages that a read brings."""
    first = len(read.hashes) - len(pages_of_pair.pages)
    hashes, after = read.hashes[first:], read.hashes[first - 1] if first else read.after
    before = None
    if read.chain is not None and hashes:
        before = LazyKeys(read.chain[: read.chain.index(hashes[0])], _names)
    return ChainUse(
        LazyKeys(hashes, _names), before, after.hex(), read.tenant, read.extra_key, pages_of_pair.pair
    )


def _names(hashes: Sequence[bytes]) -> list[str]:
    """Storage's names of pages."""
    return [digest.hex() for digest in hashes]


def _done(ok: bool) -> None:
    """StorageError unless the store did as it was told."""
    if not ok:
        raise StorageError("the store did not forget what it was told to")


def _listed(num_pages: int | None) -> int:
    """The number of pages that a store has listed. None, a store that cannot tell, stops the job."""
    if num_pages is None:
        raise Stopped(FailReason.UNLISTED)
    return num_pages


def _all_done(task: Task, answer: Sequence[bool]) -> bool:
    """Count the leading True of a get or put answer into the task; whether there is no other.

    StorageError where a fault kept pages back: unlike a page that is not there, it is why a job fails.
    """
    done = answer.index(False) if False in answer else len(answer)
    task.num_pages += done
    if done < len(answer) and has_failed(answer):
        why = ", ".join(reason.value for reason in reasons_of(answer))
        raise StorageError(f"{len(answer) - done} of {len(answer)} pages failed: {why}")
    return done == len(answer)

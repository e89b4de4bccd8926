"""What storage jobs do, as generators: one `next` is one call of the backend at most.

A page of tokens has one name and a page of bytes per component. Storage has a part for each: what a job says
of pages it says of each component's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from hiradix.errors import Misuse, StorageError
from hiradix.storage.kit.pieces import ChainUse, as_use
from hiradix.transfer.jobs import (
    BACKBONE_PAIR,
    Chain,
    JobKind,
    QueryPayload,
    ReadPayload,
    StorePayload,
    TrailingPages,
    TrailingWindow,
)
from hiradix.transfer.protocols import (
    PartedStorage,
    PrefixKeys,
    StorageLike,
    TenantStorage,
    Views,
)
from hiradix.transfer.runtime import Runtime
from hiradix.transfer.worker import BadStorageAnswer, Steps, Task
from hiradix.tree.hashing import PageRows

if TYPE_CHECKING:
    from hiradix.memory.pools import HostPool

MAX_LOOKS = 256
"""Calls a query makes to find where its hits end in all components, before it says that they do nowhere."""


class StorageRunner:
    """QUERY, READ and STORE against the attached backend, at most `batch_pages` pages per call.

    `parts`: a store for each host pool, none when no storage is attached. Set by attach and detach, never
    while a job runs.
    """

    def __init__(self, hosts: Sequence[HostPool], runtime: Runtime):
        self.parts: tuple[StorageLike, ...] = ()
        self._hosts = tuple(hosts)
        self._hash_pages = runtime.hash_pages
        self._batch_pages = runtime.limits.batch_pages
        self.jobs: dict[JobKind, Steps] = {
            JobKind.QUERY: self.query,
            JobKind.READ: self.read,
            JobKind.STORE: self.store,
        }

    def introduce(self, storage: StorageLike | PartedStorage) -> None:
        """Tell `storage`, or each of its `parts`, of its pool's memory, if that is one piece. Any thread."""
        for part, host in zip(_parts(storage), self._hosts):
            register, memory = getattr(part, "register", None), getattr(host, "memory", None)
            if register is not None and memory is not None:
                register(memory)

    def use(self, storage: StorageLike | PartedStorage) -> None:
        """Serve jobs with `storage`, or its `parts`, introduced here if that was not done."""
        parts = _parts(storage)
        if len(parts) != len(self._hosts):
            raise StorageError(f"storage for {len(parts)} components of {len(self._hosts)}")
        self.introduce(storage)
        self.parts = parts

    def release(self) -> None:
        """Serve no storage any more."""
        self.parts = ()

    @property
    def wants_prefix_keys(self) -> bool:
        """Whether the storage attached asks for the chain before a call's pages."""
        return any(getattr(part, "wants_prefix_keys", False) for part in self.parts)

    @property
    def wants_computed(self) -> bool:
        """Whether pages are to be put although another rank stores them: storage compares them."""
        return any(getattr(part, "wants_computed", False) for part in self.parts)

    # -- jobs -----------------------------------------------------------------------------

    def query(self, task: Task) -> Iterator[None]:
        """Hash the rows, then count the leading pages storage has; stops at the first batch with a miss.

        With windows it looks from there on backwards for where they end, and nothing counts before it knows.
        """
        query = task.payload
        assert isinstance(query, QueryPayload)
        self._hash(task, query.rows)
        yield
        found = query.known
        while found < query.num_pages:
            task.check()
            batch = range(found, min(found + self._batch_pages, query.num_pages))
            found += self._count(task, query, BACKBONE_PAIR, batch)
            if not query.windows:
                task.num_pages = found
            if found < batch.stop:
                break
            yield
        if query.windows:
            task.num_pages = yield from self._boundary(task, query, found)

    def read(self, task: Task) -> Iterator[None]:
        """Fill host pages; stops at the first page that does not arrive."""
        read = task.payload
        assert isinstance(read, ReadPayload)
        for pages_of_pair in read.trailing:
            hashes = read.hashes[len(read.hashes) - len(pages_of_pair.pages) :]
            storage = self._part(pages_of_pair.pair)
            use = ChainUse(_front(read.chain, hashes), extra_key=read.extra_key)
            for start in range(0, len(hashes), self._batch_pages):
                task.check()
                batch = _names(hashes[start : start + self._batch_pages])
                views = self._views(pages_of_pair, start)
                before = self._before_read(read, hashes[start])
                more = () if before is None else (before,)
                with as_use(use):
                    answer = storage.get(batch, views, *more)
                if not add_leading(task, answer, len(batch)):
                    return
                yield

    def store(self, task: Task) -> Iterator[None]:
        """Hash the rows, then put the pages; stops at the first page the backend does not take."""
        store = task.payload
        assert isinstance(store, StorePayload)
        self._hash(task, store.rows)
        keys = _names(task.hashes)
        yield
        for pages_of_pair in store.trailing:
            first = len(keys) - len(pages_of_pair.pages)
            use = ChainUse(_key_before(task, store.rows, first), extra_key=store.rows.extra_key)
            for start in range(0, len(pages_of_pair.pages), self._batch_pages):
                task.check()
                batch = keys[first + start : first + start + self._batch_pages]
                before = self._keys_before(task, store.rows, first + start)
                with as_use(use):
                    put = self._put(
                        pages_of_pair.pair,
                        batch,
                        self._views(pages_of_pair, start),
                        before,
                        store.rows.tenant,
                    )
                if not add_leading(task, put, len(batch)):
                    return
                yield

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
        known = end  # pages [known, end) are there
        for _ in looks:
            first = at = max(0, end - window.reach)
            if known <= first:
                return end
            is_whole = True
            while is_whole and at < known:
                task.check()
                batch = range(at, min(known, at + self._batch_pages))
                at += self._count(task, query, window.pair, batch)
                is_whole = at == batch.stop
                yield
            end, known = (end if is_whole else at), first
        return 0

    def _count(self, task: Task, query: QueryPayload, pair: int, batch: range) -> int:
        """How many leading pages of a batch, numbered from the first asked for, a component's store has."""
        first = len(query.rows) - query.num_pages
        keys = _names(task.hashes[first + batch.start : first + batch.stop])
        storage, before = self._part(pair), self._keys_before(task, query.rows, first + batch.start)
        with as_use(ChainUse(extra_key=query.rows.extra_key)):
            answer = storage.exists(keys) if before is None else storage.exists(keys, before)
        return checked_count(answer, len(keys))

    # -- inside -----------------------------------------------------------------------------

    def _put(self, pair: int, keys: Sequence[str], views: Views, before: PrefixKeys, tenant: str) -> object:
        """A put with what storage asked for beside the pages."""
        storage = self._part(pair)
        if getattr(storage, "wants_tenant", False):
            return cast(TenantStorage, storage).put(keys, views, before, tenant)
        return storage.put(keys, views) if before is None else storage.put(keys, views, before)

    def _keys_before(self, task: Task, rows: PageRows, page: int) -> list[str] | None:
        """The chain before a page of `rows`, for storage that asked and rows that begin it."""
        if rows.start or not self.wants_prefix_keys:
            return None
        return _names(task.hashes[:page])

    def _before_read(self, read: ReadPayload, digest: bytes) -> list[str] | None:
        """The same before a page of a read."""
        if read.chain is None or not self.wants_prefix_keys:
            return None
        return _names(read.chain[: read.chain.index(digest)])

    def _part(self, pair: int) -> StorageLike:
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
        """Of one batch of a pair's trailing pages, from `start` on."""
        page_views = self._hosts[pages_of_pair.pair].page_views
        return [page_views(page) for page in pages_of_pair.pages[start : start + self._batch_pages].tolist()]


def _parts(storage: StorageLike | PartedStorage) -> tuple[StorageLike, ...]:
    return tuple(getattr(storage, "parts", (storage,)))


def _key_before(task: Task, rows: PageRows, page: int) -> str:
    """Storage's name of the page before a page of `rows`; "" of the first."""
    if page:
        return task.hashes[page - 1].hex()
    return rows.prior.hex() if rows.start else ""


def _front(chain: Chain, hashes: Sequence[bytes]) -> str:
    """The same of the first of `hashes` that are part of a sequence's; "" where that is not known."""
    at = 0 if chain is None or not hashes else chain.index(hashes[0])
    return "" if chain is None or not at else chain[at - 1].hex()


def _names(hashes: Sequence[bytes]) -> list[str]:
    """Storage's names of pages."""
    return [digest.hex() for digest in hashes]


def checked_count(answer: object, limit: int) -> int:
    """`answer` as a count in [0, limit]; raises BadStorageAnswer for anything else."""
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer) or not 0 <= answer <= limit:
        raise BadStorageAnswer(f"exists answered {short(answer)} for {limit} keys")
    return int(answer)


def add_leading(task: Task, answer: object, num_pages: int) -> bool:
    """Count the leading True of a get or put answer into the task; whether all `num_pages` were.

    A False is a normal miss. Anything else (no list, wrong length, values that are no bool) fails the rest.
    """
    if not isinstance(answer, list | tuple | np.ndarray) or len(answer) > num_pages:
        raise BadStorageAnswer(f"answer {short(answer)} for {num_pages} pages")
    for ok in answer:
        if not isinstance(ok, bool | np.bool_):
            raise BadStorageAnswer(f"page answer {short(ok)}")
        if not ok:
            return False
        task.num_pages += 1
    if len(answer) < num_pages:
        raise BadStorageAnswer(f"{len(answer)} answers for {num_pages} pages")
    return True


def short(value: object) -> str:
    """A value for an error message, cut to a line."""
    return f"{type(value).__name__} {value!r}"[:120]

"""What each job kind does, as generators: one `next` is one batch, and progress is in the task at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from hiradix.transfer.gate import LayerDoneCounter
from hiradix.transfer.jobs import Copy, JobKind, LoadBatch, Pages, Query, Read, Store
from hiradix.transfer.ports import (
    DevicePoolLike,
    HashPages,
    HostPoolLike,
    PrefixKeys,
    StorageLike,
    TenantStorage,
    TransportLike,
    Views,
)
from hiradix.transfer.streams import Streams
from hiradix.transfer.worker import BadAnswer, Task
from hiradix.tree.hashing import PageRows


@dataclass(frozen=True)
class PoolPair:
    """Two pools of one shape and the copy between them.

    layers: which of the model's layers each of the pools' layers is; None: they are the model's.
    """

    device: DevicePoolLike
    host: HostPoolLike
    transport: TransportLike
    layers: Sequence[int] | None = None

    @property
    def model_layers(self) -> Sequence[int]:
        return range(self.device.shape.num_layers) if self.layers is None else self.layers


class CopyRunner:
    """WRITE in chunks of `chunk_pages`, LOAD layer by layer of the model. A job's copies end with it."""

    def __init__(
        self, pairs: Sequence[PoolPair], streams: Streams, gate: LayerDoneCounter, chunk_pages: int
    ):
        self._pairs = tuple(pairs)
        self._at = [
            {layer: range(i, i + 1) for i, layer in enumerate(pair.model_layers)} for pair in pairs
        ]  # per pair: a model layer's place in its pools
        self._streams = streams
        self._gate = gate
        self._chunk_pages = chunk_pages

    def write(self, task: Task) -> Iterator[None]:
        """Device to host, all layers of a chunk of pages per step."""
        copies = task.job.payload
        assert isinstance(copies, tuple)
        for copy in copies:
            pools = self._pairs[copy.pair]
            for start in range(0, len(copy.source), self._chunk_pages):
                task.check()
                chunk = slice(start, start + self._chunk_pages)
                source, target = copy.source[chunk], copy.target[chunk]
                try:
                    with self._streams.copying(JobKind.WRITE, task.job.after):
                        pools.transport.copy_pages(pools.device, pools.host, source, target, None)
                finally:
                    self._streams.drain(JobKind.WRITE)
                task.num_pages += len(source)
                yield

    def load(self, task: Task) -> Iterator[None]:
        """Host to device, one layer of the model of all pages per step. All or nothing."""
        batch = task.job.payload
        assert isinstance(batch, LoadBatch)
        try:
            for layer in range(self._gate.num_layers):
                task.check()
                with self._streams.copying(JobKind.LOAD, task.job.after):
                    for copy in batch.copies:
                        self._load_layer(copy, layer)
                    event = self._streams.record(JobKind.LOAD)
                self._gate.layer_done(batch.producer, layer, event)
                yield
        finally:
            self._streams.drain(JobKind.LOAD)
        task.num_pages = sum(len(copy.source) for copy in batch.copies)

    def _load_layer(self, copy: Copy, layer: int) -> None:
        """One model layer's pages of one pair of pools, which may not have that layer."""
        pools, at = self._pairs[copy.pair], self._at[copy.pair].get(layer)
        if at is not None:
            pools.transport.copy_pages(pools.host, pools.device, copy.source, copy.target, at)


class StorageRunner:
    """QUERY, READ and STORE against the attached backend, at most `batch_pages` pages per call.

    `storage` is set by attach and detach, never while a job runs.
    """

    def __init__(self, host: HostPoolLike, hash_pages: HashPages, batch_pages: int):
        self.storage: StorageLike | None = None
        self._host = host
        self._hash_pages = hash_pages
        self._batch_pages = batch_pages

    def register_host(self, storage: StorageLike) -> None:
        """Tell storage of the host pool's memory, where the one asks and the other is one piece."""
        register, memory = getattr(storage, "register", None), getattr(self._host, "memory", None)
        if register is not None and memory is not None:
            register(memory)

    @property
    def wants_prefix_keys(self) -> bool:
        """Whether the storage attached asks for the chain before a call's pages."""
        return bool(getattr(self.storage, "wants_prefix_keys", False))

    def query(self, task: Task) -> Iterator[None]:
        """Hash the rows, then count the leading pages storage has; stops at the first batch with a miss."""
        query = task.job.payload
        assert isinstance(query, Query)
        storage = self._attached()
        keys = self._hash(task, query.rows, query.num_pages)
        yield
        for start in range(0, len(keys), self._batch_pages):
            task.check()
            batch = keys[start : start + self._batch_pages]
            before = self._keys_before(task, query.rows, len(keys) - start)
            answer = storage.exists(batch) if before is None else storage.exists(batch, before)
            num_hits = checked_count(answer, len(batch))
            task.num_pages += num_hits
            if num_hits < len(batch):
                return
            yield

    def read(self, task: Task) -> Iterator[None]:
        """Fill host pages; stops at the first page that does not arrive."""
        read = task.job.payload
        assert isinstance(read, Read)
        storage = self._attached()
        keys = [digest.hex() for digest in read.hashes]
        for start in range(0, len(keys), self._batch_pages):
            task.check()
            batch = keys[start : start + self._batch_pages]
            views = self._views(read.target[start : start + self._batch_pages])
            before = self._before_read(read, start)
            answer = storage.get(batch, views) if before is None else storage.get(batch, views, before)
            if not add_leading(task, answer, len(batch)):
                return
            yield

    def store(self, task: Task) -> Iterator[None]:
        """Hash the rows, then put the pages; stops at the first page the backend does not take."""
        store = task.job.payload
        assert isinstance(store, Store)
        storage = self._attached()
        keys = self._hash(task, store.rows, len(store.source))
        yield
        for start in range(0, len(keys), self._batch_pages):
            task.check()
            batch = keys[start : start + self._batch_pages]
            views = self._views(store.source[start : start + self._batch_pages])
            before = self._keys_before(task, store.rows, len(keys) - start)
            answer = self._put(storage, batch, views, before, store.rows.tenant)
            if not add_leading(task, answer, len(batch)):
                return
            yield

    def _put(
        self, storage: StorageLike, keys: Sequence[str], views: Views, before: PrefixKeys, tenant: str
    ) -> object:
        """A put with what storage asked for beside the pages."""
        if getattr(storage, "wants_tenant", False):
            return cast(TenantStorage, storage).put(keys, views, before, tenant)
        return storage.put(keys, views) if before is None else storage.put(keys, views, before)

    def _keys_before(self, task: Task, rows: PageRows, num_left: int) -> list[str] | None:
        """The chain before the last `num_left` pages, for storage that asked and rows that begin it."""
        if rows.start or not self.wants_prefix_keys:
            return None
        return [digest.hex() for digest in task.hashes[: len(task.hashes) - num_left]]

    def _before_read(self, read: Read, start: int) -> list[str] | None:
        """The same before the page at `start` of a read."""
        if read.chain is None or not self.wants_prefix_keys:
            return None
        return [digest.hex() for digest in read.chain[: read.chain.index(read.hashes[start])]]

    def _attached(self) -> StorageLike:
        assert self.storage is not None, "a storage job is running with no storage attached"
        return self.storage

    def _hash(self, task: Task, rows: PageRows, num_pages: int) -> list[str]:
        """Keys of the last `num_pages` pages of `rows`; all digests go into the task."""
        hashes = tuple(self._hash_pages(rows))
        assert len(hashes) == len(rows), f"{len(hashes)} digests for {len(rows)} rows"
        assert len(hashes) >= num_pages, f"{num_pages} pages but only {len(hashes)} rows"
        task.hashes = hashes
        return [digest.hex() for digest in hashes[len(hashes) - num_pages :]]

    def _views(self, pages: Pages) -> list[list[memoryview]]:
        return [self._host.page_views(page) for page in pages.tolist()]


def checked_count(answer: object, limit: int) -> int:
    """`answer` as a count in [0, limit]; raises BadAnswer for anything else."""
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer) or not 0 <= answer <= limit:
        raise BadAnswer(f"exists answered {short(answer)} for {limit} keys")
    return int(answer)


def add_leading(task: Task, answer: object, num_pages: int) -> bool:
    """Count the leading True of a get or put answer into the task; whether all `num_pages` were.

    A False is a normal miss. Anything else (no list, wrong length, values that are no bool) fails the rest.
    """
    if not isinstance(answer, list | tuple | np.ndarray) or len(answer) > num_pages:
        raise BadAnswer(f"answer {short(answer)} for {num_pages} pages")
    for ok in answer:
        if not isinstance(ok, bool | np.bool_):
            raise BadAnswer(f"page answer {short(ok)}")
        if not ok:
            return False
        task.num_pages += 1
    if len(answer) < num_pages:
        raise BadAnswer(f"{len(answer)} answers for {num_pages} pages")
    return True


def short(value: object) -> str:
    """A value for an error message, cut to a line."""
    return f"{type(value).__name__} {value!r}"[:120]

"""The steps of copy jobs, as generators: one `next` copies one piece, and the task has its progress at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hiradix.errors import Misuse
from hiradix.transfer.gate import LayerDoneCounter
from hiradix.transfer.jobs import Copy, JobKind, LoadBatch
from hiradix.transfer.pool_pair import PoolPair
from hiradix.transfer.streams import Streams
from hiradix.transfer.worker import Steps, Task


class CopyRunner:
    """WRITE in chunks of `chunk_pages`, LOAD layer by layer of the model. A job's copies end with it."""

    def __init__(self, pairs: Sequence[PoolPair], streams: Streams, gate: LayerDoneCounter, chunk_pages: int):
        self._pairs = tuple(pairs)
        self._at = [
            {layer: range(i, i + 1) for i, layer in enumerate(pair.model_layers)} for pair in pairs
        ]  # per pair: a model layer's place in its pools
        self._streams = streams
        self._gate = gate
        self._chunk_pages = chunk_pages
        self.jobs: dict[JobKind, Steps] = {JobKind.WRITE: self.write, JobKind.LOAD: self.load}

    def write(self, task: Task) -> Iterator[None]:
        """Device to host, all layers of a chunk of pages per step."""
        copies = task.payload
        if not isinstance(copies, tuple):
            raise Misuse(f"a write of {type(copies).__name__}")
        for copy in copies:
            pools = self._pairs[copy.pair]
            for start in range(0, len(copy.source), self._chunk_pages):
                task.check()
                chunk = slice(start, start + self._chunk_pages)
                source, target = copy.source[chunk], copy.target[chunk]
                try:
                    with self._streams.copying(JobKind.WRITE, task.after):
                        pools.transport.copy_pages(pools.device, pools.host, source, target, None)
                finally:
                    self._streams.drain(JobKind.WRITE)
                task.num_pages += len(source)
                yield

    def load(self, task: Task) -> Iterator[None]:
        """Host to device, one layer of the model of all pages per step. All or nothing."""
        batch = task.payload
        if not isinstance(batch, LoadBatch):
            raise Misuse(f"a load of {type(batch).__name__}")
        try:
            for layer in range(self._gate.num_layers):
                task.check()
                with self._streams.copying(JobKind.LOAD, task.after):
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

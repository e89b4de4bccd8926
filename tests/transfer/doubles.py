"""Pools, a transport and a storage backend small enough to watch: every page is one number per layer."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from hiradix.memory import PageAllocator
from hiradix.storage import (
    BreakerLimits,
    GuardedStorage,
    GuardLimits,
    PageFingerprint,
    StorageBackend,
    Stores,
    Traits,
)
from hiradix.storage.guard.breaker import NO_TROUBLES
from hiradix.transfer import JobKind, LayerDoneCounter, LoadFailed, Runtime, TransferLimits
from hiradix.transfer.streams import Streams
from hiradix.tree.hashing import PageRows

NUM_LAYERS = 4


@dataclass(frozen=True)
class Shape:
    num_layers: int = NUM_LAYERS


class Pool:
    """A pool of `num_pages` pages, `num_layers` int64 values each; contiguous per page like page_first."""

    device = "cpu"

    def __init__(self, num_pages: int, num_layers: int = NUM_LAYERS):
        self.shape = Shape(num_layers)
        self.data = np.zeros((num_pages, num_layers), np.int64)
        self.page_bytes = num_layers * 8
        self.gate: Any = None
        self.on_view: Callable[[int], None] = lambda page: None

    def register_layer_transfer_counter(self, counter: Any) -> None:
        self.gate = counter

    def page_views(self, page: int) -> list[memoryview]:
        self.on_view(page)
        return [memoryview(self.data[page]).cast("B")]


class Transport:
    """Copies; `before(src, dst, src_pages, dst_pages, layers)` may raise or watch."""

    def __init__(self) -> None:
        self.before: Callable[..., None] = lambda *args: None
        self.late: LateStreams | None = None
        self.num_calls = 0

    def copy_pages(
        self, src: Any, dst: Any, src_pages: Any, dst_pages: Any, layers: range | None = None
    ) -> None:
        self.num_calls += 1
        self.before(src, dst, src_pages, dst_pages, layers)
        layer_slice = slice(None) if layers is None else slice(layers.start, layers.stop)

        def copy() -> None:
            dst.data[dst_pages, layer_slice] = src.data[src_pages, layer_slice]

        if self.late is None:
            copy()
        else:
            self.late.launch(copy)


class LateStreams(Streams):
    """A device whose streams run late: nothing happens before someone waits for it, or `advance` is called.

    `compute` is the engine's stream; the controller has one per direction. A wait of the engine's thread runs
    what it waits for. late: False has everything run at once, as on a CPU.
    """

    def __init__(self, late: bool = True) -> None:
        self.late = late
        self.current: Any = None  # the stream of copies that are launched now
        self._queues: dict[Any, deque[Callable[[], None]]] = {
            "compute": deque(),
            JobKind.WRITE: deque(),
            JobKind.LOAD: deque(),
        }
        self._num_added = dict.fromkeys(self._queues, 0)
        self._num_run = dict.fromkeys(self._queues, 0)

    def add(self, name: Any, work: Callable[[], None]) -> None:
        """Give a stream its next piece of work."""
        if not self.late:
            return work()
        self._queues[name].append(work)
        self._num_added[name] += 1

    def compute(self, work: Callable[[], None]) -> None:
        self.add("compute", work)

    def launch(self, copy: Callable[[], None]) -> None:
        assert self.current is not None, "a copy outside the copy streams"
        self.add(self.current, copy)

    def _point(self, name: Any) -> tuple[Any, int]:
        return name, self._num_added[name]

    def mark(self) -> object:
        return self._point("compute")

    @contextmanager
    def copying(self, kind: JobKind, after: object) -> Iterator[None]:
        assert after is not None, "a copy that waits for no forward pass"
        self.add(kind, lambda: self.finish(after))
        self.current = kind
        try:
            yield
        finally:
            self.current = None

    def record(self, kind: JobKind) -> object:
        return self._point(kind)

    def drain(self, kind: JobKind) -> None:
        self.finish(self._point(kind))

    def wait_event(self, event: Any) -> None:
        self.finish(event)

    def finish(self, point: Any) -> None:
        """Run a stream up to a point."""
        name, count = point
        while self._num_run[name] < count:
            self.advance(name)

    def advance(self, name: Any) -> bool:
        """Let one stream do its next piece of work; False if it has none."""
        queue = self._queues[name]
        if not queue:
            return False
        self._num_run[name] += 1
        queue.popleft()()
        return True

    def advance_any(self, rng: random.Random) -> bool:
        return self.late and self.advance(rng.choice(list(self._queues)))

    def synchronize(self) -> None:
        while any(self.advance(name) for name in self._queues):
            pass


class PoisonedPages(PageAllocator):
    """Overwrites what is freed, so that whoever still reads it is found out (known-bugs row 9)."""

    def __init__(self, num_pages: int, poison: Callable[[int], None], first_page: int = 0):
        super().__init__(num_pages, first_page)
        self._poison = poison

    def free(self, pages: Any) -> None:
        super().free(pages)
        for page in np.asarray(pages).tolist():
            self._poison(page)


class StoreDouble:
    """Base of doubles of a guarded store: it is all of a cache's stores, and says nothing of itself."""

    wants_computed, troubles, num_adopted = False, NO_TROUBLES, 0

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self,)


class MemoryStorage(StorageBackend):
    """A dictionary. `before(call, keys)` may raise, block, or return something to answer instead."""

    traits = Traits(verifies=True, namespaced=True, direct=True)

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.before: Callable[[str, Sequence[str]], Any] = lambda call, keys: NORMAL
        self.calls: list[tuple[str, int]] = []

    def _enter(self, call: str, keys: Sequence[str]) -> Any:
        self.calls.append((call, len(keys)))
        return self.before(call, keys)

    def exists(self, keys: Sequence[str]) -> Any:
        answer = self._enter("exists", keys)
        if answer is not NORMAL:
            return answer
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, keys: Sequence[str], into: Sequence[Sequence[memoryview]]) -> Any:
        answer = self._enter("get", keys)
        if answer is not NORMAL:
            return answer
        done = []
        for key, views in zip(keys, into, strict=True):
            data = self.pages.get(key)
            done.append(data is not None)
            if data is not None:
                views[0][:] = data
        return done

    def put(self, keys: Sequence[str], pages: Sequence[Sequence[memoryview]]) -> Any:
        answer = self._enter("put", keys)
        if answer is not NORMAL:
            return answer
        for key, views in zip(keys, pages, strict=True):
            self.pages[key] = bytes(views[0])
        return [True] * len(keys)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.pages.pop(key, None)

    def clear(self) -> None:
        self.pages.clear()

    def close(self) -> None:
        pass


NORMAL = object()


def guarded(backend: StorageBackend, clock: Callable[[], float] = time.monotonic) -> Stores:
    """`backend` as a cache has it, behind a guard that never gives up on it."""
    limits = GuardLimits(deadline_s=3600.0, breaker=BreakerLimits(failures_to_open=1 << 30))
    return Stores([GuardedStorage(backend, PageFingerprint("test/model"), limits, clock)])


def loads_came(gate: LayerDoneCounter, slots: Sequence[int]) -> bool:
    """Wait for loads layer by layer, as a forward pass does; False if one of them failed."""
    gate.set_consumer(*slots)
    try:
        for layer in range(gate.num_layers):
            gate.wait_until(layer)
    except LoadFailed:
        return False
    return True


def rows_of(first: int, num_pages: int, prior: bytes = b"") -> PageRows:
    """Pages of one token each: first, first + 1, ..."""
    return PageRows(prior, np.arange(first, first + num_pages, dtype=np.int64).reshape(-1, 1))


TWO_PAGES = Runtime(limits=TransferLimits(batch_pages=2))


def task_of(payload: Any, check: Callable[[], None] = lambda: None) -> Any:
    """A task as a runner sees it. check: what it calls between batches."""
    return SimpleNamespace(payload=payload, check=check, num_pages=0, hashes=())


def run(steps: Callable[[Any], Iterator[None]], task: Any) -> Any:
    """Take all steps of a task; itself."""
    for _ in steps(task):
        pass
    return task

"""Pools, copies and streams of the simulation: a slot is one number per layer, and streams may run late.

A page is written by whoever owns it and overwritten with POISON when it is freed; both are work of the
compute stream, as a real engine's would be. A copy that is not ordered behind it meets the poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hiradix.memory import PageAllocator, SlotAllocator
from hiradix.transfer import JobKind
from tests.transfer.doubles import LateStreams

NUM_LAYERS = 2
POISON = -7


class Broken(BaseException):
    """A promise is broken inside a worker's step; no Exception, which would pass for a backend's fault."""


@dataclass(frozen=True)
class Shape:
    num_layers: int = NUM_LAYERS


class DevicePages:
    """data: int64 [layers, slots]; page 0 is the engine's dummy page."""

    device = "cpu"
    shape = Shape()

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.data = np.full((NUM_LAYERS, (num_pages + 1) * page_size), POISON, np.int64)
        self.by_page = self.data.reshape(NUM_LAYERS, num_pages + 1, page_size)

    def register_layer_transfer_counter(self, counter: Any) -> None:
        self.gate = counter


class HostPages:
    """data: int64 [pages, layers, page_size]: a page is one piece, which storage reads and writes."""

    def __init__(self, num_pages: int, page_size: int):
        self.data = np.full((num_pages, NUM_LAYERS, page_size), POISON, np.int64)
        self.page_bytes = NUM_LAYERS * page_size * 8
        self.allocator: HostAllocator | None = None

    def page_views(self, page: int) -> list[memoryview]:
        if self.allocator is not None and not self.allocator.is_out(np.array([page]))[0]:
            raise Broken(f"storage was given host page {page}, which is free")
        return [memoryview(self.data[page].reshape(-1)).cast("B")]


class SimStreams(LateStreams):
    """Waits of the engine's thread are work of its stream, as on a device. A late server's first copies may
    wait for no forward pass."""

    @contextmanager
    def copying(self, kind: JobKind, after: object) -> Iterator[None]:
        if after is not None:
            self.add(kind, lambda: self.finish(after))
        yield

    def wait_event(self, event: Any) -> None:
        self.add("compute", lambda: self.finish(event))


class Transport:
    """Copies pages on the current stream; `fails()` says whether a call raises half done."""

    def __init__(self, streams: SimStreams, fails: Callable[[], bool]):
        self._streams = streams
        self._fails = fails

    def copy_pages(self, src: Any, dst: Any, src_pages: Any, dst_pages: Any, layers: Any = None) -> None:
        failed = self._fails()
        num = len(src_pages) // 2 if failed else len(src_pages)
        part = slice(None) if layers is None else slice(layers.start, layers.stop)
        to_host = isinstance(dst, HostPages)

        def copy() -> None:
            if to_host:
                dst.data[dst_pages[:num], part] = src.by_page[part, src_pages[:num]].swapaxes(0, 1)
            else:
                dst.by_page[part, dst_pages[:num]] = src.data[src_pages[:num], part].swapaxes(0, 1)

        self._streams.add(JobKind.WRITE if to_host else JobKind.LOAD, copy)
        if failed:
            raise RuntimeError("injected: copy")


class DeviceAllocator(SlotAllocator):
    """Poisons what is freed. `refuses()` makes page calls (load backs) fail, never the engine's."""

    def __init__(self, pool: DevicePages, num_tokens: int, streams: SimStreams, refuses: Callable[[], bool]):
        super().__init__(num_tokens, pool.page_size, "cpu", pool)
        self._pool, self._streams, self._refuses = pool, streams, refuses
        self.pages.free = self._free_pages(self.pages.free)  # type: ignore[method-assign]

    def _free_pages(self, free: Callable[[Any], None]) -> Callable[[Any], None]:
        def free_and_poison(pages: Any) -> None:
            free(pages)
            self._streams.compute(lambda: self._poison(np.array(pages)))

        return free_and_poison

    def _poison(self, pages: Any) -> None:
        self._pool.by_page[:, pages] = POISON

    def alloc_pages(self, num_pages: int) -> Any:
        return None if self._refuses() else super().alloc_pages(num_pages)


class HostAllocator(PageAllocator):
    """Poisons what is freed; now and then, as `refuses()` says, it has nothing to give."""

    def __init__(self, pool: HostPages, refuses: Callable[[], bool]):
        super().__init__(len(pool.data))
        self._pool, self._refuses = pool, refuses
        pool.allocator = self

    def alloc(self, num_pages: int) -> Any:
        return None if self._refuses() else super().alloc(num_pages)

    def free(self, pages: Any) -> None:
        super().free(pages)
        self._pool.data[np.asarray(pages, np.int64)] = POISON

"""Small views of either side in the other's terms: SGLang's allocator, our host tier, our controller."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hiradix.cache import PageSource
from hiradix.errors import Misuse
from hiradix.prefix_cache.allocator_ports import AllocatorPort
from hiradix.prefix_cache.slots import Pages, pages_of, slots_of
from hiradix.storage import Stores
from hiradix.transfer.jobs import JobKind
from hiradix.transfer.streams import CudaStreams
from hiradix.tree import ids
from hiradix.tree.ids_numpy import FEW_PAGES


class Rows:
    """The rows of SGLang's ReqToTokenPool as pages of `port`. On a CPU read where they are."""

    def __init__(self, pool: Any, port: AllocatorPort):
        self._pool = pool
        self._port = port
        self._page_size = port.page_size
        table: torch.Tensor = pool.req_to_token
        self._width = table.shape[1]
        self._all: Any = table.view(-1).numpy() if table.is_cpu else None
        self._slots: Any = None if self._all is None else self._all.data
        self._frees_pages = self._slots is not None and port.takes_page_ids

    def pages(self, index: int, start: int, end: int) -> Pages:
        """int32 [end - start], read-only: what a row names at pages [start, end). Waits for a GPU."""
        return np.frombuffer(self._packed(index, start, end), np.int32)  # what the tree keeps without a copy

    def _packed(self, index: int, start: int, end: int) -> bytes:
        size = self._page_size
        stop = min(end * size, self._width)  # the last page of a row may be cut
        if self._slots is None:
            return pages_of(self._pool.req_to_token[index], size, start * size, stop).tobytes()
        row = index * self._width
        if end - start > FEW_PAGES:
            return ids.pages_of(self._all, size, row + start * size, row + stop).tobytes()
        first = self._slots[row + start * size : row + stop : size]
        return array("i", [slot // size for slot in first]).tobytes()

    def free(self, index: int, start: int, end: int) -> None:
        """Give SGLang's allocator the slots a row names at positions [start, end), from a page boundary on.

        Never waits for the device.
        """
        size, port = self._page_size, self._port
        if not self._frees_pages:
            port.free_segment(self._pool.req_to_token[index, start:end], start)
            return
        if start % size != 0:
            raise Misuse(f"position {start} is inside a page of {size}")
        if 0 < end - start <= size:
            port.free_page(self._slots[index * self._width + start] // size)
        else:
            port.free_pages(self.pages(index, start // size, -(-end // size)))

    def write(self, index: int, start: int, pages: Pages) -> None:
        """Have a row name these pages from page `start` on."""
        size, table = self._page_size, self._pool.req_to_token
        span = slice(start * size, (start + len(pages)) * size)
        self._pool.write((index, span), slots_of(pages, size, table.device).to(table.dtype))


class HostPoolView:
    """Our host pool as far as SGLang's metrics look at one. Sizes are in tokens."""

    def __init__(self, pages: PageSource, page_size: int):
        self.page_size = page_size
        self._pages = pages

    @property
    def logical_size(self) -> int:
        return self._pages.num_pages * self.page_size

    size = logical_size

    def available_size(self) -> int:
        return self._pages.available * self.page_size


class FencedStreams(CudaStreams):
    """Copies also wait for SGLang's forward stream: a forward under way may use what is to be overwritten."""

    def __init__(self, device: Any, fence: Any = None):
        super().__init__(device)
        self.fence = fence

    def mark(self) -> object:
        events = [super().mark()]
        if self.fence is not None:
            event = self._cuda.Event()
            event.record(self.fence)
            events.append(event)
        return tuple(events)

    @contextmanager
    def copying(self, kind: JobKind, after: object) -> Iterator[None]:
        first, *others = after if isinstance(after, tuple) else (after,)
        with super().copying(kind, first):
            for event in others:
                self._streams[kind].wait_event(event)
            yield


class ControllerView:
    """A cache's `cache_controller`, as far as SGLang reads and sets it.

    storage_backend: the object whose class's name reports carry, as `storage_backend` beside cached tokens.
    load_fence_stream, write_fence_stream: SGLang's forward stream, set by its scheduler.
    """

    pp_prefetch_command_group = None

    def __init__(self, layer_done_counter: Any, streams: FencedStreams | None = None):
        self.layer_done_counter = layer_done_counter
        self.storage_backend: Any = None
        self.storage_backend_type: str | None = None
        self.write_fence_stream: Any = None
        self._streams = streams

    @property
    def load_fence_stream(self) -> Any:
        return None if self._streams is None else self._streams.fence

    @load_fence_stream.setter
    def load_fence_stream(self, stream: Any) -> None:
        if self._streams is not None:
            self._streams.fence = stream

    def show_storage(self, name: str | None, storage: Stores | None) -> None:
        """Have SGLang see that this storage is attached, or none."""
        self.storage_backend_type = name
        self.storage_backend = None if storage is None else innermost(storage)


def innermost(storage: Stores) -> Any:
    """The object that stores, behind guard and wrappers; SGLang's own where we host one."""
    backend: Any = storage.backend
    while (inside := getattr(backend, "inner", None)) is not None:
        backend = inside
    return getattr(backend, "hosted", backend)

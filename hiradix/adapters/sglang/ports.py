"""Small views of either side in the other's terms: SGLang's allocator, our host tier, our controller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hiradix.cache.pages import PageSource
from hiradix.prefix_cache.slots import Pages, on_device, pages_of, slots_of
from hiradix.storage import Stores
from hiradix.transfer.jobs import JobKind
from hiradix.transfer.streams import CudaStreams
from hiradix.tree import ids


class AllocatorPort:
    """SGLang's paged allocator as the slot allocator of our classes. Its own method calls stay SGLang's.

    SGLang names its free list `free_pages`; here that is the call which frees pages.
    """

    def __init__(self, allocator: Any, page_size: int):
        self.page_size = page_size
        self.device = allocator.device
        self.size = allocator.size // page_size * page_size
        self._allocator = allocator
        self._free_ids = getattr(allocator, "free_page_ids", None)

    def available_size(self) -> int:
        return int(self._allocator.available_size())

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots: torch.Tensor | None = self._allocator.alloc(need_size)
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        self._allocator.free(free_index)

    def get_kvcache(self) -> Any:
        return self._allocator.get_kvcache()

    def alloc_pages(self, num_pages: int) -> Pages | None:
        """int32 [num_pages], or None if there are too few."""
        slots = self.alloc(num_pages * self.page_size)
        return None if slots is None else pages_of(slots, self.page_size)

    def free_pages(self, pages: Pages) -> None:
        """Give back whole pages, each named once."""
        if self._free_ids is not None:
            self._free_ids(on_device(pages.astype(np.int64), self.device))
        else:
            self._allocator.free(slots_of(pages, self.page_size, self.device))


class HybridPort(AllocatorPort):
    """SGLang's allocator of full slots with window slots beside them, likewise."""

    def __init__(self, allocator: Any, page_size: int):
        super().__init__(allocator, page_size)
        self.full_to_swa_index_mapping: torch.Tensor = allocator.full_to_swa_index_mapping
        self.full_attn_allocator = allocator.full_attn_allocator
        self.swa_attn_allocator = allocator.swa_attn_allocator
        self.size_full = allocator.size_full // page_size * page_size
        self.size_swa = allocator.size_swa // page_size * page_size

    def full_available_size(self) -> int:
        return int(self._allocator.full_available_size())

    def swa_available_size(self) -> int:
        return int(self._allocator.swa_available_size())

    def free(self, free_index: torch.Tensor) -> None:
        """Free full slots and, where there are any, the window slots beside them."""
        self.free_swa(free_index[self.full_to_swa_index_mapping[free_index] > 0])
        self._allocator.free_full(free_index)

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Free the window slots beside these full slots, which all have one."""
        self._allocator.free_swa(free_index)


class Rows:
    """The rows of SGLang's ReqToTokenPool as pages. On a CPU read through one array of all of them."""

    def __init__(self, pool: Any, page_size: int):
        self._pool = pool
        self._page_size = page_size
        table: torch.Tensor = pool.req_to_token
        self._table: Any = table.numpy() if table.is_cpu else table

    def pages(self, index: int, start: int, end: int) -> Pages:
        """int32 [end - start]: what a row names at pages [start, end). Waits for a GPU."""
        row, size = self._table[index], self._page_size
        find = ids.pages_of if isinstance(row, np.ndarray) else pages_of
        return find(row, size, start * size, end * size)

    def free(self, index: int, start: int, end: int, allocator: Any) -> None:
        """Give SGLang's allocator the slots a row names at positions [start, end), from a page boundary on.

        Never waits for the device.
        """
        free_ids = getattr(allocator, "free_page_ids", None)
        if free_ids is None or not isinstance(self._table, np.ndarray):
            allocator.free_segment(self._pool.req_to_token[index, start:end], start_pos=start)
            return
        assert start % self._page_size == 0, f"position {start} is inside a page of {self._page_size}"
        pages = ids.pages_of(self._table[index], self._page_size, start, end)
        free_ids(torch.from_numpy(pages.astype(np.int64)))

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
    """What SGLang reads and sets on a cache's `cache_controller`.

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

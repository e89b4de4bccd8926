"""A hybrid allocator as two sources of pages: full pages, and the window pages beside them.

To the tree a window page is independent of a full page. A model finds it only through the allocator's map,
so whenever a window page comes to lie beside another full page, the map is rewritten.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hiradix.prefix_cache.records import HybridAllocatorLike
from hiradix.prefix_cache.slots import AllocatorPages, Pages, on_device, pages_of, slots_of


class FullPages(AllocatorPages):
    """The full pages. `free` takes along the window page beside one, if the map still names it."""

    def __init__(self, allocator: HybridAllocatorLike, page_size: int):
        super().__init__(allocator, page_size, allocator.size_full // page_size)
        self._hybrid = allocator
        self._alloc_pages = self._free_pages = None  # those would pass the map by

    @property
    def available(self) -> int:
        return self._hybrid.full_available_size() // self._page_size

    def alloc(self, num_pages: int, /) -> Pages | None:
        """Full pages alone."""
        slots = self._hybrid.full_attn_allocator.alloc(num_pages * self._page_size)
        return None if slots is None else pages_of(slots, self._page_size)


class WindowPages:
    """The window pages. Knows beside which full page each one that the tree holds lies."""

    def __init__(self, allocator: HybridAllocatorLike, page_size: int):
        self._allocator = allocator
        self._page_size = page_size
        self._map = allocator.full_to_swa_index_mapping
        self.num_pages = allocator.size_swa // page_size
        self._full: npt.NDArray[np.int32] = np.zeros(self.num_pages + 1, np.int32)  # by window page

    @property
    def available(self) -> int:
        return self._allocator.swa_available_size() // self._page_size

    def alloc(self, num_pages: int, /) -> Pages | None:
        """Window pages that lie beside nothing, to be paired."""
        slots = self._allocator.swa_attn_allocator.alloc(num_pages * self._page_size)
        if slots is None:
            return None
        window = pages_of(slots, self._page_size)
        self._full[window] = 0
        return window

    def beside(self, full: Pages) -> Pages:
        """int32 [P]: the window pages beside full pages, 0 for none. What is to enter the tree comes from
        here or from `alloc`."""
        first = on_device(full.astype(np.int64) * self._page_size, self._map.device)
        window = pages_of(self._map[first], 1) // self._page_size
        self._full[window] = full
        return window

    def pair(self, full: Pages, window: Pages, /) -> None:
        """Have `window` lie beside `full`, which have no window page, and beside nothing else."""
        before = self._full[window]
        moved = before[(before > 0) & (before != full)]
        if len(moved):
            self._write(moved, None)
        self._write(full, window)
        self._full[window] = full

    def unpair(self, full: Pages) -> None:
        """Have nothing lie beside these full pages, whose window pages somebody has freed already."""
        if len(full):
            self._write(full, None)

    def free(self, window: Pages, /) -> None:
        """Free them and forget beside what they lay."""
        full = self._full[window]
        paired, alone = full[full > 0], window[full == 0]
        if len(paired):
            self._full[window] = 0
            self._allocator.free_swa(slots_of(paired, self._page_size, self._map.device))
        if len(alone):
            self._allocator.swa_attn_allocator.free(slots_of(alone, self._page_size, self._map.device))

    def _write(self, full: Pages, window: Pages | None) -> None:
        slots = slots_of(full, self._page_size, self._map.device)
        self._map[slots] = 0 if window is None else slots_of(window, self._page_size, self._map.device)

"""SGLang's allocators in our terms: pages by page calls where an allocator has them, by its slots where not.

An allocator of SGLang's is told by its free list, `free_pages`: with ours that is the call which frees pages.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch

from hiradix.errors import Misuse
from hiradix.prefix_cache.slots import Pages, moved, on_device, pages_of, slots_of
from hiradix.tree.ids_numpy import FEW_PAGES

_PAGED = "PagedTokenToKVPoolAllocator"  # exactly that class: one that inherits from it may allocate otherwise


class PageNumbers:
    """Page ids 0 .. num_pages as tensors for SGLang's allocator, which reads them and no more."""

    def __init__(self, num_pages: int, device: Any):
        self._device = device
        self._all = torch.arange(num_pages + 1, device=device)

    def one(self, page: int) -> torch.Tensor:
        """int64 [1]: a view."""
        return self._all[page : page + 1]

    def of(self, pages: Pages) -> torch.Tensor:
        """int64 [len(pages)]: a view where each page follows on the one before, else a copy."""
        if 0 < len(pages) <= FEW_PAGES:
            found = pages.tolist()
            first, end = found[0], found[0] + len(found)
            if found == list(range(first, end)):
                return self._all[first:end]
            return moved(torch.frombuffer(array("q", found), dtype=torch.int64), self._device)
        return on_device(pages.astype(np.int64), self._device)


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
        self._is_paged = type(allocator).__name__ == _PAGED and page_size > 1
        self._numbers = PageNumbers(self.size // page_size if self.takes_page_ids else 0, self.device)

    @property
    def takes_page_ids(self) -> bool:
        """Whether SGLang's frees pages by their ids, not by their slots alone."""
        return self._free_ids is not None

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
        """int32 [num_pages], or None if there are too few.

        SGLang's paged allocator gives slots; pages are taken off its list as it takes them, and not spread.
        """
        if self._is_paged:
            return self._take(num_pages)
        slots = self.alloc(num_pages * self.page_size)
        return None if slots is None else pages_of(slots, self.page_size)

    def _take(self, num_pages: int) -> Pages | None:
        allocator = self._allocator
        if num_pages > len(allocator.free_pages):
            allocator.merge_and_sort_free()
            if num_pages > len(allocator.free_pages):
                return None
        taken, allocator.free_pages = allocator.free_pages[:num_pages], allocator.free_pages[num_pages:]
        found: Pages = taken.cpu().numpy().astype(np.int32)
        return found

    def free_pages(self, pages: Pages) -> None:
        """Give back whole pages, each named once."""
        if self._free_ids is not None:
            self._free_ids(self._numbers.of(pages))
        else:
            self._allocator.free(slots_of(pages, self.page_size, self.device))

    def free_page(self, page: int) -> None:
        """Give back one page, to an allocator that takes page ids."""
        if self._free_ids is None:
            raise Misuse(f"page {page}: {type(self._allocator).__name__} takes no page ids")
        self._free_ids(self._numbers.one(page))

    def free_segment(self, free_index: torch.Tensor, start_pos: int) -> None:
        """Free a row's slots from position `start_pos` on, a page boundary; the last page whole."""
        self._allocator.free_segment(free_index, start_pos=start_pos)


class NumberedSlots:
    """Slots that are numbers and hold nothing, as many as are asked for: of a cache without pools."""

    device = "cpu"
    MOST_PAGES = 1 << 30

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._num_made = 0  # pages 1 .. that many
        self._free: list[Pages] = []
        self._num_free = 0

    def available_size(self) -> int:
        return (self.MOST_PAGES - self._num_made + self._num_free) * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        pages = self.alloc_pages(-(-need_size // self.page_size))
        return None if pages is None else slots_of(pages, self.page_size)[:need_size]

    def free(self, free_index: torch.Tensor) -> None:
        self.free_pages(np.unique(pages_of(free_index, 1) // self.page_size).astype(np.int32))

    def get_kvcache(self) -> None:
        """There is no memory behind these."""

    def alloc_pages(self, num_pages: int) -> Pages | None:
        """int32 [num_pages]: those that came back last, then new ones; None if there are too few."""
        if num_pages * self.page_size > self.available_size():
            return None
        parts = []
        while num_pages and self._free:
            last = self._free.pop()
            if len(last) > num_pages:
                self._free.append(last[num_pages:])
            parts.append(last[:num_pages])
            num_pages -= len(parts[-1])
            self._num_free -= len(parts[-1])
        first = self._num_made + 1
        self._num_made += num_pages
        return np.concatenate([*parts, np.arange(first, first + num_pages, dtype=np.int32)])

    def free_pages(self, pages: Pages) -> None:
        """Take pages back. Numbers that a caller made up itself are forgotten."""
        own = pages[pages <= self._num_made].copy()
        if len(own):
            self._free.append(own)
            self._num_free += len(own)


class HybridPort(AllocatorPort):
    """SGLang's allocator of full slots with window slots beside them, likewise."""

    def __init__(self, allocator: Any, page_size: int):
        super().__init__(allocator, page_size)
        self.full_to_swa_index_mapping: torch.Tensor = allocator.full_to_swa_index_mapping
        self.full_attn_allocator = allocator.full_attn_allocator
        self._free_full = getattr(allocator, "free_full", None) or allocator.full_attn_allocator.free
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
        self._free_full(free_index)

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Free the window slots beside these full slots, which all have one."""
        self._allocator.free_swa(free_index)

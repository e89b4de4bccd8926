"""Pages in, slots out: the only place that knows a slot is page * page_size + offset."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hiradix.prefix_cache.records import SlotAllocatorLike

Pages = npt.NDArray[np.int32]


def slots_of(pages: Pages, page_size: int, device: object = "cpu") -> torch.Tensor:
    """int64 [len(pages) * page_size] on `device`: the slots of `pages` in order. A fresh tensor."""
    wide = pages.astype(np.int64) * page_size
    if page_size > 1:
        wide = (wide[:, None] + np.arange(page_size)).reshape(-1)
    slots = torch.from_numpy(wide)
    return slots if str(device) == "cpu" else slots.to(device)  # type: ignore[call-overload]


def pages_of(slots: torch.Tensor, page_size: int) -> Pages:
    """int32 [ceil(len / page_size)]: the pages of a row of slots that starts on a page boundary."""
    first = slots[::page_size].cpu().numpy()
    return (first // page_size).astype(np.int32)


class SlotPages:
    """A foreign slot allocator as a source of pages. Uses page calls where the allocator has them."""

    def __init__(self, allocator: SlotAllocatorLike, page_size: int, num_pages: int):
        self._allocator = allocator
        self._page_size = page_size
        self.num_pages = num_pages

    @property
    def available(self) -> int:
        return self._allocator.available_size() // self._page_size

    def alloc(self, num_pages: int, /) -> Pages | None:
        slots = self._allocator.alloc(num_pages * self._page_size)
        return None if slots is None else pages_of(slots, self._page_size)

    def free(self, pages: Pages, /) -> None:
        if len(pages):
            self._allocator.free(slots_of(pages, self._page_size, self._allocator.device))

"""Pages in, slots out: the only place that knows a slot is page * page_size + offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import torch

from hiradix.memory.upload import upload
from hiradix.prefix_cache.records import SlotAllocatorLike
from hiradix.tree import ids
from hiradix.tree.key import Bookmark
from hiradix.tree.native import mypyc_attr

Pages = npt.NDArray[np.int32]
MANY_SLOTS: Final = 8192  # from here on torch spreads pages faster than numpy
WIDE: Final = torch.int64
SHORT: Final = torch.int32  # of an engine's table of slots
GROWTH_PART: Final = 4  # an answer that grows out of its memory gets a quarter more than it needs


def slots_of(pages: Pages, page_size: int, device: object = "cpu") -> torch.Tensor:
    """int64 [len(pages) * page_size] on `device`: the slots of `pages` in order. A fresh tensor."""
    if len(pages) * page_size >= MANY_SLOTS and page_size > 1 and not ids.IS_BUILT:
        spread = torch.add(torch.arange(page_size), torch.from_numpy(pages.copy())[:, None], alpha=page_size)
        return moved(spread.view(-1), device)
    return on_device(ids.slots_of(pages, page_size), device)


def on_device(wide: npt.NDArray[np.int64], device: object) -> torch.Tensor:
    """`wide` as a tensor on `device`: over the same memory on a CPU. Does not wait for a GPU."""
    return moved(torch.from_numpy(wide), device)


def moved(slots: torch.Tensor, device: object) -> torch.Tensor:
    """Slots or page ids of a CPU on `device`; itself on a CPU. Does not wait for a GPU."""
    return slots if _is_cpu(device) else upload(slots, cast(torch.device, device))


def _is_cpu(device: object) -> bool:
    """Asked for each answer, so without making a torch.device of a name."""
    return getattr(device, "type", device) == "cpu"


def pages_of(slots: torch.Tensor, page_size: int, start: int = 0, stop: int | None = None) -> Pages:
    """int32 [P]: the pages of slots [start, stop), where start is on a page boundary. One call on a CPU."""
    if slots.is_cpu:
        dtype, length = slots.dtype, slots.numel()
        end = length if stop is None else stop
        if ids.IS_BUILT and (dtype is WIDE or dtype is SHORT) and slots.is_contiguous():
            return ids.pages_at(slots.data_ptr(), dtype is SHORT, length, page_size, start, end)
        return ids.pages_of(slots.numpy(), page_size, start, end)
    first = slots[slice(start, stop, page_size)].cpu().numpy()  # one slot of each page comes over
    return (first // page_size).astype(np.int32)


class SlotTable:
    """The slots of one pool's pages 0 .. num_pages; by numpy spread ahead, 8 bytes for each of its slots."""

    def __init__(self, num_pages: int, page_size: int, device: object = "cpu"):
        self._page_size = page_size
        self._device = None if _is_cpu(device) else cast(torch.device, device)
        self._spread: npt.NDArray[np.int64] | None = None
        if page_size > 1 and not ids.IS_BUILT:
            slots = ids.slots_of(np.arange(num_pages + 1, dtype=np.int32), page_size)
            self._spread = slots.reshape(num_pages + 1, page_size)

    def of(self, pages: Pages) -> torch.Tensor:
        """int64 [len(pages) * page_size] on the device: the slots of `pages` in order. A fresh tensor."""
        wide = ids.slots_of(pages, self._page_size) if self._spread is None else self._looked_up(pages)
        slots = torch.from_numpy(wide)
        return slots if self._device is None else upload(slots, self._device)

    def of_growing(self, pages: Pages, bookmark: Bookmark) -> torch.Tensor:
        """The slots of `pages`, for a key that was looked up before: the part that the last answer has is
        reused.

        A view of memory that only grows. Costs a comparison of page ids and the new slots, not all slots.
        """
        last, size = bookmark.slots, self._page_size
        if not isinstance(last, _Answer) or last.source is not self or not last.agrees(pages):
            slots = self.of(pages)
            bookmark.slots = _Answer(self, pages.copy(), slots)
            return slots
        known = len(last.pages)
        if len(pages) > known:
            last.extend(self.of(pages[known:]), known * size)
            last.pages = pages.copy()
        return last.slots[: len(pages) * size]

    def _looked_up(self, pages: Pages) -> npt.NDArray[np.int64]:
        assert self._spread is not None
        try:
            return self._spread.take(pages, 0).reshape(-1)
        except IndexError:  # an allocator that did not say how many pages it has
            return ids.slots_of(pages, self._page_size)


class _Answer:
    """The last answer for the keys of one growing sequence. Slots behind those of `pages` are room to grow."""

    __slots__ = ("source", "pages", "slots")

    def __init__(self, source: SlotTable, pages: Pages, slots: torch.Tensor):
        self.source = source
        self.pages = pages
        self.slots = slots

    def agrees(self, pages: Pages) -> bool:
        """Whether these and `pages` are the same as far as both go: what was evicted came back elsewhere."""
        common = min(len(pages), len(self.pages))
        return np.array_equal(pages[:common], self.pages[:common])

    def extend(self, new: torch.Tensor, start: int) -> None:
        """Put `new` behind the first `start` slots. Nobody was given what is there."""
        end = start + len(new)
        if end > len(self.slots):
            grown = self.slots.new_empty(end + end // GROWTH_PART)
            grown[:start] = self.slots[:start]
            self.slots = grown
        self.slots[start:end] = new


@mypyc_attr(allow_interpreted_subclasses=True)
class AllocatorPages:
    """A foreign slot allocator as a source of pages. Uses page calls where the allocator has them.

    end_page: one more than its largest page id, as its first page may be kept back; None if it has no size.
    """

    def __init__(self, allocator: SlotAllocatorLike, page_size: int, num_pages: int):
        self._allocator = allocator
        self._page_size = page_size
        self.num_pages = num_pages
        self.end_page = num_pages + 1 if hasattr(allocator, "size") else None
        self._alloc_pages: Callable[[int], Pages | None] | None = getattr(allocator, "alloc_pages", None)
        self._free_pages: Callable[[Pages], None] | None = getattr(allocator, "free_pages", None)

    @property
    def available(self) -> int:
        return self._allocator.available_size() // self._page_size

    def alloc(self, num_pages: int, /) -> Pages | None:
        if self._alloc_pages is not None:
            return self._alloc_pages(num_pages)
        slots = self._allocator.alloc(num_pages * self._page_size)
        return None if slots is None else pages_of(slots, self._page_size)

    def free(self, pages: Pages, /) -> None:
        if not len(pages):
            return
        if self._free_pages is not None:
            self._free_pages(pages)
        else:
            self._allocator.free(slots_of(pages, self._page_size, self._allocator.device))


class RowCopies:
    """int64 copies of running requests' rows. A copy grows in place, so a next chunk costs what is new."""

    def __init__(self) -> None:
        self._grown: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # rid: (the copy given, its buffer)

    def copy(self, rid: str, row: torch.Tensor, last: torch.Tensor | None, num_kept: int) -> torch.Tensor:
        """int64 [len(row)]: a copy of `row`. What was returned before keeps its first `num_kept` slots.

        last: what the request has as its copy. If that is the one given out last, `row` still has its first
        `num_kept` slots, and only the rest is read.
        """
        given, buffer = self._grown.get(rid, (None, None))
        length = len(row)
        if given is None or given is not last or buffer is None:
            buffer = row.to(torch.int64, copy=True)  # exactly as long: most requests never come back for more
        else:
            if len(buffer) < length:
                buffer, num_kept = buffer.new_empty(2 * length), 0
            buffer[num_kept:length] = row[num_kept:]
        copied = buffer[:length]
        self._grown[rid] = (copied, buffer)
        return copied

    def forget(self, rid: str) -> None:
        """The request has ended, or runs on other slots."""
        self._grown.pop(rid, None)

    def clear(self) -> None:
        self._grown.clear()

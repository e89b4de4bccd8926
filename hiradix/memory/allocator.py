"""Allocation of device memory: page allocator, its face in slots (SGLang's names), table of requests' slots.

All three belong to the scheduler thread and take no locks.
"""

from __future__ import annotations

from operator import index
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from hiradix.errors import ConfigError, Misuse
from hiradix.memory.upload import upload
from hiradix.tree import ids
from hiradix.tree.native import mypyc_attr

Pages = npt.NDArray[np.int32]


@mypyc_attr(allow_interpreted_subclasses=True)
class PageAllocator:
    """Page ids `first_page` .. `first_page + num_pages - 1`; a page is free or out, never both.

    What is out has one owner, who frees it once: the tree, a request or a transfer. Which of them is not
    known here, only that the id is out.

    A stack of free ids, so that recently used memory is used again; a fresh pool hands out ascending ids.
    `alloc` and `free` cost their own pages, not the pool, and what they return or take is never kept or
    shared.
    """

    def __init__(self, num_pages: SupportsIndex, first_page: SupportsIndex = 0) -> None:
        self.num_pages = index(num_pages)
        self.first_page = index(first_page)
        if self.num_pages < 1 or self.first_page < 0:
            raise ConfigError(f"page allocator: {self.num_pages} pages from page {self.first_page} on")
        self.clear()

    def clear(self) -> None:
        """Everything free again, ascending. Costs the pool."""
        self._free = np.arange(self.first_page + self.num_pages - 1, self.first_page - 1, -1, dtype=np.int32)
        self._num_free = self.num_pages
        self._out = np.zeros(self.first_page + self.num_pages, np.bool_)  # by id: whether it is handed out

    @property
    def available(self) -> int:
        return self._num_free

    @property
    def end_page(self) -> int:
        """One more than the largest page id."""
        return self.first_page + self.num_pages

    def alloc(self, num_pages: SupportsIndex) -> Pages | None:
        """int32 [num_pages], the caller's own array; None, and nothing taken, if fewer are free."""
        count = index(num_pages)
        if count < 0:
            raise Misuse(f"alloc of {count} pages")
        if count > self._num_free:
            return None
        pages = ids.take(self._free, self._num_free, count, self._out)
        self._num_free -= count
        return pages

    def free(self, pages: npt.ArrayLike) -> None:
        """Take pages back. Raises Misuse, with the ids and before any change, unless each is handed out and
        named once."""
        given = np.asarray(pages)
        if not ids.give(self._free, self._num_free, given, self._out):
            self._refuse(given)
        self._num_free += len(given)

    def _refuse(self, given: npt.NDArray[Any]) -> NoReturn:
        """Raise the assertion that says what is wrong with freeing these pages."""
        foreign = (given < self.first_page) | (given >= self.first_page + self.num_pages)
        if foreign.any():
            raise Misuse(f"free of foreign pages {_some(given[foreign])}: not in {self._span()}")
        _, first, where = np.unique(given, return_index=True, return_inverse=True)
        wrong = ~self._out[given] | (first[where] != np.arange(len(given)))
        free = f"{self._num_free} free of {self.num_pages}"
        raise Misuse(f"double free of pages {_some(given[wrong])}, {free}")

    def require_out(self, pages: list[int]) -> None:
        """Assert that each of these is handed out: what is asked of them is asked by who has them."""
        end, flags = len(self._out), self._out.data
        wrong = [page for page in pages if not 0 <= page < end or not flags[page]]
        if wrong:
            raise Misuse(f"pages {wrong[:16]} of {self._span()} are not handed out")

    def is_out(self, pages: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """A flag for each of these (own) pages: whether it is handed out."""
        return self._out[np.asarray(pages, np.int64)]

    def out_pages(self) -> Pages:
        """All pages handed out, ascending. Costs the pool; for checks."""
        return np.flatnonzero(self._out).astype(np.int32)

    def _span(self) -> str:
        return f"{self.first_page}..{self.first_page + self.num_pages - 1}"


@mypyc_attr(allow_interpreted_subclasses=True)
class SlotAllocator:
    """SGLang's token_to_kv_pool_allocator over our pages: slots of pages 1 .. num_tokens / page_size.

    num_tokens: rounded down to whole pages. kvcache: the device pool, handed out as it is.

    >>> slots = SlotAllocator(num_tokens=8, page_size=4)
    >>> given = slots.alloc(4)
    >>> len(given), slots.available_size(), slots.alloc(8)
    (4, 4, None)
    >>> slots.free(given[:1])  # any slot of a page frees it
    >>> slots.available_size()
    8
    """

    def __init__(
        self,
        num_tokens: SupportsIndex,
        page_size: SupportsIndex,
        device: torch.device | str = "cpu",
        kvcache: Any = None,
    ) -> None:
        self.page_size, size = index(page_size), index(num_tokens)
        if self.page_size < 1 or size < self.page_size:
            raise ConfigError(f"slot allocator: {size} tokens hold no page of {self.page_size}")
        self.pages = PageAllocator(size // self.page_size, first_page=1)
        self.size = self.pages.num_pages * self.page_size
        self.device = torch.device(device)
        self._is_cpu = self.device.type == "cpu"
        self._kvcache = kvcache

    def available_size(self) -> int:
        """Free tokens."""
        return self.pages.available * self.page_size

    def get_kvcache(self) -> Any:
        return self._kvcache

    def alloc(self, need_size: SupportsIndex) -> torch.Tensor | None:
        """int64 [need_size]: whole pages' slots, page after page; None if fewer are free."""
        count = index(need_size)
        if count % self.page_size != 0:
            raise Misuse(f"alloc of {count} slots in pages of {self.page_size}")
        pages = self.pages.alloc(count // self.page_size)
        if pages is None:
            return None
        found = torch.from_numpy(ids.slots_of(pages, self.page_size))
        return found if self._is_cpu else upload(found, self.device)

    def free(self, free_index: torch.Tensor) -> None:
        """Free every page that has a slot among these, once."""
        if free_index.numel():
            self.pages.free(np.unique(free_index.cpu().numpy() // self.page_size))

    def alloc_pages(self, num_pages: SupportsIndex) -> Pages | None:
        return self.pages.alloc(num_pages)

    def free_pages(self, pages: npt.ArrayLike) -> None:
        self.pages.free(pages)

    def clear(self) -> None:
        self.pages.clear()


@mypyc_attr(allow_interpreted_subclasses=True)
class ReqToTokenPool:
    """Each running request's slots: `req_to_token` int32 [size, max_context_len] on `device`, a row each."""

    def __init__(
        self, size: SupportsIndex, max_context_len: SupportsIndex, device: torch.device | str = "cpu"
    ) -> None:
        self.size = index(size)
        self.max_context_len = index(max_context_len)
        if self.size < 1 or self.max_context_len < 1:
            raise ConfigError(f"request table: {self.size} requests of {self.max_context_len} tokens")
        self.device = torch.device(device)
        shape = (self.size, self.max_context_len)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.clear()

    def clear(self) -> None:
        """All rows free; their contents stay until overwritten."""
        self.free_slots = list(range(self.size - 1, -1, -1))
        self._out: set[int] = set()

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, need_size: SupportsIndex) -> list[int] | None:
        """Rows for `need_size` requests; None, and nothing taken, if fewer are free."""
        count = index(need_size)
        if count < 0:
            raise Misuse(f"alloc of {count} request rows")
        if count > len(self.free_slots):
            return None
        rows = [self.free_slots.pop() for _ in range(count)]
        self._out.update(rows)
        return rows

    def free(self, free_index: Any) -> None:
        """Take rows back, one or several. Misuse, before any change, unless each is out and named once."""
        given = [free_index] if isinstance(free_index, (int, np.integer)) else free_index
        rows = [index(row) for row in given]
        if len(set(rows)) != len(rows):
            raise Misuse(f"free of request rows {rows[:16]}, one of them twice")
        for row in rows:
            if row not in self._out:
                raise Misuse(f"free of request row {row}, out are {sorted(self._out)[:16]}")
        for row in rows:
            self._out.remove(row)
            self.free_slots.append(row)

    def write(self, indices: Any, values: torch.Tensor) -> None:
        """Set `req_to_token[indices]` to `values`; `indices` is any index a tensor takes, such as (row,
        slice(a, b))."""
        self.req_to_token[indices] = values


def _some(ids: npt.NDArray[Any]) -> str:
    """The first few ids, for a message."""
    return f"{ids[:16].tolist()}{' ...' if len(ids) > 16 else ''}"

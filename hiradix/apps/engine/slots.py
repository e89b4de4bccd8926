"""Device slots for running requests: taken from the allocator, or from the prefix cache when that is short.

A model with windows has two pools. Full slots are taken as in any model. A window page is opened beside a
full page only when its tokens are about to be computed, and given back once the window has passed it, so a
request holds about a window and a chunk of them, however long it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hiradix.memory import HybridSlotAllocator, SlotAllocator
from hiradix.prefix_cache import EvictParams

if TYPE_CHECKING:
    from hiradix.apps.engine.session_ends import SessionEnds
    from hiradix.prefix_cache import PrefixCache

Allocator = SlotAllocator | HybridSlotAllocator


class SlotSupply:
    """The allocator and the cache behind it, as one supply. Sizes are in tokens.

    ends: what leaves the cache before the eviction policy chooses, and what stays if it can.
    """

    def __init__(self, cache: PrefixCache, allocator: Allocator, page_size: int, ends: SessionEnds):
        self._cache = cache
        self._allocator = allocator
        self._hybrid = allocator if isinstance(allocator, HybridSlotAllocator) else None
        self._page_size = page_size
        self._ends = ends

    @property
    def has_windows(self) -> bool:
        return self._hybrid is not None

    @property
    def room(self) -> int:
        """Tokens that are free or can be made so."""
        return free_tokens(self._allocator) + self._cache.full_evictable_size()

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Slots of whole pages, evicting when short; None when that is not enough. No window pages."""
        short = num_tokens - free_tokens(self._allocator)
        if short > 0:
            self._ends.drop_first(short)
            short = num_tokens - free_tokens(self._allocator)
        if short > 0:
            with self._ends.keeping():
                self._cache.evict(EvictParams(num_tokens=short))
            short = num_tokens - free_tokens(self._allocator)
        if short > 0:
            self._cache.evict(EvictParams(num_tokens=short))
        if self._hybrid is None:
            return self._allocator.alloc(num_tokens)
        return self._hybrid.alloc_full(num_tokens)

    def free(self, slots: torch.Tensor) -> None:
        """Give slots back, and the window pages beside them."""
        self._allocator.free(slots)

    def open_windows(self, row: torch.Tensor) -> bool:
        """See that these slots' pages have window pages, evicting when short. False: no page was opened."""
        if self._hybrid is None:
            return True
        slots = row.to(torch.int64)
        if self._hybrid.open_windows(slots):
            return True
        short = self._hybrid.missing_windows(slots) - self._hybrid.swa_available_size()
        self._cache.evict(EvictParams(num_tokens=0, swa_num_tokens=short))
        return self._hybrid.open_windows(slots)

    def close_windows(self, row: torch.Tensor) -> None:
        """Give the window pages beside these slots back."""
        if self._hybrid is not None and len(row):
            self._hybrid.free_swa(row.to(torch.int64))


def free_tokens(allocator: Allocator) -> int:
    """Full tokens nobody has."""
    if isinstance(allocator, HybridSlotAllocator):
        return allocator.full_available_size()
    return int(allocator.available_size())


def num_tokens(allocator: Allocator) -> int:
    """Full tokens in all."""
    return allocator.size_full if isinstance(allocator, HybridSlotAllocator) else allocator.size

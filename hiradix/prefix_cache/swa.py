"""SWARadixCache: the drop-in prefix cache for models that mix full attention and sliding windows.

A request's table has full slots; the allocator's map gives the window slots beside them. To the tree both
are page ids of their own, so a prefix may keep its full pages after its window pages have gone, and gets
them back from the next request that computes it.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from hiradix.cache import PageSource
from hiradix.errors import ConfigError
from hiradix.policy.uses import Finished
from hiradix.prefix_cache.hiradix import HiRadixCache
from hiradix.prefix_cache.hybrid import HybridRadixCache
from hiradix.prefix_cache.records import (
    WINDOW,
    CacheInitParams,
    EvictParams,
    EvictResult,
    HybridAllocatorLike,
    InsertParams,
)
from hiradix.prefix_cache.slots import Pages, SlotPages
from hiradix.prefix_cache.window_pages import FullPages, WindowPages
from hiradix.tree import DEVICE, Component, Lock, Node, RadixKey

_SURFACE = ("full_to_swa_index_mapping", "full_attn_allocator", "swa_attn_allocator", "free_swa")


class SWARadixCache(HybridRadixCache):
    """Caches prefixes whose window layers keep the last tokens only. The plain size methods speak of full
    tokens, as the `full_` ones do.

    >>> from hiradix.memory import HybridSlotAllocator, ReqToTokenPool
    >>> from hiradix.prefix_cache import MatchPrefixParams
    >>> slots = HybridSlotAllocator(64, 32, page_size=4)
    >>> rows = ReqToTokenPool(8, 64)
    >>> cache = SWARadixCache(CacheInitParams(False, rows, slots, page_size=4, sliding_window_size=8))
    >>> key = RadixKey(list(range(16)))
    >>> cache.insert(InsertParams(key, slots.alloc(16))), cache.total_size()  # with full, with window data
    (InsertResult(prefix_len=0), (16, 16))
    >>> cache.evict(EvictParams(num_tokens=0, swa_num_tokens=8)).swa_num_tokens_evicted
    8
    >>> len(cache.match_prefix(MatchPrefixParams(key)).device_indices)  # the last 8 tokens' window is there
    16
    """

    token_to_kv_pool_allocator: HybridAllocatorLike

    def _make_pages(self, params: CacheInitParams) -> SlotPages:
        if not params.sliding_window_size or params.sliding_window_size < 1:
            raise ConfigError(f"sliding_window_size: {params.sliding_window_size}, needed by SWARadixCache")
        allocator = params.token_to_kv_pool_allocator
        if lacking := [name for name in _SURFACE if not hasattr(allocator, name)]:
            raise ConfigError(f"token_to_kv_pool_allocator: a hybrid one is needed, this has no {lacking}")
        self.sliding_window_size = params.sliding_window_size
        hybrid = cast(HybridAllocatorLike, allocator)
        self._window_pages = WindowPages(hybrid, params.page_size)
        return FullPages(hybrid, params.page_size)

    def _further(self, params: CacheInitParams) -> tuple[Component, PageSource]:
        reach = -(-self.sliding_window_size // params.page_size)
        return Component("window", reach), self._window_pages

    # -- sizes --------------------------------------------------------------------------

    def swa_evictable_size(self) -> int:
        """Device tokens whose window data no request holds."""
        return self.tree.evictable_pages(DEVICE, WINDOW) * self.page_size

    def swa_protected_size(self) -> int:
        """Device tokens whose window data a request or a transfer holds."""
        return self.tree.protected_pages(DEVICE, WINDOW) * self.page_size

    def total_size(self) -> tuple[int, int]:  # type: ignore[override]
        """Device tokens in the tree: with full data, and with window data."""
        resident = [self.tree.resident_pages(DEVICE, component) for component in (0, WINDOW)]
        return resident[0] * self.page_size, resident[1] * self.page_size

    def supports_swa(self) -> bool:
        return True

    def available_and_evictable_str(self) -> str:
        """Two lines for an out-of-memory message."""
        allocator = self.token_to_kv_pool_allocator
        full, window = allocator.full_available_size(), allocator.swa_available_size()
        full_evictable, swa_evictable = self.full_evictable_size(), self.swa_evictable_size()
        return (
            f"Available full tokens: {full + full_evictable} "
            f"(full_available_size={full} + {full_evictable=})\n"
            f"Available swa tokens: {window + swa_evictable} "
            f"(swa_available_size={window} + {swa_evictable=})\n"
        )

    # -- writing ------------------------------------------------------------------------

    def _insert(self, key: RadixKey, pages: Pages, params: InsertParams, ended: Finished | None) -> Lock:
        return self.insert_pages(key, pages, None, ended)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least so many full and so many window tokens, or all that nothing holds.

        Full pages take the window pages beside them along. Window pages leave the full pages where some
        match can still use them.
        """
        if self.disable:
            return EvictResult()
        size = self.page_size
        full, window = self._evicted(-(-params.num_tokens // size), 0)
        more = self._evicted(-(-params.swa_num_tokens // size) - window, WINDOW)
        return EvictResult((full + more[0]) * size, (window + more[1]) * size)

    def insert_pages(
        self, key: RadixKey, pages: Pages, held: Lock | None, ended: Finished | None = None
    ) -> Lock:
        """Insert full pages and, of the window pages beside them, the last run without a gap."""
        if self.cache.is_blocked(key):
            return self.cache.insert(key, pages, at=held)
        window = self._window_pages.beside(pages)
        gaps = np.flatnonzero(window == 0)
        first = int(gaps[-1]) + 1 if len(gaps) else 0
        lock = self.cache.insert(key, pages, at=held, others=(window[first:],), ended=ended)
        if window[:first].any():
            self._free_strays(lock.node, lock.node.end - len(pages), window[:first])
        return lock

    def _free_strays(self, node: Node, start: int, window: Pages) -> None:
        """Free those of the window pages from page `start` of the path on that the tree does not hold."""
        held = self._held_pages(node, start, len(window), WINDOW)
        self._window_pages.free(window[(window > 0) & (window != held)])


class SWAHiRadixCache(SWARadixCache, HiRadixCache):
    """`SWARadixCache` with a host tier and storage: full and window pages come back from there at once."""

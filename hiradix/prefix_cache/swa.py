"""SWARadixCache: the drop-in prefix cache for models that mix full attention and sliding windows.

A request's table has full slots; the allocator's map gives the window slots beside them. To the tree both
are page ids of their own, so a prefix may keep its full pages after its window pages have gone, and gets
them back from the next request that computes it.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from hiradix.cache import HierarchicalCache, HostTier
from hiradix.errors import ConfigError
from hiradix.policy.eviction import make_order
from hiradix.policy.uses import Finished
from hiradix.prefix_cache.hiradix import HiRadixCache
from hiradix.prefix_cache.radix import RadixCache
from hiradix.prefix_cache.records import (
    WINDOW,
    CacheInitParams,
    EvictParams,
    EvictResult,
    HybridAllocatorLike,
    InsertParams,
    InsertResult,
    LockReceipt,
    RequestLike,
)
from hiradix.prefix_cache.slots import Pages, SlotPages, pages_of
from hiradix.prefix_cache.window_pages import FullPages, WindowPages
from hiradix.tree import DEVICE, FULL, Component, DeadLeaf, Lock, Match, Node, RadixKey, RadixTree

_SURFACE = ("full_to_swa_index_mapping", "full_attn_allocator", "swa_attn_allocator", "free_swa")


class SWARadixCache(RadixCache):
    """See the module's docstring. The plain size methods speak of full tokens, as the `full_` ones do.

    A request keeps its lock's receipt, what `inc_lock_ref` gave, in `swa_uuid_for_lock`, as in upstream.
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

    def _make_cache(self, params: CacheInitParams, host: HostTier | None) -> HierarchicalCache:
        reach = -(-self.sliding_window_size // params.page_size)
        order = make_order(params.eviction_policy, params.eviction_policy_config)
        components = (FULL, Component("window", reach))
        tree = RadixTree(params.page_size, components, order=order, dead_leaf=DeadLeaf.UNUSABLE)
        return HierarchicalCache(tree, (self._pages, self._window_pages), host, agree=params.agree)

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

    def split_match(self, node: Node) -> Match:
        """`node` as a match: the deepest usable boundaries at or above it."""
        return self.tree.boundaries(self.tree.current(node) or self.tree.root)

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

    # -- locks --------------------------------------------------------------------------

    def dec_lock_ref(self, node: Node | LockReceipt, swa_uuid_for_lock: Any = None) -> int:
        """Undo the `inc_lock_ref` that gave the receipt, either argument. Returns full tokens freed up."""
        receipt = node if isinstance(node, LockReceipt) else swa_uuid_for_lock
        assert isinstance(receipt, LockReceipt), f"unlock of {node} without the receipt of its lock"
        return super().dec_lock_ref(receipt)

    def _held(self, req: RequestLike) -> Lock:
        receipt = getattr(req, "swa_uuid_for_lock", None)
        assert isinstance(receipt, LockReceipt), f"request {req.rid}: swa_uuid_for_lock is {receipt}"
        return receipt.lock

    def _hold(self, req: RequestLike, lock: Lock) -> None:
        super()._hold(req, lock)
        req.swa_uuid_for_lock = LockReceipt(lock)  # type: ignore[attr-defined]

    # -- writing ------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Give `params.value` to the tree where it has nothing; free the rest but for `prev_prefix_len`."""
        key = self._view(params.key).page_aligned(self.page_size)
        if self.disable or len(key) == 0:
            return InsertResult(0)
        num_before = self.tree.resident_pages(DEVICE)
        start = params.prev_prefix_len // self.page_size * self.page_size
        pages = pages_of(params.value, self.page_size, start, len(key))
        ended = None if params.chunked else Finished(len(key), 0)
        self.tree.unlock(self.insert_pages(key, pages, None, ended))
        num_new = (self.tree.resident_pages(DEVICE) - num_before) * self.page_size
        return InsertResult(len(key) - num_new)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least so many full and so many window tokens, or all that nothing holds.

        Full pages take the window pages beside them along. Window pages leave the full pages where some
        match can still use them.
        """
        if self.disable:
            return EvictResult()
        dropped, size = self.cache.supply.num_dropped, self.page_size
        full, window = dropped
        if params.num_tokens > 0:
            self.cache.evict(-(-params.num_tokens // size))
        missing = -(-params.swa_num_tokens // size) - (dropped[WINDOW] - window)
        if missing > 0:
            self.cache.evict(missing, WINDOW)
        return EvictResult((dropped[0] - full) * size, (dropped[WINDOW] - window) * size)

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
        held = np.zeros_like(window)
        for n in self.tree.path(node):
            own = n.residency(WINDOW, DEVICE).pages
            if own is not None and n.start < start + len(window) and n.end > start:
                lo, hi = max(n.start, start), min(n.end, start + len(window))
                held[lo - start : hi - start] = own[lo - n.start : hi - n.start]
        self._window_pages.free(window[(window > 0) & (window != held)])


class SWAHiRadixCache(SWARadixCache, HiRadixCache):
    """`SWARadixCache` with a host tier and storage: full and window pages come back from there at once."""

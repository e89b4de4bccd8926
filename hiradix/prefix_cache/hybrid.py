"""What prefix caches have in common whose tree has a component beside full attention."""

from __future__ import annotations

from abc import abstractmethod
from operator import index
from typing import Any

import numpy as np

from hiradix.cache import HierarchicalCache, HostTier, PageSource
from hiradix.errors import Misuse
from hiradix.policy.eviction import make_order
from hiradix.policy.uses import Finished
from hiradix.prefix_cache.radix import RadixCache
from hiradix.prefix_cache.records import (
    CacheInitParams,
    InsertParams,
    InsertResult,
    LockReceipt,
    RequestLike,
)
from hiradix.prefix_cache.slots import Pages, pages_of
from hiradix.tree import BACKBONE, DEVICE, FULL, Component, DeadLeaf, Lock, Match, Node, RadixKey, RadixTree


class HybridRadixCache(RadixCache):
    """A prefix cache over full attention and one further component.

    A request keeps its lock's receipt, what `inc_lock_ref` gave, in `swa_uuid_for_lock`, as in upstream.
    """

    @abstractmethod
    def _further(self, params: CacheInitParams) -> tuple[Component, PageSource]:
        """The component beside full attention, and its device pages."""

    def _make_cache(self, params: CacheInitParams, host: HostTier | None) -> HierarchicalCache:
        order = make_order(params.eviction_policy, params.eviction_policy_config)
        component, pages = self._further(params)
        tree = RadixTree(self.page_size, (FULL, component), order=order, dead_leaf=DeadLeaf.UNUSABLE)
        return HierarchicalCache(tree, (self._pages, pages), host, agree=params.agree)

    def split_match(self, node: Node) -> Match:
        """`node` as a match: the deepest usable boundaries at or above it."""
        return self.tree.boundaries(self.tree.current(node) or self.tree.root)

    def insert(self, params: InsertParams) -> InsertResult:
        """Give `params.value` to the tree where it has nothing; free the rest but for `prev_prefix_len`."""
        key = self._view(params.key).page_aligned(self.page_size)
        if self.disable or len(key) == 0:
            return InsertResult(0)
        start = index(params.prev_prefix_len) // self.page_size
        pages = pages_of(params.value, self.page_size, start * self.page_size, len(key))
        if self.cache.is_blocked(key):
            held = self._held_pages(self.tree.find(key), start, len(pages))
            self._free_refused(pages[pages != held], params)
            return InsertResult(len(key))
        num_before = self._num_given()
        ended = None if params.chunked else Finished(len(key), 0)
        lock = self._insert(key, pages, params, ended)
        self.tree.prioritise(lock, params.priority or 0)
        self.tree.unlock(lock)
        return InsertResult(len(key) - (self._num_given() - num_before) * self.page_size)

    def _num_given(self) -> int:
        """Device pages that the tree has, or had and dropped."""
        return self.tree.resident_pages(DEVICE) + self.cache.supply.num_dropped[BACKBONE]

    def _held_pages(self, node: Node, start: int, num_pages: int, component: int = BACKBONE) -> Pages:
        """int32 [num_pages]: the tree's device pages of the path of `node` from page `start` on; 0: none."""
        held = np.zeros(num_pages, np.int32)
        for n in self.tree.path(node):
            own = n.residency(component, DEVICE).pages
            if own is not None and n.start < start + num_pages and n.end > start:
                lo, hi = max(n.start, start), min(n.end, start + num_pages)
                held[lo - start : hi - start] = own[lo - n.start : hi - n.start]
        return held

    def _free_refused(self, pages: Pages, params: InsertParams) -> None:
        """Free full pages that may not be inserted, and what came with them."""
        self._pages.free(pages)

    @abstractmethod
    def _insert(self, key: RadixKey, pages: Pages, params: InsertParams, ended: Finished | None) -> Lock:
        """Insert full pages, the last of `key`, and what of the other component comes with them."""

    def _evicted(self, num_pages: int, component: int) -> tuple[int, int]:
        """Evict so many pages of `component`: how many full pages, and of the other component, went."""
        dropped = self.cache.supply.num_dropped
        full, other = dropped
        if num_pages > 0:
            self.cache.evict(index(num_pages), component)
        return dropped[0] - full, dropped[1] - other

    # -- locks --------------------------------------------------------------------------

    def dec_lock_ref(self, node: Node | LockReceipt, swa_uuid_for_lock: Any = None) -> int:
        """Undo the `inc_lock_ref` that gave the receipt, either argument. Returns full tokens freed up."""
        receipt = node if isinstance(node, LockReceipt) else swa_uuid_for_lock
        if not isinstance(receipt, LockReceipt):
            raise Misuse(f"unlock of {node} without the receipt of its lock")
        return super().dec_lock_ref(receipt)

    def _held(self, req: RequestLike) -> Lock:
        receipt = getattr(req, "swa_uuid_for_lock", None)
        if not isinstance(receipt, LockReceipt):
            raise Misuse(f"request {req.rid}: swa_uuid_for_lock is {receipt}")
        return receipt.lock

    def _hold(self, req: RequestLike, lock: Lock) -> None:
        super()._hold(req, lock)
        req.swa_uuid_for_lock = LockReceipt(lock)  # type: ignore[attr-defined]

"""Sizes, checks and texts of a prefix cache: what one may ask of it without changing it."""

from __future__ import annotations

from dataclasses import asdict, fields
from operator import index
from typing import Any, SupportsIndex

import torch

from hiradix.cache import HierarchicalCache
from hiradix.prefix_cache.lower_tiers import NoLowerTiers
from hiradix.prefix_cache.records import STATE, WINDOW, CacheStats, PoolStats, SlotAllocatorLike
from hiradix.prefix_cache.slots import SlotPages, slots_of
from hiradix.storage import Stores
from hiradix.tree import BACKBONE, Node, RadixTree, Tier
from hiradix.tree.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Figures(NoLowerTiers):
    """The reading half of `RadixCache`. Sizes are in tokens."""

    cache: HierarchicalCache
    tree: RadixTree  # the cache's
    page_size: int
    disable: bool
    device: Any
    token_to_kv_pool_allocator: SlotAllocatorLike
    _pages: SlotPages

    @property
    def root_node(self) -> Node:
        return self.cache.tree.root

    # -- sizes --------------------------------------------------------------------------

    def evictable_size(self) -> int:
        """Device tokens no request holds."""
        return self.tree.evictable_pages(Tier.DEVICE) * self.page_size

    def protected_size(self) -> int:
        """Device tokens in the tree that a request or a transfer holds."""
        return self.tree.protected_pages(Tier.DEVICE) * self.page_size

    def total_size(self) -> int:
        """Device tokens in the tree."""
        return self.tree.resident_pages(Tier.DEVICE) * self.page_size

    def full_evictable_size(self) -> int:
        return self.evictable_size()

    def full_protected_size(self) -> int:
        return self.protected_size()

    def swa_evictable_size(self) -> int:
        return 0

    def swa_protected_size(self) -> int:
        return 0

    def all_values_flatten(self) -> torch.Tensor:
        """int64 [total tokens]: every device slot in the tree. O(tree); for leak hunts."""
        return slots_of(self.tree.all_pages(Tier.DEVICE), self.page_size, self.device)

    # -- kinds --------------------------------------------------------------------------

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def is_chunk_cache(self) -> bool:
        return self.disable

    def is_tree_cache(self) -> bool:
        return not self.disable

    # -- for people and metrics ---------------------------------------------------------

    def pretty_print(self) -> None:
        """Print the tree: tokens, tiers, locks, hits."""
        print(self.tree.render())

    def available_and_evictable_str(self) -> str:
        """One line for an out-of-memory message."""
        free, evictable = self.token_to_kv_pool_allocator.available_size(), self.evictable_size()
        return f"Available tokens: {free + evictable} (available_size={free} + evictable_size={evictable})\n"

    def stats(self) -> CacheStats:
        """A snapshot for metrics. O(1)."""
        return self._stats(None, None)

    def _stats(self, storage_name: str | None, storage: Stores | None) -> CacheStats:
        size, counters = self.page_size, self.cache.counters
        total = {f.name: getattr(counters, f.name) for f in fields(counters)}
        unfulfilled = total.pop("unfulfilled")
        controller = self.cache.controller
        return CacheStats(
            **asdict(self._pool_stats(BACKBONE, size)),
            unfulfilled={reason: count * size for reason, count in unfulfilled.items()},
            num_in_flight=len(self.cache.flights),
            storage_attached=storage is not None,
            storage_backend=storage_name,
            storage=dict(storage.stats()) if storage is not None else {},
            transfers=controller.stats() if controller is not None else None,
            window=self._stats_beside(per_page=True),
            state=self._stats_beside(per_page=False),
            **{name: count * size for name, count in total.items()},
        )

    def _stats_beside(self, *, per_page: bool) -> PoolStats | None:
        """Of the component beside full attention, if there is one of this kind."""
        further = self.tree.components[1:]
        if not further or further[0].per_page != per_page:
            return None
        return self._pool_stats(WINDOW, self.page_size) if per_page else self._pool_stats(STATE, 1)

    def _pool_stats(self, component: int, size: int) -> PoolStats:
        """In pages of `size` tokens, or records of 1."""
        tree, supply = self.tree, self.cache.supply
        device = supply.device_pools[component]
        host = supply.host_pools[component] if supply.host_pools else None
        return PoolStats(
            device_total=device.num_pages * size,
            device_available=device.available * size,
            device_evictable=tree.evictable_pages(Tier.DEVICE, component) * size,
            device_protected=tree.protected_pages(Tier.DEVICE, component) * size,
            host_total=host.num_pages * size if host else 0,
            host_used=(host.num_pages - host.available) * size if host else 0,
        )

    def check_conservation(self, num_held: SupportsIndex) -> None:
        """Assert that no slot is lost or counted twice, in either tier; cheap enough for every step. O(1).

        num_held: tokens of the whole pages that requests have and the tree has not: what is allocated to them
        from `cache_protected_len` on. Between steps.
        """
        self.cache.supply.check_conservation(index(num_held) // self.page_size, self.cache.flights.num_owned)

    def check(self) -> None:
        """Assert all invariants, O(tree)."""
        self.cache.check()

    def sanity_check(self) -> None:
        self.check()

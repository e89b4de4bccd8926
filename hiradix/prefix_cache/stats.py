"""A snapshot of a prefix cache for logs and metrics: sizes, counts and transfers, in tokens."""

from __future__ import annotations

from dataclasses import asdict, fields

from hiradix.cache import HierarchicalCache
from hiradix.prefix_cache.attached import AttachedStorage
from hiradix.prefix_cache.kinds import AttentionKind
from hiradix.prefix_cache.records import STATE, WINDOW, CacheStats, PoolStats
from hiradix.tree import BACKBONE, DEVICE


def stats_of(
    cache: HierarchicalCache, page_size: int, beside: AttentionKind | None, attached: AttachedStorage | None
) -> CacheStats:
    """A snapshot for metrics. O(1), but for what is held for requests that wait: O(its nodes)."""
    total = {f.name: getattr(cache.counters, f.name) for f in fields(cache.counters)}
    unfulfilled = total.pop("unfulfilled")
    storage = None if attached is None else attached.storage
    window = state = None
    if beside is not None and beside.component.per_page:
        window = _pool_stats(cache, WINDOW, beside.unit)
    elif beside is not None:
        state = _pool_stats(cache, STATE, beside.unit)
    prefetcher = cache.prefetcher
    return CacheStats(
        **asdict(_pool_stats(cache, BACKBONE, page_size)),
        intents=cache.intents.stats(),
        window=window,
        state=state,
        unfulfilled={reason: count * page_size for reason, count in unfulfilled.items()},
        waiting_reserved=0 if prefetcher is None else prefetcher.room.reserved_pages()[BACKBONE] * page_size,
        waiting_cap=0 if prefetcher is None else prefetcher.caps[BACKBONE] * page_size,
        num_waiting_for_room=0 if prefetcher is None else prefetcher.room.num_short,
        num_in_flight=len(cache.in_flight),
        storage_attached=storage is not None,
        storage_backend=None if attached is None else attached.name,
        storage=dict(storage.stats()) if storage is not None else {},
        transfers=cache.controller.stats() if cache.controller is not None else None,
        **{name: count * page_size for name, count in total.items()},
    )


def _pool_stats(cache: HierarchicalCache, component: int, size: int) -> PoolStats:
    """The figures of one component's pools, in pages of `size` tokens, or records of 1."""
    tree, supply = cache.tree, cache.supply
    device = supply.device_pools[component]
    host = supply.host_pools[component] if supply.host_pools else None
    return PoolStats(
        device_total=device.num_pages * size,
        device_available=device.available * size,
        device_evictable=tree.evictable_pages(DEVICE, component) * size,
        device_protected=tree.protected_pages(DEVICE, component) * size,
        host_total=host.num_pages * size if host else 0,
        host_used=(host.num_pages - host.available) * size if host else 0,
    )

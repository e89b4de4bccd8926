"""Puts a prefix cache together from a configuration and an engine's device pool."""

from __future__ import annotations

from hiradix.config import HiCacheConfig
from hiradix.errors import ConfigError
from hiradix.memory import DevicePool, HybridPools
from hiradix.prefix_cache.cache import PrefixCache
from hiradix.prefix_cache.identity import ModelIdentity
from hiradix.prefix_cache.lower_tiers import hybrid_tiers, lower_tiers
from hiradix.prefix_cache.names import (
    HiRadixCache,
    RadixCache,
    StateHiRadixCache,
    StateRadixCache,
    SWAHiRadixCache,
    SWARadixCache,
)
from hiradix.prefix_cache.records import CacheInitParams
from hiradix.prefix_cache.upstream import cache_params
from hiradix.transfer import Runtime


def build_prefix_cache(
    config: HiCacheConfig,
    params: CacheInitParams,
    device_pool: DevicePool,
    model: ModelIdentity,
    runtime: Runtime | None = None,
) -> PrefixCache:
    """A `HiRadixCache` when the hierarchical cache is on, else a `RadixCache`; never reuses when disabled.

    device_pool: the pool behind `params.token_to_kv_pool_allocator`. runtime: what runs the transfers, for
    engines with streams of their own. Allocates the host pool and starts the transfer threads: `close()` ends
    them. Raises ConfigError naming the flag, with nothing left behind.

    >>> import torch
    >>> from hiradix.memory import KVShape, ReqToTokenPool, SlotAllocator
    >>> shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=2, v_head_dim=2, dtype=torch.float32)
    >>> pool = DevicePool(shape, num_pages=8, page_size=4)
    >>> slots = SlotAllocator(num_tokens=32, page_size=4, device="cpu", kvcache=pool)
    >>> params = CacheInitParams(False, ReqToTokenPool(8, 32), slots, page_size=4)
    >>> config = HiCacheConfig(page_size=4, enable_hierarchical_cache=True, hicache_ratio=3.0)
    >>> cache = build_prefix_cache(config, params, pool, ModelIdentity("my-model"))
    >>> type(cache).__name__, cache.stats().device_total, cache.stats().host_total  # tokens
    ('HiRadixCache', 32, 96)
    >>> cache.close()
    >>> build_prefix_cache(HiCacheConfig(page_size=16), params, pool, ModelIdentity("my-model"))
    Traceback (most recent call last):
    hiradix.errors.ConfigError: --page-size 16: the allocator's page size is 4
    """
    config, params = _checked(config, params)
    if params.disable or not config.enable_hierarchical_cache:
        return RadixCache(params)
    tiers = lower_tiers(config, params, device_pool, model, runtime)
    cache = HiRadixCache(params, host=tiers.host, storage_factory=tiers.storage)
    tiers.attach_to(cache)
    return cache


def build_hybrid_cache(
    config: HiCacheConfig,
    params: CacheInitParams,
    pools: HybridPools,
    model: ModelIdentity,
    runtime: Runtime | None = None,
) -> PrefixCache:
    """Build the cache of a model that mixes kinds of layers; otherwise like `build_prefix_cache`.

    pools: those behind `params.token_to_kv_pool_allocator`, and with recurrent states `params.state_records`.
    """
    config, params = _checked(config, params)
    has_states = params.state_records is not None
    if params.disable or not config.enable_hierarchical_cache:
        return StateRadixCache(params) if has_states else SWARadixCache(params)
    tiers = hybrid_tiers(config, params, pools, model, runtime)
    kind = StateHiRadixCache if has_states else SWAHiRadixCache
    cache = kind(params, host=tiers.host, storage_factory=tiers.storage)
    tiers.attach_to(cache)
    return cache


def _checked(config: HiCacheConfig, params: CacheInitParams) -> tuple[HiCacheConfig, CacheInitParams]:
    if params.page_size != config.page_size:
        raise ConfigError(f"--page-size {config.page_size}: the allocator's page size is {params.page_size}")
    return config.normalised(), cache_params(params)

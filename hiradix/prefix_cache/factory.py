"""Puts a prefix cache together from a configuration and an engine's device pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hiradix.cache import HostTier, PageSource
from hiradix.config import ExtraConfig, HiCacheConfig
from hiradix.errors import ConfigError
from hiradix.memory import (
    DevicePool,
    HostPool,
    HybridPools,
    PageAllocator,
    make_transport,
    page_bytes,
    size_host_pool,
    size_host_pools,
)
from hiradix.policy.prefetch_policy import PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.prefix_cache.attached import StorageFactory, prefetch_limits
from hiradix.prefix_cache.cache import PrefixCache
from hiradix.prefix_cache.identity import (
    STATE_NAME,
    ModelIdentity,
    component_name,
    is_replicated,
    stored_pages,
)
from hiradix.prefix_cache.names import (
    HiRadixCache,
    RadixCache,
    StateHiRadixCache,
    StateRadixCache,
    SWAHiRadixCache,
    SWARadixCache,
)
from hiradix.prefix_cache.records import CacheInitParams
from hiradix.storage import (
    ComponentPages,
    Stores,
    StoreSettings,
    Trust,
    Witness,
    open_stores,
    trust_of,
    trusted_stores,
    whole_key,
)
from hiradix.transfer import Copy, HiCacheController, PoolPair, Runtime
from hiradix.transfer.jobs import BACKBONE_PAIR, NO_PAGES
from hiradix.tree import Pages

WITNESS_S = 60.0  # longest that the copy of one page is waited for at start


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
    config = config.normalised()
    if params.page_size != config.page_size:
        raise ConfigError(f"--page-size {config.page_size}: the allocator's page size is {params.page_size}")
    if params.disable or not config.enable_hierarchical_cache:
        return RadixCache(params)
    host_pool = _host_pool(config, device_pool, _ranks_on_host(params, model))
    host = _host_tier(config, device_pool, host_pool, runtime)
    if is_replicated(host_pool):  # one of the ranks stores for all
        host.controller.backs_up = model.tp_rank == 0
    stored = stored_pages(model, host_pool, config.hicache_mem_layout)
    witness = _witness(params, host.controller, [host_pool])
    trust = _trust(config, params, witness, stores=host.controller.backs_up)
    cache = HiRadixCache(params, host, NamedStorage([stored], trust))
    cache.attached.served_model_name = model.model_id
    _attach(cache, config)
    return cache


def build_hybrid_cache(
    config: HiCacheConfig,
    params: CacheInitParams,
    pools: HybridPools,
    model: ModelIdentity,
    runtime: Runtime | None = None,
) -> PrefixCache:
    """As `build_prefix_cache` for models that mix kinds of layers.

    pools: those behind `params.token_to_kv_pool_allocator`, and with recurrent states `params.state_records`.
    """
    config, kind = config.normalised(), _kind(params)
    if params.page_size != config.page_size:
        raise ConfigError(f"--page-size {config.page_size}: the allocator's page size is {params.page_size}")
    if params.disable or not config.enable_hierarchical_cache:
        return kind.on_device(params)
    hosts = _hybrid_hosts(config, pools, _ranks_on_host(params, model))
    pairs = [
        PoolPair(pool, host, make_transport(config.hicache_io_backend, pool.device, (pool, host)), layers)
        for pool, host, layers in zip(
            (pools.full, pools.other), hosts, (pools.full_layers, pools.other_layers), strict=True
        )
    ]
    sources = tuple(PageAllocator(host.num_pages) for host in hosts)
    tier = _tier(config, sources, HiCacheController.over(pairs, runtime))
    stored = [
        stored_pages(model, host, config.hicache_mem_layout, name, config.page_size, layers)
        for host, name, layers in zip(
            hosts,
            (component_name(None), kind.name),
            (pools.full_layers, pools.other_layers),
            strict=True,
        )
    ]
    witness = _witness(params, tier.controller, hosts)
    cache = kind.tiered(params, tier, NamedStorage(stored, _trust(config, params, witness)))
    cache.attached.served_model_name = model.model_id
    _attach(cache, config)
    return cache


@dataclass(frozen=True)
class _Kind:
    """The classes for a kind of component beside full attention, and what storage calls its pages."""

    on_device: Callable[[CacheInitParams], PrefixCache]
    tiered: Callable[[CacheInitParams, HostTier, StorageFactory], PrefixCache]
    name: str


def _kind(params: CacheInitParams) -> _Kind:
    if params.state_records is not None:
        return _Kind(StateRadixCache, StateHiRadixCache, STATE_NAME)
    return _Kind(SWARadixCache, SWAHiRadixCache, component_name(params.sliding_window_size))


def _hybrid_hosts(config: HiCacheConfig, pools: HybridPools, num_ranks: int) -> list[HostPool]:
    """A host pool for each of the device pools."""
    devices = (pools.full, pools.other)
    bytes_of = [page_bytes(pool.shape, pool.page_size) for pool in devices]
    counts = size_host_pools(bytes_of, [pool.num_pages for pool in devices], config, num_ranks)
    return [
        HostPool(pool.shape, count, pool.page_size, layout=config.hicache_mem_layout, device=pool.device)
        for pool, count in zip(devices, counts, strict=True)
    ]


def _trust(
    config: HiCacheConfig, params: CacheInitParams, witness: Witness | None, stores: bool = True
) -> Trust:
    adapter_of = params.adapter_of or whole_key
    return Trust(config.hicache_storage_identity, adapter_of, witness, stores)


def _witness(
    params: CacheInitParams, controller: HiCacheController, hosts: Sequence[HostPool]
) -> Witness | None:
    """What the engine has computed to be compared, as the host pools have it. Before anything is in these."""
    computed = params.witness
    if computed is None:
        return None
    pages: list[list[bytes | None]] = [[] for _ in hosts]
    for of_name in computed.pages:
        for pair, device_page in enumerate(of_name):
            if device_page is None:
                pages[pair].append(None)
                continue
            backbone, others = _one_copy(pair, device_page)
            ticket = controller.write(*backbone, others)
            if not controller.wait([ticket], WITNESS_S) or any(r.error for r in controller.poll()):
                raise ConfigError(f"a page of the device was not copied to the host in {WITNESS_S:g} s")
            pages[pair].append(b"".join(hosts[pair].page_views(0)))
    return Witness(computed.keys, tuple(map(tuple, pages)))


def _one_copy(pair: int, device_page: int) -> tuple[tuple[Pages, Pages], list[Copy]]:
    """A device page to host page 0 of its pair of pools."""
    one = np.array([device_page], np.int32), np.zeros(1, np.int32)
    return (one, []) if pair == BACKBONE_PAIR else ((NO_PAGES, NO_PAGES), [Copy(*one, pair)])


def _attach(cache: PrefixCache, config: HiCacheConfig) -> None:
    """Attach the storage that `config` asks for, or close the cache."""
    if config.hicache_storage_backend is not None:
        try:
            cache.attached.attach(config.hicache_storage_backend, config.hicache_storage_backend_extra_config)
        except BaseException:
            cache.close()
            raise


def _ranks_on_host(params: CacheInitParams, model: ModelIdentity) -> int:
    return params.ranks_on_host or model.tp_size * model.pp_size


def _host_pool(config: HiCacheConfig, device_pool: DevicePool, num_ranks: int) -> HostPool:
    shape, size = device_pool.shape, config.page_size
    num_pages = size_host_pool(shape, size, device_pool.num_pages, config, num_ranks)
    return HostPool(shape, num_pages, size, layout=config.hicache_mem_layout, device=device_pool.device)


def _host_tier(
    config: HiCacheConfig, device_pool: DevicePool, host_pool: HostPool, runtime: Runtime | None
) -> HostTier:
    controller = HiCacheController(
        device_pool,
        host_pool,
        transport=make_transport(config.hicache_io_backend, device_pool.device, (device_pool, host_pool)),
        runtime=runtime,
    )
    return _tier(config, PageAllocator(host_pool.num_pages), controller)


def _tier(
    config: HiCacheConfig, pages: PageSource | Sequence[PageSource], controller: HiCacheController
) -> HostTier:
    limits = prefetch_limits(config.page_size, config.hicache_storage_backend_extra_config)
    return HostTier(
        pages,
        controller,
        WritePolicy.from_name(config.hicache_write_policy),
        PrefetchPolicy.from_name(config.hicache_storage_prefetch_policy, limits),
        no_regret=config.is_no_regret,
    )


class NamedStorage:
    """Opens storage by name for the model's pages; it serves what `trust` says the same weights computed.

    label: part of the pages' names from the next time on, where the weights are not the model's files' any
    more; "" where they are.
    """

    def __init__(self, stored: Sequence[ComponentPages], trust: Trust) -> None:
        self._label = ""
        self.trust = trust
        self._stored = stored

    @property
    def label(self) -> str:
        return self._label

    @label.setter
    def label(self, label: str) -> None:
        self._label = label
        self.trust.remembered.clear()  # of other weights, or of the first ones before others came

    def __call__(self, name: str, extra: ExtraConfig) -> Stores:
        pages = [self._labelled(pages) for pages in self._stored]
        settings = StoreSettings.read(extra.backend)
        trust = replace(self.trust, identity=extra.storage_identity or self.trust.identity)
        stores = open_stores(name, settings, pages, required=bool(extra.hicache_storage_required))
        return trusted_stores(stores, pages, trust_of(name, settings, trust))

    def _labelled(self, pages: ComponentPages) -> ComponentPages:
        if not self.label:
            return pages
        mark = pages.fingerprint
        return replace(pages, fingerprint=replace(mark, revision=f"{mark.revision}={self.label}"))

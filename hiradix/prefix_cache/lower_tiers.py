"""Makes the tiers below an engine's device pool from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True)
class LowerTiers:
    """The tiers below a device pool, made and not in use yet: host, what opens its storage, by which name the
    model's pages are stored, and the configuration that says whether one is attached at start."""

    host: HostTier
    storage: StorageFactory | None
    model_name: str | None = None
    config: HiCacheConfig = HiCacheConfig()

    def attach_to(self, cache: PrefixCache) -> None:
        """Attach the storage that the configuration asks for to `cache`, which has `host`; or close it."""
        if self.model_name is not None:
            cache.attached.served_model_name = self.model_name
        if self.config.hicache_storage_backend is None:
            return
        extra = self.config.hicache_storage_backend_extra_config
        try:
            cache.attached.attach(self.config.hicache_storage_backend, extra)
        except BaseException:
            cache.close()
            raise


def lower_tiers(
    config: HiCacheConfig,
    params: CacheInitParams,
    device_pool: DevicePool,
    model: ModelIdentity,
    runtime: Runtime | None = None,
) -> LowerTiers:
    """Host and storage below `device_pool`. Allocates the host pool and starts the transfer threads."""
    host_pool = _host_pool(config, device_pool, _ranks_on_host(params, model))
    host = _host_tier(config, device_pool, host_pool, runtime)
    if is_replicated(host_pool):  # one of the ranks stores for all
        host.controller.backs_up = model.tp_rank == 0
    stored = stored_pages(model, host_pool, config.hicache_mem_layout)
    witness = _witness(params, host.controller, [host_pool])
    trust = _trust(config, params, witness, stores=host.controller.backs_up)
    return LowerTiers(host, NamedStorage([stored], trust), model.model_id, config)


def hybrid_tiers(
    config: HiCacheConfig,
    params: CacheInitParams,
    pools: HybridPools,
    model: ModelIdentity,
    runtime: Runtime | None = None,
) -> LowerTiers:
    """Build the lower tiers of a model that mixes kinds of layers: two host pools; otherwise like
    `lower_tiers`."""
    name = component_name(params.sliding_window_size) if params.state_records is None else STATE_NAME
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
        stored_pages(model, host, config.hicache_mem_layout, component, config.page_size, layers)
        for host, component, layers in zip(
            hosts,
            (component_name(None), name),
            (pools.full_layers, pools.other_layers),
            strict=True,
        )
    ]
    witness = _witness(params, tier.controller, hosts)
    storage = NamedStorage(stored, _trust(config, params, witness))
    return LowerTiers(tier, storage, model.model_id, config)


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
    """The pages that the engine computed for comparison with storage, as bytes of the host pools. Call before
    anything is in these."""
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

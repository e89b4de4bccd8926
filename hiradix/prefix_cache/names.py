"""The names by which engines construct a prefix cache: SGLang's, and those of recurrent states.

Each says which kinds of attention and which tiers `PrefixCache` is made with, and nothing else.
"""

from __future__ import annotations

from typing import Any

from hiradix.cache import HostTier
from hiradix.prefix_cache.attached import StorageFactory
from hiradix.prefix_cache.cache import PrefixCache
from hiradix.prefix_cache.kinds import RecurrentStates, SlidingWindows
from hiradix.prefix_cache.lower_tiers import LowerTiers
from hiradix.prefix_cache.records import CacheInitParams
from hiradix.prefix_cache.upstream import cache_params, server_tiers
from hiradix.transfer import Runtime
from hiradix.tree.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixCache(PrefixCache):
    """Reuses the KV of equal prefixes on the device.

    >>> from hiradix.memory import ReqToTokenPool, SlotAllocator
    >>> from hiradix.prefix_cache import EvictParams, InsertParams, MatchPrefixParams, RadixKey
    >>> slots = SlotAllocator(num_tokens=64, page_size=4)
    >>> cache = RadixCache(CacheInitParams(False, ReqToTokenPool(8, 64), slots, page_size=4))
    >>> tokens = list(range(8))
    >>> done = cache.insert(InsertParams(RadixKey(tokens), slots.alloc(8)))  # the tree owns these slots now
    >>> done.prefix_len, done.total_len
    (0, 8)
    >>> hit = cache.match_prefix(MatchPrefixParams(RadixKey([*tokens, 99])))
    >>> receipt = cache.inc_lock_ref(hit.last_device_node)
    >>> len(hit.device_indices), cache.evict(EvictParams(8)).num_tokens_evicted
    (8, 0)
    >>> cache.dec_lock_ref(receipt), cache.evict(EvictParams(8)).num_tokens_evicted
    (8, 8)
    """

    def __init__(self, params: Any):
        super().__init__(cache_params(params))

    @classmethod
    def create_simulated(
        cls,
        disable: bool = False,
        mock_allocator: Any = None,
        page_size: int = 1,
        enable_kv_cache_events: bool = False,
    ) -> RadixCache:
        """A cache of keys alone: without an allocator its slots are numbers, of its own where a value has none.

        >>> from hiradix.prefix_cache import InsertParams, MatchPrefixParams
        >>> from hiradix.tree import RadixKey
        >>> tree = RadixCache.create_simulated(page_size=2)
        >>> tree.insert(InsertParams(RadixKey([1, 2, 3, 4]))).total_len
        4
        >>> len(tree.match_prefix(MatchPrefixParams(RadixKey([1, 2, 9]))).device_indices)
        2
        """
        rows: Any = None
        params = CacheInitParams(
            disable, rows, mock_allocator, page_size, enable_kv_cache_events=enable_kv_cache_events
        )
        return cls(params)


@mypyc_attr(allow_interpreted_subclasses=True)
class HiRadixCache(PrefixCache):
    """Serves prefixes from device, host and storage to an engine. Built by `build_prefix_cache`.

    >>> import torch
    >>> from hiradix.config import HiCacheConfig
    >>> from hiradix.memory import DevicePool, KVShape, ReqToTokenPool, SlotAllocator
    >>> from hiradix.prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    >>> from hiradix.prefix_cache import ModelIdentity, RadixKey, build_prefix_cache
    >>> shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=2, v_head_dim=2, dtype=torch.float32)
    >>> pool = DevicePool(shape, num_pages=8, page_size=4)
    >>> slots = SlotAllocator(num_tokens=32, page_size=4, device="cpu", kvcache=pool)
    >>> params = CacheInitParams(False, ReqToTokenPool(8, 32), slots, page_size=4)
    >>> config = HiCacheConfig(page_size=4, enable_hierarchical_cache=True)
    >>> cache = build_prefix_cache(config, params, pool, ModelIdentity("my-model"))
    >>> key = RadixKey(list(range(8)))
    >>> cache.insert(InsertParams(key, slots.alloc(8))).prefix_len, cache.drain(timeout_s=10)  # copied
    (0, True)
    >>> cache.evict(EvictParams(8)).num_tokens_evicted
    8
    >>> hit = cache.match_prefix(MatchPrefixParams(key))
    >>> len(hit.device_indices), hit.host_hit_length
    (0, 8)
    >>> loaded, node = cache.init_load_back(hit.last_host_node, hit.host_hit_length)
    >>> cache.layer_done_counter.set_consumer(cache.ready_to_load_host_cache())
    >>> len(loaded), pool.get_key_buffer(0).shape  # waits until the layer is loaded
    (8, torch.Size([36, 1, 2]))
    >>> cache.close()
    """

    def __init__(
        self, params: Any, server_args: Any = None, host: HostTier | None = None,
        storage_factory: StorageFactory | None = None, runtime: Runtime | None = None,
    ):  # fmt: skip
        own = cache_params(params)
        tiers = server_tiers(own, server_args, runtime) if host is None else LowerTiers(host, storage_factory)
        super().__init__(own, None, tiers.host, storage_factory or tiers.storage)
        tiers.attach_to(self)


@mypyc_attr(allow_interpreted_subclasses=True)
class SWARadixCache(PrefixCache):
    """Caches prefixes of models that mix full attention and sliding windows, on the device. The plain size
    methods speak of full tokens, as the `full_` ones do.

    >>> from hiradix.memory import HybridSlotAllocator, ReqToTokenPool
    >>> from hiradix.prefix_cache import EvictParams, InsertParams, MatchPrefixParams, RadixKey
    >>> slots = HybridSlotAllocator(64, 32, page_size=4)
    >>> rows = ReqToTokenPool(8, 64)
    >>> cache = SWARadixCache(CacheInitParams(False, rows, slots, page_size=4, sliding_window_size=8))
    >>> key = RadixKey(list(range(16)))
    >>> cache.insert(InsertParams(key, slots.alloc(16))).window_len, cache.total_size()  # full, and window data
    (16, (16, 16))
    >>> cache.evict(EvictParams(num_tokens=0, swa_num_tokens=8)).swa_num_tokens_evicted
    8
    >>> len(cache.match_prefix(MatchPrefixParams(key)).device_indices)  # the last 8 tokens' window is there
    16
    """

    def __init__(self, params: Any):
        own = cache_params(params)
        super().__init__(own, SlidingWindows(own))


@mypyc_attr(allow_interpreted_subclasses=True)
class SWAHiRadixCache(PrefixCache):
    """`SWARadixCache` over all tiers: full and window pages come back to the device at once."""

    def __init__(
        self, params: Any, server_args: Any = None, host: HostTier | None = None,
        storage_factory: StorageFactory | None = None, runtime: Runtime | None = None,
    ):  # fmt: skip
        own = cache_params(params)
        tiers = server_tiers(own, server_args, runtime) if host is None else LowerTiers(host, storage_factory)
        super().__init__(own, SlidingWindows(own), tiers.host, storage_factory or tiers.storage)
        tiers.attach_to(self)


@mypyc_attr(allow_interpreted_subclasses=True)
class StateRadixCache(PrefixCache):
    """Caches prefixes with the recurrent state at their ends, on the device. The plain size methods speak of
    full tokens.

    Whenever a request's tokens enter the tree, `take_record` is asked for the state behind the last of them.

    >>> from hiradix.memory import PageAllocator, ReqToTokenPool, SlotAllocator
    >>> from hiradix.prefix_cache import InsertParams, MatchPrefixParams, RadixKey
    >>> slots, records = SlotAllocator(num_tokens=64, page_size=4), PageAllocator(8, first_page=1)
    >>> params = CacheInitParams(False, ReqToTokenPool(8, 64), slots, page_size=4, state_records=records)
    >>> cache = StateRadixCache(params)
    >>> (record,) = records.alloc(1).tolist()
    >>> cache.insert(InsertParams(RadixKey(list(range(8))), slots.alloc(8), mamba_value=record)).mamba_exist
    False
    >>> hit = cache.match_prefix(MatchPrefixParams(RadixKey([*range(8), 99])))
    >>> len(hit.device_indices), cache.record(hit.last_device_node) == record
    (8, True)
    >>> hit = cache.match_prefix(MatchPrefixParams(RadixKey([0, 1, 2, 3, 99])))
    >>> len(hit.device_indices), hit.mamba_branching_seqlen  # pages are there, and no record at their end
    (0, 4)
    """

    def __init__(self, params: Any):
        own = cache_params(params)
        super().__init__(own, RecurrentStates(own))


@mypyc_attr(allow_interpreted_subclasses=True)
class StateHiRadixCache(PrefixCache):
    """`StateRadixCache` over all tiers: pages and the record of their end come back to the device at once."""

    def __init__(
        self, params: Any, server_args: Any = None, host: HostTier | None = None,
        storage_factory: StorageFactory | None = None, runtime: Runtime | None = None,
    ):  # fmt: skip
        own = cache_params(params)
        tiers = server_tiers(own, server_args, runtime) if host is None else LowerTiers(host, storage_factory)
        super().__init__(own, RecurrentStates(own), tiers.host, storage_factory or tiers.storage)
        tiers.attach_to(self)

"""The prefix cache inside an engine of your own: three tiers, a tenant's namespace, and a restart.

The engine owns the device pool. The cache says which slots of it hold a prefix already, takes over those that
the engine has filled, and copies pages down and up between the tiers.
"""

import tempfile
import time
from collections.abc import Sequence

import torch

from hiradix.config import ExtraConfig, HiCacheConfig
from hiradix.memory import DevicePool, KVShape, ReqToTokenPool, SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    ModelIdentity,
    RadixKey,
    build_prefix_cache,
)  # fmt: skip

PAGE = 16


class Engine:
    """The cache's side of an engine: `compute` stands for a prefill that fills slots with keys and values."""

    def __init__(self, folder: str):
        shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=16, v_head_dim=16, dtype=torch.float32)
        pool = DevicePool(shape, num_pages=64, page_size=PAGE)
        self.slots = SlotAllocator(num_tokens=64 * PAGE, page_size=PAGE, device="cpu", kvcache=pool)
        params = CacheInitParams(False, ReqToTokenPool(8, 512), self.slots, page_size=PAGE)
        config = HiCacheConfig(
            page_size=PAGE, enable_hierarchical_cache=True, hicache_storage_backend="file",
            hicache_storage_backend_extra_config=ExtraConfig.from_mapping({"file_storage_path": folder}),
        )  # fmt: skip
        self.cache = build_prefix_cache(config, params, pool, ModelIdentity("my-model"))

    def compute(self, tokens: Sequence[int], tenant: str | None = None) -> None:
        """Prefill `tokens` and give their slots to the tree, which frees those that it has already."""
        key = RadixKey(list(tokens), extra_key=tenant)
        self.cache.insert(InsertParams(key, self.slots.alloc(len(tokens))))
        self.cache.drain(timeout_s=10)  # only here: a server goes on, and copies are made beside it

    def cached(self, tokens: Sequence[int], tenant: str | None = None) -> tuple[int, int]:
        """How many leading tokens are on the device, and how many more can be loaded back from the host."""
        hit = self.cache.match_prefix(MatchPrefixParams(RadixKey(list(tokens), extra_key=tenant)))
        return len(hit.device_indices), hit.host_hit_length

    def prefetch(self, tokens: Sequence[int]) -> None:
        """Bring to the host what storage has behind the match. A server asks while the request waits."""
        hit = self.cache.match_prefix(MatchPrefixParams(RadixKey(list(tokens))))
        behind = len(hit.device_indices) + hit.host_hit_length
        self.cache.prefetch_from_storage("request-1", hit.last_host_node, list(tokens)[behind:])
        while not self.cache.check_prefetch_progress("request-1"):
            self.cache.check_hicache_events()  # a scheduler calls it once per step
            time.sleep(0.001)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(folder)
        prompt = range(512)
        engine.compute(prompt)
        print(engine.cached([*prompt, 7, 8]))  # (512, 0)
        print(engine.cached(prompt, tenant="somebody else"))  # (0, 0)
        engine.cache.evict(EvictParams(512))
        print(engine.cached(prompt))  # (0, 512)
        engine.cache.close()

        engine = Engine(folder)  # after a restart only storage has it
        engine.compute(prompt[:PAGE])  # the first page is computed, and compared with what storage has
        engine.prefetch(prompt)
        print(engine.cached(prompt))  # (16, 496)
        engine.cache.close()

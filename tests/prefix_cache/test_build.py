"""What is refused before anything of a cache is made: more host memory than all ranks together find."""

from __future__ import annotations

import pytest
import torch

from hiradix.config import HiCacheConfig
from hiradix.errors import ConfigError
from hiradix.memory import (
    DevicePool,
    HybridPools,
    HybridSlotAllocator,
    KVShape,
    ReqToTokenPool,
    SlotAllocator,
    sizing,
)
from hiradix.prefix_cache import (
    CacheInitParams,
    ModelIdentity,
    RadixCache,
    build_hybrid_cache,
    build_prefix_cache,
)

PAGES, SIZE = 8, 4
SHAPE = KVShape(2, 1, 4, 4, torch.float32)
POOL_BYTES = PAGES * SIZE * 2 * 8 * 4  # of one device pool, and of the host pool that has as many pages


def build(kind: str, num_ranks: int) -> RadixCache:
    config = HiCacheConfig(page_size=SIZE, enable_hierarchical_cache=True, hicache_ratio=1.0)
    model = ModelIdentity("m", tp_size=num_ranks)
    rows, num_slots = ReqToTokenPool(2, 64, "cpu"), PAGES * SIZE
    pools = [DevicePool(SHAPE, PAGES, SIZE) for _ in range(2)]
    if kind == "full":
        params = CacheInitParams(
            disable=False, req_to_token_pool=rows, page_size=SIZE,
            token_to_kv_pool_allocator=SlotAllocator(num_slots, SIZE),
        )  # fmt: skip
        return build_prefix_cache(config, params, pools[0], model)
    params = CacheInitParams(
        disable=False, req_to_token_pool=rows, page_size=SIZE, sliding_window_size=8,
        token_to_kv_pool_allocator=HybridSlotAllocator(num_slots, num_slots, SIZE),
    )  # fmt: skip
    return build_hybrid_cache(config, params, HybridPools(*pools, [0, 1], [2, 3]), model)


@pytest.mark.parametrize(("kind", "num_pools"), [("full", 1), ("windows", 2)])
def test_ranks_share_the_hosts_memory(monkeypatch: pytest.MonkeyPatch, kind: str, num_pools: int) -> None:
    """There is enough for two ranks and not for three."""
    monkeypatch.setattr(sizing, "available_bytes", lambda: int(2.5 * num_pools * POOL_BYTES / 0.9))
    for num_ranks in (1, 2):
        build(kind, num_ranks).close()
    with pytest.raises(ConfigError, match="per rank x 3 ranks"):
        build(kind, 3)

"""What SGLang's versions have in common: pools, parameters, a host pool that needs no GPU.

To be imported behind `mocks.install_sglang`.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


def make_pool(page_size: int, num_tokens: int) -> Any:
    """One layer of int64."""
    return MHATokenToKVPool(
        size=num_tokens, page_size=page_size, dtype=torch.int64, head_num=1, head_dim=1,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def make_allocator(page_size: int, num_tokens: int, pool: Any) -> Any:
    """SGLang's own, over `pool`."""
    if page_size == 1:
        return TokenToKVPoolAllocator(num_tokens, torch.int64, "cpu", pool, False)
    return PagedTokenToKVPoolAllocator(num_tokens, page_size, torch.int64, "cpu", pool, False)


def make_params(page_size: int, allocator: Any, rows: Any, **options: Any) -> CacheInitParams:
    """LRU. options: fields that not every version has."""
    return CacheInitParams(
        disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=page_size,
        eviction_policy="lru", **options,
    )  # fmt: skip


def server_args(ratio: float, write_policy: str, io_backend: str, **storage: Any) -> Any:
    """What HiRadixCache reads of the server's flags. storage: `hicache_storage_*`, none if not given."""
    values = {
        "hicache_storage_backend": None, "hicache_storage_backend_extra_config": None,
        "hicache_storage_prefetch_policy": "best_effort", **storage,
    }  # fmt: skip
    return types.SimpleNamespace(
        hicache_io_backend=io_backend, hicache_mem_layout="layer_first", disable_hicache_numa_detect=True,
        hicache_ratio=ratio, hicache_size=0, hicache_write_policy=write_policy, served_model_name="m",
        extra_metric_labels=None, **values,
    )  # fmt: skip


def one_rank() -> None:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def unpin(host_pool: Any) -> None:
    """Have pools of the class `host_pool` take memory that is not pinned."""
    original = host_pool.__init__
    signature = inspect.signature(original)

    def unpinned(self: Any, *args: Any, **options: Any) -> None:
        bound = signature.bind(self, *args, **options)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    host_pool.__init__ = unpinned

"""SGLang 0.5.9 on a CPU: RadixCache and HiRadixCache, unmodified; copies of KV are no-ops."""

from __future__ import annotations

import inspect
import logging
import types
from typing import Any

from install import wheel_folder
from mocks import install, patch_streams

install(
    str(wheel_folder("0.5.9")),
    [
        "IPython", "sgl_kernel", "flashinfer", "torchvision", "transformers", "decord", "torch_memory_saver",
        "tvm_ffi", "sglang.srt.layers", "sglang.srt.configs", "sglang.srt.distributed",
        "sglang.srt.model_executor", "sglang.jit_kernel", "sglang.srt.utils.custom_op", "sglang.srt.metrics",
    ],
)  # fmt: skip

import torch  # noqa: E402

patch_streams()
logging.getLogger().setLevel(logging.ERROR)

from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache import memory_pool_host  # noqa: E402
from sglang.srt.mem_cache.allocator import (  # noqa: E402
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from timed import HostMatch, HostPeer, Request, TreePeer  # noqa: E402


def make_allocator(page_size: int, num_tokens: int) -> Any:
    """SGLang's own, over a pool of one layer of int64."""
    pool = MHATokenToKVPool(
        size=num_tokens, page_size=page_size, dtype=torch.int64, head_num=1, head_dim=1,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    if page_size == 1:
        return TokenToKVPoolAllocator(num_tokens, torch.int64, "cpu", pool, False)
    return PagedTokenToKVPoolAllocator(num_tokens, page_size, torch.int64, "cpu", pool, False)


def make_params(page_size: int, allocator: Any, rows: Any = None) -> CacheInitParams:
    return CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        eviction_policy="lru",
        tp_cache_group=None,
    )


class Radix(TreePeer):
    """RadixCache."""

    def new(self, page_size: int, num_tokens: int) -> None:
        self.page_size = page_size
        self.allocator = make_allocator(page_size, num_tokens)
        self.rows = ReqToTokenPool(2, 1 << 13, "cpu", False)
        self.cache = RadixCache(make_params(page_size, self.allocator, self.rows))

    def key(self, ids: Any) -> Any:
        return RadixKey(list(ids))

    def match(self, key: Any) -> tuple[int, Any, torch.Tensor]:
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        return len(found.device_indices), found.last_device_node, found.device_indices

    def lock(self, node: Any) -> Any:
        self.cache.inc_lock_ref(node)
        return node

    def unlock(self, receipt: Any) -> None:
        self.cache.dec_lock_ref(receipt)

    def insert(self, key: Any, slots: torch.Tensor, num_matched: int) -> None:
        self.cache.insert(InsertParams(key=key, value=slots))

    def evict(self, num_tokens: int) -> int:
        return self.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted

    def tokens(self, ids: Any) -> Any:
        return list(ids)

    def finish_prefill(self, request: Request) -> None:
        self.cache.cache_unfinished_req(request)

    def finish(self, request: Request) -> None:
        self.cache.cache_finished_req(request)


class HiRadix(HostPeer):
    """HiRadixCache, write_through, no storage."""

    def new(self, page_size: int, num_tokens: int, ratio: float) -> None:
        prepare_host()
        self.allocator = make_allocator(page_size, num_tokens)
        self.cache = HiRadixCache(make_params(page_size, self.allocator), server_args(ratio))

    key = Radix.key
    lock = Radix.lock
    unlock = Radix.unlock
    insert = Radix.insert

    def match(self, key: Any) -> HostMatch:
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        node = found.last_device_node
        return HostMatch(len(found.device_indices), found.host_hit_length, node, found)

    def indices(self, match: HostMatch) -> torch.Tensor:
        return match.found.device_indices

    def load(self, match: HostMatch) -> tuple[torch.Tensor, Any]:
        return self.cache.init_load_back(match.found.last_host_node, match.num_host)

    def evict(self, num_tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens=num_tokens))


def server_args(ratio: float, write_policy: str = "write_through", io_backend: str = "kernel") -> Any:
    """What HiRadixCache reads of the server's flags."""
    return types.SimpleNamespace(
        hicache_io_backend=io_backend, hicache_mem_layout="layer_first", disable_hicache_numa_detect=True,
        hicache_ratio=ratio, hicache_size=0, hicache_storage_backend=None,
        hicache_storage_backend_extra_config=None, hicache_storage_prefetch_policy="best_effort",
        hicache_write_policy=write_policy, served_model_name="m", extra_metric_labels=None,
    )  # fmt: skip


def prepare_host() -> None:
    """One rank, memory that is not pinned, copies that do nothing."""
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    memory_pool_host.alloc_with_host_register = lambda dims, dtype, device, pin_memory, allocator: (
        allocator.allocate(dims, dtype=dtype, device=device)
    )
    original = memory_pool_host.HostKVCache.__init__
    signature = inspect.signature(original)

    def unpinned(self: Any, *args: Any, **options: Any) -> None:
        bound = signature.bind(self, *args, **options)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    memory_pool_host.HostKVCache.__init__ = unpinned
    cache_controller.is_dp_attention_enabled = lambda: False
    cache_controller.get_tensor_model_parallel_rank = lambda: 0
    cache_controller.get_tensor_model_parallel_world_size = lambda: 1
    for name in ("transfer_kv_all_layer", "transfer_kv_per_layer"):
        setattr(memory_pool_host, name, lambda *args, **options: None)


NAME = "sglang-0.5.9"
TREE, REQUESTS, HOST = Radix, Radix, HiRadix

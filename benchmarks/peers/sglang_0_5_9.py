"""SGLang 0.5.9 on a CPU: RadixCache and HiRadixCache, unmodified; copies of KV are no-ops."""

from __future__ import annotations

from typing import Any

from mocks import install_sglang

install_sglang("0.5.9")

import torch  # noqa: E402
from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache import memory_pool_host  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang_parts import (  # noqa: E402
    make_allocator,
    make_params,
    make_pool,
    one_rank,
    server_args,
    unpin,
)
from timed import HostMatch, HostPeer, Request, TreePeer  # noqa: E402


class Radix(TreePeer):
    """RadixCache."""

    def new(self, page_size: int, num_tokens: int) -> None:
        self.page_size = page_size
        self.allocator = make_allocator(page_size, num_tokens, make_pool(page_size, num_tokens))
        self.rows = ReqToTokenPool(2, 1 << 13, "cpu", False)
        self.cache = RadixCache(make_params(page_size, self.allocator, self.rows, tp_cache_group=None))

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
        self.allocator = make_allocator(page_size, num_tokens, make_pool(page_size, num_tokens))
        params = make_params(page_size, self.allocator, None, tp_cache_group=None)
        self.cache = HiRadixCache(params, server_args(ratio, "write_through", "kernel"))

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


def prepare_host() -> None:
    """One rank, memory that is not pinned, copies that do nothing."""
    if torch.distributed.is_initialized():
        return
    one_rank()
    memory_pool_host.alloc_with_host_register = lambda dims, dtype, device, pin_memory, allocator: (
        allocator.allocate(dims, dtype=dtype, device=device)
    )
    unpin(memory_pool_host.HostKVCache)
    cache_controller.is_dp_attention_enabled = lambda: False
    cache_controller.get_tensor_model_parallel_rank = lambda: 0
    cache_controller.get_tensor_model_parallel_world_size = lambda: 1
    for name in ("transfer_kv_all_layer", "transfer_kv_per_layer"):
        setattr(memory_pool_host, name, lambda *args, **options: None)


NAME = "sglang-0.5.9"
TREE, REQUESTS, HOST = Radix, Radix, HiRadix

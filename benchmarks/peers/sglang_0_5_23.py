"""SGLang 0.5.23 on a CPU: UnifiedRadixCache with its Rust tree core, device only and with a host tier."""

from __future__ import annotations

import types
from array import array
from typing import Any

from mocks import install_sglang

install_sglang("0.5.23")

import sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler as assembler  # noqa: E402
import sglang.srt.mem_cache.pool_host.base as host_base  # noqa: E402
import sglang.srt.mem_cache.pool_host.common as host_common  # noqa: E402
import sglang.srt.mem_cache.pool_host.mha as host_mha  # noqa: E402
import sglang.srt.runtime_context as runtime_context  # noqa: E402
import torch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang_parts import make_allocator, make_pool, unpin  # noqa: E402
from sglang_parts import make_params as make_plain_params  # noqa: E402
from timed import HostMatch, HostPeer, Request, TreePeer  # noqa: E402


class NoKV:
    """Allocators only keep a reference to the pool."""

    device = "cpu"
    size = 0
    layer_num = 1

    def get_kvcache(self) -> NoKV:
        return self


def make_params(page_size: int, allocator: Any, rows: Any = None, core: str = "rust") -> Any:
    parts = (ComponentType.FULL,)
    return make_plain_params(page_size, allocator, rows, tree_components=parts, tree_core_backend=core)


class Unified(TreePeer):
    """UnifiedRadixCache, full attention, Rust core."""

    def new(self, page_size: int, num_tokens: int) -> None:
        self.page_size = page_size
        publish(hicache_ratio=1.0)
        self.allocator = make_allocator(page_size, num_tokens, NoKV())
        self.rows = ReqToTokenPool(2, 1 << 13, "cpu", False)
        self.cache = UnifiedRadixCache(make_params(page_size, self.allocator, self.rows))

    def tokens(self, ids: Any) -> Any:
        return array("q", ids)

    def key(self, ids: Any) -> Any:
        return RadixKey(array("q", ids))

    def match(self, key: Any) -> tuple[int, Any, torch.Tensor]:
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        node = found.last_device_node
        return found.device_prefix_len, node, self.cache.path_device_indices(node)

    def lock(self, node: Any) -> Any:
        return node, self.cache.inc_lock_ref(node).to_dec_params()

    def unlock(self, receipt: Any) -> None:
        self.cache.dec_lock_ref(*receipt)

    def insert(self, key: Any, slots: torch.Tensor, num_matched: int) -> None:
        self.cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=len(slots)))

    def evict(self, num_tokens: int) -> int:
        return self.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted

    def finish_prefill(self, request: Request) -> None:
        self._request = self._as_request(request)
        self.cache.checkpoint_into_tree(self._request, up_to=len(request.fill_ids))

    def finish(self, request: Request) -> None:
        asked, end = self._request, request.num_committed
        asked.finished = lambda: True
        self.cache.checkpoint_into_tree(asked, up_to=end)
        self.cache.free_kv_row(asked.kv, [(asked.kv.cache_protected_len, end)])
        self.cache.unlock(asked.lock)

    def timed_request(self, ids: Any, num_generated: int) -> tuple[int, float]:
        self._full = self.tokens(ids)
        return super().timed_request(self._full, num_generated)

    def _as_request(self, request: Request) -> Any:
        """This version's request; its lock is taken again, as only its own kind of lock is accepted."""
        matched = request.cache_protected_len
        kv = types.SimpleNamespace(
            req_pool_idx=1, cache_protected_len=matched, cache_inserted_len=matched, mamba_pool_idx=None,
            get_evicted_seqlen=lambda component: 0, swa_dead_lo=lambda position: 0,
        )  # fmt: skip
        return types.SimpleNamespace(
            finished=lambda: False, full_untruncated_fill_ids=self._full, kv=kv, priority=0, session_id=None,
            kv_rotation_base=None, extra_key=None, cache_salt=None, origin_input_ids=request.fill_ids,
            lock=request.swa_uuid_for_lock, last_node=request.last_node, rid=request.rid,
            finished_reason=None,
        )  # fmt: skip


class UnifiedRequests(Unified):
    """The same with the locks its request-level calls take."""

    def lock(self, node: Any) -> Any:
        return self.cache.lock(node)

    def unlock(self, receipt: Any) -> None:
        self.cache.unlock(receipt)


class UnifiedHost(HostPeer):
    """The same with HiCache: hybrid controller and an MHA host pool."""

    def new(self, page_size: int, num_tokens: int, ratio: float) -> None:
        prepare_host()
        publish(hicache_ratio=ratio)
        self.allocator = make_allocator(page_size, num_tokens, make_pool(page_size, num_tokens))
        params = make_params(page_size, self.allocator)
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(types.SimpleNamespace(file_storage_path=None), params)

    key = Unified.key
    lock = Unified.lock
    unlock = Unified.unlock

    def match(self, key: Any) -> HostMatch:
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        return HostMatch(found.device_prefix_len, found.host_hit_length, found.last_device_node, found)

    def indices(self, match: HostMatch) -> torch.Tensor:
        return self.cache.path_device_indices(match.node)

    def load(self, match: HostMatch) -> tuple[torch.Tensor | None, Any]:
        kv = types.SimpleNamespace(mamba_pool_idx=None)
        request = types.SimpleNamespace(
            last_node=match.node, swa_host_hit_length=0, mamba_host_hit_length=0, rid="r", kv=kv
        )
        params = InitLoadBackParams(
            best_match_node=match.found.best_match_node, host_hit_length=match.num_host, mem_quota=None,
            req=request,
        )  # fmt: skip
        count, node = self.cache.init_load_back(params)
        if not count:
            return None, node
        return self.cache.tree_core.collect_full_device_indices(node, match.node), node

    def insert(self, key: Any, slots: torch.Tensor, num_matched: int) -> None:
        self.cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=num_matched))

    def evict(self, num_tokens: int) -> None:
        self.cache.evict_for_alloc(EvictParams(num_tokens=num_tokens))


def _bag(bag: str, **values: Any) -> Any:
    made = runtime_context._ConfigBag(bag)
    for name, value in values.items():
        made._set(name, value)
    return made


def publish(hicache_ratio: float, write_policy: str = "write_through", io_backend: str = "kernel") -> None:
    """Fill in what the server's start would have."""
    memory = _bag(
        "memory", hicache_host_memory_mode="cache", hicache_storage_backend=None,
        hicache_storage_backend_extra_config=None, hicache_write_policy=write_policy,
        hicache_storage_prefetch_policy="best_effort", hicache_ratio=hicache_ratio, hicache_size=0,
        hicache_mem_layout="layer_first", hicache_io_backend=io_backend, enable_unified_memory=False,
    )  # fmt: skip
    runtime_context._CONTEXT._config_bags = {
        "memory": memory,
        "observability": _bag("observability", extra_metric_labels=None),
        "disagg": _bag("disagg", disaggregation_mode="null"),
        "serving": _bag("serving", served_model_name="m"),
        "model": _bag("model", context_length=1 << 20),
    }
    ones = ("attn_dcp_size", "tp_size", "pp_size", "attn_tp_size", "attn_cp_size", "attn_dp_size", "dp_size")
    ones += ("launch_world_size", "nnodes", "world_size")
    zeros = ("attn_dcp_rank", "tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "dp_rank")
    stamp = {"dcp_enabled": False, "pp_group": None, **dict.fromkeys(ones, 1), **dict.fromkeys(zeros, 0)}
    runtime_context.get_parallel()._stamp.update(stamp)


def prepare_host() -> None:
    """Memory that is not pinned, copies that do nothing, the plain strategy only. Once."""
    if getattr(host_base, "prepared", False):
        return
    host_base.prepared = True
    unpin(host_base.HostKVCache)
    for module in (host_common, host_mha, host_base):
        for name in ("_cuda_host_register", "_cuda_host_unregister"):
            if hasattr(module, name):
                setattr(module, name, lambda *args, **options: None)
    for name in ("transfer_kv_all_layer", "transfer_kv_per_layer"):
        setattr(host_mha, name, lambda *args, **options: None)
    strategies = assembler._STRATEGIES
    assembler._STRATEGIES = [s for s in strategies if type(s).__name__ == "_PlainKvStrategy"]


NAME = "sglang-0.5.23-rust"
TREE, REQUESTS, HOST = Unified, UnifiedRequests, UnifiedHost

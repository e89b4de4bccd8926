"""The prefix cache for SGLangs with `cache_finished_req` (0.5.15), over device and host.

Their scheduler reads hashes and residencies off the nodes themselves before it prefetches, so storage needs a
newer SGLang.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)

from hiradix.adapters.sglang.engine_views import ControllerView, HostPoolView
from hiradix.adapters.sglang.front import Front
from hiradix.adapters.sglang.lora_adapters import NO_ADAPTERS
from hiradix.cache.pages import BACKBONE
from hiradix.prefix_cache import EvictParams as OwnEvictParams
from hiradix.prefix_cache import MatchPrefixParams as OwnMatchPrefixParams
from hiradix.prefix_cache import PrefixCache
from hiradix.tree import Node


class LegacyRequest:
    """SGLang's request with the names of our contract. What is set on it is set on SGLang's."""

    __slots__ = ("_req",)

    def __init__(self, req: Any):
        object.__setattr__(self, "_req", req)

    @property
    def fill_ids(self) -> Any:
        get: Any = getattr(self._req, "get_fill_ids", None)
        return self._req.fill_ids if get is None else get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._req, name, value)


class HiRadixLegacyCache(Front):
    """hiradix's radix tree as the `tree_cache` of an older SGLang, with a host tier if `inner` has one."""

    def __init__(self, params: Any, inner: PrefixCache, controller: ControllerView | None):
        super().__init__(params, inner, NO_ADAPTERS)  # without storage, nothing outlives an adapter's id
        self.enable_storage = False
        self.hicache_storage_pass_prefix_keys = False
        self.cache_controller = controller
        if inner.has_host:
            host = inner.cache.supply.host_pools[BACKBONE]
            self.token_to_kv_pool_host = HostPoolView(host, self.page_size)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        found = self.inner.match_prefix(OwnMatchPrefixParams(self._key(params.key)))
        host_node = found.last_host_node
        return MatchResult(
            found.device_indices, found.last_device_node, host_node, host_node, found.host_hit_length
        )

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **_: Any) -> None:
        ours: Any = LegacyRequest(req)
        self.inner.cache_unfinished_req(ours, chunked)

    def cache_finished_req(self, req: Any, is_insert: bool = True, **_: Any) -> None:
        ours: Any = LegacyRequest(req)
        self.inner.cache_finished_req(ours, is_insert)

    def inc_lock_ref(self, node: Node) -> IncLockRefResult:
        return IncLockRefResult(delta=self.inner.inc_lock_ref(node).delta)

    def dec_lock_ref(self, node: Node, params: Any = None, **_: Any) -> DecLockRefResult:
        return DecLockRefResult(delta=self.inner.dec_lock_ref(node))

    def evict(self, params: EvictParams) -> EvictResult:
        return EvictResult(self.inner.evict(OwnEvictParams(params.num_tokens)).num_tokens_evicted)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, Node]:
        return self.inner.init_load_back(params.best_match_node, params.host_hit_length, params.mem_quota)

    def check_hicache_events(self) -> None:
        self.inner.check_hicache_events()

    flush_write_through_acks = check_hicache_events

    def ready_to_load_host_cache(self) -> int:
        return self.inner.ready_to_load_host_cache()

    @property
    def ongoing_write_through(self) -> Any:
        return self.inner.ongoing_write_through

    @property
    def ongoing_load_back(self) -> Any:
        return self.inner.ongoing_load_back

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        return False, "hiradix: storage needs SGLang 0.5.23 or newer"

    def detach_storage_backend(self) -> tuple[bool, str]:
        return True, "HiCache storage backend is detached."

    def clear_storage_backend(self) -> bool:
        return False

    def release_aborted_request(self, rid: str) -> None:
        """Do nothing: the cache keeps nothing of requests that wait."""

"""SGLang 0.5.23's UnifiedRadixCache, unmodified, with its Python or its Rust core, in a process of its own.

What each tier holds is read from the pools: a page's content names its tokens and all before them. So nothing
is asked of the core's own books, and the Rust core needs no window into it.

    python -m tests.differential.peer_0_5_23 STREAMS.json OBSERVATIONS.json python|rust
"""

from __future__ import annotations

import os
import sys
import types
from array import array
from typing import Any

from tests.differential.wheels import share_drivers

# A running request's own slots behind its window go early there: the request's affair, not the tree's.
os.environ["SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS"] = "0"
share_drivers()
import sglang_0_5_23 as driver  # noqa: E402
import torch  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

from tests.differential.peer_main import copy, main  # noqa: E402
from tests.differential.sides import Found, Pages, Request, RequestTable, Side  # noqa: E402
from tests.differential.windows import WindowSide  # noqa: E402


class PeerSide(Side):
    """A side over UnifiedRadixCache, full attention, with HiCache where `host_ratio` is not 0."""

    def __init__(self, setup: dict[str, Any]):
        self.page_size, num_tokens = setup["page_size"], setup["num_pages"] * setup["page_size"]
        driver.publish(setup["host_ratio"] or 1.0, setup["write_policy"], "direct")
        pool = driver.make_pool(self.page_size, num_tokens)
        self.allocator = driver.make_allocator(self.page_size, num_tokens, pool)
        self.kv = pool.k_buffer[0].view(-1)
        self.rows = RequestTable()
        params = driver.make_params(self.page_size, self.allocator, self.rows, sys.argv[3])
        self.cache = UnifiedRadixCache(params)
        self.host: Any = None
        if setup["host_ratio"]:
            self.cache.init_hicache(types.SimpleNamespace(file_storage_path=None), params)
            self.host = self.cache.cache_controller.mem_pool_host.anchor_entry.host_pool
            spare = (
                self.host.available_size() - int(setup["num_pages"] * setup["host_ratio"]) * self.page_size
            )
            self.taken = self.host.alloc(spare + setup["host_taken"] * self.page_size)
            if not setup["load_back_minimum"]:
                self.cache.load_back_threshold = 0

    # -- the calls ------------------------------------------------------------------------

    def key(self, namespace: str | None, tokens: list[int]) -> Any:
        return RadixKey(array("q", tokens), namespace)

    def match(self, namespace: str | None, tokens: list[int]) -> Found:
        found = self.cache.match_prefix(MatchPrefixParams(key=self.key(namespace, tokens)))
        node = found.last_device_node
        slots = self.cache.path_device_indices(node)
        return Found(slots, node, (found.best_match_node, node), found.host_hit_length)

    def lock(self, node: Any) -> tuple[Any, int]:
        before = self.cache.evictable_size()
        receipt = self.cache.lock(node)
        return receipt, self.cache.evictable_size() - before

    def unlock(self, receipt: Any) -> int:
        before = self.cache.evictable_size()
        self.cache.unlock(receipt)
        return self.cache.evictable_size() - before

    def insert(self, namespace: str | None, tokens: list[int], slots: torch.Tensor) -> int:
        before = self.allocator.available_size()
        self.cache.insert(InsertParams(key=self.key(namespace, tokens), value=slots))
        return self.allocator.available_size() - before

    def load(self, found: Found) -> tuple[torch.Tensor, Any]:
        best, node = found.host_node
        request = types.SimpleNamespace(
            last_node=node, swa_host_hit_length=0, mamba_host_hit_length=0, rid="r",
            kv=types.SimpleNamespace(mamba_pool_idx=None),
        )  # fmt: skip
        params = InitLoadBackParams(
            best_match_node=best, host_hit_length=found.num_host, mem_quota=None, req=request
        )
        count, end = self.cache.init_load_back(params)
        self.cache.ready_to_load_host_cache()
        if not count:
            return torch.empty(0, dtype=torch.int64), end
        return self.cache.tree_core.collect_full_device_indices(end, node), end

    def evict(self, num_tokens: int) -> int:
        return int(self.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted)

    def share(self, request: Request, chunked: bool) -> None:
        self._checkpoint(self._as_its_own(request), request)

    def finish(self, request: Request, is_insert: bool) -> None:
        own = self._as_its_own(request)
        if is_insert:
            own.finished = lambda: True
            self._checkpoint(own, request)
        self.cache.free_kv_row(own.kv, [(own.kv.cache_protected_len, len(request.fill_ids))])
        self.cache.unlock(own.lock)

    def _as_its_own(self, request: Request) -> Any:
        """The request as this version has it."""
        kv = types.SimpleNamespace(
            req_pool_idx=request.req_pool_idx, cache_protected_len=request.cache_protected_len,
            cache_inserted_len=request.cache_inserted_len, mamba_pool_idx=None,
            get_evicted_seqlen=lambda component: 0, swa_dead_lo=lambda position: 0,
        )  # fmt: skip
        return types.SimpleNamespace(
            finished=lambda: False, full_untruncated_fill_ids=array("q", request.fill_ids), kv=kv, priority=0,
            session_id=None, kv_rotation_base=None, extra_key=request.extra_key, cache_salt=None,
            origin_input_ids=array("q", request.origin_input_ids), lock=request.receipt,
            last_node=request.last_node, rid=request.rid, finished_reason=None, swa_branching_seqlen=None,
        )  # fmt: skip

    def _checkpoint(self, own: Any, request: Request) -> None:
        self.cache.checkpoint_into_tree(own, up_to=len(request.fill_ids))
        request.receipt, request.last_node = own.lock, own.last_node
        request.cache_protected_len = own.kv.cache_protected_len
        request.cache_inserted_len = own.kv.cache_inserted_len
        row = self.rows.req_to_token[request.req_pool_idx, : len(request.fill_ids)]
        request.prefix_indices = row.to(torch.int64, copy=True)

    # -- what is seen ---------------------------------------------------------------------

    def sizes(self) -> list[int]:
        cache = self.cache
        return [cache.full_evictable_size(), cache.full_protected_size(), cache.total_size()[0]]

    def settle(self) -> None:
        if self.host is not None:
            self.cache.ready_to_load_host_cache()
            self.cache.check_hicache_events()
            self.cache.check_hicache_events()  # the first submits what the second applies

    def host_free(self) -> int:
        return int(self.host.available_size()) if self.host is not None else 0

    def pages(self) -> Pages:
        self.cache.sanity_check()
        device = self._names(self.cache.all_values_flatten(), self.kv)
        host: set[str] = set()
        if self.host is not None:
            used = self.host.slot_used.clone()
            used[self.taken] = False
            host = self._names(used.nonzero().view(-1), self.host.k_buffer[0].view(-1))
        return {name: "D" * (name in device) + "H" * (name in host) for name in device | host}

    def _names(self, slots: torch.Tensor, stored: torch.Tensor) -> set[str]:
        """Of the pages that `slots` fill whole."""
        last = slots[slots % self.page_size == self.page_size - 1]
        names = {f"{stamp:x}" for stamp in stored[last].tolist()}
        assert len(names) == len(slots) // self.page_size, "two pages of a tier hold the same"
        return names


class PeerWindowSide(WindowSide, PeerSide):
    """A side over UnifiedRadixCache with a sliding window."""

    records = types.SimpleNamespace(EvictParams=EvictParams)

    def __init__(self, setup: dict[str, Any]):
        self.host = None
        driver.publish(1.0)
        self.use_pools(setup, SWAKVPool, SWATokenToKVPoolAllocator)
        params = driver.make_params(self.page_size, self.allocator, self.rows, sys.argv[3])
        params.sliding_window_size = self.window
        params.tree_components = (ComponentType.FULL, ComponentType.SWA)
        self.cache = UnifiedRadixCache(params)

    def lock(self, node: Any) -> tuple[Any, Any]:
        before = self._evictable()
        receipt = self.cache.lock(node)
        return receipt, [now - was for now, was in zip(self._evictable(), before)]

    def unlock(self, receipt: Any) -> Any:
        before = self._evictable()
        self.cache.unlock(receipt)
        return [now - was for now, was in zip(self._evictable(), before)]

    def insert(self, namespace: str | None, tokens: list[int], slots: torch.Tensor) -> int:
        params = InsertParams(key=self.key(namespace, tokens), value=slots)
        return int(self.cache.insert(params).prefix_len)

    share = PeerSide.share
    finish = PeerSide.finish

    def pages(self) -> Pages:
        self.cache.sanity_check()
        slots = self.cache.all_values_flatten()
        full = self._names(slots, self.kv)
        beside = self.beside(slots)
        window = self._names(beside[beside > 0], self.window_kv)
        return {name: "D" + "W" * (name in window) for name in full}


def make(setup: dict[str, Any]) -> Side:
    """The side that a stream's setup asks for."""
    return PeerWindowSide(setup) if setup["window"] else PeerSide(setup)


if __name__ == "__main__":
    driver.prepare_host()
    driver.host_mha.transfer_kv_direct = copy
    main(make)

"""Our class over SGLang's real pools, allocators and records, in this process, without a model.

Workers move one step at a time, when the test says so: `rig.driver.held` names those that stand still.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from hiradix.adapters.sglang.cache_factory import gate_reads, own_params
from hiradix.adapters.sglang.engine_views import ControllerView
from hiradix.adapters.sglang.lora_adapters import LoraAdapters
from hiradix.adapters.sglang.tiers import HiRadixHostCache
from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.memory.engine_pools import device_pool, window_pools
from hiradix.prefix_cache import (
    ModelIdentity,
    RadixCache,
    build_hybrid_cache,
    build_prefix_cache,
)
from hiradix.prefix_cache.allocator_ports import HybridPort
from hiradix.transfer import Runtime, StepDriver

PAGE = 4
LAYERS, HEADS, DIM = 2, 1, 8
NUM_TOKENS = 64 * PAGE


def stored_in(folder: Path) -> str:
    """Extra config of the file backend in a folder, whose disk may be busy: a late call is a miss."""
    return f'{{"file_storage_path": "{folder}", "prefetch_threshold": 1, "deadline_s": 60.0}}'


@dataclass(eq=False)
class Request:
    """What the cache sees of SGLang's Req."""

    rid: str
    origin_input_ids: array[int]
    extra_key: str | None = None
    cache_salt: str | None = None
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    kv: Any = field(default_factory=ReqKvInfo)
    lock: Any = None
    last_node: Any = None
    prefix_len: int = 0
    priority: int | None = None
    is_finished: bool = False
    full_untruncated_fill_ids: array[int] = field(default_factory=lambda: array("q"))

    def refresh_fill_ids(self) -> None:
        """One array that grows with the output."""
        num_known = len(self.full_untruncated_fill_ids) - len(self.origin_input_ids)
        if 0 <= num_known <= len(self.output_ids):
            self.full_untruncated_fill_ids.extend(self.output_ids[num_known:])
        else:
            self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.is_finished


class Rig:
    """A cache over `NUM_TOKENS` device tokens. storage: a folder that the file backend stores in.

    adapters: digests of adapters' weights by the ids SGLang has for them.
    """

    window: int | None = None
    page: int = PAGE

    def __init__(
        self,
        storage: Path | None = None,
        is_eagle: bool = False,
        adapters: Mapping[str, str] | None = None,
        **flags: Any,
    ):
        self.kvcache, self.allocator = self.make_pool()
        self.rows = self.make_rows()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            is_eagle=is_eagle,
            enable_kv_cache_events=True,
            eviction_policy=flags.get("radix_eviction_policy", "lru"),
            sliding_window_size=self.window,
        )
        extra = stored_in(storage) if storage else None
        config = HiCacheConfig(
            page_size=self.page,
            enable_hierarchical_cache=True,
            hicache_ratio=4.0,
            hicache_storage_backend="file" if storage else None,
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=parse_extra_config(extra),
            **flags,
        )
        self.driver = StepDriver()
        runtime = Runtime(driver=self.driver, clock=self.driver.now)
        inner = self.make_inner(config, params, runtime)
        assert inner.has_host
        controller = ControllerView(inner.layer_done_counter)
        self.gate = controller.layer_done_counter
        gate_reads(params, self, self.gate)
        self.cache = HiRadixHostCache(params, inner, controller, LoraAdapters(adapters or {}))
        self._num_requests = 0

    def make_rows(self) -> Any:
        """SGLang's table of slots."""
        return ReqToTokenPool(8, 2 * NUM_TOKENS, "cpu", enable_memory_saver=False)

    def make_pool(self) -> tuple[Any, Any]:
        """SGLang's device pool, and the allocator of its slots."""
        kvcache = MHATokenToKVPool(
            NUM_TOKENS, PAGE, torch.float32, HEADS, DIM, LAYERS, "cpu", enable_memory_saver=False
        )
        return kvcache, PagedTokenToKVPoolAllocator(
            NUM_TOKENS, PAGE, torch.float32, "cpu", kvcache, need_sort=False
        )

    def make_inner(self, config: HiCacheConfig, params: Any, runtime: Runtime) -> RadixCache:
        pool = device_pool(self.kvcache, PAGE)
        return build_prefix_cache(config, own_params(params), pool, ModelIdentity("rig"), runtime)

    def alloc(self, num_tokens: int) -> torch.Tensor:
        slots: torch.Tensor | None = self.allocator.alloc(num_tokens)
        assert slots is not None, "the device pool is too small for this test"
        return slots

    def fill(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """What a forward computes for these slots."""
        for buffer in (*self.kvcache.k_buffer, *self.kvcache.v_buffer):
            buffer[slots] = values[:, None, None].expand(-1, HEADS, DIM)

    def register_hicache_layer_transfer_counter(self, gate: Any) -> None:
        """What SGLang's worker keeps the gate for: each forward says there what it waits for."""
        self.gate = gate

    # -- one request, as SGLang's scheduler leads it -------------------------------------

    def request(self, tokens: Sequence[int], **namespace: Any) -> Request:
        self._num_requests += 1
        return Request(f"r{self._num_requests}", array("q", tokens), **namespace)

    def match(self, req: Request) -> Any:
        """Match all but the last token, as a request does before it runs."""
        req.refresh_fill_ids()
        tokens = req.full_untruncated_fill_ids
        key = RadixKey(tokens, req.extra_key, limit=len(tokens) - 1, cache_salt=req.cache_salt)
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.prefix_len, req.last_node = found.device_prefix_len, found.last_device_node
        req.kv.cache_protected_len = req.prefix_len
        return found

    def admit(self, req: Request) -> Any:
        """Match, load back, lock, and allocate what is to be computed; its data is the token ids."""
        found = self.match(req)
        if found.host_hit_length:
            params = InitLoadBackParams(found.best_match_node, found.host_hit_length, None, req)
            num_loaded, req.last_node = self.cache.init_load_back(params)
            assert num_loaded in (0, found.host_hit_length)
            req.prefix_len += num_loaded
            req.kv.cache_protected_len = req.prefix_len
        req.lock = self.cache.lock(req.last_node)
        self.gate.set_consumer(self.cache.ready_to_load_host_cache())
        num_tokens = len(req.origin_input_ids)
        need = -(-num_tokens // PAGE) * PAGE - req.prefix_len
        if self.allocator.available_size() < need:
            self.cache.evict(EvictParams(num_tokens=need - self.allocator.available_size()))
        slots = self.alloc(need)
        req.kv.req_pool_idx = self.rows.free_slots.pop()
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        row[: req.prefix_len] = self.cache.path_device_indices(req.last_node)[: req.prefix_len]
        row[req.prefix_len : req.prefix_len + need] = slots
        req.kv.kv_allocated_len = num_tokens
        own = slots[: num_tokens - req.prefix_len]
        values = torch.tensor(req.origin_input_ids[req.prefix_len :], dtype=torch.float32)
        self.fill(own, values)
        return found

    def finish(self, req: Request) -> None:
        """End it as SGLang's release_kv_cache does."""
        req.is_finished = True
        req.refresh_fill_ids()
        num_tokens = len(req.origin_input_ids)
        self.cache.checkpoint(req, up_to=num_tokens)
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, num_tokens)])
        self.cache.unlock(req.lock)
        req.lock = None
        self.cache.on_release(req, checkpointed=True)
        self.rows.free_slots.append(req.kv.req_pool_idx)

    def abort(self, req: Request) -> None:
        """End it as SGLang ends a running request whose client has left: nothing of it is kept."""
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, len(req.origin_input_ids))])
        self.cache.unlock(req.lock)
        req.lock = None
        self.cache.on_release(req, checkpointed=False)
        self.rows.free_slots.append(req.kv.req_pool_idx)

    def run(self, tokens: Sequence[int], **namespace: Any) -> Any:
        """A whole request; what it matched."""
        req = self.request(tokens, **namespace)
        found = self.admit(req)
        self.finish(req)
        return found

    # -- around it -----------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything under way end, and apply it."""
        while self.driver.run():
            self.cache.check_hicache_events()
        self.cache.check_hicache_events()

    def evict_all(self) -> None:
        self.cache.evict(EvictParams(num_tokens=NUM_TOKENS))

    def handle(self, req: Request) -> CacheRequestHandle:
        return CacheRequestHandle(req.rid, 0)

    def prefetch(self, req: Request) -> CacheRequestHandle:
        """Ask storage for what the tiers lack of a request's prompt."""
        found = self.match(req)
        matched = found.device_prefix_len + found.host_hit_length
        tokens = req.full_untruncated_fill_ids
        self.cache.prefetch_from_storage(
            self.handle(req),
            found.last_host_node,
            tokens[matched : len(tokens) - 1],
            None,
            None,
            matched_prefix_tokens=tokens[:matched],
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
        )
        return self.handle(req)

    def data(self, node: Any) -> torch.Tensor:
        """What the device has for the path of `node`, first layer's keys."""
        return self.kvcache.k_buffer[0][self.cache.path_device_indices(node)][:, 0, 0]

    def slots_of(self, req: Request) -> list[int]:
        """What its row names."""
        found: list[int] = self.rows.req_to_token[req.kv.req_pool_idx, : len(req.origin_input_ids)].tolist()
        return found

    def check(self) -> None:
        """SGLang's idle equation, and our own invariants."""
        cache = self.cache
        total = self.allocator.available_size() + cache.evictable_size() + cache.protected_size()
        assert total == NUM_TOKENS, f"{total} tokens of {NUM_TOKENS} are accounted for"
        cache.sanity_check()


class WindowRig(Rig):
    """The same over full layers and layers with a window of two pages, one of each."""

    window = 2 * PAGE

    def make_pool(self) -> tuple[Any, Any]:
        kvcache = SWAKVPool(
            NUM_TOKENS, NUM_TOKENS, PAGE, torch.float32, HEADS, DIM, swa_attention_layer_ids=[1],
            full_attention_layer_ids=[0], device="cpu",
        )  # fmt: skip
        return kvcache, SWATokenToKVPoolAllocator(
            NUM_TOKENS, NUM_TOKENS, PAGE, torch.float32, "cpu", kvcache, need_sort=False
        )

    def make_inner(self, config: HiCacheConfig, params: Any, runtime: Runtime) -> RadixCache:
        own, pools = own_params(params, HybridPort), window_pools(self.kvcache)
        return build_hybrid_cache(config, own, pools, ModelIdentity("rig"), runtime)

    def alloc(self, num_tokens: int) -> torch.Tensor:
        full = self.allocator.full_attn_allocator.alloc(num_tokens)
        window = self.allocator.swa_attn_allocator.alloc(num_tokens)
        assert full is not None and window is not None, "a device pool is too small for this test"
        self.allocator.set_full_to_swa_mapping(full, window)
        return full

    def fill(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        beside = self.allocator.full_to_swa_index_mapping[slots]
        for pool, own in ((self.kvcache.full_kv_pool, slots), (self.kvcache.swa_kv_pool, beside)):
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[own] = values[:, None, None].expand(-1, HEADS, DIM)

    def check(self) -> None:
        """SGLang's idle equations of both pools, and our own invariants."""
        cache, allocator = self.cache, self.allocator
        full = allocator.full_available_size() + cache.full_evictable_size() + cache.full_protected_size()
        window = allocator.swa_available_size() + cache.swa_evictable_size() + cache.swa_protected_size()
        assert (full, window) == (NUM_TOKENS, NUM_TOKENS), "full and window tokens accounted for"
        cache.sanity_check()

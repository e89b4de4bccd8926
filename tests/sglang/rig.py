"""Our class over SGLang's real pools, allocators and records, in this process, without a model.

Workers move one step at a time, when the test says so: `rig.driver.held` names those that stand still.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from hiradix.adapters.sglang.cache_factory import gate_reads, own_params
from hiradix.adapters.sglang.engine_views import ControllerView
from hiradix.adapters.sglang.lora_adapters import LoraAdapters
from hiradix.adapters.sglang.states import StateRecords, require_known_states
from hiradix.adapters.sglang.tiers import HiRadixHostCache
from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.memory.engine_pools import device_pool, state_pools, window_pools
from hiradix.prefix_cache import CacheInitParams as OwnParams
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
RECORDS = 24
STATE_LAYERS, FULL_LAYERS = [0, 2], [1, 3]


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
    cached_tokens_device: int = 0
    cached_tokens_host: int = 0
    cached_tokens_storage: int = 0
    priority: int | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
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


def explained(own: OwnParams) -> OwnParams:
    """The same for a cache that explains its requests."""
    return replace(own, explain_names=4096)


class Rig:
    """A cache over `NUM_TOKENS` device tokens. storage: a folder that the file backend stores in.

    adapters: digests of adapters' weights by the ids SGLang has for them.
    """

    window: int | None = None
    page: int = PAGE
    has_states = False

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
        return build_prefix_cache(config, explained(own_params(params)), pool, ModelIdentity("rig"), runtime)

    def alloc(self, num_tokens: int) -> torch.Tensor:
        slots: torch.Tensor | None = self.allocator.alloc(num_tokens)
        assert slots is not None, "the device pool is too small for this test"
        return slots

    @property
    def attention(self) -> Any:
        """The pool of full attention."""
        return self.kvcache

    def fill(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """What a forward computes for these slots."""
        for buffer in (*self.attention.k_buffer, *self.attention.v_buffer):
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
        limit = min(len(tokens) - 1, req.logprob_start_len) if req.return_logprob else len(tokens) - 1
        key = RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        params = MatchPrefixParams(key=key, req=req, cow_mamba=self.has_states)
        found = self.cache.match_prefix(params)
        req.prefix_len, req.last_node = found.device_prefix_len, found.last_device_node
        req.kv.cache_protected_len = req.prefix_len
        return found

    def admit(self, req: Request) -> Any:
        """Match, load back, lock, and allocate what is to be computed; its data is the token ids."""
        found = self.match(req)
        if found.host_hit_length:
            assert found.mamba_host_hit_length == int(self.has_states)
            params = InitLoadBackParams(found.best_match_node, found.host_hit_length, None, req)
            num_loaded, req.last_node = self.cache.init_load_back(params)
            assert num_loaded in (0, found.host_hit_length)
            req.prefix_len += num_loaded
            req.cached_tokens_host = num_loaded
            req.kv.cache_protected_len = req.prefix_len
        req.cached_tokens_device = found.device_prefix_len
        req.lock = self.cache.lock(req.last_node)
        self.gate.set_consumer(self.cache.ready_to_load_host_cache())
        num_tokens = len(req.origin_input_ids)
        need = -(-num_tokens // self.page) * self.page - req.prefix_len
        self.make_room(need)
        slots = self.alloc(need)
        self.take_row(req)
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        row[: req.prefix_len] = self.cache.path_device_indices(req.last_node)[: req.prefix_len]
        row[req.prefix_len : req.prefix_len + need] = slots
        req.kv.kv_allocated_len = num_tokens
        own = slots[: num_tokens - req.prefix_len]
        self.fill(own, torch.tensor(req.origin_input_ids[req.prefix_len :], dtype=torch.float32))
        return found

    def make_room(self, num_tokens: int) -> None:
        """Evict what is short of so many tokens."""
        short = num_tokens - self.allocator.available_size()
        if short > 0:
            self.cache.evict(EvictParams(num_tokens=short))

    def take_row(self, req: Request) -> None:
        req.kv.req_pool_idx = self.rows.free_slots.pop()

    def give_row(self, req: Request) -> None:
        self.rows.free_slots.append(req.kv.req_pool_idx)

    def compute(self, req: Request, chunks: Sequence[int] = ()) -> None:
        """The prompt in chunks as long as these, and the rest; what attention keeps is there already."""

    def finish(self, req: Request, up_to: int | None = None) -> None:
        """End it as SGLang's release_kv_cache does. up_to: tokens that are kept, None for all."""
        req.is_finished = True
        req.refresh_fill_ids()
        num_tokens = len(req.origin_input_ids) if up_to is None else up_to
        self.cache.checkpoint(req, up_to=num_tokens)
        self.check_explained(req)
        self._release(req, True)

    def check_explained(self, req: Request) -> None:
        """Each token of its prompt has one source, as it was when it was admitted."""
        explainer = self.cache.explainer
        assert explainer is not None
        told: Any = explainer.recent.one(req.rid)
        hit = [req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage]
        assert told["prompt_tokens"] == len(req.origin_input_ids)
        assert [told["by_source"].get(tier, 0) for tier in ("device", "host", "storage")] == hit
        assert sum(told["by_reason"].values()) == len(req.origin_input_ids) - sum(hit)

    def abort(self, req: Request) -> None:
        """End it as SGLang ends a running request whose client has left: nothing of it is kept."""
        self._release(req, False)

    def _release(self, req: Request, checkpointed: bool) -> None:
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, len(req.origin_input_ids))])
        self.cache.unlock(req.lock)
        req.lock = None
        self.cache.on_release(req, checkpointed=checkpointed)
        self.give_row(req)

    def run(self, tokens: Sequence[int], chunks: Sequence[int] = (), **namespace: Any) -> Any:
        """A whole request; what it matched."""
        req = self.request(tokens, **namespace)
        found = self.admit(req)
        self.compute(req, chunks)
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
        return self.attention.k_buffer[0][self.cache.path_device_indices(node)][:, 0, 0]

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
        own, pools = explained(own_params(params, HybridPort)), window_pools(self.kvcache)
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


def digest(tokens: Sequence[int]) -> float:
    """The state behind these tokens; any other prefix has another."""
    value = 1
    for token in tokens:
        value = (value * 31 + token + 7) % 65521
    return float(value)


def per_layer(num_layers: int, shift: float) -> torch.Tensor:
    """float32 [L, 1, 1]: what each layer's state has beyond the digest, of tails or of states."""
    return torch.arange(num_layers, dtype=torch.float32)[:, None, None] / 4 + shift


class StateRig(Rig):
    """The same over attention and recurrent states, each a digest of all tokens before it.

    What SGLang's forward does with states is done here over its real request pool. has_buffers: SGLang's
    `extra_buffer`, in pages of `PAGE`, where passes leave boundaries in two more slots; else one state a
    request, pages of one token.
    """

    has_states = True

    def __init__(self, storage: Path | None = None, has_buffers: bool = False, **flags: Any):
        self.has_buffers = has_buffers
        self.page = PAGE if has_buffers else 1
        self.restored: list[float] = []  # states that passes began with
        super().__init__(storage, **flags)

    def make_rows(self) -> Any:
        dtype = SimpleNamespace(conv=torch.float32, temporal=torch.float32)
        shape = SimpleNamespace(conv=[(6, 3)], temporal=(2, 4, 3))
        params = SimpleNamespace(shape=shape, dtype=dtype, is_kda=False, layers=STATE_LAYERS)
        self.kvcache.mamba_pool = None
        return HybridReqToTokenPool(
            size=8, mamba_size=RECORDS, mamba_spec_state_size=0, max_context_len=2 * NUM_TOKENS, device="cpu",
            enable_memory_saver=False, cache_params=params, mamba_layer_ids=STATE_LAYERS,
            enable_mamba_extra_buffer=self.has_buffers,
        )  # fmt: skip

    def make_pool(self) -> tuple[Any, Any]:
        kvcache = HybridLinearKVPool(
            NUM_TOKENS, torch.float32, self.page, HEADS, DIM, FULL_LAYERS, "cpu", SimpleNamespace()
        )
        own = (torch.float32, "cpu", kvcache)
        if self.page == 1:
            return kvcache, TokenToKVPoolAllocator(NUM_TOKENS, *own, need_sort=False)
        return kvcache, PagedTokenToKVPoolAllocator(NUM_TOKENS, self.page, *own, need_sort=False)

    def make_inner(self, config: HiCacheConfig, params: Any, runtime: Runtime) -> RadixCache:
        require_known_states(self.rows)
        own = explained(own_params(params))
        own.state_records = StateRecords(self.rows.mamba_allocator)
        pools = state_pools(self.kvcache, self.rows, self.page)
        return build_hybrid_cache(config, own, pools, ModelIdentity("rig"), runtime)

    @property
    def attention(self) -> Any:
        return self.kvcache.full_kv_pool

    # -- states: what a forward does ------------------------------------------------------

    def state(self, slot: Any) -> set[float]:
        """The digests of a slot: one, unless it is torn, or layers or arrays are exchanged."""
        cache, at = self.rows.mamba_pool.mamba_cache, int(slot)
        tails = cache.conv[0][:, at] - per_layer(len(STATE_LAYERS), 0.0)
        states = cache.temporal[:, at].flatten(2) - per_layer(len(STATE_LAYERS), 0.125)
        return {*tails.flatten().tolist(), *states.flatten().tolist()}

    def write_state(self, slot: Any, value: float) -> None:
        cache, at = self.rows.mamba_pool.mamba_cache, int(slot)
        cache.conv[0][:, at] = value + per_layer(len(STATE_LAYERS), 0.0)
        cache.temporal[:, at] = (value + per_layer(len(STATE_LAYERS), 0.125))[..., None]

    def make_room(self, num_tokens: int) -> None:
        short = num_tokens - self.allocator.available_size()
        few = 3 - self.rows.mamba_allocator.available_size()
        self.cache.evict(EvictParams(num_tokens=max(0, short), mamba_num=max(0, few)))

    def take_row(self, req: Request) -> None:
        self.rows.alloc([req])

    def give_row(self, req: Request) -> None:
        assert not req.kv.holds_mamba and req.kv.mamba_ping_pong_track_buffer is None
        self.rows.free(req)

    def forward(self, req: Request, start: int, end: int) -> None:
        """Compute tokens [start, end) of the prompt: begin with what is due, leave the state, and a boundary."""
        kv, tokens = req.kv, req.origin_input_ids
        if kv.mamba_cow_src_index is not None:
            self.rows.copy_mamba_state(kv.mamba_cow_src_index, kv.mamba_pool_idx.unsqueeze(0))
        elif kv.mamba_needs_clear:
            self.write_state(kv.mamba_pool_idx, digest([]))
        kv.mamba_cow_src_index, kv.mamba_needs_clear = None, False
        began = self.state(kv.mamba_pool_idx)
        assert began == {digest(tokens[:start])}, f"a state that is not behind {start} tokens"
        self.restored.append(digest(tokens[:start]))
        self.write_state(kv.mamba_pool_idx, digest(tokens[:end]))
        kv.kv_committed_len = end
        boundary = end // self.page * self.page
        if self.has_buffers and boundary > start:
            self.write_state(
                kv.mamba_ping_pong_track_buffer[kv.mamba_next_track_idx], digest(tokens[:boundary])
            )
            kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, boundary
            kv.mamba_last_track_idx = kv.mamba_next_track_idx
            kv.mamba_next_track_idx = self.rows.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)

    def compute(self, req: Request, chunks: Sequence[int] = ()) -> None:
        """With a checkpoint behind each chunk."""
        start, num_tokens = req.prefix_len, len(req.origin_input_ids)
        for length in (*chunks, num_tokens):
            end = min(start + length, num_tokens)
            if end > start:
                self.forward(req, start, end)
                self.cache.checkpoint(req, up_to=end)
                start = end

    def evict_all(self) -> None:
        self.cache.evict(EvictParams(num_tokens=NUM_TOKENS, mamba_num=RECORDS))

    def check(self) -> None:
        """SGLang's idle equations of tokens and of states, and our own invariants."""
        cache, slots = self.cache, self.rows.mamba_allocator
        tokens = self.allocator.available_size() + cache.full_evictable_size() + cache.full_protected_size()
        assert tokens == NUM_TOKENS, f"{tokens} tokens of {NUM_TOKENS} are accounted for"
        states = slots.available_size() + cache.mamba_evictable_size() + cache.mamba_protected_size()
        assert states == RECORDS, f"{states} states of {RECORDS} are accounted for"
        named = sorted([*slots.free_slots.tolist(), *cache.all_mamba_values_flatten().tolist()])
        assert named == list(range(1, RECORDS + 1)), "a state is lost, or in two places"
        cache.sanity_check()

"""The rig over a model of attention and recurrent states, whose state is a digest of all tokens before.

What SGLang's scheduler and forward do with a request's slots is done here over its real request pool, both
ways: one state a request in pages of one token, or two more slots that passes leave boundaries in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from hiradix.adapters.sglang.cache_factory import own_params
from hiradix.adapters.sglang.states import StateRecords, require_known_states
from hiradix.config import HiCacheConfig
from hiradix.memory.engine_pools import state_pools
from hiradix.prefix_cache import ModelIdentity, RadixCache, build_hybrid_cache
from hiradix.transfer import Runtime
from tests.sglang.rig import DIM, HEADS, NUM_TOKENS, PAGE, Request, Rig

RECORDS = 24
STATE_LAYERS, FULL_LAYERS = [0, 2], [1, 3]


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
    """has_buffers: SGLang's `extra_buffer`, in pages of `PAGE`; else one state a request, pages of one."""

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
        own = own_params(params)
        own.state_records = StateRecords(self.rows.mamba_allocator)
        pools = state_pools(self.kvcache, self.rows, self.page)
        return build_hybrid_cache(config, own, pools, ModelIdentity("rig"), runtime)

    def fill(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        pool = self.kvcache.full_kv_pool
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[slots] = values[:, None, None].expand(-1, HEADS, DIM)

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

    def match(self, req: Request) -> Any:
        req.refresh_fill_ids()
        tokens = req.full_untruncated_fill_ids
        key = RadixKey(tokens, req.extra_key, limit=len(tokens) - 1, cache_salt=req.cache_salt)
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=req, cow_mamba=True))
        req.prefix_len, req.last_node = found.device_prefix_len, found.last_device_node
        req.kv.cache_protected_len = req.prefix_len
        return found

    def admit(self, req: Request) -> Any:
        """Match, load back, lock, and allocate; nothing is computed yet."""
        found = self.match(req)
        if found.host_hit_length:
            assert found.mamba_host_hit_length == 1
            params = InitLoadBackParams(found.best_match_node, found.host_hit_length, None, req)
            num_loaded, req.last_node = self.cache.init_load_back(params)
            assert num_loaded in (0, found.host_hit_length)
            req.prefix_len += num_loaded
            req.kv.cache_protected_len = req.prefix_len
        req.lock = self.cache.lock(req.last_node)
        self.gate.set_consumer(self.cache.ready_to_load_host_cache())
        num_tokens, page = len(req.origin_input_ids), self.page
        need = -(-num_tokens // page) * page - req.prefix_len
        short = need - self.allocator.available_size()
        few = 3 - self.rows.mamba_allocator.available_size()
        self.cache.evict(EvictParams(num_tokens=max(0, short), mamba_num=max(0, few)))
        slots = self.alloc(need)
        self.rows.alloc([req])
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        row[: req.prefix_len] = self.cache.path_device_indices(req.last_node)[: req.prefix_len]
        row[req.prefix_len : req.prefix_len + need] = slots
        req.kv.kv_allocated_len = num_tokens
        own = slots[: num_tokens - req.prefix_len]
        self.fill(own, torch.tensor(req.origin_input_ids[req.prefix_len :], dtype=torch.float32))
        return found

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
        """The whole prompt, with a checkpoint behind each chunk: as long as these, and the rest."""
        start, num_tokens = req.prefix_len, len(req.origin_input_ids)
        for length in (*chunks, num_tokens):
            end = min(start + length, num_tokens)
            if end > start:
                self.forward(req, start, end)
                self.cache.checkpoint(req, up_to=end)
                start = end

    def finish(self, req: Request, up_to: int | None = None) -> None:
        req.is_finished = True
        req.refresh_fill_ids()
        num_tokens = len(req.origin_input_ids) if up_to is None else up_to
        self.cache.checkpoint(req, up_to=num_tokens)
        self._release(req, True)

    def abort(self, req: Request) -> None:
        self._release(req, False)

    def _release(self, req: Request, checkpointed: bool) -> None:
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, len(req.origin_input_ids))])
        self.cache.unlock(req.lock)
        req.lock = None
        self.cache.on_release(req, checkpointed=checkpointed)
        assert not req.kv.holds_mamba and req.kv.mamba_ping_pong_track_buffer is None
        self.rows.free(req)

    def run(self, tokens: Sequence[int], chunks: Sequence[int] = (), **namespace: Any) -> Any:
        req = self.request(tokens, **namespace)
        found = self.admit(req)
        self.compute(req, chunks)
        self.finish(req)
        return found

    def evict_all(self) -> None:
        self.cache.evict(EvictParams(num_tokens=NUM_TOKENS, mamba_num=RECORDS))

    def data(self, node: Any) -> torch.Tensor:
        return self.kvcache.full_kv_pool.k_buffer[0][self.cache.path_device_indices(node)][:, 0, 0]

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

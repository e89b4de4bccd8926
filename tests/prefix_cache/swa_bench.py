"""The tiny scheduler of `bench_engine` for models with sliding windows: two pools, a map, windows that slide.

Both pools are stamped. A prefix counts as exact only if its full data is, and the window data of the last
`window` positions, read through the map, is too.
"""

from __future__ import annotations

from typing import Any

import torch

from hiradix.config import HiCacheConfig
from hiradix.memory import DevicePool, HybridPools, HybridSlotAllocator, KVShape, ReqToTokenPool
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    ModelIdentity,
    SWARadixCache,
    build_hybrid_cache,
)
from tests.prefix_cache.bench_engine import SHAPE, Bench, ForeignAllocator, Request

WINDOW_SHAPE = KVShape(1, 1, 4, 4, torch.float32)
FULL_LAYERS, WINDOW_LAYERS = (0, 2), (1,)  # of the model


class ForeignHybridAllocator:
    """SGLang's hybrid surface and nothing more: frees are masked by the map, and not idempotent."""

    def __init__(self, num_full: int, num_window: int, page_size: int):
        self.full_attn_allocator = ForeignAllocator(num_full, page_size, None, seed=1)
        self.swa_attn_allocator = ForeignAllocator(num_window, page_size, None, seed=2)
        self.page_size, self.device = page_size, "cpu"
        self.size_full, self.size_swa = num_full * page_size, num_window * page_size
        self.size = min(self.size_full, self.size_swa)
        self.full_to_swa_index_mapping = torch.zeros(self.size_full + page_size + 1, dtype=torch.int64)
        self.full_to_swa_index_mapping[-1] = -1

    def available_size(self) -> int:
        return min(self.full_available_size(), self.swa_available_size())

    def full_available_size(self) -> int:
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        return self.swa_attn_allocator.available_size()

    def get_kvcache(self) -> Any:
        return None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > self.available_size():
            return None
        full, window = self.full_attn_allocator.alloc(need_size), self.swa_attn_allocator.alloc(need_size)
        self.full_to_swa_index_mapping[full] = window
        return full

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel():
            self.full_attn_allocator.free(free_index)
            self.free_swa(free_index)

    def free_swa(self, free_index: torch.Tensor) -> None:
        window = self.full_to_swa_index_mapping[free_index]
        self.swa_attn_allocator.free(window[window > 0])
        self.full_to_swa_index_mapping[free_index] = 0


class SwaBench(Bench):
    """Pools, cache and moves. window: in tokens; config: of the host tier, None without one."""

    def __init__(
        self, num_pages: int, num_window_pages: int, page_size: int, window: int, *, foreign: bool = False,
        config: dict[str, Any] | None = None, **switches: Any,
    ):  # fmt: skip
        self.page_size, self.num_pages, self.num_window_pages = page_size, num_pages, num_window_pages
        self.window = window
        self.pool = DevicePool(SHAPE, num_pages, page_size)
        self.window_pool = DevicePool(WINDOW_SHAPE, num_window_pages, page_size)
        if foreign:
            self.allocator: Any = ForeignHybridAllocator(num_pages, num_window_pages, page_size)
        else:
            tokens = num_pages * page_size, num_window_pages * page_size
            self.allocator = HybridSlotAllocator(*tokens, page_size)
        self.rows = ReqToTokenPool(8, 512, "cpu")
        params = CacheInitParams(
            req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator, page_size=page_size,
            sliding_window_size=window, **{"disable": False, **switches},
        )  # fmt: skip
        self.cache: Any = SWARadixCache(params)
        if config is not None:
            pools = HybridPools(self.pool, self.window_pool, FULL_LAYERS, WINDOW_LAYERS)
            flags = HiCacheConfig(page_size=page_size, **config)
            self.cache = build_hybrid_cache(flags, params, pools, ModelIdentity("bench"))
        self.running: list[Request] = []
        self.counter = 0

    # -- stamps -------------------------------------------------------------------------

    def _write(self, req: Request, start: int, end: int) -> None:
        super()._write(req, start, end)
        row = self.rows.req_to_token[req.req_pool_idx]
        for position in range(start, end):
            slot = int(self.allocator.full_to_swa_index_mapping[int(row[position])])
            assert slot > 0, f"{req.rid}: no window slot to write at {position}"
            self.window_pool.k_buffer[0][slot] = self._stamp(req, req.fill_ids, position) + 0.5

    def verify(self, req: Request, count: int) -> None:
        super().verify(req, count)
        row = self.rows.req_to_token[req.req_pool_idx]
        for position in range(max(0, count - self.window), count):
            slot = int(self.allocator.full_to_swa_index_mapping[int(row[position])])
            want = self._stamp(req, req.fill_ids, position) + 0.5
            assert slot > 0 and self.window_pool.k_buffer[0][slot].eq(want).all(), (req.rid, position, slot)

    # -- a request's life ---------------------------------------------------------------

    def alloc(self, need: int) -> torch.Tensor | None:
        full = max(0, need - self.allocator.full_available_size())
        window = max(0, need - self.allocator.swa_available_size())
        if full or window:
            self.cache.evict(EvictParams(num_tokens=full, swa_num_tokens=window))
        return self.allocator.alloc(need)

    def decode(self, req: Request, token: int) -> bool:
        ok = super().decode(req, token)
        if ok:
            self.slide(req)
        return ok

    def slide(self, req: Request) -> None:
        """Free the request's own window pages that lie wholly behind its window."""
        start = max(req.swa_evicted_seqlen, req.cache_protected_len)
        end = (req.committed - self.window) // self.page_size * self.page_size
        if end > start:
            row = self.rows.req_to_token[req.req_pool_idx]
            self.allocator.free_swa(row[start:end].to(torch.int64))
            req.swa_evicted_seqlen = end

    # -- checks -------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants, each page of both pools in one place, and the map in step with the tree."""
        self.cache.check()
        size, mapping = self.page_size, self.allocator.full_to_swa_index_mapping
        full, window = (tokens // size for tokens in self.cache.total_size())
        own = self.own_pages()
        own_window = {int(mapping[page * size]) // size for page in own} - {0}
        free = self.allocator.full_available_size() // size
        free_window = self.allocator.swa_available_size() // size
        assert full + len(own) + free == self.num_pages, (full, len(own), free)
        assert window + len(own_window) + free_window == self.num_window_pages, (
            f"{window} tree + {len(own_window)} requests + {free_window} free != {self.num_window_pages}"
        )
        for node in self.cache.tree.nodes():
            pages, beside = node.device.pages, node.others[0].pages
            if pages is None:
                continue
            mapped = mapping[torch.from_numpy(pages).long() * size] // size
            expected = torch.zeros_like(mapped) if beside is None else torch.from_numpy(beside).long()
            assert torch.equal(mapped, expected), f"{node}: map {mapped.tolist()}, tree {expected.tolist()}"

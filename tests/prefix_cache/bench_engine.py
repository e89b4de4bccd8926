"""A tiny scheduler for tests of the facade: the 0.5.9 call order, with KV stamped instead of computed.

Runs on our pools and on a stand-in with SGLang's surface (slot 0 a dummy, page-aligned slots in any order).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from hiradix.config import HiCacheConfig
from hiradix.memory import DevicePool, KVShape, ReqToTokenPool, SlotAllocator, make_transport
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    MatchPrefixParams,
    ModelIdentity,
    RadixCache,
    RadixKey,
    build_prefix_cache,
)

SHAPE = KVShape(2, 1, 4, 4, torch.float32)
PATIENCE_S = 60.0
"""For what ends by itself, and for storage on a disk that others keep busy."""


class ForeignAllocator:
    """SGLang's allocator surface and nothing more; hands out page-aligned slots in scrambled order."""

    def __init__(self, num_pages: int, page_size: int, kvcache: Any, seed: int = 0):
        self.size, self.page_size, self.device = num_pages * page_size, page_size, "cpu"
        self._kvcache = kvcache
        self._free = list(range(1, num_pages + 1))
        random.Random(seed).shuffle(self._free)

    def available_size(self) -> int:
        return len(self._free) * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        assert need_size % self.page_size == 0, need_size
        count = need_size // self.page_size
        if count > len(self._free):
            return None
        pages, self._free = self._free[:count], self._free[count:]
        return torch.tensor(
            [p * self.page_size + i for p in pages for i in range(self.page_size)], dtype=torch.int64
        )

    def free(self, free_index: torch.Tensor) -> None:
        for page in sorted(set((free_index // self.page_size).tolist())):
            assert page > 0 and page not in self._free, f"page {page} freed twice"
            self._free.append(page)

    def get_kvcache(self) -> Any:
        return self._kvcache


class ForeignKVCache:
    """SGLang's MHA pool surface: per-layer buffers with a dummy page in front."""

    def __init__(self, num_pages: int, page_size: int):
        rows = (num_pages + 1) * page_size
        self.k_buffer = [torch.zeros(rows, 1, 4) for _ in range(SHAPE.num_layers)]
        self.v_buffer = [torch.zeros(rows, 1, 4) for _ in range(SHAPE.num_layers)]


@dataclass(eq=False)
class Request:
    """What the facade reads and writes on a request."""

    rid: str
    origin_input_ids: list[int]
    extra_key: str | None = None
    cache_salt: str | None = None
    page_extras: Sequence[bytes | None] | None = None
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    req_pool_idx: int = -1
    prefix_indices: Any = None
    last_node: Any = None
    last_host_node: Any = None
    host_hit_length: int = 0
    cache_protected_len: int = 0
    swa_uuid_for_lock: Any = None
    swa_evicted_seqlen: int = 0
    committed: int = 0
    host_tokens: int = 0
    device_tokens: int = 0
    session_hint: str | None = None
    priority: int | None = None

    def pop_committed_kv_cache(self) -> int:
        return self.committed


class Bench:
    """Pools, cache and the moves of a scheduler."""

    def __init__(self, config: HiCacheConfig, num_pages: int, *, foreign: bool = False, **switches: bool):
        size = config.page_size
        self.page_size, self.num_pages = size, num_pages
        if foreign:
            kvcache: Any = ForeignKVCache(num_pages, size)
            self.pool = DevicePool.wrap(kvcache.k_buffer, kvcache.v_buffer, size)
            self.allocator: Any = ForeignAllocator(num_pages, size, kvcache)
        else:
            self.pool = DevicePool(SHAPE, num_pages, size)
            self.allocator = SlotAllocator(num_pages * size, size, "cpu", self.pool)
        self.rows = ReqToTokenPool(8, 512, "cpu")
        params = CacheInitParams(
            req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator, page_size=size,
            eviction_policy=config.radix_eviction_policy, **switches,
        )  # fmt: skip
        self.cache: RadixCache = build_prefix_cache(config, params, self.pool, ModelIdentity("bench"))
        self.running: list[Request] = []
        self.counter = 0

    # -- stamps -------------------------------------------------------------------------

    def _stamp(self, req: Request, tokens: list[int], position: int) -> float:
        text = repr((req.extra_key, req.cache_salt, tokens[: position + 1]))
        extras = list(req.page_extras or ())[: position // self.page_size + 1]
        if any(extras):
            text += repr(extras + [None] * (position // self.page_size + 1 - len(extras)))
        return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=3).digest(), "big"))

    def _write(self, req: Request, start: int, end: int) -> None:
        row = self.rows.req_to_token[req.req_pool_idx]
        for position in range(start, end):
            for layer in range(SHAPE.num_layers):
                self.pool.k_buffer[layer][int(row[position])] = self._stamp(req, req.fill_ids, position)
                self.pool.v_buffer[layer][int(row[position])] = -self._stamp(req, req.fill_ids, position)

    def verify(self, req: Request, count: int) -> None:
        """The first `count` positions of the request's row hold exactly its tokens' data."""
        row = self.rows.req_to_token[req.req_pool_idx]
        for position in range(count):
            want = self._stamp(req, req.fill_ids, position)
            for layer in range(SHAPE.num_layers):
                slot = int(row[position])
                assert self.pool.k_buffer[layer][slot].eq(want).all(), (req.rid, position, slot)
                assert self.pool.v_buffer[layer][slot].eq(-want).all(), (req.rid, position, slot)

    # -- a request's life ---------------------------------------------------------------

    def start(
        self, tokens: list[int], *, wait_s: float = PATIENCE_S, share: bool = True,
        between: Callable[[], object] | None = None, **namespace: Any,
    ) -> Request | None:  # fmt: skip
        """Admit a request and prefill it; None when the pool has no room.

        between: what others do between its match and its load back.
        """
        self.counter += 1
        req = Request(f"r{self.counter}", list(tokens), **namespace)
        req.fill_ids = list(tokens)
        self.cache.check_hicache_events()
        if self.cache.enable_storage:
            self._prefetch(req, wait_s)
        if not self._admit(req, between):
            return None
        slot = self.cache.ready_to_load_host_cache()
        counter = getattr(self.cache, "layer_done_counter", None)
        if counter is not None:
            counter.set_consumer(slot)
            for layer in range(counter.num_layers):
                counter.wait_until(layer)
        prefix = len(req.prefix_indices)
        self.verify(req, prefix)
        self._write(req, prefix, len(tokens))
        req.committed = len(tokens)
        if share:
            self.cache.cache_unfinished_req(req)
        self.verify(req, len(tokens))
        self.running.append(req)
        return req

    def _match(self, req: Request) -> None:
        extras = req.page_extras
        key = RadixKey(req.fill_ids[:-1], req.extra_key, cache_salt=req.cache_salt, page_extras=extras)
        match = self.cache.match_prefix(MatchPrefixParams(key, req))
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        req.last_host_node, req.host_hit_length = match.last_host_node, match.host_hit_length
        req.cache_protected_len = len(match.device_indices)

    def _prefetch(self, req: Request, wait_s: float) -> None:
        self._match(req)
        matched = len(req.prefix_indices) + req.host_hit_length
        self.cache.prefetch_from_storage(req.rid, req.last_host_node, req.fill_ids[matched:-1], req=req)
        while not self.cache.check_prefetch_progress(req.rid):
            assert self.cache.controller.wait_any(wait_s), "prefetch made no progress"
            self.cache.check_hicache_events()

    def _admit(self, req: Request, between: Callable[[], object] | None = None) -> bool:
        self._match(req)
        held = self.cache.inc_lock_ref(req.last_node)
        if between is not None:
            between()
        req.device_tokens = len(req.prefix_indices)
        if req.host_hit_length:
            indices, node = self.cache.init_load_back(req.last_host_node, req.host_hit_length)
            req.host_tokens = len(indices)
            req.prefix_indices = torch.cat([req.prefix_indices, indices])
            req.last_node, req.cache_protected_len = node, len(req.prefix_indices)
        req.swa_uuid_for_lock = self.cache.inc_lock_ref(req.last_node)
        self.cache.dec_lock_ref(held)
        need = -(-(len(req.fill_ids) - len(req.prefix_indices)) // self.page_size) * self.page_size
        slots = self.alloc(need)
        if slots is None:
            self.cache.dec_lock_ref(req.last_node, req.swa_uuid_for_lock)
            return False
        req.req_pool_idx = self.rows.alloc(1)[0]
        row = torch.cat([req.prefix_indices, slots]).to(torch.int32)
        self.rows.write((req.req_pool_idx, slice(0, len(row))), row)
        return True

    def alloc(self, need: int) -> torch.Tensor | None:
        short = need - self.allocator.available_size()
        if short > 0:
            self.cache.evict(EvictParams(num_tokens=short))
        return self.allocator.alloc(need)

    def decode(self, req: Request, token: int) -> bool:
        """Append one token and compute its KV; False when there is no page for it."""
        at = req.committed
        if at % self.page_size == 0:
            slots = self.alloc(self.page_size)
            if slots is None:
                return False
            self.rows.write((req.req_pool_idx, slice(at, at + self.page_size)), slots.to(torch.int32))
        req.output_ids.append(token)
        req.fill_ids.append(token)
        self._write(req, at, at + 1)
        req.committed += 1
        return True

    def finish(self, req: Request, *, insert: bool = True) -> None:
        self.running.remove(req)
        self.verify(req, req.committed)
        self.cache.cache_finished_req(req, is_insert=insert)
        self.rows.free(req.req_pool_idx)

    def live(
        self, rng: random.Random, num_moves: int, begin: Callable[[], Request | None]
    ) -> tuple[int, int]:
        """Random moves, each of them checked, then the end of every request; (device, host) tokens found.

        begin: starts a request of the caller's drawing.
        """
        device = host = 0
        for _ in range(num_moves):
            move = rng.random()
            if move < 0.45 and len(self.running) < 3:
                if (req := begin()) is not None:
                    device, host = device + req.device_tokens, host + req.host_tokens
            elif move < 0.75 and self.running:
                self.decode(rng.choice(self.running), rng.randint(900, 902))
            elif move < 0.93 and self.running:
                self.finish(rng.choice(self.running), insert=rng.random() < 0.8)
            elif move < 0.97:
                self.cache.evict(EvictParams(rng.randint(0, 40), rng.randint(0, 20)))
            elif not self.running:
                self.cache.reset()
            self.check()
        while self.running:
            self.finish(self.running[0])
        self.settle()
        self.check()
        return device, host

    # -- checks -------------------------------------------------------------------------

    def own_pages(self) -> set[int]:
        """Pages that running requests hold beside the tree's."""
        pages: set[int] = set()
        for req in self.running:
            row = self.rows.req_to_token[req.req_pool_idx]
            own = row[req.cache_protected_len : -(-req.committed // self.page_size) * self.page_size]
            mine = set((own // self.page_size).tolist())
            assert not mine & pages, "two requests own a page"
            pages |= mine
        return pages

    def check(self) -> None:
        """Invariants, and each device page in exactly one of free, tree, request."""
        self.cache.check()
        tree = self.cache.total_size() // self.page_size
        own, free = self.own_pages(), self.allocator.available_size() // self.page_size
        assert tree + len(own) + free == self.num_pages, (tree, len(own), free)
        self.cache.check_conservation(len(own) * self.page_size)

    def settle(self) -> None:
        assert self.cache.drain(PATIENCE_S)

    def close(self) -> None:
        self.cache.close()


AnyBench = TypeVar("AnyBench", bound=Bench)


def closed_after(make: Callable[..., AnyBench]) -> Iterator[Callable[..., AnyBench]]:
    """The body of a fixture: yields `make`, and in the end closes what it made."""
    benches: list[AnyBench] = []

    def build(*args: Any, **options: Any) -> AnyBench:
        benches.append(make(*args, **options))
        return benches[-1]

    yield build
    for bench in benches:
        bench.close()


def prompt(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def failing_copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Caches built from here on copy as usual until the one entry of the list is True; then copies fail."""
    failing = [False]

    def made(*given: Any) -> Any:
        inner = make_transport(*given)

        def copy_pages(*copied: Any) -> None:
            assert not failing[0], "injected: copy"
            inner.copy_pages(*copied)

        return SimpleNamespace(name=inner.name, note=inner.note, copy_pages=copy_pages)

    monkeypatch.setattr("hiradix.prefix_cache.lower_tiers.make_transport", made)
    return failing

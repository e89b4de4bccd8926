"""vLLM 0.32 on a CPU: block hashes and KVCacheManager. No mocks, no tree: prompts are hashed per block.

A request's blocks are hashed when it is made, so hashing is part of every time here.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from timed import now
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

MAX_TOKENS = 1 << 21
SAMPLING = SamplingParams(max_tokens=1)


class Blocks:
    """KVCacheManager with sha256 block hashes; the page size is the block size."""

    def __init__(self) -> None:
        self._hash = get_hash_fn_by_name("sha256")
        init_none_hash(self._hash)
        self._count = 0

    def new(self, page_size: int, num_tokens: int) -> None:
        self.page_size = page_size
        spec = FullAttentionSpec(block_size=page_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        num_blocks = num_tokens // page_size + 8
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.cache = KVCacheManager(
            config, max_model_len=MAX_TOKENS, scheduler_block_size=page_size, hash_block_size=page_size,
            enable_caching=True,
        )  # fmt: skip
        self._hasher = get_request_block_hasher(page_size, self._hash)

    def touch_pools(self) -> None:
        """Its blocks are objects that exist from the start."""

    def _request(self, ids: Any) -> Request:
        self._count += 1
        return Request(str(self._count), ids, SAMPLING, None, block_hasher=self._hasher)

    def _found(self, request: Request) -> tuple[Any, int]:
        blocks, num_cached, *_ = self.cache.get_computed_blocks(request)
        return blocks, num_cached

    def timed_turn(self, ids: Any) -> tuple[int, float]:
        """Hash, look up, allocate, free."""
        prompt = list(ids)
        begin = now()
        request = self._request(prompt)
        blocks, num_cached = self._found(request)
        allocated = self.cache.allocate_slots(request, len(prompt) - num_cached, num_cached, blocks)
        assert allocated is not None
        self.cache.free(request)
        return num_cached, now() - begin

    def store(self, ids: Any) -> None:
        self.timed_turn(ids)

    def cut(self, ids: Any) -> None:
        """Blocks are cut already."""

    def timed_match(self, ids: Any) -> float:
        """Hash and look up; the last token is always computed anew, so one more is asked for."""
        prompt = [*ids, 7]
        begin = now()
        _, num_cached = self._found(self._request(prompt))
        seconds = now() - begin
        assert num_cached == len(ids), f"{num_cached} of {len(ids)}"
        return seconds

    def timed_insert(self, ids: Any, num_shared: int) -> float:
        return self.timed_turn(ids)[1]

    def timed_evict(self, num_tokens: int) -> float:
        """Allocating while every free block is cached: evicting is part of it."""
        request = self._request([self._count + 500_000 + i for i in range(-(-num_tokens // 64) * 64)])
        blocks, num_cached = self._found(request)
        begin = now()
        allocated = self.cache.allocate_slots(request, request.num_tokens, num_cached, blocks)
        seconds = now() - begin
        assert allocated is not None
        self.cache.free(request)
        return seconds


NAME = "vllm-0.32"
TREE = Blocks

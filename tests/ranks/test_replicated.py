"""MLA: all tensor parallel ranks have the same pages; rank 0 stores them, every rank reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.memory import DevicePool, KVShape, MLAShape, ReqToTokenPool, SlotAllocator
from hiradix.prefix_cache import (
    CacheInitParams,
    HiRadixCache,
    InsertParams,
    MatchPrefixParams,
    ModelIdentity,
    build_prefix_cache,
)
from hiradix.tree import RadixKey

PAGE_SIZE = 4
TOKENS = list(range(100, 100 + 6 * PAGE_SIZE))
LATENT = MLAShape(2, 8, 4, torch.float32)
HEADS = KVShape(2, 1, 8, 8, torch.float32)


def build(shape: MLAShape | KVShape, rank: int, folder: Path, identity: str | None = "same") -> HiRadixCache:
    keys = {"prefetch_threshold": PAGE_SIZE, "file_storage_path": str(folder), "deadline_s": 60}
    config = HiCacheConfig(
        page_size=PAGE_SIZE, enable_hierarchical_cache=True, hicache_no_regret=False, hicache_ratio=2.0,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=parse_extra_config(json.dumps(keys)),
        hicache_storage_prefetch_policy="wait_complete", hicache_storage_identity=identity,
    )  # fmt: skip
    pool = DevicePool(shape, 16, PAGE_SIZE)
    slots = SlotAllocator(16 * PAGE_SIZE, PAGE_SIZE, "cpu", pool)
    params = CacheInitParams(False, ReqToTokenPool(4, 64), slots, PAGE_SIZE, agree=lambda vector: vector)
    cache = build_prefix_cache(config, params, pool, ModelIdentity("m", "r", tp_rank=rank, tp_size=2))
    assert isinstance(cache, HiRadixCache)
    return cache


def compute(cache: HiRadixCache) -> None:
    """Insert one computed prompt and let its write-through and backup end."""
    slots = cache.token_to_kv_pool_allocator.alloc(len(TOKENS))
    assert slots is not None
    cache.insert(InsertParams(RadixKey(TOKENS), slots))
    assert cache.drain(30.0) and cache.drain(30.0)


def fetched_tokens(cache: HiRadixCache) -> int:
    assert cache.prefetch_from_storage("r", cache.root_node, np.array(TOKENS))
    assert cache.drain(30.0) and cache.check_prefetch_progress("r")
    cache.match_prefix(MatchPrefixParams(RadixKey(TOKENS)))
    return cache.pop_prefetch_loaded_tokens("r")


@pytest.mark.parametrize(
    ("shape", "writer", "reader", "tokens"),
    [(LATENT, 0, 1, len(TOKENS)), (LATENT, 1, 0, 0), (HEADS, 0, 0, len(TOKENS)), (HEADS, 0, 1, 0)],
    ids=["rank 0 stores for all", "rank 1 stores nothing", "heads: its own", "heads: not another's"],
)
def test_who_stores_and_who_finds_it(
    shape: MLAShape | KVShape, writer: int, reader: int, tokens: int, tmp_path: Path
) -> None:
    first = build(shape, writer, tmp_path)
    compute(first)
    assert first.stats().backed_up == len(TOKENS), "a store left to rank 0 counts as done"
    first.close()
    second = build(shape, reader, tmp_path)
    assert fetched_tokens(second) == tokens
    second.close()


def test_a_rank_that_stores_nothing_compares_what_it_computes(tmp_path: Path) -> None:
    """What rank 0 of the same weights stored is served to it then, and nothing of other weights."""
    first = build(LATENT, 0, tmp_path, None)
    compute(first)
    first.close()
    found = []
    for value in (0.0, 1.0):
        reader = build(LATENT, 1, tmp_path, None)
        for layer in reader.token_to_kv_pool_allocator.get_kvcache().array("latent"):
            layer.fill_(value)
        found.append(fetched_tokens(reader))
        compute(reader)
        reader.reset()
        found.append(fetched_tokens(reader))
        reader.close()
    assert found == [0, len(TOKENS), 0, 0]

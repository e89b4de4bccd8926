"""Cache configurations of the engine tests with pages of 8 tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hiradix.config import HiCacheConfig, parse_extra_config

DEVICE_ONLY = HiCacheConfig(page_size=8)
TIERED = replace(DEVICE_ONLY, enable_hierarchical_cache=True, hicache_no_regret=False, hicache_ratio=2.0)
CONFIGS = {
    "off": replace(DEVICE_ONLY, disable_radix_cache=True),
    "device": DEVICE_ONLY,
    "tiers": TIERED,
    "write_back": replace(TIERED, hicache_write_policy="write_back"),
    "layer_first": replace(TIERED, hicache_mem_layout="layer_first"),
    "small_host": replace(TIERED, hicache_ratio=0.6),
}


def stored_in(folder: Path, backend: str) -> str:
    """Keys of a backend, as JSON."""
    own = {f"{backend}_storage_path": str(folder / backend), "max_size": "16MiB", "min_free_space": 0}
    return json.dumps(own | {"prefetch_threshold": 8, "deadline_s": 60})


def with_storage(folder: Path, backend: str, **fields: object) -> HiCacheConfig:
    return replace(
        TIERED, hicache_storage_backend=backend, hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=parse_extra_config(stored_in(folder, backend)), **fields,
    )  # fmt: skip

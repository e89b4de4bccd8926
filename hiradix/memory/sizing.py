"""Sizes the host pools, and refuses, with the numbers, a size that cannot fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hiradix.config import DEFAULT_HICACHE_RATIO, GB, HiCacheConfig
from hiradix.errors import ConfigError
from hiradix.memory.host_memory import available_bytes
from hiradix.memory.shape import CacheShape, page_bytes

logger = logging.getLogger(__name__)

_MAX_RESERVE = 10 << 30  # left to everything else: 10 GiB, or a tenth of what is free where that is less
_POOL_SHARE = 0.95


@dataclass(frozen=True)
class HostPlan:
    """A host pool's size, what decided it, and what there was; `str()` is the start-up line."""

    num_pages: int
    page_bytes: int
    available: int
    num_ranks: int
    flag: str

    @property
    def num_bytes(self) -> int:
        """Per rank."""
        return self.num_pages * self.page_bytes

    def __str__(self) -> str:
        return (
            f"host pool: {self.num_pages} pages, {_gb(self.num_bytes)} per rank x {self.num_ranks} ranks "
            f"({self.flag}); {_gb(self.available)} of host memory available"
        )


def size_host_pool(
    shape: CacheShape, page_size: int, device_pages: int, config: HiCacheConfig, num_ranks: int = 1
) -> int:
    """Pages of the host pool for one of `num_ranks` ranks on this machine now; see `plan_host_pool`."""
    plan = plan_host_pool(page_bytes(shape, page_size), device_pages, config, available_bytes(), num_ranks)
    logger.info("%s", plan)
    return plan.num_pages


def size_host_pools(
    page_bytes: Sequence[int], device_pages: Sequence[int], config: HiCacheConfig, num_ranks: int = 1
) -> list[int]:
    """The page counts of several host pools that together have the size in `config`, in the proportion of the
    device pools.

    page_bytes, device_pages: of each pool; the first, the backbone's, is what a ratio counts.
    """
    backbone = device_pages[0]
    all_bytes = sum(own * pages for own, pages in zip(page_bytes, device_pages, strict=True))
    plan = plan_host_pool(-(-all_bytes // backbone), backbone, config, available_bytes(), num_ranks)
    logger.info("%s", plan)
    return [max(1, plan.num_pages * pages // backbone) for pages in device_pages]


def plan_host_pool(
    page_bytes: int, device_pages: int, config: HiCacheConfig, available: int, num_ranks: int = 1
) -> HostPlan:
    """The host pool that `config` asks for, with `available` bytes free on a host of `num_ranks` ranks.

    A size (GB of 1e9 bytes per rank) wins over a ratio of device pages; with neither, the default ratio
    shrunk to the memory fraction. Raises ConfigError naming the flag and the numbers if it would not fit or
    hold a page.
    """
    reserve = min(_MAX_RESERVE, available // 10)
    budget = max(0, available - reserve) // num_ranks
    if config.hicache_size > 0:
        flag = f"--hicache-size {config.hicache_size:g}"
        num_pages = int(config.hicache_size * GB) // page_bytes
    elif config.hicache_ratio is not None:
        flag = f"--hicache-ratio {config.hicache_ratio:g}"
        num_pages = int(device_pages * config.hicache_ratio)
    else:
        fraction = config.hicache_host_memory_fraction
        affordable = budget * fraction * _POOL_SHARE / page_bytes
        flag = f"--hicache-host-memory-fraction {fraction:g}"
        num_pages = int(min(device_pages * DEFAULT_HICACHE_RATIO, affordable))
    plan = HostPlan(num_pages, page_bytes, available, num_ranks, flag)
    if num_pages < 1:
        raise ConfigError(
            f"{flag} gives the host pool no page: a page needs {page_bytes} bytes, the device pool has "
            f"{device_pages} pages, {_gb(available)} of host memory available"
        )
    if plan.num_bytes > budget:
        raise ConfigError(
            f"Not enough host memory available. {flag} requests {_gb(plan.num_bytes)} per rank x {num_ranks} "
            f"ranks but only {_gb(available)} are free, of which {_gb(reserve)} stay reserved. "
            f"Please reduce the size of the hierarchical cache."
        )
    return plan


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f} GB"

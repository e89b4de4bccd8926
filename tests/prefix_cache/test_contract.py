"""The four drop-in classes keep one contract."""

from __future__ import annotations

from typing import Any

from hiradix.config import HiCacheConfig
from hiradix.prefix_cache import HiRadixCache, RadixCache, SWAHiRadixCache, SWARadixCache
from tests.contracts.prefix_cache import HostTierContract, PrefixCacheContract
from tests.prefix_cache.bench_engine import Bench
from tests.prefix_cache.swa_bench import SwaBench

NUM_TOKENS = 192
HOST: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}


class TestRadixCache(PrefixCacheContract):
    config: dict[str, Any] = {}
    kind: type = RadixCache

    def make(self, page_size: int, foreign: bool, **switches: Any) -> Bench:
        config = {} if switches.get("disable") else self.config
        bench = Bench(
            HiCacheConfig(page_size=page_size, **config), NUM_TOKENS // page_size, foreign=foreign,
            **{"disable": False, **switches},
        )  # fmt: skip
        assert switches.get("disable") or type(bench.cache) is self.kind
        return bench


class TestHiRadixCache(TestRadixCache, HostTierContract):
    config = HOST
    kind = HiRadixCache


class TestSWARadixCache(PrefixCacheContract):
    """A window of two pages of 4."""

    config: dict[str, Any] | None = None
    kind: type = SWARadixCache

    def make(self, page_size: int, foreign: bool, **switches: Any) -> Bench:
        num_pages, config = NUM_TOKENS // page_size, None if switches.get("disable") else self.config
        bench = SwaBench(num_pages, num_pages, page_size, 8, foreign=foreign, config=config, **switches)
        assert switches.get("disable") or type(bench.cache) is self.kind
        return bench


class TestSWAHiRadixCache(TestSWARadixCache, HostTierContract):
    config = HOST
    kind = SWAHiRadixCache

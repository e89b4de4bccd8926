"""Drop-in prefix-cache classes for engines.

`RadixCache` (device only), `HiRadixCache` (all tiers), `SWARadixCache` (full attention and sliding windows).
"""

from __future__ import annotations

from hiradix.prefix_cache.build import ModelIdentity, build_prefix_cache
from hiradix.prefix_cache.hiradix import HiRadixCache, OpenedStorage
from hiradix.prefix_cache.radix import RadixCache
from hiradix.prefix_cache.records import (
    CacheInitParams,
    CacheStats,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    LockReceipt,
    MatchPrefixParams,
    MatchResult,
)
from hiradix.prefix_cache.swa import SWARadixCache
from hiradix.tree import RadixKey

__all__ = [
    "CacheInitParams",
    "CacheStats",
    "EvictParams",
    "EvictResult",
    "HiRadixCache",
    "InsertParams",
    "InsertResult",
    "LockReceipt",
    "MatchPrefixParams",
    "MatchResult",
    "ModelIdentity",
    "OpenedStorage",
    "RadixCache",
    "RadixKey",
    "SWARadixCache",
    "build_prefix_cache",
]

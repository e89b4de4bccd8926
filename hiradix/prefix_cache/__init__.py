"""The drop-in prefix cache for engines: one class, `PrefixCache`, under the names that engines construct.

`RadixCache` (device only) and `HiRadixCache` (all tiers); for models that mix full attention and sliding
windows `SWARadixCache` and `SWAHiRadixCache`, for those with recurrent layers `StateRadixCache` and
`StateHiRadixCache`.
"""

from __future__ import annotations

from hiradix.prefix_cache.attached import AttachedStorage, OpenedStorage
from hiradix.prefix_cache.build import build_hybrid_cache, build_prefix_cache
from hiradix.prefix_cache.cache import PrefixCache
from hiradix.prefix_cache.identity import (
    ModelIdentity,
    component_name,
    model_identity,
    page_fingerprint,
    run_with,
    stored_pages,
)
from hiradix.prefix_cache.names import (
    HiRadixCache,
    RadixCache,
    StateHiRadixCache,
    StateRadixCache,
    SWAHiRadixCache,
    SWARadixCache,
)
from hiradix.prefix_cache.receipts import LockReceipt
from hiradix.prefix_cache.records import (
    CacheInitParams,
    CacheStats,
    ComputedPages,
    EvictParams,
    EvictResult,
    FoundPrefix,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from hiradix.prefix_cache.weight_files import Origin, origin_of, repository_of
from hiradix.tree import RadixKey

__all__ = [
    "AttachedStorage",
    "CacheInitParams",
    "CacheStats",
    "ComputedPages",
    "EvictParams",
    "EvictResult",
    "FoundPrefix",
    "HiRadixCache",
    "InsertParams",
    "InsertResult",
    "LockReceipt",
    "MatchPrefixParams",
    "MatchResult",
    "ModelIdentity",
    "OpenedStorage",
    "Origin",
    "PrefixCache",
    "RadixCache",
    "RadixKey",
    "SWAHiRadixCache",
    "SWARadixCache",
    "StateHiRadixCache",
    "StateRadixCache",
    "build_hybrid_cache",
    "build_prefix_cache",
    "component_name",
    "model_identity",
    "origin_of",
    "page_fingerprint",
    "repository_of",
    "run_with",
    "stored_pages",
]

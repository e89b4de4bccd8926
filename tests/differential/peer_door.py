"""Our classes where SGLang's would be: over SGLang's own pools, allocators, keys and records, in its process.

python -m tests.differential.peer_door STREAMS.json OBSERVATIONS.json 0_5_9|0_5_23
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from tests.differential.wheels import share_drivers

share_drivers()
VERSION = sys.argv[3]
driver = importlib.import_module(f"sglang_{VERSION}")  # has SGLang importable, what it never runs mocked
import sglang_parts as parts  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402

from tests.differential.ours import AS_SHIPPED, OurSide, OurWindowSide  # noqa: E402
from tests.differential.peer_main import main  # noqa: E402
from tests.differential.sides import Side  # noqa: E402
from tests.differential.streams import Setup  # noqa: E402
from tests.differential.windows import WindowSide  # noqa: E402

IS_OLD = VERSION == "0_5_9"
_ALLOCATORS = "sglang.srt.mem_cache." + ("swa_memory_pool" if IS_OLD else "allocator.swa")
_POOL_OPTIONS = {"enable_kvcache_transpose": False} if IS_OLD else {}


class _Records:
    """SGLang's, and pools of SGLang's under them."""

    records = types.SimpleNamespace(
        RadixKey=RadixKey,
        MatchPrefixParams=MatchPrefixParams,
        InsertParams=InsertParams,
        EvictParams=EvictParams,
    )
    page_size: int
    allocator: Any
    rows: Any

    def params(self) -> Any:
        return parts.make_params(self.page_size, self.allocator, self.rows, tp_cache_group=None)


class DoorSide(_Records, OurSide):
    """`RadixCache(params)`, or `HiRadixCache(params, server_args)`."""

    def make_pools(self, setup: Setup) -> None:
        num_tokens = setup.num_pages * setup.page_size
        pool = parts.make_pool(setup.page_size, num_tokens)
        self.allocator = parts.make_allocator(setup.page_size, num_tokens, pool)
        self.kv = pool.k_buffer[0].view(-1)


class DoorWindowSide(_Records, OurWindowSide):
    """`SWARadixCache(params)`."""

    def make_pools(self, setup: Setup) -> None:
        allocator = importlib.import_module(_ALLOCATORS).SWATokenToKVPoolAllocator
        WindowSide.use_pools(self, vars(setup), SWAKVPool, allocator, **_POOL_OPTIONS)


def make(given: dict[str, Any]) -> Side:
    """The side that a stream's setup asks for."""
    setup = Setup(**given)
    return (DoorWindowSide if setup.window else DoorSide)(setup, AS_SHIPPED)


if __name__ == "__main__":
    main(make)

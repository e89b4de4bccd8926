"""SGLang 0.5.9's classes, unmodified, in a process of their own.

Copies are real, the clock of its LRU is a counter (so ties and slow machines change nothing), and the host
pool is not pinned. Mocks and pools are those of the benchmarks, and never leave this process.
"""

from __future__ import annotations

import types
from typing import Any

from tests.differential.wheels import share_drivers

share_drivers()
import sglang_0_5_9 as driver  # noqa: E402
from sglang.srt.mem_cache import (  # noqa: E402
    hiradix_cache,
    memory_pool_host,
    radix_cache,
    swa_radix_cache,
)
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool, SWATokenToKVPoolAllocator  # noqa: E402

from tests.differential.old_peers import OldSide  # noqa: E402
from tests.differential.peer_main import copy, count_instead_of_time, main  # noqa: E402
from tests.differential.sides import Found, Pages, Side, pages_of_nodes  # noqa: E402
from tests.differential.windows import WindowSide  # noqa: E402

RECORDS = types.SimpleNamespace(
    RadixKey=radix_cache.RadixKey,
    MatchPrefixParams=MatchPrefixParams,
    InsertParams=InsertParams,
    EvictParams=EvictParams,
)


class PeerSide(OldSide):
    """A side over SGLang's class: RadixCache, or HiRadixCache where `host_ratio` is not 0."""

    records = RECORDS


class PeerWindowSide(WindowSide):
    """A side over SWARadixCache."""

    records = RECORDS

    def __init__(self, setup: dict[str, Any]):
        self.use_pools(setup, SWAKVPool, SWATokenToKVPoolAllocator, enable_kvcache_transpose=False)
        params = driver.make_params(self.page_size, self.allocator, self.rows, tp_cache_group=None)
        params.sliding_window_size = self.window
        self.cache = swa_radix_cache.SWARadixCache(params)

    def match(self, namespace: str | None, tokens: list[int]) -> Found:
        found = self.cache.match_prefix(MatchPrefixParams(key=self.key(namespace, tokens)))
        return Found(found.device_indices, found.last_device_node, None, 0)

    def tiers(self, node: Any) -> str:
        return "D" if node.swa_tombstone else "DW"

    def pages(self) -> Pages:
        return pages_of_nodes(self.cache.root_node, self.page_size, self.tiers)


def make(setup: dict[str, Any]) -> Side:
    """The side that a stream's setup asks for."""
    return PeerWindowSide(setup) if setup["window"] else PeerSide(setup)


if __name__ == "__main__":
    count_instead_of_time(radix_cache, hiradix_cache)
    driver.prepare_host()
    memory_pool_host.transfer_kv_direct = copy
    main(make)

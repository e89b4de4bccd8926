"""RadixCache and HiRadixCache as 0.5.9 and 0.5.15 have them. To be imported behind the version's modules."""

from __future__ import annotations

from typing import Any

import sglang_parts as parts
from sglang.srt.mem_cache import hiradix_cache, radix_cache

from tests.differential.sides import Pages, RequestTable, Side, pages_of_nodes


class OldSide(Side):
    """A side over SGLang's class: RadixCache, or HiRadixCache where `host_ratio` is not 0.

    taken: slots of the host pool that are nobody's, so that as many are left as the stream asks for.
    """

    taken: int

    def __init__(self, setup: dict[str, Any]):
        self.page_size, num_tokens = setup["page_size"], setup["num_pages"] * setup["page_size"]
        pool = parts.make_pool(self.page_size, num_tokens)
        self.allocator = parts.make_allocator(self.page_size, num_tokens, pool)
        self.kv = pool.k_buffer[0].view(-1)
        self.rows = RequestTable()
        params = parts.make_params(self.page_size, self.allocator, self.rows, tp_cache_group=None)
        self.tiered = setup["host_ratio"] > 0
        self.cache: Any = self._tiered(params, setup) if self.tiered else radix_cache.RadixCache(params)

    def _tiered(self, params: Any, setup: dict[str, Any]) -> Any:
        cache = hiradix_cache.HiRadixCache(params, self.flags(setup))
        free = cache.token_to_kv_pool_host.available_size()
        spare = free - int(setup["num_pages"] * setup["host_ratio"]) * self.page_size
        self.taken = spare + setup["host_taken"] * self.page_size
        cache.token_to_kv_pool_host.alloc(self.taken)
        if not setup["load_back_minimum"]:
            cache.load_back_threshold = 0
        return cache

    def flags(self, setup: dict[str, Any]) -> Any:
        """What HiRadixCache reads of the server's flags."""
        return parts.server_args(setup["host_ratio"], setup["write_policy"], "direct")

    def settle(self) -> None:
        if self.tiered:
            self.cache.ready_to_load_host_cache()
            self.cache.check_hicache_events()

    def host_free(self) -> int:
        return int(self.cache.token_to_kv_pool_host.available_size()) if self.tiered else 0

    def tiers(self, node: Any) -> str:
        return "D" * (node.value is not None) + "H" * (node.host_value is not None)

    def pages(self) -> Pages:
        return pages_of_nodes(self.cache.root_node, self.page_size, self.tiers)

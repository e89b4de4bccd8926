"""SGLang 0.5.9's classes, unmodified, in a process of their own.

Copies are real, the clock of its LRU is a counter (so ties and slow machines change nothing), and the host
pool is not pinned. Mocks and pools are those of the benchmarks, and never leave this process.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

from tests.differential.wheels import share_drivers

share_drivers()
import sglang_0_5_9 as driver  # noqa: E402
import torch  # noqa: E402
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

from tests.differential.peer_main import copy, main  # noqa: E402
from tests.differential.sides import Found, Pages, RequestTable, Side, pages_of_nodes  # noqa: E402
from tests.differential.windows import WindowSide  # noqa: E402

RECORDS = types.SimpleNamespace(
    RadixKey=radix_cache.RadixKey,
    MatchPrefixParams=MatchPrefixParams,
    InsertParams=InsertParams,
    EvictParams=EvictParams,
)


def count_instead_of_time() -> None:
    """Every look at the clock is later than the one before."""
    ticks = itertools.count(1)
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=lambda: 0.0)
    radix_cache.time = hiradix_cache.time = clock


class PeerSide(Side):
    """A side over SGLang's class: RadixCache, or HiRadixCache where `host_ratio` is not 0."""

    records = RECORDS

    def __init__(self, setup: dict[str, Any]):
        self.page_size, num_tokens = setup["page_size"], setup["num_pages"] * setup["page_size"]
        self.allocator = driver.make_allocator(self.page_size, num_tokens)
        self.kv = self.allocator.get_kvcache().k_buffer[0].view(-1)
        self.rows = RequestTable()
        params = driver.make_params(self.page_size, self.allocator, self.rows)
        self.tiered = setup["host_ratio"] > 0
        self.cache: Any = self._tiered(params, setup) if self.tiered else radix_cache.RadixCache(params)

    def _tiered(self, params: Any, setup: dict[str, Any]) -> Any:
        arguments = driver.server_args(setup["host_ratio"], setup["write_policy"], "direct")
        cache = hiradix_cache.HiRadixCache(params, arguments)
        taken = 1 + setup["host_taken"]  # it makes one page more than the ratio says
        cache.token_to_kv_pool_host.alloc(taken * self.page_size)
        if not setup["load_back_minimum"]:
            cache.load_back_threshold = 0
        return cache

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


class PeerWindowSide(WindowSide):
    """A side over SWARadixCache."""

    records = RECORDS

    def __init__(self, setup: dict[str, Any]):
        self.page_size, self.window = setup["page_size"], setup["window"]
        num_full, num_window = (setup[name] * self.page_size for name in ("num_pages", "num_window_pages"))
        pool = SWAKVPool(
            size=num_full, size_swa=num_window, page_size=self.page_size, dtype=torch.int64, head_num=1,
            head_dim=1, swa_attention_layer_ids=[1], full_attention_layer_ids=[0],
            enable_kvcache_transpose=False, device="cpu",
        )  # fmt: skip
        self.allocator = SWATokenToKVPoolAllocator(
            num_full, num_window, self.page_size, torch.int64, "cpu", pool, False
        )
        self.kv = pool.full_kv_pool.k_buffer[0].view(-1)
        self.window_kv = pool.swa_kv_pool.k_buffer[0].view(-1)
        self.rows = RequestTable()
        params = driver.make_params(self.page_size, self.allocator, self.rows)
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
    count_instead_of_time()
    driver.prepare_host()
    memory_pool_host.transfer_kv_direct = copy
    main(make)

"""Classes that users extend, compiled or not: what a subclass overrides is called from inside too."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hiradix.memory import PageAllocator, ReqToTokenPool, SlotAllocator
from hiradix.policy.uses import Finished
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
    RadixCache,
    RadixKey,
)
from hiradix.prefix_cache.records import RequestLike
from hiradix.prefix_cache.slots import AllocatorPages, Pages
from hiradix.tree import Lock, Node
from tests.prefix_cache.bench_engine import Request


class OwnAllocator(SlotAllocator):
    """Has pages of its own kind."""

    def __init__(self, num_tokens: int, page_size: int):
        super().__init__(num_tokens, page_size)
        self.asked: list[int] = []
        self.num_freed = 0

    def alloc_pages(self, num_pages: int) -> Pages | None:
        self.asked.append(num_pages)
        return super().alloc_pages(num_pages)

    def free_pages(self, pages: Pages) -> None:
        self.num_freed += len(pages)
        super().free_pages(pages)


class OwnCache(RadixCache):
    """Overrides what the class calls itself, and keeps what it has seen in attributes of its own."""

    def __init__(self, params: CacheInitParams):
        self.seen: list[str] = []
        super().__init__(params)

    def device_slots(self, node: Node, start: int = 0) -> torch.Tensor:
        self.seen.append("slots")
        return super().device_slots(node, start)

    def insert_row(
        self, key: RadixKey, row: torch.Tensor, req: RequestLike, ended: Finished | None = None
    ) -> Lock:
        self.seen.append("row")
        return super().insert_row(key, row, req, ended)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        found = super().match_prefix(params)
        return found._replace(host_hit_length=-1)

    def evict(self, params: EvictParams) -> EvictResult:
        return super().evict(EvictParams(params.num_tokens * 2))


def test_what_a_subclass_overrides_is_called() -> None:
    allocator = OwnAllocator(16, 2)
    rows = ReqToTokenPool(1, 16)
    cache = OwnCache(CacheInitParams(False, rows, allocator, 2))
    slots = allocator.alloc(8)
    assert slots is not None
    request: Any = Request("a", list(range(8)), fill_ids=list(range(8)), req_pool_idx=0)
    rows.req_to_token[0, :8] = slots.to(torch.int32)
    request.last_node = cache.root_node
    cache.inc_lock_ref(request.last_node)
    cache.cache_unfinished_req(request)
    assert cache.seen == ["row", "slots"]
    found = cache.match_prefix(MatchPrefixParams(RadixKey(list(range(8)))))
    assert found.device_indices.tolist() == slots.tolist() and found.host_hit_length == -1
    cache.dec_lock_ref(request.last_node)
    assert cache.evict(EvictParams(4)) == EvictResult(8) and allocator.num_freed == 4
    cache.check_conservation(0)


def test_an_allocator_of_ones_own_is_asked() -> None:
    allocator = OwnAllocator(16, 2)
    pages = AllocatorPages(allocator, 2, 8).alloc(3)
    assert pages is not None and len(pages) == 3 and allocator.asked == [3]


def test_a_subclass_of_the_page_allocator_sees_what_slots_take_and_free() -> None:
    class Poisoned(PageAllocator):
        freed: list[int] = []

        def free(self, pages: Any) -> None:
            self.freed += np.asarray(pages).tolist()
            super().free(pages)

    allocator = SlotAllocator(8, 2)
    allocator.pages = Poisoned(4, first_page=1)
    slots = allocator.alloc(4)
    assert slots is not None
    allocator.free(slots)
    assert sorted(Poisoned.freed) == [1, 2] and allocator.available_size() == 8


def test_a_subclass_may_take_over_inserts() -> None:
    class Deaf(RadixCache):
        def insert(self, params: InsertParams) -> Any:
            return None

    cache = Deaf(CacheInitParams(False, ReqToTokenPool(1, 8), SlotAllocator(8, 2), 2))
    assert cache.insert(InsertParams(RadixKey([1, 2]), torch.tensor([2, 3]))) is None
    assert cache.total_size() == 0

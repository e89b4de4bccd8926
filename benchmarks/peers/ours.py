"""hiradix: the drop-in RadixCache and HiRadixCache, and the bare tree below them."""

from __future__ import annotations

import os
from array import array
from typing import Any

import torch
from timed import HostMatch, HostPeer, Request, TreePeer, now

from hiradix.cache import HostTier
from hiradix.memory import DevicePool, HostPool, KVShape, PageAllocator, ReqToTokenPool, SlotAllocator
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.prefix_cache import (
    CacheInitParams,
    EvictParams,
    HiRadixCache,
    InsertParams,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
)
from hiradix.transfer import HiCacheController, JobKind
from hiradix.tree import Lock, RadixTree, Tier, TokenLog

SHAPE = KVShape(1, 1, 1, 1, torch.float32)
COPY_DEADLINE_S = 30.0
POLICY = os.environ.get("HIRADIX_BENCH_POLICY", "lru")  # of the drop-in classes


def touch(pages: PageAllocator) -> None:
    """Hand out every page once: what is booked per page is in memory from then on."""
    pages.free(pages.alloc(pages.available))


class Keys:
    """How ours makes keys: of their own, or of one log, if all prompts continue each other."""

    _log: TokenLog | None = None

    def keep_log(self) -> None:
        """From here on prompts are prefixes of one conversation."""
        self._log = TokenLog()

    def key(self, ids: Any) -> RadixKey:
        if self._log is None:
            return RadixKey(array("q", ids))
        self._log.extend(ids[len(self._log) :])
        return self._log.key(len(ids))


class DropIn(Keys, TreePeer):
    """RadixCache over our own slot allocator."""

    def new(self, page_size: int, num_tokens: int) -> None:
        self.page_size = page_size
        self.allocator = SlotAllocator(num_tokens, page_size)
        self.rows = ReqToTokenPool(2, 1 << 13)
        params = CacheInitParams(False, self.rows, self.allocator, page_size, eviction_policy=POLICY)
        self.cache = RadixCache(params)

    def touch_pools(self) -> None:
        touch(self.allocator.pages)

    def tokens(self, ids: Any) -> Any:
        return array("q", ids)

    def match(self, key: Any) -> tuple[int, Any, Any]:
        found = self.cache.match_prefix(MatchPrefixParams(key))
        return len(found.device_indices), found.last_device_node, found.device_indices

    def lock(self, node: Any) -> Any:
        return self.cache.inc_lock_ref(node)

    def unlock(self, receipt: Any) -> None:
        self.cache.dec_lock_ref(receipt)

    def insert(self, key: Any, slots: Any, num_matched: int) -> None:
        self.cache.insert(InsertParams(key, slots))

    def evict(self, num_tokens: int) -> int:
        return self.cache.evict(EvictParams(num_tokens)).num_tokens_evicted

    def finish_prefill(self, request: Request) -> None:
        self.cache.cache_unfinished_req(request)

    def finish(self, request: Request) -> None:
        self.cache.cache_finished_req(request)

    def timed_conservation(self, count: int) -> float:
        """`count` calls of the check that an engine makes after every step."""
        begin = now()
        for _ in range(count):
            self.cache.check_conservation(0)
        return now() - begin

    def begin_chunks(self, ids: Any) -> None:
        """A request that has got as far as `ids`, which are cached, and holds its lock."""
        whole = self.tokens(ids)
        self.rows = ReqToTokenPool(2, len(whole) + (1 << 14))
        self.cache.req_to_token_pool = self.rows
        num_matched, node, matched = self.match(self.key(ids))
        assert num_matched == len(whole), f"{num_matched} of {len(whole)}"
        self.rows.req_to_token[1, :num_matched] = matched.to(torch.int32)
        self._request = Request(
            "r", whole, whole, array("q"), num_matched, num_matched, node, self.lock(node), matched
        )  # fmt: skip

    def timed_chunk(self, ids: Any) -> float:
        """The request's next chunk enters the cache, from the node that it holds."""
        request = self._request
        slots = self.alloc(len(ids) - len(request.fill_ids))
        self.rows.req_to_token[1, len(request.fill_ids) : len(ids)] = slots.to(torch.int32)
        request.fill_ids = self.tokens(ids)
        begin = now()
        self.cache.cache_unfinished_req(request, chunked=True)
        return now() - begin


class BareTree(Keys, TreePeer):
    """RadixTree in page ids; inserts continue from the node that the turn has locked."""

    def new(self, page_size: int, num_tokens: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_tokens // page_size)
        self.tree = RadixTree(page_size)

    def alloc(self, num_tokens: int) -> Any:
        return self.allocator.alloc(num_tokens // self.page_size)

    def joined(self, matched: Any, num_new: int) -> Any:
        return self.alloc(num_new)

    def match(self, key: Any) -> tuple[int, Any, Any]:
        node = self.tree.match(key).device_node
        return node.end * self.page_size, node, self.tree.pages(node, Tier.DEVICE)

    def lock(self, node: Any) -> Lock:
        self._held = self.tree.lock(node, Tier.DEVICE)
        return self._held

    def unlock(self, receipt: Lock) -> None:
        self.tree.unlock(receipt)
        self._held = None

    _held: Lock | None = None

    def insert(self, key: Any, slots: Any, num_matched: int) -> None:
        self.tree.unlock(self.tree.insert(key, Tier.DEVICE, [slots], self._held).lock)

    def evict(self, num_tokens: int) -> int:
        freed = self.tree.evict(0, Tier.DEVICE, -(-num_tokens // self.page_size))
        for drop in freed:
            self.allocator.free(drop.pages)
        return sum(len(drop.pages) for drop in freed) * self.page_size

    def begin_chunks(self, ids: Any) -> None:
        """A holder of a lock on the cached prompt `ids`."""
        self._held = self.tree.lock(self.match(self.key(ids))[1], Tier.DEVICE)
        self._num_held = len(ids)

    def timed_chunk(self, ids: Any) -> float:
        """The next chunk, from the lock that is held."""
        key, pages = self.key(ids), self.alloc(len(ids) - self._num_held)
        begin = now()
        lock = self.tree.insert(key, Tier.DEVICE, [pages], self._held).lock
        self.tree.unlock(self._held)
        self._held, self._num_held = lock, len(ids)
        return now() - begin


class NoCopies:
    """A transport that copies nothing: what is measured is the control plane, as for the peers."""

    def copy_pages(
        self, source: Any, target: Any, source_pages: Any, target_pages: Any, layers: Any = None
    ) -> None:
        pass


class DropInHost(Keys, HostPeer):
    """HiRadixCache, write_through, no storage; its copy threads run between the timed turns."""

    def new(self, page_size: int, num_tokens: int, ratio: float) -> None:
        self.page_size = page_size
        num_pages = num_tokens // page_size
        pool = DevicePool(SHAPE, num_pages, page_size)
        host_pool = HostPool(SHAPE, int(num_pages * ratio), page_size)
        self.allocator = SlotAllocator(num_pages * page_size, page_size, kvcache=pool)
        self._controller = HiCacheController(pool, host_pool, transport=NoCopies())
        prefetch = PrefetchPolicy.from_name("best_effort", PrefetchLimits(page_size))
        self._host_pages = PageAllocator(host_pool.num_pages)
        host = HostTier(
            self._host_pages,
            self._controller,
            WritePolicy.from_name("write_through"),
            prefetch,
        )
        params = CacheInitParams(False, None, self.allocator, page_size, eviction_policy=POLICY)
        self.cache = HiRadixCache(params, host=host, storage_factory=_no_storage)

    def touch_pools(self) -> None:
        touch(self.allocator.pages)
        touch(self._host_pages)

    lock = DropIn.lock
    unlock = DropIn.unlock
    insert = DropIn.insert

    def match(self, key: Any) -> HostMatch:
        found = self.cache.match_prefix(MatchPrefixParams(key))
        return HostMatch(len(found.device_indices), found.host_hit_length, found.last_device_node, found)

    def indices(self, match: HostMatch) -> torch.Tensor:
        return match.found.device_indices

    def load(self, match: HostMatch) -> tuple[torch.Tensor, Any]:
        return self.cache.init_load_back(match.found.last_host_node, match.num_host)

    def evict(self, num_tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens))

    def settle(self) -> None:
        tickets = self.cache.cache.in_flight.tickets(JobKind.WRITE, JobKind.LOAD)
        assert self._controller.wait(tickets, COPY_DEADLINE_S), "a copy of nothing did not end"

    def close(self) -> None:
        self.cache.close()


def _no_storage(name: str, extra: Any) -> Any:
    raise AssertionError("the benchmark attaches no storage")


NAME = "ours"
TREE, REQUESTS, HOST, BARE = DropIn, DropIn, DropInHost, BareTree

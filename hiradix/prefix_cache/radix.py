"""RadixCache: the drop-in device-only prefix cache; requests and tokens in, slots out.

Every method runs on the scheduler thread. Names and semantics are those of SGLang 0.5.9's class; the
work is done in pages by `HierarchicalCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sized
from dataclasses import asdict, fields
from operator import index
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np
import torch

from hiradix.cache import HierarchicalCache, HostTier
from hiradix.errors import Misuse
from hiradix.policy.eviction import make_order
from hiradix.policy.uses import Finished
from hiradix.prefix_cache.records import (
    STATE,
    WINDOW,
    CacheInitParams,
    CacheStats,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    LockReceipt,
    MatchPrefixParams,
    MatchResult,
    PoolStats,
    RequestLike,
    SlotAllocatorLike,
)
from hiradix.prefix_cache.slots import Pages, PageSlots, RowCopies, SlotPages, pages_of, slots_of
from hiradix.storage import Stores
from hiradix.tree import BACKBONE, DEVICE, Lock, Match, Node, RadixKey, RadixTree, Tier
from hiradix.tree.key import as_tokens
from hiradix.tree.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixCache:
    """Reuses the KV of equal prefixes on the device. Sizes are in tokens.

    >>> from hiradix.memory import ReqToTokenPool, SlotAllocator
    >>> slots = SlotAllocator(num_tokens=64, page_size=4)
    >>> cache = RadixCache(CacheInitParams(False, ReqToTokenPool(8, 64), slots, page_size=4))
    >>> tokens = list(range(8))
    >>> cache.insert(InsertParams(RadixKey(tokens), slots.alloc(8)))  # the tree owns these slots now
    InsertResult(prefix_len=0)
    >>> hit = cache.match_prefix(MatchPrefixParams(RadixKey([*tokens, 99])))
    >>> receipt = cache.inc_lock_ref(hit.last_device_node)
    >>> len(hit.device_indices), cache.evict(EvictParams(8)).num_tokens_evicted
    (8, 0)
    >>> cache.dec_lock_ref(receipt), cache.evict(EvictParams(8)).num_tokens_evicted
    (8, 8)
    """

    cache: HierarchicalCache
    tree: RadixTree  # the cache's
    page_size: int
    disable: bool
    device: Any
    token_to_kv_pool_allocator: SlotAllocatorLike
    _pages: SlotPages

    def __init__(self, params: CacheInitParams, host: HostTier | None = None):
        self.disable = params.disable
        init: Any = params
        self.page_size = index(init.page_size)
        self.is_eagle = params.is_eagle
        self.disable_finished_insert = params.disable_finished_insert
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.device = params.token_to_kv_pool_allocator.device
        self._pages = self._make_pages(params)
        self.cache = self._make_cache(params, host)
        self.tree = self.cache.tree
        self._counted: set[str] = set()  # running requests whose found prefix was counted as used
        self._copies = RowCopies()
        self._slots = PageSlots(self._pages.num_pages, self.page_size, self.device)
        self._empty = torch.empty(0, dtype=torch.int64, device=self.device)

    def _make_pages(self, params: CacheInitParams) -> SlotPages:
        num_pages = _num_device_pages(params)
        return SlotPages(params.token_to_kv_pool_allocator, self.page_size, num_pages)

    def _make_cache(self, params: CacheInitParams, host: HostTier | None) -> HierarchicalCache:
        order = make_order(params.eviction_policy, params.eviction_policy_config)
        tree = RadixTree(self.page_size, order=order)
        return HierarchicalCache(tree, self._pages, host, agree=params.agree)

    # -- reading ------------------------------------------------------------------------

    @property
    def root_node(self) -> Node:
        return self.cache.tree.root

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix of `params.key`, in whole pages. Splits a node the match ends in.

        Answers for keys of one `TokenLog`, or for one key, may be views of the same memory, which is not
        written again: do not write into them.
        """
        root = self.tree.root
        key = self._view(params.key)
        if self.disable or len(key) < self.page_size:
            return MatchResult(self._empty, root, root)
        is_known = key.bookmark.node is not None
        match = self.cache.match(key)
        node, loadable = match.device_node, match.loadable_node
        if node is root:
            slots = self._empty
        elif is_known:
            slots = self._slots.of_growing(self.tree.pages(node, DEVICE), key.bookmark)
        else:
            slots = self.device_slots(node)
        return MatchResult(slots, node, loadable, (loadable.end - node.end) * self.page_size)

    def device_slots(self, node: Node, start: int = 0) -> torch.Tensor:
        """int64 [tokens]: the device slots of the path to `node`, from page `start` on. A fresh tensor."""
        return self._slots.of(self.tree.pages(node, DEVICE, start))

    # -- locks --------------------------------------------------------------------------

    def inc_lock_ref(self, node: Node) -> LockReceipt:
        """Pin the path to `node` on the device until `dec_lock_ref`."""
        before = self.tree.evictable_pages(DEVICE)
        lock = self.tree.lock(node, DEVICE)
        return LockReceipt(lock, (self.tree.evictable_pages(DEVICE) - before) * self.page_size)

    def dec_lock_ref(self, node: Node | LockReceipt, swa_uuid_for_lock: Any = None) -> int:
        """Undo one `inc_lock_ref`. Returns the tokens that became evictable."""
        before = self.tree.evictable_pages(DEVICE)
        self.tree.unlock(node.lock if isinstance(node, LockReceipt) else self._lock_on(node))
        return (self.tree.evictable_pages(DEVICE) - before) * self.page_size

    def _held(self, req: RequestLike) -> Lock:
        """The lock `req` holds on the prefix it runs on."""
        return self._lock_on(req.last_node)

    def _hold(self, req: RequestLike, lock: Lock) -> None:
        """Have `req` hold `lock` instead."""
        self.tree.unlock(self._held(req))
        req.last_node = lock.node

    def _lock_on(self, node: Node) -> Lock:
        """The receipt of a lock on `node`: with full attention only, it always reaches to the root.

        It is on the node that ends there now: `node` may have been merged away before it was locked.
        """
        return Lock(self.tree.current(node) or node, DEVICE, (0,))

    # -- writing ------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Give `params.value` to the tree where it has nothing. The duplicates' slots stay the caller's."""
        key = self._view(params.key).page_aligned(self.page_size)
        if self.disable or len(key) == 0:
            return InsertResult(0)
        if self.cache.is_blocked(key):
            return InsertResult(len(key))
        given: Any = params  # flags and counts may be numpy's, which the compiled form does not take
        live = self.tree.match(key).device_node
        num_live = live.end * self.page_size
        priority = _priority_of(params)
        self.tree.hit(live, priority)  # an insert counts only what is below its `at`
        pages = pages_of(params.value, self.page_size, num_live, len(key))
        done = self.tree.insert(key, DEVICE, [pages], self._lock_on(live), priority)
        if given.chunked:
            self.cache.inserted(done.lock.node)
        else:
            self.cache.finished(key, done.lock.node, Finished(len(key), 0))
        self.tree.unlock(done.lock)
        return InsertResult(num_live)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least `num_tokens` device tokens, or all that nothing holds."""
        given: Any = params
        num_tokens = index(given.num_tokens)
        if self.disable or num_tokens <= 0:
            return EvictResult()
        freed = self.cache.evict(-(-num_tokens // self.page_size))
        return EvictResult(freed * self.page_size)

    def cache_unfinished_req(self, req: RequestLike, chunked: bool = False) -> None:
        """Share what a running request has computed, and let it run on the tree's slots.

        Rewrites the request's row from `cache_protected_len` on, its lock, `last_node`, `prefix_indices`
        and `cache_protected_len`. Costs the new tokens, not the prefix; a list of `fill_ids` is read whole.
        """
        asked: Any = req  # its counts may be numpy's, which the compiled form does not take
        tokens, place, kept = req.fill_ids, index(asked.req_pool_idx), index(asked.cache_protected_len)
        row = self.req_to_token_pool.req_to_token[place, : len(tokens)]
        if not self.disable:
            self.count_use(req)
        key = self._key(tokens, req).page_aligned(self.page_size)
        if self.disable or len(key) <= kept:
            req.prefix_indices = row.to(torch.int64, copy=True)
            return
        old = self._held(req)
        lock = self.insert_row(key, row, req)
        start, end = old.node.end, lock.node.end
        self.tree.prioritise(lock, _priority_of(req), start)
        slots = self.device_slots(lock.node, start)
        first = start * self.page_size
        self.req_to_token_pool.write((place, slice(first, end * self.page_size)), slots.to(row.dtype))
        self._hold(req, lock)
        req.cache_protected_len = end * self.page_size
        req.prefix_indices = self._copies.copy(req.rid, row, req.prefix_indices, first)

    def cache_finished_req(self, req: RequestLike, is_insert: bool = True) -> None:
        """Take over (or free) the slots of a request that ended, and drop its lock.

        Slots beyond the committed length are the caller's to free, from the next whole page on.
        """
        asked: Any = req
        place, kept, priority = index(asked.req_pool_idx), index(asked.cache_protected_len), _priority_of(req)
        num_tokens = index(asked.pop_committed_kv_cache())
        row = self.req_to_token_pool.req_to_token[place, :num_tokens]
        if is_insert and not self.disable and not self.disable_finished_insert:
            self.count_use(req)
            if self.cache.learner is not None or num_tokens // self.page_size * self.page_size > kept:
                tokens = np.concatenate([as_tokens(req.origin_input_ids), as_tokens(req.output_ids)])
                key = self._key(tokens[:num_tokens], req).page_aligned(self.page_size)
                if len(key) > kept:
                    lock = self.insert_row(key, row, req, _ended(req))
                    self.tree.prioritise(lock, priority, kept // self.page_size)
                    kept = lock.node.end * self.page_size
                    self.tree.unlock(lock)
                else:
                    self.cache.finished(key, self._held(req).node, _ended(req))
        self.forget_request(req)
        tail = pages_of(row[kept:], self.page_size) if kept < num_tokens else None
        if tail is not None:
            self._pages.free(tail)
        if not self.disable:
            self.tree.unlock(self._held(req))

    def hint(self, key: RadixKey, hint: str) -> int:
        """`end_of_session` or `keep_alive` of a conversation; its cached tokens (0: nothing learns)."""
        learner = self.cache.learner
        if self.disable or learner is None:
            return 0
        return learner.hint_prefix(self.tree, self._view(key), hint) * self.page_size

    def forget_request(self, req: RequestLike) -> None:
        """A request has ended, or runs anew from its beginning."""
        self._counted.discard(req.rid)
        self._copies.forget(req.rid)

    def count_use(self, req: RequestLike) -> None:
        """Count the prefix a request found as used, once; it may be due to be copied down now."""
        if req.rid not in self._counted:
            self._counted.add(req.rid)
            self.cache.count_use(req.last_node, _priority_of(req))
            self.cache.inserted(req.last_node)

    def insert_row(
        self, key: RadixKey, row: torch.Tensor, req: RequestLike, ended: Finished | None = None
    ) -> Lock:
        """Insert `key` from the node `req` holds; slots behind it go to the tree or are freed."""
        held = self._held(req)
        start = held.node.end * self.page_size
        return self.insert_pages(key, pages_of(row, self.page_size, start, len(key)), held, ended)

    def insert_pages(
        self, key: RadixKey, pages: Pages, held: Lock | None, ended: Finished | None = None
    ) -> Lock:
        """Insert `key`, whose last pages these are, from the node held; pages go to the tree or are freed."""
        return self.cache.insert(key, pages, at=held, ended=ended)

    def reset(self) -> None:
        """Drop everything on the device (and host). No request may hold a lock."""
        self.cache.reset()
        self._copies.clear()

    # -- keys ---------------------------------------------------------------------------

    def _view(self, key: RadixKey) -> RadixKey:
        return key.bigrams() if self.is_eagle and not key.is_bigram else key

    def _key(self, token_ids: Any, req: RequestLike) -> RadixKey:
        salt = getattr(req, "cache_salt", None)
        extras = getattr(req, "page_extras", None)
        return self._view(RadixKey(token_ids, req.extra_key, cache_salt=salt, page_extras=extras))

    def split_match(self, node: Node) -> Match:
        """`node` as a match: its deepest ancestor on the device, and itself if it can still be loaded.

        For nodes that were matched earlier: what was evicted since is left out.
        """
        loadable = self.tree.current(node) or self.tree.root
        at = loadable
        while at.device.pages is None:
            if at.parent is None or at.host.pages is None:
                raise Misuse(f"{at} is in neither tier")
            at = at.parent
        return Match(at, loadable)

    # -- sizes --------------------------------------------------------------------------

    def evictable_size(self) -> int:
        """Device tokens no request holds."""
        return self.tree.evictable_pages(Tier.DEVICE) * self.page_size

    def protected_size(self) -> int:
        """Device tokens in the tree that a request or a transfer holds."""
        return self.tree.protected_pages(Tier.DEVICE) * self.page_size

    def total_size(self) -> int:
        """Device tokens in the tree."""
        return self.tree.resident_pages(Tier.DEVICE) * self.page_size

    def full_evictable_size(self) -> int:
        return self.evictable_size()

    def full_protected_size(self) -> int:
        return self.protected_size()

    def swa_evictable_size(self) -> int:
        return 0

    def swa_protected_size(self) -> int:
        return 0

    def all_values_flatten(self) -> torch.Tensor:
        """int64 [total tokens]: every device slot in the tree. O(tree); for leak hunts."""
        return slots_of(self.tree.all_pages(Tier.DEVICE), self.page_size, self.device)

    # -- kinds --------------------------------------------------------------------------

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def is_chunk_cache(self) -> bool:
        return self.disable

    def is_tree_cache(self) -> bool:
        return not self.disable

    # -- for people and metrics ---------------------------------------------------------

    def pretty_print(self) -> None:
        """Print the tree: tokens, tiers, locks, hits."""
        print(self.tree.render())

    def available_and_evictable_str(self) -> str:
        """One line for an out-of-memory message."""
        free, evictable = self.token_to_kv_pool_allocator.available_size(), self.evictable_size()
        return f"Available tokens: {free + evictable} (available_size={free} + evictable_size={evictable})\n"

    def stats(self) -> CacheStats:
        """A snapshot for metrics. O(1)."""
        return self._stats(None, None)

    def _stats(self, storage_name: str | None, storage: Stores | None) -> CacheStats:
        size, counters = self.page_size, self.cache.counters
        total = {f.name: getattr(counters, f.name) for f in fields(counters)}
        unfulfilled = total.pop("unfulfilled")
        controller = self.cache.controller
        return CacheStats(
            **asdict(self._pool_stats(BACKBONE, size)),
            unfulfilled={reason: count * size for reason, count in unfulfilled.items()},
            num_in_flight=len(self.cache.in_flight),
            storage_attached=storage is not None,
            storage_backend=storage_name,
            storage=dict(storage.stats()) if storage is not None else {},
            transfers=controller.stats() if controller is not None else None,
            window=self._stats_beside(per_page=True),
            state=self._stats_beside(per_page=False),
            **{name: count * size for name, count in total.items()},
        )

    def _stats_beside(self, *, per_page: bool) -> PoolStats | None:
        """Of the component beside full attention, if there is one of this kind."""
        further = self.tree.components[1:]
        if not further or further[0].per_page != per_page:
            return None
        return self._pool_stats(WINDOW, self.page_size) if per_page else self._pool_stats(STATE, 1)

    def _pool_stats(self, component: int, size: int) -> PoolStats:
        """In pages of `size` tokens, or records of 1."""
        tree, supply = self.tree, self.cache.supply
        device = supply.device_pools[component]
        host = supply.host_pools[component] if supply.host_pools else None
        return PoolStats(
            device_total=device.num_pages * size,
            device_available=device.available * size,
            device_evictable=tree.evictable_pages(Tier.DEVICE, component) * size,
            device_protected=tree.protected_pages(Tier.DEVICE, component) * size,
            host_total=host.num_pages * size if host else 0,
            host_used=(host.num_pages - host.available) * size if host else 0,
        )

    def check_conservation(self, num_held: SupportsIndex) -> None:
        """Assert that no slot is lost or counted twice, in either tier; cheap enough for every step. O(1).

        num_held: tokens of the whole pages that requests have and the tree has not: what is allocated to them
        from `cache_protected_len` on. Between steps.
        """
        self.cache.supply.check_conservation(
            index(num_held) // self.page_size, self.cache.in_flight.num_owned
        )

    def check(self) -> None:
        """Assert all invariants, O(tree)."""
        self.cache.check()

    def sanity_check(self) -> None:
        self.check()

    # -- lower tiers: here there are none, so engines need not ask which class they have ------

    @property
    def enable_storage(self) -> bool:
        return False

    @property
    def ongoing_write_through(self) -> Sized:
        return ()

    @property
    def ongoing_load_back(self) -> Sized:
        return ()

    @property
    def ongoing_prefetch(self) -> Sized:
        return ()

    @property
    def ongoing_backup(self) -> Sized:
        return ()

    def check_hicache_events(self) -> None:
        return None

    def ready_to_load_host_cache(self) -> int:
        return -1

    def init_load_back(
        self, last_host_node: Node, host_hit_length: SupportsIndex, mem_quota: SupportsIndex | None = None
    ) -> tuple[torch.Tensor, Node]:
        return torch.empty(0, dtype=torch.int64), last_host_node

    def prefetch_from_storage(self, req_id: Hashable, last_host_node: Node, *_: Any, **__: Any) -> bool:
        return False

    def check_prefetch_progress(self, req_id: Hashable) -> bool:
        return True

    def pop_prefetch_loaded_tokens(self, req_id: Hashable) -> int:
        return 0

    def release_aborted_request(self, req_id: Hashable) -> None:
        return None

    def attach_storage_backend(self, storage_backend: str, *_: Any, **__: Any) -> tuple[bool, str]:
        return False, "Hierarchical cache is not enabled."

    def detach_storage_backend(self) -> tuple[bool, str]:
        return False, "Hierarchical cache is not enabled."

    def clear_storage_backend(self) -> bool:
        return False

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        return None

    def drain(self, timeout_s: SupportsFloat) -> bool:
        return True

    def close(self, timeout_s: SupportsFloat = 10.0) -> None:
        return None


def _priority_of(req: Any) -> int:
    return index(getattr(req, "priority", None) or 0)  # some engines have none for most of them


def _ended(req: RequestLike) -> Finished:
    """What the eviction policy may learn from a request that has ended."""
    hint = getattr(req, "session_hint", None)
    return Finished(len(req.origin_input_ids), len(req.output_ids), hint)


def _num_device_pages(params: CacheInitParams) -> int:
    size = getattr(params.token_to_kv_pool_allocator, "size", None)
    if size is None:
        size = params.token_to_kv_pool_allocator.available_size()
    return int(np.ceil(size / params.page_size))

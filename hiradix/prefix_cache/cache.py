"""PrefixCache: the one class behind the drop-in prefix caches; requests and tokens in, slots out.

It is made with its kinds of attention and its tiers (see `kinds` and `names`). Every method runs on the
scheduler thread. Names and semantics are those of SGLang 0.5.9's classes; the work is done in pages by
`HierarchicalCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence, Sized
from dataclasses import replace
from operator import index
from typing import Any, Final, SupportsFloat, SupportsIndex

import numpy as np
import torch

from hiradix.cache import HierarchicalCache, HostTier
from hiradix.cache.misses import Hit, Withheld
from hiradix.errors import Misuse, NoTier
from hiradix.explain import Explanation, Reason
from hiradix.intents import (
    BRING_WAIT_S,
    OPERATOR,
    TIER_NAMES,
    WISH_WAIT_S,
    Intent,
    Receipt,
    Selector,
    TenantUse,
    Verb,
)
from hiradix.policy.eviction import make_order
from hiradix.policy.no_regret import NoRegret
from hiradix.policy.uses import Finished, known_hint
from hiradix.prefix_cache.attached import AttachedStorage, StorageFactory
from hiradix.prefix_cache.kinds import AttentionKind, full_pages, tokens_str
from hiradix.prefix_cache.receipts import LockReceipt, LocksByNode
from hiradix.prefix_cache.records import (
    CacheInitParams,
    CacheStats,
    EvictParams,
    EvictResult,
    FoundPrefix,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    RequestLike,
    insert_params,
)
from hiradix.prefix_cache.slots import AllocatorPages, Pages, RowCopies, SlotTable, pages_of, slots_of
from hiradix.prefix_cache.stats import stats_of
from hiradix.transfer import HiCacheController, JobKind, LayerDoneCounter
from hiradix.tree import BACKBONE, DEVICE, FULL, DeadLeaf, Lock, Node, RadixKey, RadixTree
from hiradix.tree.key import as_tokens, namespace
from hiradix.tree.native import mypyc_attr
from hiradix.tree.node import NO_PAGES

BESIDE: Final = 1  # the tree's component of the kind beside full attention


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache:
    """Reuses the KV of equal prefixes. Sizes are in tokens, where not said otherwise of full attention.

    beside: the kind of attention beside the full one, if there is one. host: the host tier, whose controller
    the cache owns; without it the cache is on the device alone. storage_factory: opens a storage backend by
    name, fingerprinted for this model and layout.
    """

    cache: HierarchicalCache
    tree: RadixTree  # the cache's
    page_size: int
    disable: bool
    device: Any
    _pages: AllocatorPages
    _beside: AttentionKind | None

    def __init__(
        self,
        params: CacheInitParams,
        beside: AttentionKind | None = None,
        host: HostTier | None = None,
        storage_factory: StorageFactory | None = None,
    ):
        init: Any = params  # its counts may be numpy's, which the compiled form does not take
        self.disable = params.disable
        self.page_size = index(init.page_size)
        self.is_eagle = params.is_eagle
        self.disable_finished_insert = params.disable_finished_insert
        self.eviction_policy = params.eviction_policy
        window = init.sliding_window_size
        self.sliding_window_size: int | None = None if window is None else index(window)
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator: Any = params.token_to_kv_pool_allocator
        self.device = params.token_to_kv_pool_allocator.device
        self._beside = beside
        self._pages = full_pages(params) if beside is None else beside.full
        self.cache = self._make_cache(params, host)
        self.tree = self.cache.tree
        if params.explain_names and not params.disable:
            self.cache.remember_departures(params.eviction_policy, index(init.explain_names))
        self._by_node = LocksByNode(self.tree)
        self._prefetcher = self.cache.prefetcher
        self._attached: AttachedStorage | None = None
        if host is not None and storage_factory is not None:
            self._attached = AttachedStorage(self.cache, storage_factory)
        # running requests whose found prefix was counted as used: how much had been forgotten by then
        self._counted: dict[str, int] = {}
        self._copies = RowCopies()
        num_pages = 0 if self._pages.end_page is None else self._pages.num_pages
        self._slot_table = SlotTable(num_pages, self.page_size, self.device)
        self._empty = torch.empty(0, dtype=torch.int64, device=self.device)
        self.enable_kv_cache_events = params.enable_kv_cache_events
        self._events: Any = None
        if params.enable_kv_cache_events:
            from hiradix.events import KVEvents, storage_medium

            self._events = KVEvents(self.tree, None, lambda: storage_medium(self.storage_name))

    def _make_cache(self, params: CacheInitParams, host: HostTier | None) -> HierarchicalCache:
        order, beside = make_order(params.eviction_policy, params.eviction_policy_config), self._beside
        if beside is None:
            return HierarchicalCache(
                RadixTree(self.page_size, order=order), self._pages, host, agree=params.agree,
                intents=params.intents,
            )  # fmt: skip
        components = (FULL, beside.component)
        tree = RadixTree(self.page_size, components, order=order, dead_leaf=DeadLeaf.UNUSABLE)
        return HierarchicalCache(
            tree, (self._pages, beside.pages), host, agree=params.agree, intents=params.intents
        )

    # -- reading ------------------------------------------------------------------------

    @property
    def root_node(self) -> Node:
        return self.cache.tree.root

    def match_prefix(self, params: MatchPrefixParams | Any) -> MatchResult:
        """The longest cached prefix of `params.key`, in whole pages. Splits a node the match ends in.

        With recurrent states up to a record; and where the pages end that are there beyond it. Answers for
        keys of one `TokenLog`, or for one key, may be views of the same memory, which is not written again:
        do not write into them.
        """
        asked: Any = params  # or SGLang's record, of any version
        root = self.tree.root
        key = self._view(asked.key)
        if self.disable or len(key) < self.page_size:
            return MatchResult(self._empty, root, root)
        is_known = key.bookmark.node is not None
        match = self.cache.match(key)
        node, loadable = match.device_node, match.loadable_node
        if node is root:
            slots = self._empty
        elif is_known:
            slots = self._slot_table.of_growing(self.tree.pages(node, DEVICE), key.bookmark)
        else:
            slots = self.device_slots(node)
        found = MatchResult(slots, node, loadable, (loadable.end - node.end) * self.page_size)
        if self._beside is None or self._beside.component.per_page:
            return found
        known = self.tree.find(key).end
        if known <= loadable.end:
            return found
        return found._replace(mamba_branching_seqlen=known * self.page_size)

    def find_prefix(self, key: RadixKey) -> FoundPrefix:
        """The lengths that `match_prefix` would find, in tokens by tier: a walk of the tree, no slots."""
        key = self._view(key)
        if self.disable or len(key) < self.page_size:
            return FoundPrefix(0, 0, self.tree.root)
        match = self.cache.match(key)
        node, size = match.device_node, self.page_size
        return FoundPrefix(node.end * size, (match.loadable_node.end - node.end) * size, node)

    def device_slots(self, node: Node, start: int = 0) -> torch.Tensor:
        """int64 [tokens]: the device slots of the path to `node`, from page `start` on. A fresh tensor."""
        return self._slot_table.of(self.tree.pages(node, DEVICE, start))

    def path_device_indices(self, node: Node) -> torch.Tensor:
        """`device_slots` of the whole path, as SGLang calls it."""
        return self.device_slots(node)

    def get_height(self, node: Node) -> int:
        """The number of nodes on the path to `node`; 0 for the root. O(path)."""
        height, at = 0, node
        while at.parent is not None:
            height, at = height + 1, at.parent
        return height

    def record(self, node: Node) -> int:
        """The device record of state at `node`, a boundary that is locked there; 0 at the root: no state."""
        if node is self.tree.root:
            return 0
        own = node.residency(BESIDE, DEVICE).pages if self.supports_mamba() else None
        if own is None or len(own) != 1:
            raise Misuse(f"{node} is matched and has no record: {own}")
        return int(own[0])

    # -- locks --------------------------------------------------------------------------

    def inc_lock_ref(self, node: Node) -> LockReceipt:
        """Pin the path to `node` on the device until `dec_lock_ref`. Whoever lets go of the receipt gives the
        node back instead."""
        before = self.tree.evictable_pages(DEVICE)
        lock = self.tree.lock(node, DEVICE)
        delta = (self.tree.evictable_pages(DEVICE) - before) * self.page_size
        return LockReceipt(lock, delta, self._by_node)

    def dec_lock_ref(self, node: Any, swa_uuid_for_lock: Any = None) -> int:
        """Undo the `inc_lock_ref` that gave the receipt, either argument; without one, one on `node` whose
        receipt was let go. Returns the tokens that became evictable.

        Misuse: the receipt was given back before, or no such lock is out on `node`.
        """
        before = self.tree.evictable_pages(DEVICE)
        receipt = node if isinstance(node, LockReceipt) else swa_uuid_for_lock
        if isinstance(receipt, LockReceipt):
            if receipt.cache_locks is not self._by_node:
                raise Misuse(f"{receipt} is of another cache")
            self.tree.unlock(receipt.lock)
        elif isinstance(node, Node):
            self._give_back(node)
        else:
            raise Misuse(f"{node!r} is neither a receipt nor a node")
        return (self.tree.evictable_pages(DEVICE) - before) * self.page_size

    def _held(self, req: RequestLike) -> Lock:
        """The lock `req` holds on the prefix it runs on: its receipt's, else one on its `last_node`."""
        receipt = getattr(req, "swa_uuid_for_lock", None)
        if isinstance(receipt, LockReceipt):
            return receipt.lock_in(self._by_node)
        return self._by_node.at(req.last_node)

    def _let_go(self, req: RequestLike) -> None:
        """Give back the lock that `req` holds."""
        receipt = getattr(req, "swa_uuid_for_lock", None)
        if isinstance(receipt, LockReceipt):
            self.tree.unlock(receipt.lock_in(self._by_node))
        else:
            self._give_back(req.last_node)

    def _give_back(self, node: Node) -> None:
        """Give back a lock on `node` whose receipt was let go."""
        lock = self._by_node.take(node)
        if lock is not None:
            self.tree.unlock(lock)

    def _hold(self, req: RequestLike, lock: Lock) -> None:
        """Have `req` hold `lock` instead, in the way that it holds one now."""
        self._let_go(req)
        if isinstance(getattr(req, "swa_uuid_for_lock", None), LockReceipt):
            req.swa_uuid_for_lock = LockReceipt(lock, 0, self._by_node)  # type: ignore[attr-defined]
        elif lock.node.end:
            self._by_node.add(lock)
        req.last_node = lock.node

    # -- writing ------------------------------------------------------------------------

    def insert(self, params: InsertParams | Any) -> InsertResult:
        """Give `params.value` to the tree where it has nothing.

        What it has already stays the caller's to free. With a kind beside full attention that is freed from
        `prev_prefix_len` on, as in upstream, which is the caller's word for what it has from the tree.

        Without a value, where slots hold no data, the tree takes slots of the allocator itself, and evicts for
        them. Misuse, with nothing changed: a pool of data is behind them, or there are too few.
        """
        given: Any = insert_params(params)  # flags may be numpy's, which the compiled form does not take
        key = self._view(given.key).page_aligned(self.page_size)
        if self.disable or len(key) == 0:
            return InsertResult(0)
        if self._beside is not None:
            return self._insert_with(self._beside, key, given)
        if self.cache.is_blocked(key):
            return InsertResult(len(key))
        match = self.tree.match(key)
        known = match.device_node.end * self.page_size
        pages = self._pages_given(given.value, known, len(key))
        lock = self.tree.insert(
            key, DEVICE, [pages], priority=_priority_of(given), found=match.loadable_node
        ).lock
        if given.chunked:
            self.cache.inserted(lock.node)
        else:
            self.cache.finished(key, lock.node, Finished(len(key), 0))
        return self._inserted(known, lock)

    def _pages_given(self, value: Any, start: int, stop: int) -> Pages:
        """int32: the pages of slots [start, stop) of a value, or own ones where it names none."""
        if value is not None and value.dtype != torch.bool:
            return pages_of(value, self.page_size, start, stop)
        if self.token_to_kv_pool_allocator.get_kvcache() is not None:
            raise Misuse("value: the slots that hold the key's data are needed, as there is a pool of it")
        count = (stop - start) // self.page_size
        short = count - self._pages.available
        if short > 0:
            self.cache.evict(short)
        pages = self._pages.alloc(count) if count else NO_PAGES
        if pages is None:
            raise Misuse(f"value: {count} pages are needed, {self._pages.available} are free")
        return pages

    def _inserted(self, known: int, lock: Lock, mamba_exist: bool = False) -> InsertResult:
        """Give the lock of an insert back, and return the insert's result."""
        self.tree.unlock(lock)
        node = self.tree.current(lock.node) or self.tree.root  # it may have been merged
        window, at = 0, node
        if self.supports_swa():
            while at.parent is not None and at.residency(BESIDE, DEVICE).pages is not None:
                at = at.parent
            window = (node.end - at.end) * self.page_size
        return InsertResult(known, node.end * self.page_size, node, mamba_exist, window)

    def _insert_with(self, beside: AttentionKind, key: RadixKey, given: Any) -> InsertResult:
        """`insert` of full pages with what is beside them."""
        start, priority = index(given.prev_prefix_len) // self.page_size, _priority_of(given)
        if given.value is None:
            raise Misuse("value: the slots that hold the key's data are needed, with what lies beside them")
        pages = pages_of(given.value, self.page_size, start * self.page_size, len(key))
        self.tree.match(key)  # splits the node it ends in
        there = self.tree.find(key)
        if self.cache.is_blocked(key):
            self._pages.free(pages[pages != self._held_pages(there, start, len(pages), BACKBONE)])
            beside.free_refused(given)
            return InsertResult(len(key))
        known = self.tree.absent_from(there, DEVICE)
        record = None if given.mamba_value is None else index(given.mamba_value)
        had_record = record is not None and there.end == len(key) // self.page_size and (
            there.residency(BESIDE, DEVICE).pages is not None
        )  # fmt: skip
        ended = None if given.chunked else Finished(len(key), 0)
        num_freed = min(-(-index(given.swa_evicted_seqlen) // self.page_size) - start, len(pages))
        if num_freed > 0:
            own = self._held_pages(there, start, num_freed, BACKBONE)
            beside.forget(pages[:num_freed][pages[:num_freed] != own])
        lock = self.insert_pages(key, pages, None, ended, record)
        self.tree.prioritise(lock, priority)
        return self._inserted(known * self.page_size, lock, had_record)

    def insert_pages(
        self, key: RadixKey, pages: Pages, held: Lock | None, ended: Finished | None = None,
        record: int | None = None,
    ) -> Lock:  # fmt: skip
        """Insert `key`, whose last pages these are, from the node held; pages go to the tree or are freed.

        What belongs to them of the kind beside goes with them: the windows that lie beside them, or `record`.
        """
        beside = self._beside
        if beside is None or self.cache.is_blocked(key):
            return self.cache.insert(key, pages, at=held, ended=ended)
        given, strays = beside.given(pages, record)
        lock = self.cache.insert(key, pages, at=held, others=(given,), ended=ended)
        if strays.any():
            own = self._held_pages(lock.node, lock.node.end - len(pages), len(strays), BESIDE)
            beside.pages.free(strays[(strays > 0) & (strays != own)])
        return lock

    def insert_row(
        self, key: RadixKey, row: torch.Tensor, req: RequestLike, ended: Finished | None = None
    ) -> Lock:
        """Insert `key` from the node `req` holds, with its record of state; slots behind that node go to the
        tree or are freed."""
        held, beside = self._held(req), self._beside
        if self.was_forgotten(key, req):
            return self.tree.lock(held.node, DEVICE)
        pages = pages_of(row, self.page_size, held.node.end * self.page_size, len(key))
        if beside is None or self.cache.is_blocked(key):
            return self.insert_pages(key, pages, held, ended)
        return self.insert_pages(key, pages, held, ended, beside.record_of(req, len(key)))

    def was_forgotten(self, key: RadixKey, req: RequestLike) -> bool:
        """Whether `key` was to be forgotten when `req` ran already: what it has computed stays its own."""
        began = self._counted.get(req.rid)
        return began is not None and self.cache.was_forgotten_since(key, began)

    def _held_pages(self, node: Node, start: int, num_pages: int, component: int) -> Pages:
        """int32 [num_pages]: the tree's device pages of the path of `node` from page `start` on; 0: none."""
        held = np.zeros(num_pages, np.int32)
        for n in self.tree.path(node):
            own = n.residency(component, DEVICE).pages
            if own is not None and n.start < start + num_pages and n.end > start:
                lo, hi = max(n.start, start), min(n.end, start + num_pages)
                held[lo - start : hi - start] = own[lo - n.start : hi - n.start]
        return held

    def evict(self, params: EvictParams | Any) -> EvictResult:
        """Evict at least `params.num_tokens` device tokens, and of the kind beside as many as `params` asks
        for; less if everything else is locked.

        Full pages take along what lies beside them. Windows and records leave the pages where some match can
        still use them.
        """
        given: Any = params
        num_pages, beside = -(-index(given.num_tokens) // self.page_size), self._beside
        if self.disable:
            return EvictResult()
        if beside is None:
            return EvictResult(self.cache.evict(num_pages) * self.page_size if num_pages > 0 else 0)
        dropped, num_beside = self.cache.supply.num_dropped, beside.num_asked(params)
        full, other = dropped[BACKBONE], dropped[BESIDE]
        if num_pages > 0:
            self.cache.evict(num_pages)
        more = num_beside - (dropped[BESIDE] - other)
        if more > 0:
            self.cache.evict(more, BESIDE)
        return beside.evicted((dropped[BACKBONE] - full) * self.page_size, dropped[BESIDE] - other)

    def find_again(self, node: Node) -> Node:
        """The deepest node on the path to `node`, which was found earlier, that is still on the device."""
        return self.tree.root if self.tree.current(node) is None else self.cache.match_again(node).device_node

    def drop_tail(self, node: Node, num_tokens: SupportsIndex, kept: Container[Node] = ()) -> int:
        """Free up to about `num_tokens` device tokens, from the end of the path to `node` upwards, and return
        how many were freed. Stops at a locked node, at one that another path uses, and at one in `kept`.
        Nodes that are not on the host are kept, too, if pages are written there at eviction or a kind is
        beside full attention."""
        writes, gone, most = self.cache.write_through, 0, index(num_tokens)
        keeps = self._beside is not None or (writes is not None and writes.policy.writes_on_evict)
        at = self.tree.current(node)
        while at is not None and at.parent is not None and at.num_device_children == 0 and gone < most:
            parent = at.parent
            if at.device.pages is not None:
                is_copied = at.host.pages is not None
                freed = self.tree.demote(at) if keeps or is_copied else self.tree.drop_device(at)
                if not freed:
                    break
                gone += self.cache.supply.release(freed) * self.page_size
            at = None if parent in kept else parent
        return gone

    def reset(self) -> None:
        """Drop everything on the device and host. No request may hold a lock; what is out is void."""
        self.cache.reset()
        self._copies.clear()

    # -- requests -----------------------------------------------------------------------

    def cache_unfinished_req(self, req: RequestLike, chunked: bool = False) -> None:
        """Share what a running request has computed, and let it run on the tree's slots.

        Rewrites the request's row from `cache_protected_len` on, its lock, `last_node`, `prefix_indices`
        and `cache_protected_len`. Costs the new tokens, not the prefix; a list of `fill_ids` is read whole.
        """
        asked: Any = req  # its counts may be numpy's, which the compiled form does not take
        place, kept, priority = index(asked.req_pool_idx), index(asked.cache_protected_len), _priority_of(req)
        tokens = req.fill_ids
        row = self.req_to_token_pool.req_to_token[place, : len(tokens)]
        key = self._key(tokens, req).page_aligned(self.page_size)
        if not self.disable:
            self.count_use(req)
        if self.disable or len(key) <= kept:
            req.prefix_indices = row.to(torch.int64, copy=True)
            return
        old = self._held(req)
        lock = self.insert_row(key, row, req)
        start, end = old.node.end, lock.node.end
        self.tree.prioritise(lock, priority, start)
        slots = self.device_slots(lock.node, start)
        first = start * self.page_size
        self.req_to_token_pool.write((place, slice(first, end * self.page_size)), slots.to(row.dtype))
        self._hold(req, lock)
        req.cache_protected_len = end * self.page_size
        req.prefix_indices = self._copies.copy(req.rid, row, req.prefix_indices, first)

    def cache_finished_req(self, req: RequestLike, is_insert: bool = True) -> None:
        """Take over (or free) the slots of a request that ended, and drop its lock.

        Slots beyond the committed length are the caller's to free, from the next whole page on. BadNamespace,
        with nothing changed, for a request in no namespace: end it with `is_insert` False. Misuse, likewise,
        for one that holds no lock.
        """
        asked: Any = req
        if not self.disable:
            self._held(req)  # its pages may be others' if it has ended before
        if is_insert:
            self._refuse_unnamed(req)
        place, kept, priority = index(asked.req_pool_idx), index(asked.cache_protected_len), _priority_of(req)
        ended = _ended(req)
        num_tokens = index(asked.pop_committed_kv_cache())
        row = self.req_to_token_pool.req_to_token[place, :num_tokens]
        if is_insert and not self.disable and not self.disable_finished_insert:
            self.count_use(req)
            if self.cache.learner is not None or num_tokens // self.page_size * self.page_size > kept:
                tokens = np.concatenate([as_tokens(req.origin_input_ids), as_tokens(req.output_ids)])
                key = self._key(tokens[:num_tokens], req).page_aligned(self.page_size)
                if len(key) > kept:
                    lock = self.insert_row(key, row, req, ended)
                    self.tree.prioritise(lock, priority, kept // self.page_size)
                    kept = lock.node.end * self.page_size
                    self.tree.unlock(lock)
                else:
                    self.cache.finished(key, self._held(req).node, ended)
        self.forget_request(req)
        tail = pages_of(row[kept:], self.page_size) if kept < num_tokens else None
        if tail is not None:
            self._pages.free(tail)
        if not self.disable:
            self._let_go(req)

    def hint(self, key: RadixKey, hint: str) -> int:
        """`end_of_session` or `keep_alive` of a conversation; its cached tokens (0: nothing learns, or its
        tenant, beside others, says `keep_alive` of too many of his requests).

        ValueError for other hints.
        """
        known_hint(hint)
        return 0 if self.disable else self.cache.hint(self._view(key), hint) * self.page_size

    def forget_request(self, req: RequestLike) -> None:
        """A request has ended, or runs anew from its beginning."""
        self.release_aborted_request(req.rid)
        self._counted.pop(req.rid, None)
        self._copies.forget(req.rid)

    def count_use(self, req: RequestLike, began: int | None = None) -> None:
        """Count the prefix a request found as used, once; it may be due to be copied down now. began:
        `num_forgotten` when it was matched, where that is known."""
        if req.rid not in self._counted:
            self._counted[req.rid] = self.cache.num_forgotten if began is None else began
            self.terminate_prefetch(req.rid)  # it runs: nothing need be held for it any more
            self.cache.count_use(req.last_node, _priority_of(req))
            self.cache.inserted(req.last_node)

    # -- keys ---------------------------------------------------------------------------

    def _view(self, given: Any) -> RadixKey:
        """A key of ours, or one of SGLang's, as this cache's tree sees it."""
        key: RadixKey = given if isinstance(given, RadixKey) else _as_ours(given)
        return key.bigrams() if self.is_eagle and not key.is_bigram else key

    def _key(self, token_ids: Any, req: RequestLike) -> RadixKey:
        salt = getattr(req, "cache_salt", None)
        extras = getattr(req, "page_extras", None)
        asked: Any = req  # what is no text is refused by the key, also in the compiled form
        return self._view(RadixKey(token_ids, asked.extra_key, cache_salt=salt, page_extras=extras))

    def _refuse_unnamed(self, req: RequestLike) -> None:
        """BadNamespace, for a request whose tokens are in no namespace."""
        asked: Any = req
        extra_key, salt = asked.extra_key, getattr(req, "cache_salt", None)
        if extra_key is not None or salt is not None:
            namespace(extra_key, salt, self.is_eagle)

    # -- host: every scheduler step -----------------------------------------------------

    @property
    def has_host(self) -> bool:
        """Whether there are tiers below the device. Without them nothing is ever found or asked for there."""
        return self.cache.controller is not None

    @property
    def controller(self) -> HiCacheController:
        """The controller that moves pages between the tiers. Raises NoTier without a host tier."""
        controller = self.cache.controller
        if controller is None:
            raise NoTier(f"{type(self).__name__} has no host tier, and so no controller")
        return controller

    @property
    def cache_controller(self) -> HiCacheController | None:
        """The controller that moves pages between the tiers, under SGLang's name; None without a host tier."""
        return self.cache.controller

    @property
    def layer_done_counter(self) -> LayerDoneCounter | None:
        """The gate that readers of the device pool wait at; None without a host tier."""
        controller = self.cache.controller
        return None if controller is None else controller.layer_done_counter

    def check_hicache_events(self) -> None:
        """Apply finished transfers. Call at the top of every scheduler step."""
        self.cache.tick()

    def ready_to_load_host_cache(self) -> int:
        """Start the load backs of this step; what the next forward passes to `set_consumer` (-1: no wait).

        Starts the write-through copies of the steps before too. Where it is not called in each step, the
        second `check_hicache_events` after an insert does; an engine that stops stepping calls it once more.
        """
        return self.cache.start_loading()

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Have `wakeup` called, from any thread, whenever a transfer has ended: it may end an idle wait."""
        if self.has_host:
            self.controller.wakeup = wakeup

    @property
    def ongoing_write_through(self) -> Sized:
        return self.cache.in_flight.tickets(JobKind.WRITE)

    @property
    def ongoing_load_back(self) -> Sized:
        return self.cache.in_flight.tickets(JobKind.LOAD)

    @property
    def ongoing_prefetch(self) -> Sized:
        return () if self._prefetcher is None else self._prefetcher

    @property
    def ongoing_backup(self) -> Sized:
        return self.cache.in_flight.tickets(JobKind.STORE)

    @property
    def num_in_flight(self) -> int:
        """Transfers and prefetches not ended yet."""
        return len(self.cache.in_flight) + len(self.ongoing_prefetch)

    @property
    def is_transferring(self) -> bool:
        """Whether anything moves between tiers; any of it may hold device pages for a while."""
        return self.num_in_flight > 0

    # -- host: load back ----------------------------------------------------------------

    def init_load_back(
        self, last_host_node: Node, host_hit_length: SupportsIndex, mem_quota: SupportsIndex | None = None
    ) -> tuple[torch.Tensor, Node]:
        """Bring a host hit to the device: (slots, node), all of it or (nothing, the node its prefix ends at).

        The slots are those of the last `host_hit_length` tokens of `last_host_node`. So they follow exactly
        on the device prefix of the match that gave both, whatever others have loaded since; the caller holds
        a lock on that. They may be read by forwards that wait on `ready_to_load_host_cache`'s slot.
        mem_quota: tokens.
        """
        size = self.page_size
        num_pages, rest = divmod(index(host_hit_length), size)
        start = last_host_node.end - num_pages
        if rest or not 0 <= start <= last_host_node.end:
            raise Misuse(f"host_hit_length {host_hit_length} of {last_host_node.end} pages of {size} tokens")
        if not num_pages:
            return self._empty, last_host_node
        match = self.cache.match_again(last_host_node)
        quota = None if mem_quota is None else index(mem_quota) // size
        is_whole = match.loadable_node.end == last_host_node.end
        if is_whole and self.cache.load_back(match, quota) is not None:
            return self.device_slots(last_host_node, start), last_host_node
        return self._empty, self._prefix(last_host_node, start)

    def _prefix(self, node: Node, end: int) -> Node:
        """The node at page `end` of the path of `node`, which may have left the tree since. Misuse, if the
        device has no such prefix any more: whoever was given its slots holds no lock on it."""
        at: Node | None = node
        while at is not None and at.parent is None and at is not self.tree.root:
            at = at.successor
        while at is not None and at.start >= end and at.parent is not None:
            at = at.parent
        if at is not None and at.end > end:
            self.tree.cut(at, end)
            at = at.parent
        if at is None or at.end != end or at.device.pages is None:
            raise Misuse(
                f"{end} pages before a host hit of {node} are not on the device: they are not locked"
            )
        return at

    @property
    def no_regret(self) -> NoRegret:
        """The gate, which keeps what computing, loading and fetching cost."""
        return self.cache.no_regret

    def note_prefill(self, num_tokens: SupportsIndex, seconds: SupportsFloat) -> None:
        """Tell the no-regret gate what computing costs: a forward that waited for no load computed
        `num_tokens` in `seconds`."""
        self.cache.no_regret.computed(index(num_tokens) / self.page_size, float(seconds))

    # -- storage: prefetch --------------------------------------------------------------

    def prefetch_from_storage(
        self,
        req_id: Hashable,
        last_host_node: Node,
        new_input_tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_keys: Sequence[str] | None = None,
        *,
        req: RequestLike | None = None,
    ) -> bool:
        """Ask storage for `new_input_tokens`, which follow `last_host_node`. False: not asked.

        The namespace is the node's; at the root, which has none, it is `req`'s.
        """
        if req is not None:
            self._refuse_unnamed(req)
        if self.disable or self._prefetcher is None or not self.enable_storage:
            return False
        key = self._prefetch_key(last_host_node, new_input_tokens, req)
        return not self.cache.is_forgetting(key) and self._prefetcher.start(req_id, key, last_host_node)

    def _prefetch_key(
        self, last_host_node: Node, new_input_tokens: Sequence[int], req: RequestLike | None
    ) -> RadixKey:
        """The whole pages of a prompt whose last tokens follow a node."""
        if req is None:
            path = self.tree.path_key(last_host_node)
            known = last_host_node.end * self.page_size  # its next token, which bigrams look at, is new
            key = RadixKey(
                np.concatenate([path.tokens[:known], as_tokens(new_input_tokens)]),
                path.extra_key,
                self.is_eagle,
                cache_salt=path.cache_salt,
                page_extras=path.extras,
            )
        else:
            num_tokens = last_host_node.end * self.page_size + len(new_input_tokens)
            tokens = as_tokens(req.fill_ids)[: num_tokens + self.is_eagle].copy()  # the request's may change
            key = self._key(tokens, req)[:num_tokens]
        return key.page_aligned(self.page_size)

    def prefetch_in_order(self, req_ids: Sequence[Hashable]) -> None:
        """The order in which waiting requests will run, next first: in it they are fetched, as much ahead as
        there is room. Cheap if unchanged. Without it: the order of `check_prefetch_progress`, or arrival."""
        if self._prefetcher is not None:
            self._prefetcher.in_order(req_ids)

    def fetching_tokens(self, req_id: Hashable) -> int:
        """Tokens that storage has said it has for the request and that are not on the host yet; 0: nothing,
        or not known."""
        return 0 if self._prefetcher is None else self._prefetcher.fetching_pages(req_id) * self.page_size

    def check_prefetch_progress(self, req_id: Hashable) -> bool:
        """True when the request may be scheduled: nothing to wait for, all there, or the policy says so.

        False also while it waits for host room. What was fetched for it is held on the host from then on too,
        until it is computed, or ends.
        """
        return self._prefetcher is None or self._prefetcher.progress(req_id)

    def is_prefetch_done(self, req_id: Hashable) -> bool:
        """Whether nothing more will come from storage for the request. Unlike `check_prefetch_progress` it
        decides nothing: no time to wait begins or ends with it."""
        return self._prefetcher is None or self._prefetcher.is_done(req_id)

    def terminate_prefetch(self, req_id: Hashable) -> None:
        """Stop waiting, as the request runs; what has arrived stays usable, and is held no more."""
        if self._prefetcher is not None:
            self._prefetcher.stop(req_id)

    def pop_prefetch_loaded_tokens(self, req_id: Hashable) -> int:
        """Tokens its prefetch brought from storage. Reading resets it."""
        return 0 if self._prefetcher is None else self._prefetcher.pop_loaded_pages(req_id) * self.page_size

    def release_aborted_request(self, req_id: Hashable) -> None:
        """Forget a request that waits no more. Never blocks."""
        if self._prefetcher is not None:
            self._prefetcher.abort(req_id)

    # -- explanations -------------------------------------------------------------------

    def explain(
        self, req: RequestLike, hit: Hit, refused: SupportsIndex = 0, looked_up: SupportsIndex | None = None
    ) -> Explanation | None:
        """The source of each token of a request's prompt, as it is admitted; None where nothing is remembered
        (`CacheInitParams.explain_names`).

        hit: what it has. refused: so many tokens behind the device's that the host has were not loaded.
        looked_up: first tokens that were looked up; None: all but the last, which is always computed.
        """
        misses = self.cache.misses
        if misses is None:
            return None
        withheld = []
        if index(refused):
            reason = self.cache.load_refusal or Reason.DAMAGED
            withheld.append(Withheld(hit.device + index(refused), reason, "on the host"))
        if self._prefetcher is not None:
            withheld += misses.in_storage(self._prefetcher.pop_withheld(req.rid))
        prompt = req.origin_input_ids
        key = self._key(prompt[: len(prompt) - 1 if looked_up is None else index(looked_up)], req)
        return misses.explain(req.rid, key, len(prompt), hit, withheld)

    # -- storage: while serving ---------------------------------------------------------

    @property
    def attached(self) -> AttachedStorage:
        """The storage below the host tier: opened, attached and detached step by step."""
        if self._attached is None:
            raise NoTier(f"{type(self).__name__} has no tiers below the device, and so no storage")
        return self._attached

    @property
    def enable_storage(self) -> bool:
        return self.has_host and self.controller.storage_attached

    @property
    def storage_name(self) -> str | None:
        """The name of the backend that is attached."""
        return None if self._attached is None else self._attached.name

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Attach a backend by name; (ok, message) in upstream's words. Nothing changes unless ok.

        Opens the backend here, on the scheduler thread: while serving, use what `attached` has.
        """
        if self._attached is None:
            return False, "Hierarchical cache is not enabled."
        return self._attached.attach_by_name(
            storage_backend, storage_backend_extra_config_json, served_model_name,
            hicache_storage_prefetch_policy, hicache_write_policy,
        )  # fmt: skip

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Detach and close the backend. Idempotent; a hung worker leaves it attached, to be tried again."""
        if self._attached is None:
            return False, "Hierarchical cache is not enabled."
        return self._attached.detach()

    def clear_storage_backend(self) -> bool:
        """Delete this model's pages from storage. False when there is no storage or it failed on any rank.

        Waits for the backend; a server calls `attached.storage.clear()` elsewhere, then `attached.cleared`.
        """
        return self._attached is not None and self._attached.clear()

    # -- intents ------------------------------------------------------------------------

    def submit(self, intent: Intent) -> Receipt:
        """Take a wish: it is applied with the next `check_hicache_events`, in the order of such calls. Where
        this cache cannot carry it out it is refused at once, by the receipt's state and reason. O(1) but for a
        locate in the tree, which is answered here.

        >>> from hiradix.memory import ReqToTokenPool, SlotAllocator
        >>> from hiradix.prefix_cache import CacheInitParams, EvictParams, InsertParams, RadixCache
        >>> slots = SlotAllocator(num_tokens=64, page_size=4, device="cpu", kvcache=None)
        >>> cache = RadixCache(CacheInitParams(False, ReqToTokenPool(8, 64), slots, page_size=4))
        >>> key = RadixKey(range(12))
        >>> _ = cache.insert(InsertParams(key, slots.alloc(12)))
        >>> prompt = Selector.prefix(key)
        >>> cache.locate(prompt).found["device"].tokens
        12
        >>> lease = cache.hold(prompt, ttl_s=60, tier="device")
        >>> cache.check_hicache_events()  # the engine's next step
        >>> cache.intent(lease.id).state.value, cache.intent(lease.id).done.tokens
        ('held', 12)
        >>> wish = cache.forget(prompt)  # the operator's goes before any lease
        >>> cache.check_hicache_events()
        >>> cache.intent(lease.id).reason, cache.intent(wish.id).by_tier["device"].tokens
        ('forgotten by 3', 12)
        >>> cache.total_size()
        0
        """
        key = intent.selector.key
        if key is not None and self.is_eagle and not key.is_bigram:
            intent = replace(intent, selector=Selector.prefix(key.bigrams()))
        return self.cache.intents.submit(intent)

    def locate(
        self, selector: Selector, tiers: Sequence[str] = ("device", "host"), asked_by: str = OPERATOR
    ) -> Receipt:
        """Look up how far a selection is present in each tier, without counting a use. `Receipt.found` has
        the answer at once, but for storage, which a job asks."""
        return self.submit(Intent(Verb.LOCATE, selector, tuple(tiers), asked_by=asked_by))

    def hold(
        self, selector: Selector, ttl_s: SupportsFloat, tier: str = "host", *,
        max_bytes: SupportsIndex | None = None, wait_s: SupportsFloat = WISH_WAIT_S, asked_by: str = OPERATOR,
    ) -> Receipt:  # fmt: skip
        """Keep a prefix, or a session's prompts, in `tier` for `ttl_s` seconds from when they are there; what is
        not there yet is brought, within `wait_s`. Budgets clip it to its leading pages.

        Asked for again by the same, it goes on under the first receipt's id, with the new end: so a lease is
        extended or shortened. On the device it gives way to a request that could not run else.
        """
        most = None if max_bytes is None else index(max_bytes)
        intent = Intent(
            Verb.HOLD, selector, (tier,), float(ttl_s), float(wait_s), most, asked_by=asked_by
        )  # fmt: skip
        return self.submit(intent)

    def forget(
        self, selector: Selector, tiers: Sequence[str] = TIER_NAMES, *, is_whole: bool = False,
        wait_s: SupportsFloat = WISH_WAIT_S, asked_by: str = OPERATOR,
    ) -> Receipt:  # fmt: skip
        """Have it in none of `tiers` any more: what this prefix and its continuations alone have, or all that a
        session, a tenant or everybody has.

        is_whole: of a prefix also the pages that others share, and so what continues those. Nothing of it is
        matched or fetched any more from when it is applied. What is in use then is waited for, `wait_s` at most:
        `Receipt.by_tier` says how much is gone.
        """
        intent = Intent(
            Verb.FORGET, selector, tuple(tiers), wait_s=float(wait_s), is_whole=is_whole, asked_by=asked_by
        )
        return self.submit(intent)

    def bring(
        self, selector: Selector, target: str, *, is_move: bool = False, max_bytes: SupportsIndex | None = None,
        wait_s: SupportsFloat = BRING_WAIT_S, asked_by: str = OPERATOR,
    ) -> Receipt:  # fmt: skip
        """Have it in another tier, too: `host`, from storage or the device; `storage`, from the host or the
        device; or in another store that was opened under that name, and with `is_move` no more in this one."""
        most = None if max_bytes is None else index(max_bytes)
        intent = Intent(
            Verb.BRING, selector, wait_s=float(wait_s), max_bytes=most, target=target, is_move=is_move,
            asked_by=asked_by,
        )  # fmt: skip
        return self.submit(intent)

    def release(self, intent_id: SupportsIndex, asked_by: str = OPERATOR) -> Receipt:
        """End a lease now. BadIntent: there is no such one, or it is another's."""
        return self.cancel(intent_id, asked_by)

    def cancel(self, intent_id: SupportsIndex, asked_by: str = OPERATOR) -> Receipt:
        """End a wish: a lease ends, what runs stops; what it has done stays done. BadIntent: there is no such
        one, or it is another's, and neither the operator asks."""
        return self.cache.intents.cancel(index(intent_id), asked_by)

    def intent(self, intent_id: SupportsIndex) -> Receipt | None:
        """The receipt of a wish as of now; None for one that is not known any more."""
        return self.cache.intents.receipt(index(intent_id))

    def intents(self, asked_by: str | None = None) -> list[Receipt]:
        """All wishes that are known, of one who asked or of all, oldest first."""
        return self.cache.intents.receipts(asked_by)

    def tenants(self) -> list[TenantUse]:
        """The pages and bytes of each tenant in all tiers, those with the most bytes first. O(nodes of the
        tree)."""
        used = self.cache.intents.tenants()
        if self._attached is None or self._attached.storage is None:
            return used
        stored = self._attached.tenant_bytes([one.tenant for one in used])
        return [replace(one, storage_bytes=stored.get(one.tenant)) for one in used]

    def name_session(self, session: str, key: RadixKey) -> None:
        """The prompt that a session has sent last, as a request's `session_name` says it when it ends."""
        self.cache.intents.name_session(session, self.tree.find(self._view(key)))

    # -- sizes --------------------------------------------------------------------------

    def evictable_size(self) -> Any:
        """Device tokens no request holds; with a kind beside full attention also its: a pair."""
        return self._with_beside(self.full_evictable_size(), self.cache.evictable_pages)

    def protected_size(self) -> Any:
        """Device tokens in the tree that a request or a transfer holds; likewise."""
        return self._with_beside(self.full_protected_size(), self._protected_pages)

    def total_size(self) -> Any:
        """Device tokens in the tree; with a kind beside full attention also its tokens or records: a pair."""
        num_tokens = self.tree.resident_pages(DEVICE) * self.page_size
        return self._with_beside(num_tokens, self._resident_pages)

    def _with_beside(self, num_tokens: int, count: Callable[[int], int]) -> Any:
        """`num_tokens`, and beside it what `count` says of the further component, if there is one."""
        if self._beside is None:
            return num_tokens
        return num_tokens, count(BESIDE) * self._beside.unit

    def _resident_pages(self, component: int) -> int:
        return self.tree.resident_pages(DEVICE, component)

    def _protected_pages(self, component: int) -> int:
        return self._resident_pages(component) - self.cache.evictable_pages(component)

    def full_evictable_size(self) -> int:
        """Device tokens of full attention that no request holds."""
        return self.cache.evictable_pages() * self.page_size

    def full_protected_size(self) -> int:
        """Device tokens of full attention in the tree that a request or a transfer holds."""
        return self._protected_pages(BACKBONE) * self.page_size

    def swa_evictable_size(self) -> int:
        """Device tokens whose window data no request holds."""
        return self.cache.evictable_pages(BESIDE) * self.page_size if self.supports_swa() else 0

    def swa_protected_size(self) -> int:
        """Device tokens whose window data a request or a transfer holds."""
        return self._protected_pages(BESIDE) * self.page_size if self.supports_swa() else 0

    def mamba_evictable_size(self) -> int:
        """Device records of state that no request and no transfer holds."""
        return self.cache.evictable_pages(BESIDE) if self.supports_mamba() else 0

    def mamba_protected_size(self) -> int:
        """Device records of state in the tree that a request or a transfer holds."""
        return self._protected_pages(BESIDE) if self.supports_mamba() else 0

    def all_values_flatten(self) -> torch.Tensor:
        """int64 [total tokens]: every device slot in the tree. O(tree); for leak hunts."""
        return slots_of(self.tree.all_pages(DEVICE), self.page_size, self.device)

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """int64 [records]: every device record of state in the tree. O(tree)."""
        records = self.tree.all_pages(DEVICE, BESIDE) if self.supports_mamba() else NO_PAGES
        return slots_of(records, 1, self.device)

    # -- which kind it is ---------------------------------------------------------------

    def supports_swa(self) -> bool:
        return self._beside is not None and self._beside.component.per_page

    def supports_mamba(self) -> bool:
        return self._beside is not None and not self._beside.component.per_page

    def supports_prefix_sharing(self) -> bool:
        return not self.disable

    def is_chunk_cache(self) -> bool:
        return self.disable

    def is_tree_cache(self) -> bool:
        return not self.disable

    # -- for people and metrics ---------------------------------------------------------

    def pretty_print(self) -> None:
        """Print the tree: tokens, tiers, locks, hits."""
        print(self.tree.render())

    def available_and_evictable_str(self) -> str:
        """The free and evictable tokens as text for an out-of-memory message: a line, or two with sliding
        windows."""
        allocator, evictable = self.token_to_kv_pool_allocator, self.full_evictable_size()
        if self._beside is None:
            return tokens_str(allocator, evictable)
        own = self.tree.evictable_pages(DEVICE, BESIDE) * self._beside.unit
        return self._beside.available_and_evictable_str(allocator, evictable, own)

    def take_events(self) -> list[Any]:
        """KV events since the last call, if `enable_kv_cache_events`: `hiradix.events` has their classes."""
        return [] if self._events is None else self._events.take()

    def stats(self) -> CacheStats:
        """A snapshot for metrics. O(1)."""
        return stats_of(self.cache, self.page_size, self._beside, self._attached)

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

    # -- the end ------------------------------------------------------------------------

    def drain(self, timeout_s: SupportsFloat) -> bool:
        """Let transfers under way end. True if nothing is in flight any more."""
        return self.cache.drain(float(timeout_s))

    def close(self, timeout_s: SupportsFloat = 10.0) -> None:
        """Stop the workers within the deadline and close storage."""
        self.cache.close(float(timeout_s))
        if self._attached is not None:
            self._attached.close()

    def shutdown(self) -> None:
        """Close the cache: another name of `close`. What is in storage stays there."""
        self.close()


def _as_ours(key: Any) -> RadixKey:
    """SGLang's key of any version, or what has its attributes."""
    limit, salt = getattr(key, "limit", None), getattr(key, "cache_salt", None)
    return RadixKey(key.token_ids, key.extra_key, bool(key.is_bigram), limit, salt)


def _priority_of(req: Any) -> int:
    return index(getattr(req, "priority", None) or 0)  # some engines have none for most of them


def _ended(req: RequestLike) -> Finished:
    """The lengths and hints of a finished request, for the eviction policy to learn from."""
    hint = getattr(req, "session_hint", None)
    session, stop = getattr(req, "session_name", ""), getattr(req, "session_stop", "")
    return Finished(len(req.origin_input_ids), len(req.output_ids), hint, session, stop)

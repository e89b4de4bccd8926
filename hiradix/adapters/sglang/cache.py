"""The prefix cache for SGLangs with `checkpoint`, `TreeLock` and request handles (0.5.23), on the device.

Only SGLang's records are translated here; what is cached where is `hiradix.prefix_cache`'s. Every method runs
on SGLang's scheduler thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)

from hiradix.adapters.sglang.engine_views import Rows
from hiradix.adapters.sglang.events import as_sglang, watch
from hiradix.adapters.sglang.front import Front
from hiradix.adapters.sglang.lora_adapters import NO_ADAPTERS, LoraAdapters
from hiradix.adapters.sglang.states import RequestStates
from hiradix.errors import Misuse
from hiradix.policy.uses import Finished
from hiradix.prefix_cache import EvictParams as OwnEvictParams
from hiradix.prefix_cache import LockReceipt, PrefixCache, RadixKey
from hiradix.prefix_cache.records import WINDOW
from hiradix.tree import DEVICE, HOST, Lock, Node


@dataclass
class LockTaken(IncLockRefResult):  # type: ignore[misc]
    """The result of `inc_lock_ref`. held: our receipt."""

    held: LockReceipt | None = None

    def to_dec_params(self) -> LockGiven:
        return LockGiven(held=self.held)


@dataclass
class LockGiven(DecLockRefParams):  # type: ignore[misc]
    """The argument of `dec_lock_ref`. held: our receipt."""

    held: LockReceipt | None = None


class HiRadixPrefixCache(Front):
    """hiradix's radix tree as SGLang's `tree_cache`; device only."""

    def __init__(self, params: Any, inner: PrefixCache, adapters: LoraAdapters = NO_ADAPTERS):
        super().__init__(params, inner, adapters)
        self.eviction_policy = params.eviction_policy
        self.sliding_window_size = params.sliding_window_size
        self.draft_swa_window = getattr(params, "draft_swa_window", 0)  # 0.5.22 has none
        self._learns = inner.cache.learner is not None
        port: Any = inner.token_to_kv_pool_allocator
        self._rows = Rows(params.req_to_token_pool, port)
        self._lookahead = int(self.is_eagle)
        self._states: RequestStates | None = None
        if inner.supports_mamba():
            self._states = RequestStates(params.req_to_token_pool, self._drop_record, self.page_size)
        self._events = watch(params, inner.tree, self.storage_name, adapters)
        if params.enable_metrics:
            self.init_metrics_collector()

    def storage_name(self) -> str | None:
        """The name of the storage backend that is attached."""
        return None

    def take_events(self) -> list[Any]:
        """KV events since the last call, as SGLang's records."""
        return [] if self._events is None else [as_sglang(event) for event in self._events.take()]

    # -- reading ------------------------------------------------------------------------

    def resolve_node_handle(self, node_handle: Node) -> Node:
        """The node that ends where this one did; the root if it has left the tree."""
        return self.inner.tree.current(node_handle) or self.root_node

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix, in whole pages: on the device, then on the host."""
        key = self._key(params.key)
        states, node = self._states, self.root_node
        if params.req is not None:  # what is forgotten from here on it puts back no more
            params.req.hiradix_began = self.inner.cache.num_forgotten
        if len(key) < self.page_size:
            if states is not None and params.cow_mamba:
                states.start(params.req, 0)
            return MatchResult(0, node, node, node)
        match = self.inner.cache.match(key)
        node, loadable = match.device_node, match.loadable_node
        if params.req is not None:  # what was packed is looked at again when it has run
            params.req.hiradix_key = key
        size, num_host = self.page_size, loadable.end - node.end
        if states is not None:
            if params.cow_mamba:
                states.start(params.req, self.inner.record(node))
            return MatchResult(
                node.end * size, node, loadable, loadable, num_host * size,
                mamba_host_hit_length=int(num_host > 0),
                mamba_branching_seqlen=self._branching(key, loadable, states.grid),
            )  # fmt: skip
        num_window = self._window_tokens_on_host(loadable) if num_host and self._has_windows else 0
        return MatchResult(node.end * size, node, loadable, loadable, num_host * size, num_window)

    def _window_tokens_on_host(self, node: Node) -> int:
        """Tokens of sliding windows that a load back of `node` brings."""
        missing = self.inner.tree.missing(node, HOST, DEVICE)
        pages = [segment.end - segment.start for segment in missing if segment.component == WINDOW]
        return sum(pages) * int(self.page_size)

    def _branching(self, key: RadixKey, found: Node, grid: int) -> int | None:
        """Tokens, on SGLang's grid, that have pages and whose state would be found if it were recorded."""
        num_tokens = self._tree.find(key).end * self.page_size // grid * grid
        return num_tokens if num_tokens > found.end * self.page_size else None

    def _drop_record(self) -> None:
        self.inner.evict(OwnEvictParams(num_tokens=0, mamba_num=1))

    def touch_prefix(self, key: Any) -> None:
        """Make the cached path of `key` the most recently used."""
        tree = self.inner.tree
        own = self._key(key)
        if len(own) >= self.page_size:
            tree.unlock(tree.lock(tree.match(own).device_node, DEVICE))

    def path_device_indices(self, node: Node) -> torch.Tensor:
        """int64 [tokens]: the device slots of the path to `node`. A fresh tensor."""
        return self.inner.device_slots(node)

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """int64 [tokens]: the device slots of the prefix that `req` was matched with. A fresh tensor."""
        node, num_tokens = req.last_node, req.prefix_len
        slots, num_slots = self.inner.device_slots(node), node.end * self.page_size
        if num_slots < num_tokens:
            raise Misuse(f"{req.rid}: {num_tokens} tokens of a path of {num_slots}")
        return slots if num_slots == num_tokens else slots[:num_tokens]

    def _request_key(self, req: Any, num_pages: int) -> RadixKey:
        """The first pages of what `req` has computed."""
        num_tokens = num_pages * self.page_size + self._lookahead if num_pages else 0
        space = self._space(req.extra_key, req.cache_salt or None, self.is_eagle)
        tokens, matched = req.full_untruncated_fill_ids, getattr(req, "hiradix_key", None)
        if matched is not None:
            req.hiradix_key = None
            if matched.resume(tokens, num_tokens, space):
                return matched  # type: ignore[no-any-return]
        return RadixKey.first(tokens, num_tokens, space)

    # -- locks --------------------------------------------------------------------------

    def lock(self, node: Node) -> TreeLock:
        """Pin the path to `node` on the device until `unlock`."""
        return TreeLock(node, self._tree.lock(node, DEVICE))

    def unlock(self, lock: TreeLock | None) -> None:
        if lock is not None:
            self._tree.unlock(_receipt(lock))

    def inc_lock_ref(self, node: Node) -> LockTaken:
        """Lock the path to `node`, for callers that keep the receipt in SGLang's records."""
        taken = self.inner.inc_lock_ref(node)
        return LockTaken(delta=taken.delta, held=taken)

    def dec_lock_ref(self, node: Node, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Undo the `inc_lock_ref` that gave `params`; without them, one on `node` whose answer was let go."""
        held: LockReceipt | None = getattr(params, "held", None)
        return DecLockRefResult(delta=self.inner.dec_lock_ref(held or node))

    def _held(self, req: Any) -> Lock:
        """The receipt of the lock on the prefix that `req` runs on; taken here if it has none."""
        if req.lock is None:
            req.lock = self.lock(self.root_node)
        return _receipt(req.lock)

    # -- writing ------------------------------------------------------------------------

    def checkpoint(self, req: Any, *, up_to: int, **_: Any) -> None:
        """Give the tree what `req` has computed up to `up_to`, and have it run on the tree's slots.

        Its row from the prefix it held on, its lock, `last_node` and `cache_protected_len` change. Slots of
        what the tree had already are freed, no others. Costs the new tokens, not the prefix.
        """
        held, kv, size = self._held(req), req.kv, self.page_size
        self.inner.count_use(req, getattr(req, "hiradix_began", None))
        num_tokens, record = min(up_to, len(req.full_untruncated_fill_ids)), None
        if self._states is not None:  # nothing enters the tree without the state behind it
            num_tokens, record = self._states.give(req, num_tokens)
        start, end = held.node.end, max(num_tokens - self._lookahead, 0) // size
        ended = _ended(req) if self._learns else None
        if end <= start:
            self._take_back(record)
            if ended is not None:
                self.inner.cache.finished(self._request_key(req, start), held.node, ended)
            return
        given, key = self._rows.pages(kv.req_pool_idx, start, end), self._request_key(req, end)
        was_forgotten = self.inner.was_forgotten(key, req)
        if record is not None and (was_forgotten or self.inner.cache.is_blocked(key)):
            self._take_back(record)
            record = None
        if was_forgotten:
            taken = self._tree.lock(held.node, DEVICE)
        else:
            taken = self.inner.insert_pages(key, given, held, ended, record)
        node = taken.node
        self._tree.prioritise(taken, req.priority or 0, start)
        if node.device.pages is not given:  # else the tree has taken all of them
            self._rows.write(kv.req_pool_idx, start, self._tree.pages(node, DEVICE, start=start))
        self._tree.unlock(held)
        req.lock, req.last_node = TreeLock(node, taken), node
        kv.cache_protected_len = node.end * size
        kv.cache_inserted_len = max(kv.cache_inserted_len, end * size)

    def _take_back(self, record: int | None) -> None:
        """Free a record that the tree does not get."""
        if self._states is not None and record is not None:
            self._states.take_back(record)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Free what the row names at these positions, ascending, the first on a page boundary."""
        if len(ranges) > 1 or self._has_windows:
            super().free_kv_row(kv, ranges)
            return
        for start, end in ranges:
            if start < end:
                self._rows.free(kv.req_pool_idx, start, end)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        self.inner.forget_request(req)
        if self._states is not None and not checkpointed:
            self._states.close(req)

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict at least `params.num_tokens` device tokens; less if everything else is locked."""
        start_s = time.perf_counter()
        if self._states is not None:
            done = self.inner.evict(OwnEvictParams(params.num_tokens, mamba_num=params.mamba_num))
            self.update_eviction_metrics(done.num_tokens_evicted, start_s)
            return EvictResult(done.num_tokens_evicted, mamba_num_evicted=done.mamba_num_evicted)
        if not self._has_windows:
            num_tokens = self.inner.cache.evict(-(-params.num_tokens // self.page_size)) * self.page_size
            self.update_eviction_metrics(num_tokens, start_s)
            return EvictResult(num_tokens)
        done = self.inner.evict(OwnEvictParams(params.num_tokens, params.swa_num_tokens))
        self.update_eviction_metrics(done.num_tokens_evicted, start_s)
        return EvictResult(done.num_tokens_evicted, done.swa_num_tokens_evicted)

    # -- the end ------------------------------------------------------------------------

    def release_host_resources(self) -> None:
        """Stop the transfer threads and close storage. May be called again."""
        self.inner.close()


def _receipt(lock: TreeLock) -> Lock:
    receipt: Any = lock.receipt
    if not isinstance(receipt, Lock):
        raise Misuse(f"a lock with the receipt {receipt}, which is none of ours")
    return receipt


def _ended(req: Any) -> Finished | None:
    """The lengths of a finished request, for the eviction policy to learn from; None while it runs."""
    return Finished(len(req.origin_input_ids), len(req.output_ids)) if req.finished() else None

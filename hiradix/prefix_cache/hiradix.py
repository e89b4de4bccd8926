"""HiRadixCache: the drop-in prefix cache over device, host and storage.

Adds to `RadixCache` what SGLang's 0.5.9 class of that name adds: load back, prefetch, transfer events and
storage that can be attached and detached while serving.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Sized
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np
import torch

from hiradix.cache import HostTier
from hiradix.config import PREFETCH_POLICIES, WRITE_POLICIES, ExtraConfig, parse_extra_config
from hiradix.errors import CacheError, ConfigError, StorageError
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.prefix_cache.radix import RadixCache
from hiradix.prefix_cache.records import CacheInitParams, CacheStats, RequestLike
from hiradix.storage import Stores
from hiradix.transfer import JobKind, LayerDoneCounter
from hiradix.tree import Node, RadixKey
from hiradix.tree.key import as_tokens
from hiradix.tree.native import mypyc_attr

DETACH_TIMEOUT_S = 10.0

StorageFactory = Callable[[str, ExtraConfig], Stores]  # backend name, its configuration


@dataclass(frozen=True)
class OpenedStorage:
    """A backend that is open and not attached yet, and the configuration it came with."""

    name: str
    extra: ExtraConfig
    storage: Stores


@mypyc_attr(allow_interpreted_subclasses=True)
class HiRadixCache(RadixCache):
    """Serves prefixes from device, host and storage to an engine. Built by `build_prefix_cache`.

    host: the host tier, whose controller this cache owns.
    storage_factory: makes a storage backend by name, fingerprinted for this model and layout.

    >>> from hiradix.config import HiCacheConfig
    >>> from hiradix.memory import DevicePool, KVShape, ReqToTokenPool, SlotAllocator
    >>> from hiradix.prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    >>> from hiradix.prefix_cache import ModelIdentity, build_prefix_cache
    >>> shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=2, v_head_dim=2, dtype=torch.float32)
    >>> pool = DevicePool(shape, num_pages=8, page_size=4)
    >>> slots = SlotAllocator(num_tokens=32, page_size=4, device="cpu", kvcache=pool)
    >>> params = CacheInitParams(False, ReqToTokenPool(8, 32), slots, page_size=4)
    >>> config = HiCacheConfig(page_size=4, enable_hierarchical_cache=True)
    >>> cache = build_prefix_cache(config, params, pool, ModelIdentity("my-model"))
    >>> key = RadixKey(list(range(8)))
    >>> cache.insert(InsertParams(key, slots.alloc(8))), cache.drain(timeout_s=10)  # the host has a copy
    (InsertResult(prefix_len=0), True)
    >>> cache.evict(EvictParams(8)).num_tokens_evicted
    8
    >>> hit = cache.match_prefix(MatchPrefixParams(key))
    >>> len(hit.device_indices), hit.host_hit_length
    (0, 8)
    >>> loaded, node = cache.init_load_back(hit.last_host_node, hit.host_hit_length)
    >>> cache.layer_done_counter.set_consumer(cache.ready_to_load_host_cache())
    >>> len(loaded), pool.get_key_buffer(0).shape  # waits until the layer is loaded
    (8, torch.Size([36, 1, 2]))
    >>> cache.close()
    """

    def __init__(self, params: CacheInitParams, host: HostTier, storage_factory: StorageFactory):
        super().__init__(params, host)
        self.controller = host.controller
        self.storage_factory = storage_factory
        self._storage: Stores | None = None
        self.storage_name: str | None = None
        self.served_model_name: str | None = None  # by which stored pages are named, where it is known
        assert self.cache.prefetcher is not None and self.cache.write_through is not None
        self._prefetcher = self.cache.prefetcher
        self._write_through = self.cache.write_through

    # -- every scheduler step -----------------------------------------------------------

    def check_hicache_events(self) -> None:
        """Apply finished transfers. Call at the top of every scheduler step."""
        self.cache.tick()

    def ready_to_load_host_cache(self) -> int:
        """Start the load backs of this step; what the next forward passes to `set_consumer` (-1: no wait).

        Starts the write-through copies of the steps before too. Where it is not called in each step, the
        second `check_hicache_events` after an insert does; an engine that stops stepping calls it once more.
        """
        return self.cache.start_loading()

    @property
    def layer_done_counter(self) -> LayerDoneCounter:
        return self.controller.layer_done_counter

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Have `wakeup` called, from any thread, whenever a transfer has ended: it may end an idle wait."""
        self.controller.wakeup = wakeup

    @property
    def ongoing_write_through(self) -> Sized:
        return self.cache.in_flight.tickets(JobKind.WRITE)

    @property
    def ongoing_load_back(self) -> Sized:
        return self.cache.in_flight.tickets(JobKind.LOAD)

    @property
    def ongoing_prefetch(self) -> Sized:
        return self._prefetcher

    @property
    def ongoing_backup(self) -> Sized:
        return self.cache.in_flight.tickets(JobKind.STORE)

    # -- load back ----------------------------------------------------------------------

    def init_load_back(
        self, last_host_node: Node, host_hit_length: SupportsIndex, mem_quota: SupportsIndex | None = None
    ) -> tuple[torch.Tensor, Node]:
        """Bring a host hit to the device: (its new slots, its node), all of it or (nothing, device ancestor).

        The slots may be read by forwards that wait on `ready_to_load_host_cache`'s slot. mem_quota: tokens.
        """
        match = self.split_match(last_host_node)
        quota = None if mem_quota is None else index(mem_quota) // self.page_size
        whole = match.loadable_node.end == last_host_node.end
        if not whole or not self.cache.load_back(match, quota):
            return self._empty, match.device_node
        return self.device_slots(last_host_node, match.device_node.end), last_host_node

    def note_prefill(self, num_tokens: SupportsIndex, seconds: SupportsFloat) -> None:
        """A forward that waited for no load computed so many prompt tokens: what a transfer is compared with."""
        self.cache.no_regret.computed(index(num_tokens) / self.page_size, float(seconds))

    # -- prefetch -----------------------------------------------------------------------

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
        if self.disable or not self.enable_storage:
            return False
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
        return self._prefetcher.start(req_id, key.page_aligned(self.page_size), last_host_node)

    def check_prefetch_progress(self, req_id: Hashable) -> bool:
        """True when the request may be scheduled: nothing to wait for, all there, or the policy says so."""
        return self._prefetcher.progress(req_id)

    def terminate_prefetch(self, req_id: Hashable) -> None:
        """Stop waiting; what has arrived stays usable."""
        self._prefetcher.stop(req_id)

    def pop_prefetch_loaded_tokens(self, req_id: Hashable) -> int:
        """Tokens its prefetch brought from storage. Reading resets it."""
        return self._prefetcher.pop_loaded_pages(req_id) * self.page_size

    def release_aborted_request(self, req_id: Hashable) -> None:
        """Forget a request that ended while waiting. Never blocks."""
        self._prefetcher.abort(req_id)

    # -- storage, while serving ---------------------------------------------------------

    @property
    def enable_storage(self) -> bool:
        return self.controller.storage_attached

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Attach a backend by name; (ok, message) in upstream's words. Nothing changes unless ok.

        Opens the backend here, on the scheduler thread: while serving, use the three calls it is made of.
        """
        known = self.served_model_name
        if served_model_name is not None and known is not None and served_model_name != known:
            return False, (
                f"served_model_name: {served_model_name!r} is not what pages are named by here, {known!r}: "
                "start with another name for another"
            )
        policies = hicache_storage_prefetch_policy, hicache_write_policy
        answer = self.plan_attach(storage_backend, *policies)
        if answer is not None:
            return answer
        try:
            opened = self.open_storage(storage_backend, storage_backend_extra_config_json)
        except CacheError as error:
            self.attach_opened(None)
            return False, str(error)
        return self.attach_opened(opened, *policies)

    def plan_attach(self, name: str, prefetch: str | None, write: str | None) -> tuple[bool, str] | None:
        """The answer to an attach that has nothing to open (policies are changed then), else None."""
        for flag, value, known in (
            ("hicache_storage_prefetch_policy", prefetch, PREFETCH_POLICIES),
            ("hicache_write_policy", write, WRITE_POLICIES),
        ):
            if value is not None and value not in known:
                return False, f"Invalid {flag}: {value!r}. Expected one of {sorted(known)}."
        if not self.enable_storage:
            return None
        if name != self.storage_name:
            return False, (
                f"HiCache storage backend is already enabled with backend '{self.storage_name}'. "
                f"Cannot attach different backend '{name}'. Detach first."
            )
        self._set_policies(prefetch, write, None)
        return True, "HiCache storage backend already enabled with same backend; policies updated."

    def open_storage(self, name: str, extra_config_json: str | None) -> OpenedStorage:
        """Open a backend to be attached, and tell it of the host pools' memory.

        The caller's to close until it is attached. Any thread; may take its time. StorageError has the answer
        for whoever asked: also that the store does not answer, unless the settings do not require it.
        """
        try:
            extra = parse_extra_config(extra_config_json).when_serving()
        except ConfigError as error:
            raise StorageError(f"Failed to parse storage_backend_extra_config_json: {error}") from error
        try:
            storage = self.storage_factory(name, extra)
        except (CacheError, OSError) as error:
            raise StorageError(f"Failed to attach storage backend '{name}': {error}") from error
        self.controller.introduce(storage)
        return OpenedStorage(name, extra, storage)

    def attach_opened(
        self, opened: OpenedStorage | None, prefetch: str | None = None, write: str | None = None
    ) -> tuple[bool, str]:
        """Attach what `open_storage` gave, on all ranks or none; (ok, message). It is the cache's if ok.

        None: this rank has nothing to attach, and the others are waiting to know.
        """
        try:
            self.cache.attach_storage(None if opened is None else opened.storage)
        except CacheError as error:
            if opened is None:
                return False, str(error)
            opened.storage.close()
            return False, f"Failed to attach storage backend '{opened.name}': {error}"
        assert opened is not None
        self._storage, self.storage_name = opened.storage, opened.name
        self._set_policies(prefetch, write, opened.extra)
        return True, "Attached HiCache storage backend successfully."

    def attach(self, name: str, extra: ExtraConfig) -> None:
        """Attach backend `name`, on all ranks; raises ConfigError or StorageError with nothing changed.

        A store that does not answer is joined later, unless `extra` says that it is required.
        """
        storage, failure = None, None
        try:
            storage = self.storage_factory(name, extra)
        except Exception as error:  # raised below, after the other ranks know that this one has none
            failure = error
        try:
            self.cache.attach_storage(storage)
        except CacheError as error:
            if storage is not None:
                storage.close()
            raise (failure or error) from None
        self._storage, self.storage_name = storage, name

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Detach and close the backend. Idempotent; a hung worker leaves it attached, to be tried again."""
        try:
            storage = self.release_storage(DETACH_TIMEOUT_S)
        except CacheError as error:
            return False, f"Failed to detach HiCache storage backend: {error}"
        if storage is not None:
            storage.close()
        return True, "Detached HiCache storage backend successfully."

    def release_storage(self, timeout_s: SupportsFloat = 0.0) -> Stores | None:
        """Let go of the backend: the caller's to close, or None if there was none.

        Raises StorageError while a job of it still runs after `timeout_s`; it takes no new ones, so call
        again. With 0 this never waits.
        """
        storage = self._storage
        if storage is not None:
            self.cache.detach_storage(float(timeout_s))
            self._storage = self.storage_name = None
        return storage

    @property
    def storage(self) -> Stores | None:
        """The attached backend, the cache's own; its methods may be called from any thread."""
        return self._storage

    def clear_storage_backend(self) -> bool:
        """Delete this model's pages from storage. False when there is no storage or it failed on any rank.

        Waits for the backend; a server calls `storage.clear()` elsewhere, then `cleared`.
        """
        if self._storage is None:
            return False
        return self.cleared(self._storage.clear())

    def cleared(self, ok: Any) -> bool:
        """Storage was cleared, `ok` without a fault: what is in use is offered again. `ok` of all ranks."""
        on_all = self.cache.settle(bool(ok))
        self.tree.forget_stored()
        return on_all

    def _set_policies(self, prefetch: str | None, write: str | None, extra: ExtraConfig | None) -> None:
        old = self._prefetcher.policy
        limits = old.limits if extra is None else prefetch_limits(self.page_size, extra)
        self._prefetcher.policy = PrefetchPolicy.from_name(prefetch or old.name, limits)
        if write is not None:
            self._write_through.policy = WritePolicy.from_name(write)

    # -- lifecycle and numbers ----------------------------------------------------------

    def close(self, timeout_s: SupportsFloat = 10.0) -> None:
        """Stop the workers within the deadline and close storage."""
        self.cache.close(float(timeout_s))
        if self._storage is not None:
            self._storage.close()
            self._storage = self.storage_name = None

    def drain(self, timeout_s: SupportsFloat) -> bool:
        """Let transfers under way end. True if nothing is in flight any more."""
        return self.cache.drain(float(timeout_s))

    @property
    def num_in_flight(self) -> int:
        """Transfers and prefetches not ended yet."""
        return len(self.cache.in_flight) + len(self._prefetcher)

    def stats(self) -> CacheStats:
        """A snapshot for metrics. O(1)."""
        return self._stats(self.storage_name, self._storage)


def prefetch_limits(page_size: int, extra: ExtraConfig) -> PrefetchLimits:
    """The limits the extra config asks for."""
    return PrefetchLimits(
        page_size=page_size,
        threshold_tokens=extra.prefetch_threshold,
        timeout_base_s=extra.prefetch_timeout_base,
        timeout_s_per_ki_token=extra.prefetch_timeout_per_ki_token,
    )

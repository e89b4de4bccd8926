"""What the engine needs from the prefix cache, so that it runs on any class with these methods."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

NodeRef = Any  # a tree node: opaque here, handed back as it was given
LockRef = Any  # the receipt of inc_lock_ref


class PrefixCache(Protocol):
    """A prefix cache over the device, such as `RadixCache`. Scheduler thread only."""

    def match_prefix(self, params: Any) -> Any: ...
    def evict(self, params: Any) -> Any: ...
    def inc_lock_ref(self, node: NodeRef) -> LockRef: ...
    def dec_lock_ref(self, node: Any) -> Any: ...
    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None: ...
    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None: ...
    def evictable_size(self) -> int: ...
    def protected_size(self) -> int: ...
    def total_size(self) -> int: ...
    def reset(self) -> None: ...
    def check(self) -> None: ...


class LayerGate(Protocol):
    """Tells the pool's getters which loads the next pass must wait for."""

    def set_consumer(self, *indices: int) -> None: ...


class Tiers(Protocol):
    """What a prefix cache over host and storage has besides: `HiRadixCache`. Scheduler thread only."""

    @property
    def enable_storage(self) -> bool: ...
    @property
    def num_in_flight(self) -> int: ...
    @property
    def wakeup(self) -> threading.Event: ...
    @property
    def layer_done_counter(self) -> LayerGate: ...
    def check_hicache_events(self) -> None: ...
    def ready_to_load_host_cache(self) -> int: ...
    def init_load_back(
        self, last_host_node: NodeRef, host_hit_length: int
    ) -> tuple[torch.Tensor, NodeRef]: ...
    def prefetch_from_storage(
        self, req_id: str, last_host_node: NodeRef, new_input_tokens: Sequence[int], *, req: Any = None
    ) -> Any: ...
    def check_prefetch_progress(self, req_id: str) -> bool: ...
    def pop_prefetch_loaded_tokens(self, req_id: str) -> int: ...
    def release_aborted_request(self, req_id: str) -> None: ...
    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]: ...
    def detach_storage_backend(self) -> tuple[bool, str]: ...
    def clear_storage_backend(self) -> bool: ...


class DeviceOnly:
    """The tiers of a cache that has none: nothing to wait for, nothing to load, storage refused."""

    enable_storage = False
    num_in_flight = 0

    def __init__(self) -> None:
        self.wakeup = threading.Event()
        self.layer_done_counter: LayerGate = _OpenGate()

    def check_hicache_events(self) -> None: ...

    def ready_to_load_host_cache(self) -> int:
        return -1

    def init_load_back(self, last_host_node: NodeRef, host_hit_length: int) -> tuple[torch.Tensor, NodeRef]:
        raise AssertionError(f"a host hit of {host_hit_length} tokens without a host tier")

    def prefetch_from_storage(
        self, req_id: str, last_host_node: NodeRef, new_input_tokens: Sequence[int], *, req: Any = None
    ) -> bool:
        return False

    def check_prefetch_progress(self, req_id: str) -> bool:
        return True

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        return 0

    def release_aborted_request(self, req_id: str) -> None: ...

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        return False, "Hierarchical cache is not enabled."

    def detach_storage_backend(self) -> tuple[bool, str]:
        return False, "Hierarchical cache is not enabled."

    def clear_storage_backend(self) -> bool:
        return False


class _OpenGate:
    def set_consumer(self, *indices: int) -> None: ...


def tiers_of(cache: Any) -> Tiers:
    """`cache` itself where it has host and storage tiers, else their empty stand-in."""
    if hasattr(cache, "ready_to_load_host_cache"):
        tiers: Tiers = cache
        return tiers
    return DeviceOnly()

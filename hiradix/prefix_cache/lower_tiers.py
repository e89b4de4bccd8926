"""What only a cache with lower tiers does; here it does nothing, so engines need not ask which they have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sized
from typing import Any, SupportsFloat, SupportsIndex

import torch

from hiradix.tree import Node
from hiradix.tree.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class NoLowerTiers:
    """The lower tiers' side of the contract for a device-only cache."""

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

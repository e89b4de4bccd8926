"""A prefix cache that never reuses: the engine's own work, by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class NoMatch:
    device_indices: torch.Tensor
    last_device_node: object = None
    last_host_node: object = None
    host_hit_length: int = 0


class NoReuse:
    """Frees a request's slots at its end and remembers nothing."""

    def __init__(self, params: Any):
        self._allocator = params.token_to_kv_pool_allocator
        self._rows = params.req_to_token_pool
        self.num_locks = 0

    def match_prefix(self, params: Any) -> NoMatch:
        return NoMatch(torch.empty(0, dtype=torch.int64))

    def evict(self, params: Any) -> None: ...

    def inc_lock_ref(self, node: object) -> int:
        self.num_locks += 1
        return 1

    def dec_lock_ref(self, node: object) -> None:
        self.num_locks -= 1

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        assert len(req.fill_ids) == req.num_computed

    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
        num_tokens = req.pop_committed_kv_cache()
        if num_tokens:
            row = self._rows.req_to_token[req.req_pool_idx, :num_tokens]
            self._allocator.free(row.to(torch.int64))
        self.dec_lock_ref(req.last_node)

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def total_size(self) -> int:
        return 0

    def reset(self) -> None: ...

    def check(self) -> None:
        assert self.num_locks >= 0


def build_no_reuse(config: Any, params: Any, device_pool: Any, model: Any) -> NoReuse:
    """In the form of build_prefix_cache."""
    return NoReuse(params)

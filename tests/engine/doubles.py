"""A prefix cache that never reuses: the engine's own work, by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hiradix.policy.no_regret import NoRegret
from hiradix.prefix_cache import FoundPrefix


@dataclass(frozen=True)
class NoMatch:
    device_indices: torch.Tensor
    last_device_node: object = None
    last_host_node: object = None
    host_hit_length: int = 0
    mamba_branching_seqlen: int | None = None


class NoReuse:
    """Frees a request's slots at its end and remembers nothing."""

    def __init__(self, params: Any):
        self._allocator = params.token_to_kv_pool_allocator
        self._rows = params.req_to_token_pool
        self.num_locks = 0

    enable_storage = False
    ongoing_write_through: tuple[object, ...] = ()
    ongoing_load_back: tuple[object, ...] = ()
    ongoing_prefetch: tuple[object, ...] = ()
    ongoing_backup: tuple[object, ...] = ()

    is_transferring = has_host = False
    layer_done_counter = storage_name = None
    no_regret = NoRegret(False)

    def note_prefill(self, num_tokens: int, seconds: float) -> None: ...

    def check_hicache_events(self) -> None: ...

    def ready_to_load_host_cache(self) -> int:
        return -1

    def prefetch_from_storage(
        self, req_id: str, last_host_node: object, new_input_tokens: Sequence[int], *, req: Any = None
    ) -> bool:
        return False

    def check_prefetch_progress(self, req_id: str) -> bool:
        return True

    def is_prefetch_done(self, req_id: str) -> bool:
        return True

    def pop_prefetch_loaded_tokens(self, req_id: str) -> int:
        return 0

    def release_aborted_request(self, req_id: str) -> None: ...

    def init_load_back(self, last_host_node: object, host_hit_length: int) -> tuple[torch.Tensor, object]:
        raise AssertionError("nothing is on the host")

    def match_prefix(self, params: Any) -> NoMatch:
        return NoMatch(torch.empty(0, dtype=torch.int64))

    def find_prefix(self, key: object) -> FoundPrefix:
        return FoundPrefix(0, 0, None)  # type: ignore[arg-type]

    def fetching_tokens(self, req_id: str) -> int:
        return 0

    def prefetch_in_order(self, req_ids: Sequence[str]) -> None: ...

    def find_again(self, node: object) -> object:
        return node

    def drop_tail(self, node: object, num_tokens: int, kept: object = ()) -> int:
        return 0

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

    def full_evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def full_protected_size(self) -> int:
        return 0

    def explain(self, *_: object) -> None:
        """Nothing is remembered."""

    def total_size(self) -> int:
        return 0

    def attach_storage_backend(self, *args: Any) -> tuple[bool, str]:
        return False, "no tiers"

    def detach_storage_backend(self) -> tuple[bool, str]:
        return False, "no tiers"

    def clear_storage_backend(self) -> bool:
        return False

    def set_wakeup(self, wakeup: Any) -> None: ...

    def reset(self) -> None: ...

    def close(self, timeout_s: float = 10.0) -> None: ...

    def check_conservation(self, num_held: int) -> None:
        out = self._allocator.size - self._allocator.available_size()
        assert out == num_held, f"{out} slots are out, requests have {num_held}"

    def check(self) -> None:
        assert self.num_locks >= 0


def build_no_reuse(config: Any, params: Any, device_pool: Any, model: Any) -> NoReuse:
    """In the form of build_prefix_cache."""
    return NoReuse(params)

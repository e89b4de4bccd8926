"""The records and protocols of the prefix-cache contract, with upstream's names (SGLang 0.5.9 style)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from hiradix.cache import Agree, PageSource
from hiradix.intents import IntentStats
from hiradix.intents.limits import IntentLimits
from hiradix.transfer import TransferStats
from hiradix.tree import Node, RadixKey


class SlotAllocatorLike(Protocol):
    """An engine's device allocator, in slots. `alloc` gives whole pages; `free` takes any slots of a page."""

    page_size: int
    device: Any

    def available_size(self) -> int: ...
    def alloc(self, need_size: int) -> torch.Tensor | None: ...
    def free(self, free_index: torch.Tensor) -> None: ...
    def get_kvcache(self) -> Any: ...


class HybridAllocatorLike(SlotAllocatorLike, Protocol):
    """An engine's device allocator for full attention and sliding windows, in full slots.

    full_to_swa_index_mapping: int64 [full slots ...], the window slot beside a full slot, 0 for none; a
    page's window slots are one page's too. `free` frees both, `free_swa` the window beside full slots.
    """

    full_to_swa_index_mapping: torch.Tensor
    full_attn_allocator: Any
    swa_attn_allocator: Any
    size_full: int
    size_swa: int

    def full_available_size(self) -> int: ...
    def swa_available_size(self) -> int: ...
    def free_swa(self, free_index: torch.Tensor) -> None: ...


class ReqToTokenPoolLike(Protocol):
    """An engine's table of slots: one row per running request."""

    req_to_token: torch.Tensor

    def write(self, indices: Any, values: torch.Tensor) -> None: ...


class RequestLike(Protocol):
    """The attributes of an engine's request that the cache reads and writes.

    Its lock's receipt, what `inc_lock_ref` gave, may be kept in `swa_uuid_for_lock`, as upstream has it with
    windows; a request without one holds a lock that is given back by its `last_node`.
    """

    prefix_indices: torch.Tensor
    last_node: Any
    cache_protected_len: int

    @property
    def rid(self) -> str: ...
    @property
    def origin_input_ids(self) -> Sequence[int]: ...
    @property
    def output_ids(self) -> Sequence[int]: ...
    @property
    def fill_ids(self) -> Sequence[int]: ...
    @property
    def req_pool_idx(self) -> int | None: ...
    @property
    def extra_key(self) -> str | None: ...

    def pop_committed_kv_cache(self) -> int: ...


class StatefulRequestLike(RequestLike, Protocol):
    """A request of a model that keeps a recurrent state, as `StateRadixCache` has it."""

    def take_record(self, num_tokens: int) -> int:
        """The record of the state behind its first `num_tokens` tokens, the caller's from here on."""


@dataclass(frozen=True)
class ComputedPages:
    """Device pages that an engine has computed to be compared with stored ones, by their names in storage.

    pages: for each name, the page of each pool, the backbone's first; None where there is none.
    """

    keys: tuple[str, ...]
    pages: tuple[tuple[int | None, ...], ...]


@dataclass
class CacheInitParams:
    """The arguments of a prefix cache in an engine: SGLang 0.5.9's fields, and by keyword our own. The caches
    also take SGLang's own records of this name, see `cache_params`.

    disable: no reuse at all; requests only keep and free their own slots.
    tp_cache_group: the torch process group of the ranks, `agree` over which is made where that is None.
    enable_kv_cache_events: note what moves, for `take_events`.
    sliding_window_size: tokens a window layer looks back, for `SWARadixCache`, whose allocator is hybrid.
    cache_ttl_seconds: refused if given. enable_metrics, enable_mamba_extra_buffer, pp_rank, pp_size,
    chunked_prefill_size: nothing, `stats` has the numbers; pp_size above 1 is refused with a host tier.
    state_records: device records of recurrent state, for `StateRadixCache`.
    agree: with several ranks, the elementwise minimum of a vector over all of them, else None. ranks_on_host:
    processes with a host pool each that share this machine's memory; 0: the model's ranks.
    witness: pages that the engine has computed, for storage to tell by what the weights do. adapter_of: what
    tells adapters apart in an extra key; None: all of it. intents: caps on wishes, such as leases.
    """

    disable: bool
    req_to_token_pool: ReqToTokenPoolLike
    token_to_kv_pool_allocator: SlotAllocatorLike
    page_size: int
    is_eagle: bool = False
    tp_cache_group: Any = None
    eviction_policy: str = "lru"
    disable_finished_insert: bool = False
    enable_metrics: bool = False
    enable_kv_cache_events: bool = False
    enable_mamba_extra_buffer: bool = False
    pp_rank: int = 0
    pp_size: int = 1
    chunked_prefill_size: int | None = None
    sliding_window_size: int | None = None
    cache_ttl_seconds: float | None = None
    eviction_policy_config: dict[str, Any] = field(default_factory=dict, kw_only=True)
    state_records: PageSource | None = field(default=None, kw_only=True)
    agree: Agree | None = field(default=None, kw_only=True)
    ranks_on_host: int = field(default=0, kw_only=True)
    witness: ComputedPages | None = field(default=None, kw_only=True)
    adapter_of: Callable[[str | None], str] | None = field(default=None, kw_only=True)
    intents: IntentLimits = field(default=IntentLimits(), kw_only=True)
    explain_names: int = field(default=0, kw_only=True)


class MatchPrefixParams(NamedTuple):
    """cow_mamba: nothing here; who runs on a record of state reads it, see `PrefixCache.record`."""

    key: RadixKey
    cow_mamba: bool = False
    req: RequestLike | None = None


class MatchResult(NamedTuple):
    """device_indices: int64 [tokens] on the engine's device. host_hit_length: tokens to load back.

    mamba_branching_seqlen: of `StateRadixCache`, how many tokens have pages, where that is more than what was
    matched: a record there would be found by whoever shares them next.
    """

    device_indices: torch.Tensor
    last_device_node: Node
    last_host_node: Node
    host_hit_length: int = 0
    mamba_branching_seqlen: int | None = None

    @property
    def device_prefix_len(self) -> int:
        """Tokens found on the device, as SGLang 0.5.23 has them."""
        return len(self.device_indices)

    @property
    def best_match_node(self) -> Node:
        """The node at which a load back would end, under SGLang 0.5.23's name."""
        return self.last_host_node


class FoundPrefix(NamedTuple):
    """Tokens of a prompt on the device, and behind them on the host. node: where those on the device end."""

    device: int
    host: int
    node: Node


class InsertParams(NamedTuple):
    """value: int64 [tokens of key], the slots holding the key's data; None where slots hold nothing.

    mamba_value: the record of the state behind `key`, which is in whole pages then.
    prev_prefix_len: leading tokens whose slots are the tree's already. swa_evicted_seqlen: leading tokens
    whose window slots the request has freed, whatever the allocator's map says. priority: None is 0.
    """

    key: RadixKey
    value: torch.Tensor | None = None
    mamba_value: int | None = None
    prev_prefix_len: int = 0
    swa_evicted_seqlen: int = 0
    chunked: bool = False
    priority: int | None = 0


def insert_params(given: Any) -> Any:
    """Itself, or SGLang's record of that name as ours: its versions have unlike fields."""
    if isinstance(given, InsertParams):
        return given
    fields = InsertParams._field_defaults
    values: dict[str, Any] = {name: getattr(given, name, default) for name, default in fields.items()}
    evicted = getattr(given, "component_evicted_seqlens", None) or {}
    for component, num_tokens in evicted.items():
        if str(component) == "swa":
            values["swa_evicted_seqlen"] = num_tokens
    return InsertParams(given.key, **values)


class InsertResult(NamedTuple):
    """prefix_len: leading tokens the tree had on the device. Those slots stay the caller's to free, but
    `SWARadixCache`, as in upstream, has freed them from `prev_prefix_len` on.

    total_len: tokens of the key that the tree has now, and last_device_node: where they end; None, where
    nothing was inserted. window_len: of these, how many at the end have window data. mamba_exist: a record
    was there already, so `mamba_value` was freed.
    """

    prefix_len: int
    total_len: int = 0
    last_device_node: Node | None = None
    mamba_exist: bool = False
    window_len: int = 0


class EvictParams(NamedTuple):
    """mamba_num: records of recurrent state."""

    num_tokens: int = 0
    swa_num_tokens: int = 0
    mamba_num: int = 0


class EvictResult(NamedTuple):
    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    mamba_num_evicted: int = 0


WINDOW = 1  # the component of sliding windows
STATE = 1  # the component of recurrent states


@dataclass(frozen=True)
class PoolStats:
    """Tokens of the pools of one component; of recurrent states, records."""

    device_total: int
    device_available: int
    device_evictable: int
    device_protected: int
    host_total: int
    host_used: int


@dataclass(frozen=True)
class CacheStats(PoolStats):
    """A snapshot for metrics: tokens where not said otherwise. The pools' are those of full attention."""

    evicted_device: int
    evicted_host: int
    written: int
    write_refused: int
    write_dropped: int
    write_failed: int
    loaded: int
    load_failed: int
    load_refused: int
    load_too_slow: int
    backed_up: int
    backup_failed: int
    prefetched: int
    prefetched_late: int  # of those, what came when nobody waited for it any more
    refetched: int  # fetched again for a request that waits, as one nearer to its turn had the room
    waiting_reserved: int  # on the host, held for requests that wait or being fetched for them
    waiting_cap: int  # of that, at most
    num_waiting_for_room: int  # requests whose pages storage has and which have no room for them yet
    unfulfilled: dict[str, int]
    num_in_flight: int  # transfers
    storage_attached: bool
    storage_backend: str | None
    storage: dict[str, Any]
    transfers: TransferStats | None
    window: PoolStats | None = None  # of sliding windows
    state: PoolStats | None = None  # of recurrent states, in records
    intents: IntentStats = IntentStats()  # of wishes

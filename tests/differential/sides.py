"""A cache under test with its pools, its request table and the calls the moves make of it.

`Side` makes them as SGLang 0.5.9's scheduler does, for its own classes and for ours. A cache with other calls
overrides what differs. Runs in the peers' processes too, so it imports nothing but torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

MODULUS = (1 << 61) - 1
Pages = dict[str, str]  # stamp of a page's last token -> the tiers that hold the page


def stamps(namespace: str | None, tokens: list[int], prior: int = 0) -> list[int]:
    """A number per position that names the namespace and all tokens up to there: the stand-in for KV."""
    value = prior or int.from_bytes((namespace or "").encode(), "big") + 1
    found = []
    for token in tokens:
        value = (value * 1_000_003 + token + 7) % MODULUS
        found.append(value)
    return found


def page_stamps(
    namespace: str | None, tokens: list[int], prior: int, page_size: int
) -> Iterator[tuple[str, int]]:
    """(name, last stamp) per page of a run of tokens that follows a position stamped `prior`."""
    for value in stamps(namespace, tokens, prior)[page_size - 1 :: page_size]:
        yield f"{value:x}", value


def pages_of_nodes(root: Any, page_size: int, tiers: Callable[[Any], str]) -> Pages:
    """Every page of a tree of SGLang's nodes. tiers: which of them have a node's pages."""
    found: Pages = {}
    stack = [(child, 0) for child in root.children.values()]
    while stack:
        node, prior = stack.pop()
        tokens, namespace = list(node.key.token_ids), node.key.extra_key
        for name, stamp in page_stamps(namespace, tokens, prior, page_size):
            found[name], prior = tiers(node), stamp
        stack.extend((child, prior) for child in node.children.values())
    return found


@dataclass(eq=False)
class Request:
    """What the caches read and write on a request. receipt: of its lock."""

    rid: str
    extra_key: str | None
    origin_input_ids: list[int]
    req_pool_idx: int
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    prefix_indices: Any = None
    last_node: Any = None
    receipt: Any = None
    cache_protected_len: int = 0
    cache_inserted_len: int = 0
    swa_evicted_seqlen: int = 0
    priority: int = 0
    stalled: bool = False

    @property
    def swa_uuid_for_lock(self) -> Any:
        """Where a cache with windows keeps what its lock gave."""
        return self.receipt

    @swa_uuid_for_lock.setter
    def swa_uuid_for_lock(self, receipt: Any) -> None:
        self.receipt = receipt

    def pop_committed_kv_cache(self) -> int:
        return len(self.fill_ids)


class RequestTable:
    """SGLang's table of slots, one row per running request."""

    def __init__(self, num_rows: int = 16, num_columns: int = 1024):
        self.req_to_token = torch.zeros(num_rows, num_columns, dtype=torch.int32)
        self.free = list(range(num_rows))

    def write(self, indices: Any, values: torch.Tensor) -> None:
        self.req_to_token[indices] = values.to(torch.int32)


class Found(NamedTuple):
    """A match: its slots, the nodes where its device and its host part end, and the host part's tokens."""

    slots: torch.Tensor
    node: Any
    host_node: Any
    num_host: int


class Side:
    """See the module's docstring.

    kv: int64 [slots], the stamp stored in each slot of the device pool.
    records: RadixKey, MatchPrefixParams, InsertParams, EvictParams of the cache's version.
    """

    cache: Any
    allocator: Any
    rows: RequestTable
    kv: torch.Tensor
    records: Any

    # -- what every side has of its own ---------------------------------------------------

    def before_walk(self, namespace: str | None, tokens: list[int]) -> None:
        """Called before each walk of the tree."""

    def settle(self) -> None:
        """Apply what is in flight."""

    def write(self, slots: torch.Tensor, values: list[int]) -> None:
        """What a forward pass does: put the data of tokens into their slots."""
        self.kv[slots] = torch.tensor(values, dtype=torch.int64)

    def holds(self, slots: torch.Tensor, values: list[int]) -> bool:
        """Whether a forward pass that reads these slots would find this."""
        return bool(self.kv[slots].tolist() == values)

    def free_tokens(self) -> list[int]:
        return [self.allocator.available_size(), self.host_free()]

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        slots: torch.Tensor | None = self.allocator.alloc(num_tokens)
        return slots

    def make_room(self, num_tokens: int) -> None:
        """Evict what is missing, as a scheduler does before it allocates."""
        short = num_tokens - self.allocator.available_size()
        if short > 0:
            self.evict(short)
            self.settle()

    def pages(self) -> Pages:
        raise NotImplementedError

    def host_free(self) -> int:
        return 0

    def shares(self, request: Request) -> bool:
        """Whether there is something to `share`."""
        return True

    # -- the calls ------------------------------------------------------------------------

    def key(self, namespace: str | None, tokens: list[int]) -> Any:
        return self.records.RadixKey(list(tokens), namespace)

    def match(self, namespace: str | None, tokens: list[int]) -> Found:
        found = self.cache.match_prefix(self.records.MatchPrefixParams(key=self.key(namespace, tokens)))
        node, host_node = found.last_device_node, found.last_host_node
        return Found(found.device_indices, node, host_node, found.host_hit_length)

    def lock(self, node: Any) -> tuple[Any, Any]:
        """(what `unlock` takes, tokens that stopped being evictable, negated)."""
        receipt = self.cache.inc_lock_ref(node)
        return node, int(getattr(receipt, "delta", receipt))

    def unlock(self, receipt: Any) -> Any:
        return int(self.cache.dec_lock_ref(receipt))

    def insert(self, namespace: str | None, tokens: list[int], slots: torch.Tensor) -> int:
        """Insert, and free what was a duplicate: that many tokens."""
        params = self.records.InsertParams(key=self.key(namespace, tokens), value=slots)
        num_present = self.cache.insert(params).prefix_len
        self.allocator.free(slots[:num_present])
        return int(num_present)

    def load(self, found: Found) -> tuple[torch.Tensor, Any]:
        """(slots being loaded, the node they end in)."""
        slots, node = self.cache.init_load_back(found.host_node, found.num_host)
        self.cache.ready_to_load_host_cache()
        return slots, node

    def forget(self) -> None:
        """Empty device and host, once everything is in storage."""
        raise NotImplementedError

    def fetch(self, namespace: str | None, tokens: list[int], found: Found) -> int:
        """Bring what storage has of `tokens` behind `found` to the host; that many tokens."""
        raise NotImplementedError

    def evict(self, num_tokens: int) -> Any:
        params = self.records.EvictParams(num_tokens=num_tokens)
        return int(self.cache.evict(params).num_tokens_evicted)

    def say(self, num_tokens: int, num_window_tokens: int) -> list[int]:
        raise NotImplementedError

    def share(self, request: Request, chunked: bool) -> None:
        """Give the tree what a running request has computed."""
        self.cache.cache_unfinished_req(request, chunked=chunked)

    def finish(self, request: Request, is_insert: bool) -> None:
        self.cache.cache_finished_req(request, is_insert=is_insert)

    def sizes(self) -> list[int]:
        """Evictable, protected and all tokens of the tree on the device."""
        return [self.cache.evictable_size(), self.cache.protected_size(), self.cache.total_size()]

"""What a peer must be able to do, and how each of those things is timed: CPU seconds of the calling thread.

Not timed, for any peer: making the key from the prompt, allocating and joining slots (allocating is timed in
the host-tier turn, where it may evict).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

torch.set_num_threads(1)
now = time.thread_time


@dataclass(eq=False)
class Request:
    """What SGLang's request-level calls read and write; 0.5.9's names."""

    rid: str
    fill_ids: Any
    origin_input_ids: Any
    output_ids: Any
    num_committed: int
    cache_protected_len: int
    last_node: Any
    swa_uuid_for_lock: Any  # what lock gave; 0.5.9 has the name with windows alone
    prefix_indices: torch.Tensor
    req_pool_idx: int = 1
    extra_key: str | None = None
    priority: int = 0

    def pop_committed_kv_cache(self) -> int:
        return self.num_committed


class TreePeer:
    """A device-only prefix cache. Subclasses give the calls; keys and prompts are whole pages."""

    allocator: Any
    rows: Any
    cache: Any
    page_size: int

    def new(self, page_size: int, num_tokens: int) -> None:
        """A fresh, empty cache over a pool of `num_tokens`."""
        raise NotImplementedError

    def touch_pools(self) -> None:
        """Have in memory what pools book per page, so that it is not taken for what cached tokens cost."""

    def tokens(self, ids: Any) -> Any:
        """A prompt as this peer's request keeps it."""
        return ids

    def key(self, ids: Any) -> Any:
        raise NotImplementedError

    def match(self, key: Any) -> tuple[int, Any, Any]:
        """(cached tokens, node, their slots)."""
        raise NotImplementedError

    def lock(self, node: Any) -> Any:
        raise NotImplementedError

    def unlock(self, receipt: Any) -> None:
        raise NotImplementedError

    def insert(self, key: Any, slots: Any, num_matched: int) -> None:
        raise NotImplementedError

    def evict(self, num_tokens: int) -> int:
        raise NotImplementedError

    def finish_prefill(self, request: Request) -> None:
        raise NotImplementedError

    def finish(self, request: Request) -> None:
        raise NotImplementedError

    # -- untimed ----------------------------------------------------------------------------

    def alloc(self, num_tokens: int) -> Any:
        slots = self.allocator.alloc(num_tokens)
        assert slots is not None, f"{num_tokens} slots of {self.allocator.available_size()}"
        return slots

    def joined(self, matched: Any, num_new: int) -> Any:
        """The slots of a key: the matched ones and new ones."""
        return torch.cat([matched, self.alloc(num_new)])

    def store(self, ids: Any) -> None:
        """Put a prompt into the cache."""
        key = self.key(ids)
        num_matched, _, slots = self.match(key)
        self.insert(key, self.joined(slots, len(ids) - num_matched), num_matched)

    def cut(self, ids: Any) -> None:
        """Make a node end where `ids` ends."""
        self.match(self.key(ids))

    # -- timed ------------------------------------------------------------------------------

    def timed_turn(self, ids: Any) -> tuple[int, float]:
        """One turn: match with its slots, lock, insert, unlock. (cached tokens, seconds)."""
        key = self.key(ids)
        begin = now()
        num_matched, node, matched = self.match(key)
        receipt = self.lock(node)
        middle = now()
        slots = self.joined(matched, len(ids) - num_matched)
        again = now()
        self.insert(key, slots, num_matched)
        self.unlock(receipt)
        return num_matched, (middle - begin) + (now() - again)

    def timed_match(self, ids: Any) -> float:
        """Match of a prompt that is cached whole, with its slots."""
        key = self.key(ids)
        begin = now()
        num_matched, _, slots = self.match(key)
        seconds = now() - begin
        assert num_matched == len(ids), f"{num_matched} of {len(ids)}"
        return seconds

    def timed_insert(self, ids: Any, num_shared: int) -> float:
        """Insert of a prompt whose first `num_shared` tokens are cached."""
        _, _, shared = self.match(self.key(ids[:num_shared]))
        slots = self.joined(shared, len(ids) - num_shared)
        key = self.key(ids)
        begin = now()
        self.insert(key, slots, num_shared)
        return now() - begin

    def timed_evict(self, num_tokens: int) -> float:
        begin = now()
        num_evicted = self.evict(num_tokens)
        seconds = now() - begin
        assert num_evicted >= num_tokens, num_evicted
        return seconds

    def timed_request(self, ids: Any, num_generated: int) -> tuple[int, float]:
        """A request as a scheduler serves it: match, lock, insert after prefill, insert when done, unlock."""
        full = self.tokens(ids)
        fill = full[: len(full) - num_generated]
        key = self.key(fill[:-1])
        begin = now()
        num_matched, node, matched = self.match(key)
        receipt = self.lock(node)
        seconds = now() - begin
        num_pages = -(-len(full) // self.page_size)
        slots = self.joined(matched, num_pages * self.page_size - num_matched)
        self.rows.req_to_token[1, : len(full)] = slots[: len(full)].to(torch.int32)
        request = Request(
            "r", fill, fill, full[len(fill) :], len(full), num_matched, node, receipt, matched
        )  # fmt: skip
        begin = now()
        self.finish_prefill(request)
        self.finish(request)
        return num_matched, seconds + now() - begin


@dataclass(frozen=True)
class HostMatch:
    """num_device, num_host: tokens matched per tier. node: the device node. found: the peer's own record."""

    num_device: int
    num_host: int
    node: Any
    found: Any


@dataclass
class HostTurns:
    """What turns with a host tier cost and found. all_threads_s: CPU of the process with its copy threads."""

    seconds: list[float] = field(default_factory=list)
    all_threads_s: float = 0.0
    num_tokens: int = 0
    num_device: int = 0
    num_host: int = 0


class HostPeer:
    """A prefix cache with a host tier: write-through, no storage, copies of KV that do nothing."""

    allocator: Any
    cache: Any

    def new(self, page_size: int, num_tokens: int, ratio: float) -> None:
        """A fresh cache; the host pool is `ratio` times the device pool of `num_tokens`."""
        raise NotImplementedError

    def touch_pools(self) -> None:
        """Have in memory what pools book per page, so that it is not taken for what cached tokens cost."""

    def key(self, ids: Any) -> Any:
        raise NotImplementedError

    def match(self, key: Any) -> HostMatch:
        raise NotImplementedError

    def indices(self, match: HostMatch) -> torch.Tensor:
        """Slots of what was matched on the device."""
        raise NotImplementedError

    def load(self, match: HostMatch) -> tuple[torch.Tensor | None, Any]:
        """(slots of what is being loaded back, the node it ends in)."""
        raise NotImplementedError

    def lock(self, node: Any) -> Any:
        raise NotImplementedError

    def unlock(self, receipt: Any) -> None:
        raise NotImplementedError

    def insert(self, key: Any, slots: torch.Tensor, num_matched: int) -> None:
        raise NotImplementedError

    def evict(self, num_tokens: int) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """What happens while the model runs: copies end. Untimed; nothing is applied, nothing started."""

    def close(self) -> None:
        """End threads."""

    def turn(self, ids: Any, turns: HostTurns) -> None:
        """A scheduler step with one request: events, match, lock, load back, evict, alloc, the forward pass,
        insert, unlock."""
        key = self.key(ids)
        process = time.process_time()
        begin = now()
        self.cache.check_hicache_events()
        match = self.match(key)
        receipt = self.lock(match.node)
        slots, num_loaded = self.indices(match), 0
        if match.num_host:
            loaded, node = self.load(match)
            if loaded is not None and len(loaded):
                num_loaded = len(loaded)
                above, receipt = receipt, self.lock(node)
                self.unlock(above)
                slots = torch.cat([slots, loaded])
        num_new = len(ids) - match.num_device - num_loaded
        short = num_new - self.allocator.available_size()
        if short > 0:
            self.evict(short)
        new = self.allocator.alloc(num_new)
        self.cache.ready_to_load_host_cache()
        seconds = now() - begin
        assert new is not None, f"no room for {num_new} tokens"
        slots = torch.cat([slots, new]) if len(slots) else new
        self.settle()
        begin = now()
        self.insert(key, slots, match.num_device + num_loaded)
        self.unlock(receipt)
        turns.seconds.append(seconds + now() - begin)
        turns.all_threads_s += time.process_time() - process
        turns.num_tokens += len(ids)
        turns.num_device += match.num_device
        turns.num_host += num_loaded

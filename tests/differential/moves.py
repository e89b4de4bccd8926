"""The moves of a scheduler, played on any cache with the 0.5.9 surface: what it answers, and what it holds.

The same file runs in the peer's process and in ours, so it imports nothing but torch. A stream is a list of
JSON moves that name tokens, never slots or nodes; each side plays it on its own allocator and its own tree.

    ["insert", ns, tokens]               allocate, insert, free what was a duplicate
    ["look", ns, tokens]                 match, lock, unlock
    ["peek", ns, tokens]                 match only
    ["hold", id, ns, tokens]             match and lock;   ["release", id] unlocks
    ["load", ns, tokens]                 match and load back what is on the host, making no room before
    ["evict", num_tokens]
    ["start", id, ns, tokens, n]         admit a request and prefill its first n uncached tokens
    ["more", id, n]                      prefill n more;   ["decode", id, tokens] as many new ones
    ["finish", id, insert]               end it; without insert after a last look at what it has
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

MODULUS = (1 << 61) - 1
Move = list[Any]
Pages = dict[str, str]  # stamp of a page's last token -> the tiers that hold the page


def stamps(namespace: str | None, tokens: list[int], prior: int = 0) -> list[int]:
    """A number per position that names the namespace and all tokens up to there: the stand-in for KV."""
    value = prior or int.from_bytes((namespace or "").encode(), "big") + 1
    found = []
    for token in tokens:
        value = (value * 1_000_003 + token + 7) % MODULUS
        found.append(value)
    return found


class Side(Protocol):
    """A cache under test and what the moves need beside it."""

    cache: Any
    allocator: Any
    rows: Any  # SGLang's request table: req_to_token, write
    kv: torch.Tensor  # int64 [slots]: the stamp stored in each slot of the device pool
    records: Any  # RadixKey, MatchPrefixParams, InsertParams, EvictParams

    def before_walk(self, key: Any) -> None: ...
    def settle(self) -> None: ...
    def pages(self) -> Pages: ...
    def host_free(self) -> int: ...


@dataclass(eq=False)
class Request:
    """What the caches read and write on a request."""

    rid: str
    extra_key: str | None
    origin_input_ids: list[int]
    req_pool_idx: int
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    prefix_indices: Any = None
    last_node: Any = None
    cache_protected_len: int = 0
    priority: int = 0
    stalled: bool = False

    def pop_committed_kv_cache(self) -> int:
        return len(self.fill_ids)


class RequestTable:
    """SGLang's table of slots, one row per running request."""

    def __init__(self, num_rows: int = 16, num_columns: int = 1024):
        self.req_to_token = torch.zeros(num_rows, num_columns, dtype=torch.int32)
        self.free = list(range(num_rows))

    def write(self, indices: Any, values: torch.Tensor) -> None:
        self.req_to_token[indices] = values.to(torch.int32)


class Player:
    """Plays moves on one side. `play` returns what can be seen after the move, as JSON."""

    def __init__(self, side: Side, page_size: int):
        self.side, self.page_size = side, page_size
        self._held: dict[str, tuple[Any, str | None, list[int]]] = {}
        self._running: dict[str, Request] = {}
        self._seen: Pages = {}
        self._exact = True

    def play(self, move: Move) -> dict[str, Any]:
        name, *arguments = move
        answer = getattr(self, f"_{name}")(*arguments)
        self.side.settle()
        cache, now = self.side.cache, self.side.pages()
        pages = sorted(now.keys() | self._seen.keys())
        changed = {page: now.get(page, "") for page in pages if now.get(page) != self._seen.get(page)}
        self._seen = now
        return {
            "answer": answer,
            "sizes": [cache.evictable_size(), cache.protected_size(), cache.total_size()],
            "free": [self.side.allocator.available_size(), self.side.host_free()],
            "pages": changed,
            "exact": self._exact,
        }

    # -- moves on keys ------------------------------------------------------------------

    def _insert(self, namespace: str | None, tokens: list[int]) -> Any:
        slots = self._alloc(len(tokens))
        if slots is None:
            return "refused"
        key = self._key(tokens, namespace)
        self.side.kv[slots] = torch.tensor(stamps(namespace, tokens))
        self.side.before_walk(key)
        done = self.side.cache.insert(self.side.records.InsertParams(key=key, value=slots))
        self.side.allocator.free(slots[: done.prefix_len])
        return done.prefix_len

    def _look(self, namespace: str | None, tokens: list[int]) -> Any:
        found = self._match(namespace, tokens)
        node = found.last_device_node
        return [*self._lengths(found), self._lock(node), self._unlock(node)]

    def _peek(self, namespace: str | None, tokens: list[int]) -> Any:
        return self._lengths(self._match(namespace, tokens))

    def _hold(self, name: str, namespace: str | None, tokens: list[int]) -> Any:
        found = self._match(namespace, tokens)
        self._held[name] = (found.last_device_node, namespace, tokens)
        return [*self._lengths(found), self._lock(found.last_device_node)]

    def _release(self, name: str) -> Any:
        node, _, _ = self._held.pop(name)
        return self._unlock(node)

    def _load(self, namespace: str | None, tokens: list[int]) -> Any:
        found = self._match(namespace, tokens)
        loaded, _ = self.side.cache.init_load_back(found.last_host_node, found.host_hit_length)
        self.side.cache.ready_to_load_host_cache()
        return [*self._lengths(found), len(loaded)]

    def _evict(self, num_tokens: int) -> Any:
        return self.side.cache.evict(self.side.records.EvictParams(num_tokens=num_tokens)).num_tokens_evicted

    # -- moves on requests --------------------------------------------------------------

    def _start(self, rid: str, namespace: str | None, tokens: list[int], num_first: int) -> Any:
        found = self._match(namespace, tokens[:-1])
        node, prefix = found.last_device_node, found.device_indices
        self._lock(node)
        if found.host_hit_length:
            self._room(found.host_hit_length)
            loaded, end = self.side.cache.init_load_back(found.last_host_node, found.host_hit_length)
            self.side.cache.ready_to_load_host_cache()
            self._lock(end)
            self._unlock(node)
            node, prefix = end, torch.cat([prefix, loaded])
        request = Request(rid, namespace, tokens, self.side.rows.free.pop())
        request.last_node, request.cache_protected_len = node, len(prefix)
        self.side.rows.write((request.req_pool_idx, slice(0, len(prefix))), prefix)
        request.fill_ids = tokens[: len(prefix)]
        self._running[rid] = request
        answer = [*self._lengths(found), len(prefix)]
        if not self._extend(request, tokens[len(prefix) : len(prefix) + num_first]):
            del self._running[rid]
            self.side.rows.free.append(request.req_pool_idx)
            self._unlock(node)
            return [*answer, "refused"]
        self.side.settle()  # what a forward would wait for
        self._share(request)
        return answer

    def _more(self, rid: str, count: int) -> Any:
        request = self._running.get(rid)
        if request is None:
            return "none"
        done = len(request.fill_ids)
        if not self._extend(request, request.origin_input_ids[done : done + count]):
            return "refused"
        self._share(request)
        return len(request.prefix_indices)

    def _decode(self, rid: str, tokens: list[int]) -> Any:
        request = self._running.get(rid)
        if request is None or request.stalled or len(request.fill_ids) < len(request.origin_input_ids):
            if request is not None:
                request.stalled = True  # what it has stays a prefix of what the stream says
            return "none"
        for i, token in enumerate(tokens):
            if not self._extend(request, [token]):
                request.stalled = True
                return i
            request.output_ids.append(token)
        return len(tokens)

    def _finish(self, rid: str, is_insert: bool) -> Any:
        request = self._running.pop(rid, None)
        if request is None:
            return "none"
        if not is_insert:
            self._look(request.extra_key, request.fill_ids)
        self._verify(request, len(request.fill_ids))
        self.side.before_walk(self._aligned(request))
        self.side.cache.cache_finished_req(request, is_insert=is_insert)
        self.side.rows.free.append(request.req_pool_idx)
        return len(request.fill_ids)

    # -- parts --------------------------------------------------------------------------

    def _key(self, tokens: list[int], namespace: str | None) -> Any:
        return self.side.records.RadixKey(list(tokens), namespace)

    def _aligned(self, request: Request) -> Any:
        count = len(request.fill_ids) // self.page_size * self.page_size
        return self._key(request.fill_ids[:count], request.extra_key)

    def _match(self, namespace: str | None, tokens: list[int]) -> Any:
        key = self._key(tokens, namespace)
        self.side.before_walk(key)
        found = self.side.cache.match_prefix(self.side.records.MatchPrefixParams(key=key))
        want = stamps(namespace, tokens[: len(found.device_indices)])
        self._exact = self._exact and self.side.kv[found.device_indices].tolist() == want
        return found

    def _lengths(self, found: Any) -> list[int]:
        return [len(found.device_indices), found.host_hit_length]

    def _lock(self, node: Any) -> int:
        receipt = self.side.cache.inc_lock_ref(node)
        return int(getattr(receipt, "delta", receipt))

    def _unlock(self, node: Any) -> int:
        return int(self.side.cache.dec_lock_ref(node))

    def _room(self, num_tokens: int) -> None:
        short = num_tokens - self.side.allocator.available_size()
        if short > 0:
            self._evict(short)
            self.side.settle()

    def _alloc(self, num_tokens: int) -> torch.Tensor | None:
        self._room(num_tokens)
        slots: torch.Tensor | None = self.side.allocator.alloc(num_tokens)
        return slots

    def _extend(self, request: Request, tokens: list[int]) -> bool:
        """Compute `tokens`, which follow what the request has; False when there are no slots."""
        row, start = self.side.rows.req_to_token[request.req_pool_idx], len(request.fill_ids)
        room, end = -(-start // self.page_size) * self.page_size, start + len(tokens)
        need = -(-end // self.page_size) * self.page_size - room
        if need > 0:
            slots = self._alloc(need)
            if slots is None:
                return False
            self.side.rows.write((request.req_pool_idx, slice(room, room + need)), slots)
        request.fill_ids = request.fill_ids + tokens
        written = torch.tensor(stamps(request.extra_key, request.fill_ids)[start:], dtype=torch.int64)
        self.side.kv[row[start:end].long()] = written
        return True

    def _share(self, request: Request) -> None:
        self.side.before_walk(self._aligned(request))
        chunked = len(request.fill_ids) < len(request.origin_input_ids)
        self.side.cache.cache_unfinished_req(request, chunked=chunked)
        self._verify(request, len(request.fill_ids))

    def _verify(self, request: Request, count: int) -> None:
        slots = self.side.rows.req_to_token[request.req_pool_idx, :count].long()
        want = stamps(request.extra_key, request.fill_ids[:count])
        self._exact = self._exact and self.side.kv[slots].tolist() == want


def page_stamps(
    namespace: str | None, tokens: list[int], prior: int, page_size: int
) -> Iterator[tuple[str, int]]:
    """(name, last stamp) per page of a run of tokens that follows a position stamped `prior`."""
    for value in stamps(namespace, tokens, prior)[page_size - 1 :: page_size]:
        yield f"{value:x}", value

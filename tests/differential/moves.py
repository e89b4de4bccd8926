"""The moves of a scheduler, played on any side: what it answers, and what it holds.

The same file runs in the peers' processes and in ours, so it imports nothing but torch. A stream is a list of
JSON moves that name tokens, never slots or nodes; each side plays it on its own allocator and its own tree.

    ["insert", ns, tokens]               allocate, insert, free what was a duplicate
    ["look", ns, tokens]                 match, lock, unlock
    ["peek", ns, tokens]                 match only
    ["hold", id, ns, tokens]             match and lock;   ["release", id] unlocks
    ["load", ns, tokens]                 match and load back what is on the host, making no room before
    ["forget"]                           empty device and host; storage keeps what it has
    ["fetch", ns, tokens]                match, and bring what storage has of the rest to the host
    ["evict", num_tokens]                or ["evict", num_tokens, num_window_tokens]
    ["say", num_tokens, num_window_tokens]   evict; what the cache says it evicted
    ["start", id, ns, tokens, n]         admit a request and prefill its first n uncached tokens
    ["more", id, n]                      prefill n more;   ["decode", id, tokens] as many new ones
    ["finish", id, insert]               end it; without insert with a last look at what it had
"""

from __future__ import annotations

from typing import Any

import torch

from tests.differential.sides import Found, Pages, Request, Side, stamps

Move = list[Any]


class Player:
    """Plays moves on one side. `play` returns what can be seen after the move, as JSON."""

    def __init__(self, side: Side, page_size: int):
        self.side, self.page_size = side, page_size
        self._held: dict[str, Any] = {}  # receipts
        self._running: dict[str, Request] = {}
        self._seen: Pages = {}
        self._exact = True

    def play(self, move: Move) -> dict[str, Any]:
        name, *arguments = move
        answer = getattr(self, f"_{name}")(*arguments)
        self.side.settle()
        now = self.side.pages()
        pages = sorted(now.keys() | self._seen.keys())
        changed = {page: now.get(page, "") for page in pages if now.get(page) != self._seen.get(page)}
        self._seen = now
        return {
            "answer": answer,
            "sizes": self.side.sizes(),
            "free": self.side.free_tokens(),
            "pages": changed,
            "exact": self._exact,
        }

    # -- moves on keys ------------------------------------------------------------------

    def _insert(self, namespace: str | None, tokens: list[int]) -> Any:
        slots = self._alloc(len(tokens))
        if slots is None:
            return "refused"
        self.side.write(slots, stamps(namespace, tokens))
        self.side.before_walk(namespace, tokens)
        return self.side.insert(namespace, tokens, slots)

    def _look(self, namespace: str | None, tokens: list[int]) -> Any:
        found = self._match(namespace, tokens)
        receipt, locked = self.side.lock(found.node)
        return [*self._lengths(found), locked, self.side.unlock(receipt)]

    def _peek(self, namespace: str | None, tokens: list[int]) -> Any:
        return self._lengths(self._match(namespace, tokens))

    def _hold(self, name: str, namespace: str | None, tokens: list[int]) -> Any:
        found = self._match(namespace, tokens)
        self._held[name], locked = self.side.lock(found.node)
        return [*self._lengths(found), locked]

    def _release(self, name: str) -> Any:
        return self.side.unlock(self._held.pop(name))

    def _load(self, namespace: str | None, tokens: list[int]) -> Any:
        found = self._match(namespace, tokens)
        loaded, _ = self.side.load(found)
        return [*self._lengths(found), len(loaded)]

    def _forget(self) -> Any:
        return self.side.forget()

    def _fetch(self, namespace: str | None, tokens: list[int]) -> Any:
        found = self._match(namespace, tokens)
        return [*self._lengths(found), self.side.fetch(namespace, tokens, found)]

    def _evict(self, *num_tokens: int) -> Any:
        return self.side.evict(*num_tokens)

    def _say(self, *num_tokens: int) -> Any:
        return self.side.say(*num_tokens)

    # -- moves on requests --------------------------------------------------------------

    def _start(self, rid: str, namespace: str | None, tokens: list[int], num_first: int) -> Any:
        found = self._match(namespace, tokens[:-1])
        node, prefix = found.node, found.slots
        receipt, _ = self.side.lock(node)
        if found.num_host:
            self.side.make_room(found.num_host)
            loaded, node = self.side.load(found)
            above, (receipt, _) = receipt, self.side.lock(node)
            self.side.unlock(above)
            prefix = torch.cat([prefix, loaded])
        request = Request(rid, namespace, tokens, self.side.rows.free.pop())
        request.last_node, request.receipt, request.cache_protected_len = node, receipt, len(prefix)
        request.prefix_indices = prefix
        self.side.rows.write((request.req_pool_idx, slice(0, len(prefix))), prefix)
        request.fill_ids = tokens[: len(prefix)]
        self._running[rid] = request
        answer = [*self._lengths(found), len(prefix)]
        if not self._extend(request, tokens[len(prefix) : len(prefix) + num_first]):
            del self._running[rid]
            self.side.rows.free.append(request.req_pool_idx)
            self.side.unlock(receipt)
            return [*answer, "refused"]
        self.side.settle()  # what a forward would wait for
        self._share(request)
        return answer

    def _more(self, rid: str, count: int) -> Any:
        request = self._running.get(rid)
        if request is None:
            return "none"
        done = len(request.fill_ids)
        if done >= len(request.origin_input_ids):
            return "done"
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
        self._verify(request, len(request.fill_ids))
        if is_insert:
            self.side.before_walk(request.extra_key, request.fill_ids)
        self.side.finish(request, is_insert)
        self.side.rows.free.append(request.req_pool_idx)
        if not is_insert:
            self._look(request.extra_key, request.fill_ids)
        return len(request.fill_ids)

    # -- parts --------------------------------------------------------------------------

    def _match(self, namespace: str | None, tokens: list[int]) -> Found:
        self.side.before_walk(namespace, tokens)
        found = self.side.match(namespace, tokens)
        want = stamps(namespace, tokens[: len(found.slots)])
        self._exact = self._exact and self.side.holds(found.slots, want)
        return found

    def _lengths(self, found: Found) -> list[int]:
        return [len(found.slots), found.num_host]

    def _alloc(self, num_tokens: int) -> torch.Tensor | None:
        self.side.make_room(num_tokens)
        return self.side.alloc(num_tokens)

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
        self.side.write(row[start:end].long(), stamps(request.extra_key, request.fill_ids)[start:])
        return True

    def _share(self, request: Request) -> None:
        if self.side.shares(request):
            self.side.before_walk(request.extra_key, request.fill_ids)
            self.side.share(request, chunked=len(request.fill_ids) < len(request.origin_input_ids))
        self._verify(request, len(request.fill_ids))

    def _verify(self, request: Request, count: int) -> None:
        slots = self.side.rows.req_to_token[request.req_pool_idx, :count].long()
        want = stamps(request.extra_key, request.fill_ids[:count])
        self._exact = self._exact and self.side.holds(slots, want)

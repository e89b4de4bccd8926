"""Whose turn it is: the engine's requests as an admission policy sees them, with prices and sessions.

    arrived()    a request waits; the next `begin` tells the policy
    begin()      a step begins: the time is read, who has come since is told
    order()      whom to serve, the next first; asked anew after each event and each second
    started()    it was given its pages
    planned()    the parts of a pass; `settle` says what it took
    answered()   its first token is there
    ended()      it was answered, or left; with or without a first token

A request's price is read from the tiers its prompt is found in. That costs a walk of the tree, so it is read
at arrival and again when it is a second old, at most `LOOK_TOKENS` of prompts an order, the oldest first.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hiradix.apps.engine.api import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, FINISH_TOOL, Scope
from hiradix.apps.engine.request import Request
from hiradix.policy.admission import AdmissionPolicy, WaitingRequest
from hiradix.policy.continuations import MOST_SESSIONS, Continuations
from hiradix.policy.prices import Prices
from hiradix.prefix_cache import PrefixCache
from hiradix.tree import Node, RadixKey

ASK_AGAIN_S = 1.0
LOOK_TOKENS = 1 << 17
BLOCK_TOKENS = 128  # of what sessions without a name are told by
KEPT = 0.9  # share of the old measurements that each new one leaves
PACES = (0.01, 100.0)  # a first token takes at least, and at most, so many times its price
FIRST_ANSWER = 256  # tokens an answer is taken to have until some have ended

STOPS = {
    FINISH_STOP: "end_turn", FINISH_TOOL: "tool_use", FINISH_LENGTH: "length", FINISH_ABORT: "abort"
}  # fmt: skip
"""Why an answer ended, as the policies know it."""


@dataclass(slots=True)
class _Unanswered:
    """A request that has no first token. key: of its prompt. found_s: when `device` and `host` tokens of it
    were found there. price_s: at its admission, before the pace; served_s: of passes, so far. is_fetched: it
    waits for nothing from storage."""

    request: Request
    key: RadixKey
    session: str
    device: int = 0
    host: int = 0
    found_s: float = float("-inf")
    price_s: float = 0.0
    served_s: float = 0.0
    is_fetched: bool = False


@dataclass(slots=True)
class _Tail:
    """Where a session's last prompt and answer end, `num_tokens` from the root, and whose they are."""

    node: Node
    num_tokens: int
    tenant: str


class Turns:
    """The admission policy of one scheduler. One thread.

    clock: seconds; ranks must be handed one that reads the same on all of them at the same call, and prices
    of agreed numbers, and then they decide alike.
    """

    def __init__(
        self, policy: AdmissionPolicy, cache: PrefixCache, prices: Prices, clock: Callable[[], float]
    ) -> None:
        self.policy = policy
        self.num_late = 0  # first tokens behind their deadline
        self._cache = cache
        self._prices = prices
        self._clock = clock
        self._now_s = 0.0
        self._calls: dict[
            str, _Unanswered
        ] = {}  # the policy waits for their first token; least recently looked up first
        self._fresh: dict[str, _Unanswered] = {}  # came since the step began
        self._sessions: dict[str, str] = {}  # of the requests that wait or run
        self._active: dict[str, int] = {}  # requests of a session
        self._continuations = Continuations()
        self._num_unnamed = 0
        self._tails: dict[str, _Tail] = {}  # by session, the one that ended longest ago first
        self._ends: Counter[Node] = Counter()  # how many tails end at a node
        self._behind: deque[Node] = deque(maxlen=MOST_SESSIONS)  # ends that their sessions did not go on from
        self._left: dict[str, None] = {}
        self._order: list[str] | None = None
        self._ordered_s = 0.0
        self._pass: list[tuple[_Unanswered, int]] | None = None
        self._pass_s = 0.0
        self._priced_s = self._served_s = 0.0
        self._answer_tokens = float(FIRST_ANSWER)

    @property
    def passes_over(self) -> bool:
        """Whether who has no room gives way to those behind it."""
        return self.policy.reads_prices

    # -- a request's life -------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """It waits from now on."""
        key = RadixKey(
            request.tokens(0, request.num_tokens - 1), request.extra_key, cache_salt=request.cache_salt
        )
        session = self._session_of(request)
        self._sessions[request.rid] = session
        self._active[session] = self._active.get(session, 0) + 1
        self._fresh[request.rid] = _Unanswered(request, key, session)

    def begin(self) -> None:
        """A step begins."""
        if not self._sessions:
            return
        self._now_s = self._clock()
        self.settle()
        fresh, self._fresh = self._fresh, {}
        for rid, call in fresh.items():
            self._add(rid, call)
        self._take_left()

    def _add(self, rid: str, call: _Unanswered) -> None:
        request = call.request
        num_answer = min(float(request.max_new_tokens), self._answer_tokens)
        cold_s = self._pace * self._prices.first_token_s(request.num_tokens)
        self.policy.add(
            WaitingRequest(
                rid, call.session, self._now_s, cold_s, request.num_tokens + int(num_answer),
                request.cache_salt or "",
            )
        )  # fmt: skip
        self._calls[rid] = call
        if self.policy.reads_prices:
            call.is_fetched = self._cache.is_prefetch_done(rid)
            self._look(call)
        self._order = None

    def started(self, request: Request) -> None:
        """It has its pages."""
        call = self._calls.get(request.rid)
        if call is None:
            return
        loaded = min(request.host_hit_length, request.num_computed)
        call.price_s = self._prices.first_token_s(request.num_uncomputed, loaded)
        if not self.policy.waiting[request.rid].has_started:
            self.policy.start(request.rid, self._now_s)
            self._left.pop(call.session, None)
        self._order = None

    def planned(self, parts: Sequence[tuple[Request, int]]) -> None:
        """A pass computes so many tokens of these requests."""
        found = [(self._calls[r.rid], count) for r, count in parts if r.rid in self._calls]
        self._pass = found or None
        self._pass_s = self._now_s

    def settle(self) -> None:
        """The pass is over: what it took is shared out among those it computed prompts of, by their tokens."""
        if self._pass is None:
            return
        parts, self._pass = self._pass, None
        took_s, total = self._now_s - self._pass_s, sum(count for _, count in parts)
        for call, count in parts:
            call.served_s += took_s * count / total
        self._order = None

    def answered(self, request: Request) -> None:
        """A token of it was sampled; the first one is what it has waited for."""
        if request.rid not in self._calls:
            return
        if self._pass is not None:
            self._now_s = self._clock()
            self.settle()
        call = self._calls.pop(request.rid)
        self.num_late += self._now_s > self.policy.waiting[request.rid].deadline_s
        self._priced_s = KEPT * self._priced_s + call.price_s
        self._served_s = KEPT * self._served_s + call.served_s
        self.policy.computed(request.rid, call.served_s)
        self._order = None

    def ended(self, request: Request, stop: str) -> None:
        """It runs and waits no more; `stop` of `STOPS`. What it has computed is in the cache."""
        session = self._sessions.pop(request.rid)
        self._active[session] -= 1
        if not self._active[session]:
            del self._active[session]
        if self._fresh.pop(request.rid, None) is not None:
            return
        self._order = None
        if self._calls.pop(request.rid, None) is not None:
            self.policy.remove(request.rid, self._now_s)
        else:
            self.policy.end(session, self._now_s, stop)
            self._answer_tokens += (1 - KEPT) * (len(request.output_ids) - self._answer_tokens)
        if self.policy.follows_sessions and request.num_tokens > 1:
            self._note_tail(session, request)
        if request.session_hint == "end_of_session":
            self._forget(session)

    # -- sessions ---------------------------------------------------------------------------

    def session_ended(self, prompt_ids: Sequence[int], scope: Scope) -> None:
        """A client says that no more requests of a session come: by its id, else by its last prompt."""
        if scope.session:
            self._forget(_named(scope.extra_key, scope.cache_salt, scope.session))
            return
        blocks = _blocks(prompt_ids, scope.extra_key, scope.cache_salt)
        session = self._continuations.holder(blocks)
        if session is not None:
            self._forget(session)

    def _forget(self, session: str) -> None:
        if session not in self._active:
            self.policy.forget(session)
            self._continuations.forget(session)
            self._order = None

    def _session_of(self, request: Request) -> str:
        if request.session_id:
            request.session_name = _named(request.extra_key, request.cache_salt, request.session_id)
            return request.session_name
        self._num_unnamed += 1
        fresh = f"#{self._num_unnamed}"
        if not self.policy.follows_sessions:
            return fresh
        blocks = _blocks(request.origin_input_ids, request.extra_key, request.cache_salt)
        return self._continuations.session_of(blocks, fresh, self._active)

    def _note_tail(self, session: str, request: Request) -> None:
        key = RadixKey(
            request.tokens(0, request.num_tokens - 1), request.extra_key, cache_salt=request.cache_salt
        )
        found, before = self._cache.find_prefix(key), self._tails.get(session)
        if before is not None and not _is_on_path(before.node, found.node):
            self._behind.append(before.node)
        self._drop_note(session)
        self._tails[session] = _Tail(found.node, found.device, request.cache_salt or "")
        self._ends[found.node] += 1
        if len(self._tails) > MOST_SESSIONS:
            oldest = next(iter(self._tails))
            self._drop_note(oldest)
            self._forget(oldest)  # whoever names a new one each time makes the policy no slower

    def _drop_note(self, session: str) -> None:
        """Know no more where the session ends."""
        self._left.pop(session, None)
        tail = self._tails.pop(session, None)
        if tail is not None:
            self._ends[tail.node] -= 1
            if not self._ends[tail.node]:
                del self._ends[tail.node]

    def _take_left(self) -> None:
        """Note who left, of those whose ends are known: who has none holds nothing, and is not kept here."""
        self._left |= {session: None for session in self.policy.take_left() if session in self._tails}

    def drop_first(self, num_tokens: int) -> None:
        """Let device tokens go before the eviction policy chooses, so many of them at most: what sessions did
        not go on from, what only those use that left, and what tenants have beyond their share. Where other
        sessions end, nothing goes."""
        short = num_tokens
        while short > 0 and self._behind:
            short -= self._drop_tail(self._behind.popleft(), short, 0)
        self._take_left()
        short = self._drop_tails(list(self._left), short)
        while short > 0 and (rich := self._richest()):
            short = self._drop_tails(rich[:1], short)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, nothing is evicted of what sessions hold that were let in, of tenants that have no more than
        their share; with one tenant nothing is kept. O(pages of their paths)."""
        held = self._held()
        receipts = []
        if len(held) > 1:
            share = self.policy.capacity / len(held)
            receipts = [
                self._cache.inc_lock_ref(self._cache.find_again(tail.node))
                for session, tail in self._tails.items()
                if held[tail.tenant] <= share and self.policy.is_in(session)
            ]
        try:
            yield
        finally:
            for receipt in receipts:
                self._cache.dec_lock_ref(receipt)

    def _drop_tails(self, sessions: Sequence[str], num_tokens: int) -> int:
        """Of these in turn; how many tokens are short still."""
        short = num_tokens
        for session in sessions:
            if short <= 0:
                break
            tail = self._tails.get(session)
            dropped = 0 if tail is None else self._drop_tail(tail.node, short, 1)
            if dropped < short:
                self._drop_note(session)
            elif tail is not None:
                tail.num_tokens -= dropped
            short -= dropped
        return short

    def _drop_tail(self, node: Node, num_tokens: int, num_own: int) -> int:
        """Tokens that went. num_own: tails that end at `node` and may go."""
        if self._ends[node] > num_own:
            return 0
        return self._cache.drop_tail(node, num_tokens, self._ends)

    def _held(self) -> dict[str, int]:
        """Tokens that sessions hold which are not being served, by tenant."""
        held: dict[str, int] = {}
        for tail in self._tails.values():
            held[tail.tenant] = held.get(tail.tenant, 0) + tail.num_tokens
        return held

    def _richest(self) -> list[str]:
        """Sessions of the tenant that has most, if that is more than its share."""
        held = self._held()
        if len(held) < 2:
            return []
        tenant = max(held, key=held.__getitem__)
        if held[tenant] * len(held) <= self.policy.capacity:
            return []
        return [session for session, tail in self._tails.items() if tail.tenant == tenant]

    # -- the order --------------------------------------------------------------------------

    def order(self, max_new: int, max_tokens: float) -> list[str]:
        """Ids of those that have no first token, the next first; who is not among them is held.

        max_new, max_tokens: what the pass may take in at most. Who waits for storage is asked to go on with
        what has come only where that is more than who waits for nothing can use, or when it is due.
        """
        if not self._calls:
            return []
        has_come = self.policy.reads_prices and self._have_come(max_new, max_tokens)
        if has_come or self._order is None or self._now_s - self._ordered_s >= ASK_AGAIN_S:
            self._ordered_s = self._now_s
            self._order = self._asked()
        return self._order

    def _have_come(self, max_new: int, max_tokens: float) -> bool:
        """Whether somebody waits for storage no more, who did before. Whoever does is in nobody's way."""
        has_come = False
        fetching: list[str] = []
        for rid, request in self.policy.waiting.items():
            call = self._calls[rid]
            if call.is_fetched:
                max_new -= call.request.req_pool_idx is None
                max_tokens -= self._num_missing(call)
            elif self._cache.is_prefetch_done(rid) or request.deadline_s <= self._now_s:
                has_come = self._goes_on(rid) or has_come
            else:
                fetching.append(rid)
        for rid in fetching:
            if max_new <= 0 or max_tokens <= 0:
                break
            if self._goes_on(rid):
                has_come = True
                max_new, max_tokens = max_new - 1, max_tokens - self._num_missing(self._calls[rid])
        return has_come

    def _num_missing(self, call: _Unanswered) -> int:
        """Tokens of it to load or to compute."""
        request = call.request
        return request.num_tokens - call.device if request.req_pool_idx is None else request.num_uncomputed

    def _goes_on(self, rid: str) -> bool:
        """Ask whether it goes on with what storage has brought."""
        if not self._cache.check_prefetch_progress(rid):
            return False
        call = self._calls[rid]
        call.is_fetched = True
        self._look(call)
        return True

    def _asked(self) -> list[str]:
        policy = self.policy
        if not policy.reads_prices:
            order = policy.order(self._now_s, {})
            order.sort(key=lambda rid: not policy.waiting[rid].has_started)
            self._prefetch(order)
            return order
        prices = self._priced()
        order = policy.order(self._now_s, {r: s for r, s in prices.items() if self._calls[r].is_fetched})
        taken = set(order)
        held = sorted((rid for rid in prices if rid not in taken), key=prices.__getitem__)
        self._prefetch([*order, *held])
        return order

    def _prefetch(self, order: list[str]) -> None:
        waiting = [rid for rid in order if self._calls[rid].request.req_pool_idx is None]
        self._cache.prefetch_in_order(waiting)

    def _priced(self) -> dict[str, float]:
        left = LOOK_TOKENS
        for rid, call in list(self._calls.items()):
            if left <= 0 or self._now_s - call.found_s < ASK_AGAIN_S:
                break
            if call.request.req_pool_idx is None:
                self._look(call)
                left -= len(call.key)
            del self._calls[rid]
            self._calls[rid] = call
        return {rid: self._price_s(call) for rid, call in self._calls.items()}

    def _look(self, call: _Unanswered) -> None:
        found = self._cache.find_prefix(call.key)
        call.device, call.host, call.found_s = found.device, found.host, self._now_s

    @property
    def _pace(self) -> float:
        """Seconds that a first token takes per second of its price, of late."""
        if self._priced_s <= 0 or self._served_s <= 0:
            return 1.0
        return min(max(self._served_s / self._priced_s, PACES[0]), PACES[1])

    def _price_s(self, call: _Unanswered) -> float:
        request = call.request
        if request.req_pool_idx is not None:
            return self._pace * self._prices.first_token_s(request.num_uncomputed)
        rest = request.num_tokens - call.device - call.host
        fetched = min(self._cache.fetching_tokens(request.rid), rest - 1)
        return self._pace * self._prices.first_token_s(rest - fetched, call.host, fetched)

    def found_on_device(self, request: Request) -> int:
        """Tokens of its prompt that were there when it was last looked up; all of it if it never was."""
        call = self._calls.get(request.rid)
        return request.num_tokens if call is None or call.found_s < 0 else call.device


def _is_on_path(node: Node, end: Node) -> bool:
    """Whether the way from the root to `end` goes through `node`."""
    at: Node | None = end
    while at is not None and at.end > node.end:
        at = at.parent
    return at is node


def _named(extra_key: str | None, cache_salt: str | None, session: str) -> str:
    """A client's session, which is its namespace's: nobody names one of a tenant that is another, or of a salt.

    No two namespaces give one name, whatever characters theirs have.
    """
    return json.dumps([extra_key, cache_salt, session])


def _blocks(prompt_ids: Sequence[int], extra_key: str | None, cache_salt: str | None) -> list[bytes]:
    """Names of a prompt's whole blocks: equal names iff prompts of a namespace are equal up to there."""
    tokens = np.asarray(prompt_ids, np.int64)
    digest = hashlib.blake2b(json.dumps([extra_key, cache_salt]).encode(), digest_size=16)
    found = []
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        digest.update(tokens[end - BLOCK_TOKENS : end].tobytes())
        found.append(digest.digest())
    return found

"""Whose turn it is: the engine's requests as an `AdmissionController` sees them, priced by where prompts are.

    arrived()    a request waits; the next `begin` tells the controller
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hiradix.apps.engine.api import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, FINISH_TOOL, Scope
from hiradix.apps.engine.request import Request
from hiradix.apps.engine.session_ends import SessionEnds
from hiradix.policy.admission import AdmissionPolicy
from hiradix.policy.admission_controller import AdmissionController, session_name
from hiradix.policy.prices import Prices
from hiradix.prefix_cache import PrefixCache
from hiradix.tree import RadixKey

ASK_AGAIN_S = 1.0
LOOK_TOKENS = 1 << 17
BLOCK_TOKENS = 128  # of what sessions without a name are told by

STOPS = {
    FINISH_STOP: "end_turn", FINISH_TOOL: "tool_use", FINISH_LENGTH: "length", FINISH_ABORT: "abort"
}  # fmt: skip
"""Why an answer ended, as the policies know it."""


@dataclass(slots=True)
class _Unanswered:
    """A request that has no first token. key: of its prompt. found_s: when `device` and `host` tokens of it
    were found there. is_fetched: it waits for nothing from storage."""

    request: Request
    key: RadixKey
    device: int = 0
    host: int = 0
    found_s: float = float("-inf")
    is_fetched: bool = False


class Turns:
    """The order of service of one scheduler. One thread.

    clock: seconds; ranks must be handed one that reads the same on all of them at the same call, and prices
    of agreed numbers, and then they decide alike.
    """

    def __init__(
        self, policy: AdmissionPolicy, cache: PrefixCache, prices: Prices, clock: Callable[[], float]
    ) -> None:
        self.policy = policy
        self.controller = AdmissionController(
            policy,
            prices.first_token_s,
            self._price_s,
            lambda: self._now_s,
            is_preemptive=True,
            ask_again_s=ASK_AGAIN_S,
        )
        self.ends = SessionEnds(policy, cache)
        self._cache = cache
        self._prices = prices
        self._clock = clock
        self._now_s = 0.0
        self._calls: dict[str, _Unanswered] = {}  # known to the controller; least recently looked up first
        self._fresh: dict[str, Request] = {}  # came since the step began
        self._order: list[str] = []
        self._pass: list[tuple[str, int]] = []
        self._pass_s = 0.0

    @property
    def passes_over(self) -> bool:
        """Whether who has no room gives way to those behind it."""
        return self.policy.reads_prices

    # -- a request's life -------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Add a request to those that wait."""
        self._fresh[request.rid] = request

    def begin(self) -> None:
        """A step begins."""
        if not (self._fresh or len(self.controller)):
            return
        self._now_s = self._clock()
        self.settle()
        fresh, self._fresh = self._fresh, {}
        for request in fresh.values():
            self._add(request)
        self.ends.take_left()

    def _add(self, request: Request) -> None:
        follows = self.policy.follows_sessions and not request.session_id
        self.controller.add(
            request.rid,
            request.num_tokens,
            request.max_new_tokens,
            request.cache_salt or "",
            request.session_id or "",
            _blocks(request.origin_input_ids, request.extra_key) if follows else (),
            request.extra_key,
        )
        if request.session_id:
            request.session_name = self.controller.session_of(request.rid)
        call = self._calls[request.rid] = _Unanswered(request, _key(request))
        if self.policy.reads_prices:
            call.is_fetched = self._cache.is_prefetch_done(request.rid)
            self._look(call)

    def started(self, request: Request) -> None:
        """Note that a request has its pages."""
        if request.rid not in self._calls:
            return
        loaded = min(request.host_hit_length, request.num_computed)
        self.controller.start(request.rid, self._prices.first_token_s(request.num_uncomputed, loaded))
        self.ends.is_back(self.controller.session_of(request.rid))

    def planned(self, parts: Sequence[tuple[Request, int]]) -> None:
        """A pass computes so many tokens of these requests."""
        self._pass = [(request.rid, count) for request, count in parts if request.rid in self._calls]
        self._pass_s = self._now_s

    def settle(self) -> None:
        """The pass is over: what it took is shared out among those it computed prompts of, by their tokens."""
        parts, self._pass = self._pass, []
        took_s, total = self._now_s - self._pass_s, sum(count for _, count in parts)
        for rid, count in parts:
            self.controller.served(rid, took_s * count / total)

    def answered(self, request: Request) -> None:
        """Note that a token of a request was sampled; only its first one counts."""
        if request.rid not in self._calls:
            return
        if self._pass:
            self._now_s = self._clock()
            self.settle()
        del self._calls[request.rid]
        self.controller.first_token(request.rid)

    def ended(self, request: Request, stop: str) -> None:
        """Forget a request that neither runs nor waits any more; `stop` of `STOPS`. Its computed pages are in
        the cache."""
        if self._fresh.pop(request.rid, None) is not None:
            return
        self._calls.pop(request.rid, None)
        session = self.controller.session_of(request.rid)
        self.controller.end(request.rid, stop, len(request.output_ids))
        if self.policy.follows_sessions and request.num_tokens > 1:
            self.ends.note(session, _key(request), request.cache_salt or "")
        if request.session_hint == "end_of_session":
            self.controller.forget(session)

    def session_ended(self, prompt_ids: Sequence[int], scope: Scope) -> None:
        """A client says that no more requests of a session come: by its id, else by its last prompt."""
        tenant = scope.cache_salt or ""
        if scope.session:
            self.controller.forget(session_name(tenant, scope.session, scope.extra_key))
            return
        session = self.controller.holder(tenant, _blocks(prompt_ids, scope.extra_key))
        if session is not None:
            self.controller.forget(session)

    # -- the order --------------------------------------------------------------------------

    def order(self, max_new: int, max_tokens: float) -> list[str]:
        """Ids of those that have no first token, the next first; who is not among them is held.

        max_new, max_tokens: what the pass may take in at most. Who waits for storage is asked to go on with
        what has come only where that is more than who waits for nothing can use, or when it is due.
        """
        if not self._calls:
            return []
        has_come = self.policy.reads_prices and self._have_come(max_new, max_tokens)
        if has_come or self.controller.is_stale:
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
        if self.policy.reads_prices:
            self._look_again()
            order = self.controller.order([rid for rid, call in self._calls.items() if not call.is_fetched])
        else:
            order = self.controller.order()
            order.sort(key=self.controller.is_waiting)
        next_ones = [*order, *self.controller.held(order)]
        self._cache.prefetch_in_order(
            [rid for rid in next_ones if self._calls[rid].request.req_pool_idx is None]
        )
        return order

    def _look_again(self) -> None:
        left = LOOK_TOKENS
        for rid, call in list(self._calls.items()):
            if left <= 0 or self._now_s - call.found_s < ASK_AGAIN_S:
                return
            if call.request.req_pool_idx is None:
                self._look(call)
                left -= len(call.key)
            del self._calls[rid]
            self._calls[rid] = call

    def _look(self, call: _Unanswered) -> None:
        found = self._cache.find_prefix(call.key)
        call.device, call.host, call.found_s = found.device, found.host, self._now_s

    def _price_s(self, rid: str) -> float:
        call = self._calls[rid]
        request = call.request
        if request.req_pool_idx is not None:
            return self._prices.first_token_s(request.num_uncomputed)
        rest = request.num_tokens - call.device - call.host
        fetched = min(self._cache.fetching_tokens(rid), rest - 1)
        return self._prices.first_token_s(rest - fetched, call.host, fetched)

    def found_on_device(self, request: Request) -> int:
        """Tokens of its prompt that were there when it was last looked up; all of it if it never was."""
        call = self._calls.get(request.rid)
        return request.num_tokens if call is None or call.found_s < 0 else call.device


def _key(request: Request) -> RadixKey:
    """The key of all of its tokens but the last."""
    tokens = request.tokens(0, request.num_tokens - 1)
    return RadixKey(tokens, request.extra_key, cache_salt=request.cache_salt)


def _blocks(prompt_ids: Sequence[int], extra_key: str | None) -> list[bytes]:
    """Names of a prompt's whole blocks: equal names iff prompts of an adapter are equal up to there."""
    tokens = np.asarray(prompt_ids, np.int64)
    digest = hashlib.blake2b(json.dumps(extra_key).encode(), digest_size=16)
    found = []
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        digest.update(tokens[end - BLOCK_TOKENS : end].tobytes())
        found.append(digest.digest())
    return found

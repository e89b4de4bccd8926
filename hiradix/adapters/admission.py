"""An admission policy beside an engine's own scheduler: what that does is told, and whom to serve is asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from hiradix.policy.admission import AdmissionPolicy, WaitingRequest
from hiradix.policy.continuations import Continuations
from hiradix.policy.prices import Prices

ANSWER_TOKENS = 256.0  # how long an answer is taken to be before any has ended
KEPT = 0.9  # share of the old mean that each answer's length leaves
COST_SHARE = 0.01  # of the engine's time, for orders made because time has passed
PRICE_SHARE = 0.02  # of it, for asking prices again


@dataclass(slots=True)
class _Request:
    """One from its arrival to its answer's end. price_s: when it was last asked; None before."""

    session: str
    price_s: float | None = None


class EngineAdmission:
    """Follows an engine's requests for an `AdmissionPolicy`, and has its order. One thread, no cost per token.

    Engines finish a prefill that they have begun before they look at who waits: for the policy it is computed
    when it starts, and it decides as of when those under way have ended.
    A request's session is the one its client names, of its tenant, or else the one whose last prompt it
    continues. Its footprint is its prompt with an answer of the mean length, as no engine knows better.
    price_s: seconds to a request's first token by its id, asked when an order is made: of those that came since
    the last, of all prefills under way, and of all that wait so often that it takes PRICE_SHARE of the time.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        prices: Prices,
        price_s: Callable[[str], float],
        clock: Callable[[], float],
    ) -> None:
        self.policy = policy
        self.prices = prices
        self._price_s = price_s
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._continuations = Continuations()
        self._under_way: dict[str, None] = {}  # started, and without a first token
        self._active: Counter[str] = Counter()  # requests that wait or run, by session
        self._answer_tokens = ANSWER_TOKENS
        self._ordered_s: float | None = None  # when; None: something has happened since
        self._order_cost_s = 0.0
        self._price_again_s = 0.0  # when the prices that are known are too old

    def __contains__(self, rid: str) -> bool:
        """Whether it was added and has not ended."""
        return rid in self._requests

    def is_waiting(self, rid: str) -> bool:
        """Whether it has not started, so that the policy says when it does."""
        return rid in self.policy.waiting

    def session_of(self, rid: str) -> str:
        """The name that its session has here."""
        return self._requests[rid].session

    def add(
        self,
        rid: str,
        num_tokens: int,
        most_answer: int,
        tenant: str = "",
        session: str = "",
        names: Sequence[Hashable] = (),
    ) -> None:
        """A request came. names: of its prompt's blocks, equal only where prompts are up to there. Nobody goes
        on with a session of another tenant, whose service that would count as."""
        if session:
            session = json.dumps([tenant, session])  # names no other tenant's, whatever is in either
        else:
            session = json.dumps([tenant, None, rid]) if tenant else rid
            if names:
                own = [(tenant, name) for name in names] if tenant else names
                session = self._continuations.session_of(own, session, self._active)
        self._active[session] += 1
        self._requests[rid] = _Request(session)
        self._ordered_s = None
        footprint = num_tokens + min(most_answer, round(self._answer_tokens))
        cold_s = self.prices.first_token_s(num_tokens)
        self.policy.add(WaitingRequest(rid, session, self._clock(), cold_s, footprint, tenant))

    def start(self, rid: str) -> None:
        """It was given its pages. May be told again, as after a preemption."""
        if rid in self.policy.waiting:
            self.policy.start(rid, self._clock())
            self.policy.computed(rid, self._requests[rid].price_s or 0.0)
            self._under_way[rid] = None
            self._ordered_s = None

    def first_token(self, rid: str) -> None:
        """Its first token is there."""
        self._under_way.pop(rid, None)

    def end(self, rid: str, stop: str, answer_tokens: int) -> None:
        """It is over; `stop` says why its answer ended. If it has not started it is removed."""
        request = self._requests.pop(rid)
        self._ordered_s = None
        self._under_way.pop(rid, None)
        self._active[request.session] -= 1
        if not self._active[request.session]:
            del self._active[request.session]
        if rid in self.policy.waiting:
            self.policy.remove(rid, self._clock())
            return
        if stop != "abort":
            self._answer_tokens = KEPT * self._answer_tokens + (1 - KEPT) * answer_tokens
        self.policy.end(request.session, self._clock(), stop)

    @property
    def is_stale(self) -> bool:
        """Whether to ask for the order again: something has happened; or somebody waits, and it is so old that
        a new one costs COST_SHARE of the time since."""
        if self._ordered_s is None:
            return True
        return (
            bool(self.policy.waiting) and self._clock() - self._ordered_s >= self._order_cost_s / COST_SHARE
        )

    def order(self, without: Collection[str] = ()) -> list[str]:
        """Whom to serve, the next first; those not in it are held. O(requests that wait).

        without: who cannot be served now. Nobody is held for them; where they are in it says nothing.
        """
        begin_s = self._clock()
        if self.policy.reads_prices:
            free_s = begin_s + sum(map(self._price_s, self._under_way))
            order = self.policy.order(free_s, self._prices(without))
        else:
            order = self.policy.order(begin_s, {})
        self._ordered_s = self._clock()
        self._order_cost_s = self._ordered_s - begin_s
        return order

    def _prices(self, without: Collection[str]) -> dict[str, float]:
        """Of all that wait but these."""
        begin_s, prices = self._clock(), dict[str, float]()
        is_due = begin_s >= self._price_again_s
        for rid in self.policy.waiting:
            if rid in without:
                continue
            request = self._requests[rid]
            if is_due or request.price_s is None:
                request.price_s = self._price_s(rid)
            prices[rid] = request.price_s
        if is_due:
            end_s = self._clock()
            self._price_again_s = end_s + (end_s - begin_s) / PRICE_SHARE
        return prices

"""An admission policy beside a scheduler: that says what happens to its requests, and asks whom to serve."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from hiradix.policy.admission import AdmissionPolicy, WaitingRequest
from hiradix.policy.continuations import MOST_SESSIONS, Continuations

ANSWER_TOKENS = 256.0  # how long an answer is taken to be before any has ended
KEPT = 0.9  # share of the old measurements that each new one leaves
PACES = (0.01, 100.0)  # a first token takes at least, and at most, so many times its price
COST_SHARE = 0.01  # of the time, for orders made because time has passed
PRICE_SHARE = 0.02  # of it, for asking prices again


def session_name(tenant: str, session: str, adapter: str | None = None) -> str:
    """The name here of a client's session: unique across tenants and adapters."""
    return json.dumps([tenant, adapter, session])


@dataclass(slots=True)
class _Request:
    """One from its arrival to its answer's end. price_s: when it was last asked, before the pace; None before.
    due_s: when its first token is due, once it has started. served_s: seconds of service until now."""

    session: str
    price_s: float | None = None
    due_s: float = 0.0
    served_s: float = 0.0


@dataclass(slots=True)
class _Pace:
    """Seconds that first tokens take per second of their prices, of late."""

    priced_s: float = 0.0
    served_s: float = 0.0

    def saw(self, priced_s: float, served_s: float) -> None:
        self.priced_s = KEPT * self.priced_s + priced_s
        self.served_s = KEPT * self.served_s + served_s

    @property
    def factor(self) -> float:
        """1 until something was measured."""
        if self.priced_s <= 0 or self.served_s <= 0:
            return 1.0
        return min(max(self.served_s / self.priced_s, PACES[0]), PACES[1])


@dataclass(slots=True)
class _Mean:
    """A running mean of answers' lengths, in tokens."""

    tokens: float = ANSWER_TOKENS

    def saw(self, num_tokens: int) -> None:
        self.tokens = KEPT * self.tokens + (1 - KEPT) * num_tokens


class AdmissionController:
    """Follows a scheduler's requests for an `AdmissionPolicy`, and has its order. One thread, no cost per token.

        add()          a request came
        start()        it was given its pages
        served()       it had so many seconds of service; where the scheduler knows
        first_token()  its first token is there
        end()          it was answered, or left; with or without a first token
        order()        whom to serve, the next first; `is_stale` says when to ask again

    A request's session is the one its client names, of its tenant and adapter, or else the one whose last
    prompt it continues. Its footprint is its prompt with an answer of the mean length, as nobody knows better.

    cold_price_s: seconds to compute a prompt of so many tokens from nothing. price_s: seconds to a request's
    first token by its id; of those that came since the last order it is asked with each, and of all that wait
    so often that it takes PRICE_SHARE of the time. Both are multiplied by how much longer service took of late.
    clock: seconds. Given one that reads the same on all ranks, and stands still while an order is made, and
    prices of agreed numbers, ranks decide alike.
    is_preemptive: the scheduler asks again at each chunk, and a prefill under way may give way. Else it
    finishes what it has begun: that is computed when it starts, and who is next is decided as of its end.
    ask_again_s: an order is made because time has passed at most so often.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        cold_price_s: Callable[[int], float],
        price_s: Callable[[str], float],
        clock: Callable[[], float],
        *,
        is_preemptive: bool,
        ask_again_s: float = 0.0,
    ) -> None:
        self.policy = policy
        self.num_late = 0  # first tokens behind their deadline
        self._cold_price_s = cold_price_s
        self._price_s = price_s
        self._clock = clock
        self._is_preemptive = is_preemptive
        self._ask_again_s = ask_again_s
        self._requests: dict[str, _Request] = {}
        self._active: Counter[str] = Counter()  # requests that wait or run, by session
        self._ended: OrderedDict[str, None] = OrderedDict()  # sessions, the one that ended longest ago first
        self._continuations = Continuations()
        self._num_unnamed = 0
        self._unanswered: dict[str, None] = {}  # started, and without a first token
        self._answer = _Mean()
        self._pace = _Pace()
        self._ordered_s: float | None = None  # when; None: something has happened since
        self._order_cost_s = 0.0
        self._price_again_s = 0.0  # when the prices that are known are too old

    def __contains__(self, rid: str) -> bool:
        """Whether it was added and has not ended."""
        return rid in self._requests

    def __len__(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    def is_waiting(self, rid: str) -> bool:
        """Whether it has not started, so that the policy says when it does."""
        return rid in self.policy.waiting and not self.policy.waiting[rid].has_started

    def session_of(self, rid: str) -> str:
        """The name that its session has here."""
        return self._requests[rid].session

    # -- a request's life -------------------------------------------------------------------

    def add(
        self,
        rid: str,
        num_tokens: int,
        most_answer: int,
        tenant: str = "",
        session: str = "",
        names: Sequence[Hashable] = (),
        adapter: str | None = None,
    ) -> None:
        """A request came. names: of its prompt's blocks, equal only where prompts are up to there, adapters
        and all. Nobody goes on with a session of another tenant, whose service that would count as."""
        name = session_name(tenant, session, adapter) if session else self._unnamed(tenant, names)
        self._active[name] += 1
        self._requests[rid] = _Request(name)
        self._ordered_s = None
        footprint = num_tokens + round(min(most_answer, self._answer.tokens))
        cold_s = self._pace.factor * self._cold_price_s(num_tokens)
        self.policy.add(WaitingRequest(rid, name, self._clock(), cold_s, footprint, tenant))

    def _unnamed(self, tenant: str, names: Sequence[Hashable]) -> str:
        self._num_unnamed += 1
        fresh = f"#{self._num_unnamed}"
        if not (names and self.policy.follows_sessions):
            return fresh
        return self._continuations.session_of(_own(tenant, names), fresh, self._active)

    def start(self, rid: str, price_s: float | None = None) -> None:
        """Note that a request was given its pages; may be called again, as after a preemption. price_s: of
        what it found; None: as it was last asked."""
        request = self._requests[rid]
        if price_s is not None:
            request.price_s = price_s
        if not self.is_waiting(rid):
            return
        self.policy.start(rid, self._clock())
        request.due_s = self.policy.waiting[rid].deadline_s
        self._unanswered[rid] = None
        if not self._is_preemptive:
            self.policy.computed(rid, self._pace.factor * (request.price_s or 0.0))
        self._ordered_s = None

    def served(self, rid: str, seconds: float) -> None:
        """The engine has computed its prompt for so long. Ignored where its first token is there."""
        if rid in self._unanswered:
            self._requests[rid].served_s += seconds
            self._ordered_s = None

    def first_token(self, rid: str) -> None:
        """Note that a request has its first token; for requests that do not wait for one it does nothing."""
        if rid not in self._unanswered:
            return
        del self._unanswered[rid]
        request = self._requests[rid]
        self.num_late += self._clock() > request.due_s
        self._pace.saw(request.price_s or 0.0, request.served_s)
        if self._is_preemptive:
            self.policy.computed(rid, request.served_s)
        self._ordered_s = None

    def end(self, rid: str, stop: str, answer_tokens: int) -> None:
        """Forget a request that is over; `stop` says why its answer ended. Without a first token it is
        removed from those that wait."""
        session = self._requests.pop(rid).session
        self._ordered_s = None
        self._unanswered.pop(rid, None)
        self._active[session] -= 1
        if not self._active[session]:
            del self._active[session]
        if rid in self.policy.waiting:
            self.policy.remove(rid, self._clock())
        else:
            self.policy.end(session, self._clock(), stop)
            if stop != "abort":
                self._answer.saw(answer_tokens)
        if self.policy.follows_sessions:
            self._note_ended(session)

    # -- sessions ---------------------------------------------------------------------------

    def _note_ended(self, session: str) -> None:
        """Whoever names a new one each time makes the policy no slower: the oldest is forgotten."""
        self._ended[session] = None
        self._ended.move_to_end(session)
        if len(self._ended) > MOST_SESSIONS:
            self.forget(next(iter(self._ended)))

    def forget(self, session: str) -> None:
        """The session is over, unless a request of it waits or runs."""
        self._ended.pop(session, None)
        if session not in self._active:
            self.policy.forget(session)
            self._continuations.forget(session)
            self._ordered_s = None

    def holder(self, tenant: str, names: Sequence[Hashable]) -> str | None:
        """The session whose last prompt this is, by `add`'s names; None: nobody's."""
        return self._continuations.holder(_own(tenant, names))

    # -- the order --------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether to ask for the order again: something has happened, or somebody is due; or somebody waits, and
        it is so old that a new one costs COST_SHARE of the time since."""
        if self._ordered_s is None or self._clock() >= self.policy.next_due_s:
            return True
        least_s = max(self._ask_again_s, self._order_cost_s / COST_SHARE)
        return bool(self.policy.waiting) and self._clock() - self._ordered_s >= least_s

    def order(self, without: Collection[str] = ()) -> list[str]:
        """Whom to serve, the next first; those not in it are held. O(requests that wait).

        without: who cannot be served now. Nobody is held for them; where they are in it says nothing.
        """
        begin_s = self._clock()
        if self.policy.reads_prices:
            free_s = begin_s
            if not self._is_preemptive:
                free_s += self._pace.factor * sum(map(self._price_s, self._unanswered))
            prices = self._prices()
            for rid in without:
                prices.pop(rid, None)
            order = self.policy.order(free_s, prices)
        else:
            order = self.policy.order(begin_s, {})
        self._ordered_s = self._clock()
        self._order_cost_s = self._ordered_s - begin_s
        return order

    def held(self, order: Collection[str]) -> list[str]:
        """The waiting requests that are not in `order`, by the price that was last asked."""
        taken, dearest_s = set(order), float("inf")
        held = [rid for rid in self.policy.waiting if rid not in taken]
        prices = {rid: self._requests[rid].price_s for rid in held}
        return sorted(held, key=lambda rid: dearest_s if (price_s := prices[rid]) is None else price_s)

    def _prices(self) -> dict[str, float]:
        """The prices of all that wait, by id."""
        begin_s, prices, pace = self._clock(), dict[str, float](), self._pace.factor
        is_due = begin_s >= self._price_again_s
        for rid in self.policy.waiting:
            if rid in self._unanswered:
                prices[rid] = pace * self._price_s(rid)
                continue
            request = self._requests[rid]
            if is_due or request.price_s is None:
                request.price_s = self._price_s(rid)
            prices[rid] = pace * request.price_s
        if is_due:
            end_s = self._clock()
            self._price_again_s = end_s + (end_s - begin_s) / PRICE_SHARE
        return prices


def _own(tenant: str, names: Sequence[Hashable]) -> Sequence[Hashable]:
    """A tenant's names of blocks: no other tenant's."""
    return [(tenant, name) for name in names] if tenant else names

"""Decides which waiting request is served next, and which session may enter a cache that does not hold all of
them.

    fcfs     first come, first served
    lpm      longest prefix match: whoever has the least seconds to its first token, a prefill under way first
    cached   sessions enter while their footprints fit; the least price among them but for who would be late

Numbers in, decisions out: no thread, no clock of its own, and equal calls give equal decisions, so that ranks
that are told the same decide alike. A request's *price* is the predicted seconds until its first token if it
were served now: to fetch, to load and to compute what is missing; of a prefill under way, what is left of it.
Its *cold price* is that of its prompt with nothing cached. Its *footprint* is the tokens it holds at its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from hiradix.errors import ConfigError, Misuse
from hiradix.policy.first_come import FirstComeShadow
from hiradix.policy.rooms import Inside, Rooms

FIRST_COME_SHARE = 0.95  # of the longest wait that first come, first served would have: when a request is due
ROUND_SHARE = 0.9  # of its tenant's round, if that is more: where not all sessions fit, it goes there
FAR_S = 90.0  # a session expected back later than this leaves for one that waits
FAR_SHARE = 0.35  # of what one that waits may wait, if that is less and no other tenant is known
ANSWERS = 2.0  # times the mean: how long pages of answers under way are waited for
KEPT = 0.9  # share of the old mean that each new one leaves
BEHIND_S = 1e-6  # who is held is asked for again so long after there is no time to lose
FORGET_S = 600.0  # idle for longer, a session is taken to have ended
OVER_SHARE = 1.1  # times its share of recent service: a tenant that had more comes behind the others
RECENT_S = 60.0  # of service: after so much, half of what a tenant was served no longer counts
_NEVER_S = 1e9
_FEW = 64
_TICKS = 1 << 30  # of a second: whole numbers add up to the same in whatever order they come and go


@dataclass(slots=True)
class WaitingRequest:
    """One that has no first token yet. session: its id, or its own name where it has none.

    deadline_s: when its first token is due, set by the policy. is_dated: its price has gone into that.
    has_started: its prefill is under way.
    """

    rid: str
    session: str
    arrived_s: float
    cold_price_s: float
    footprint: int
    tenant: str = ""
    deadline_s: float = _NEVER_S
    is_dated: bool = False
    has_started: bool = False


class Returns:
    """The distribution of the times after which sessions come back, by why the answer before ended: counts in
    bins of doubled seconds.

    Before anything is known each bin is as likely as another. Counts halve when a class has seen 4096.
    """

    EDGES_S = tuple(0.5 * 2.0**k for k in range(11))  # 0.5 to 512
    MIDS_S = (0.25, *(edge * 1.5 for edge in EDGES_S[:-1]), EDGES_S[-1] * 1.5)

    def __init__(self) -> None:
        self._counts: dict[str, list[float]] = {}
        self._tails: dict[str, list[tuple[float, float]]] = {}

    def saw(self, stop: str, idle_s: float) -> None:
        """A session came back `idle_s` after an answer that ended by `stop`."""
        counts = self._counts.setdefault(stop, [1.0] * len(self.MIDS_S))
        counts[bisect_right(self.EDGES_S, idle_s)] += 1.0
        if sum(counts) > 4096:
            counts[:] = [count / 2 for count in counts]
        self._tails.pop(stop, None)

    def expected_s(self, stop: str, idle_s: float) -> float:
        """Mean seconds until it comes back, of those that were as long away."""
        at = bisect_right(self.MIDS_S, idle_s)
        if at == len(self.MIDS_S):
            return _NEVER_S
        weight, total = self._tails_of(stop)[at]
        return total / weight - idle_s

    def _tails_of(self, stop: str) -> list[tuple[float, float]]:
        """For each bin, the number of sessions that came back in it or later, and their seconds added up."""
        tails = self._tails.get(stop)
        if tails is None:
            counts = self._counts.get(stop, [1.0] * len(self.MIDS_S))
            weights = list(accumulate(reversed(counts)))
            totals = list(
                accumulate(count * mid for count, mid in zip(reversed(counts), reversed(self.MIDS_S)))
            )
            tails = self._tails[stop] = list(zip(reversed(weights), reversed(totals)))
        return tails


class AdmissionPolicy:
    """First come, first served; and the calls by which every policy follows the requests.

    `add` when a request comes, `start` when it was given its pages, `computed` when its first token is there,
    `end` when its answer is whole; or `remove` where it ends before its first token. Ask `order` again after
    each of them, after each chunk, and at least each second while somebody waits.
    """

    name = "fcfs"
    reads_prices = False  # `order` may be asked without any
    follows_sessions = False
    next_due_s = float("inf")  # when `order` must be asked again even if nothing has happened

    def __init__(self, capacity: int) -> None:
        """capacity: tokens of the tiers from which a prefix comes back sooner than it is computed."""
        self.capacity = capacity
        self.waiting: dict[str, WaitingRequest] = {}  # in order of arrival

    def add(self, request: WaitingRequest) -> None:
        """Add a request to those that wait. Misuse if one of its id does already."""
        if request.rid in self.waiting:
            raise Misuse(f"{request.rid} waits already")
        self.waiting[request.rid] = request

    def start(self, rid: str, now_s: float) -> None:
        """Note that a request's prefill begins: it has its pages."""
        self.waiting[rid].has_started = True

    def computed(self, rid: str, served_s: float) -> None:
        """Remove a request whose first token is there, after `served_s` seconds of service."""
        del self.waiting[rid]

    def end(self, session: str, now_s: float, stop: str = "") -> None:
        """An answer of `session` is whole; `stop` says why it ended."""

    def remove(self, rid: str, now_s: float) -> None:
        """Remove a request that will have no first token."""
        del self.waiting[rid]

    def forget(self, session: str) -> None:
        """The session is over: its client said so."""

    def order(self, now_s: float, prices: Mapping[str, float]) -> list[str]:
        """Whom to serve, the next first. Whoever has no room is passed over; whoever is not in it is held.

        prices: seconds, by id, of all that wait and can be served now: nobody is kept waiting for the others.
        """
        return list(self.waiting)

    def is_in(self, session: str) -> bool:
        """Whether its footprint counts against the capacity."""
        return False

    @property
    def num_in(self) -> int:
        """Sessions whose footprints count against the capacity."""
        return 0

    def take_left(self) -> list[str]:
        """Sessions that left since the last call: what they alone use may be evicted first."""
        return []


class LongestPrefixMatch(AdmissionPolicy):
    """The least price first, a prefill under way before all. Unbounded: what is dear may wait for ever."""

    name = "lpm"
    reads_prices = True

    def order(self, now_s: float, prices: Mapping[str, float]) -> list[str]:
        """The ids by price, prefills under way first; at equal prices in order of arrival."""
        ready = (r for r in self.waiting.values() if r.rid in prices)
        found = sorted(ready, key=lambda r: (not r.has_started, prices[r.rid]))
        return [request.rid for request in found]


@dataclass(slots=True)
class _Session:
    """num_active: requests that wait or run; num_running: those that have pages. idle_since_s: when the last
    of them ended; None before.

    is_in: its footprint counts against the capacity. answering_s: when its last first token was there; None: it
    has had none.
    """

    tenant: str
    cold_price_s: float
    footprint: int
    num_active: int = 0
    num_running: int = 0
    idle_since_s: float | None = None
    stop: str = ""
    is_in: bool = False
    answering_s: float | None = None

    @property
    def round_ticks(self) -> int:
        """Its part of its tenant's round, in ticks."""
        return _ticks(self.cold_price_s) * max(self.num_active, 1)


class _Service:
    """Seconds that tenants were served of late: after RECENT_S of anybody's, half of them no longer count."""

    def __init__(self) -> None:
        self._served: dict[str, tuple[float, float]] = {}  # seconds, and the total at that time
        self._total_s = 0.0
        self._most = _FEW  # tenants, before those that hardly had any are taken out

    def __len__(self) -> int:
        return len(self._served)

    def add(self, tenant: str, served_s: float) -> None:
        """O(1). What is no time, or less than none, is none."""
        served_s = min(served_s, _NEVER_S) if served_s > 0 else 0.0
        self._total_s += served_s
        self._served[tenant] = (self.recent_s(tenant) + served_s, self._total_s)
        if len(self._served) > self._most:
            self._served = {name: had for name, had in self._served.items() if self.recent_s(name) > 0}
            self._most = 2 * len(self._served) + _FEW

    def recent_s(self, tenant: str) -> float:
        """0 for what is less than a millisecond."""
        served_s, total_s = self._served.get(tenant, (0.0, 0.0))
        recent_s = served_s * 0.5 ** ((self._total_s - total_s) / RECENT_S)
        return recent_s if recent_s > 1e-3 else 0.0


@dataclass(slots=True)
class _Tenant:
    """The waiting requests and sums of one tenant that has sessions. waiting: in order of arrival;
    work_ticks: their cold prices, added up; round_ticks: the time to compute each of its sessions once from
    nothing."""

    shadow: FirstComeShadow
    waiting: OrderedDict[str, WaitingRequest] = field(default_factory=OrderedDict)
    work_ticks: int = 0
    round_ticks: int = 0
    num_sessions: int = 0
    num_active: int = 0  # sessions with requests that wait or run

    @property
    def latest_s(self) -> float:
        """The latest due time of its requests."""
        return next(reversed(self.waiting.values())).deadline_s if self.waiting else -_NEVER_S


def _ticks(seconds: float) -> int:
    return round(min(seconds, _NEVER_S) * _TICKS)


class CachedAdmission(AdmissionPolicy):
    """Sessions enter while their footprints fit, and leave by predicted return. Those who are in go first, by
    least price; a prefill under way by what is left of it.

    The bound: nobody waits longer than first come, first served would make somebody wait. A shadow of that
    order runs beside the real one (see `FirstComeShadow`), and a request is due after FIRST_COME_SHARE of its
    longest wait of late. Where the sessions' footprints are more than the capacity that order heads for a
    *round*, the time in which each of a tenant's sessions is computed once from nothing, and a request is due
    after ROUND_SHARE of it, if that is more. It is never due before it would be served if those that came
    earlier all went first (where not all fits: from nothing), nor before one of its tenant's that came
    earlier. Tenants have shadows of their own; each time is multiplied by the number of those at work.

    Whoever goes before another that is due earlier does so only while that one, and all due before it, would
    still be in time; and who is due enters, whatever has to leave. One that does not fit beside the answers
    under way is taken earlier by what those take, and one that is held is asked for at `next_due_s`. So with
    one tenant every first token comes when it is due or before, but for time in which whoever is next has no
    pages, and for what is evicted of a session that is in.

    Tenants: one that had more than OVER_SHARE of its share of recent service comes behind the others, due or
    not, and those with less than their share of the capacity enter for idle sessions of those with more.
    """

    name = "cached"
    reads_prices = follows_sessions = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._returns = Returns()
        self._sessions: dict[str, _Session] = {}
        self._idle: OrderedDict[str, float] = (
            OrderedDict()
        )  # sessions, and since when; the longest idle first
        self._inside: dict[str, _Session] = {}
        self._num_inside = self._num_known = 0  # tokens: footprints of those inside, and of all
        self._num_held = 0  # tokens: footprints of those with a request that has pages
        self._answer_s = 0.0  # mean seconds from a first token to the answer's end
        self._tenants: dict[str, _Tenant] = {}
        self._at_work: dict[str, None] = {}  # tenants with a request that waits or runs
        self._service = _Service()
        self._rooms: Rooms | None = None  # as of the order that is being made
        self._left: dict[str, None] = {}
        self._num_running = 0
        self._now_s = 0.0  # when it was last asked

    # -- what happens -----------------------------------------------------------------------

    def add(self, request: WaitingRequest) -> None:
        """Misuse too where the session is another tenant's, or a price is no number of seconds. O(log n)."""
        session = self._sessions.get(request.session)
        if session is not None and session.tenant != request.tenant:
            raise Misuse(f"session {request.session:.64} is of tenant {session.tenant!r:.64}")
        if not request.cold_price_s >= 0:
            raise Misuse(f"{request.rid}: a cold price of {request.cold_price_s} s")
        super().add(request)
        own = self._tenants.get(request.tenant)
        if own is None:
            own = self._tenants[request.tenant] = _Tenant(FirstComeShadow(self.capacity))
        self._begin(request, session, own)
        self._drop_ended(request.arrived_s)
        latest_s = own.latest_s
        own.waiting[request.rid] = request
        own.work_ticks += _ticks(request.cold_price_s)
        work_s = own.work_ticks / _TICKS
        first_come_s = request.arrived_s + work_s * len(self._at_work)
        request.deadline_s = self._due_s(request, first_come_s, latest_s)

    def _begin(self, request: WaitingRequest, session: _Session | None, own: _Tenant) -> None:
        """A request of a session, which may be new."""
        if session is None:
            session = self._sessions[request.session] = _Session(request.tenant, 0.0, 0)
            own.num_sessions += 1
        else:
            self._weigh(session, -1)
            if session.idle_since_s is not None:
                self._returns.saw(session.stop, request.arrived_s - session.idle_since_s)
                session.idle_since_s = None
                del self._idle[request.session]
        if not session.num_active:
            own.num_active += 1
            self._at_work[request.tenant] = None
        session.num_active += 1
        session.cold_price_s, session.footprint = request.cold_price_s, request.footprint
        self._weigh(session, 1)
        own.shadow.capacity = self.capacity // len(self._at_work)
        gap_s = 0.0 if session.answering_s is None else request.arrived_s - session.answering_s
        own.shadow.arrive(request.session, request.arrived_s, request.cold_price_s, request.footprint, gap_s)

    def _weigh(self, session: _Session, sign: int) -> None:
        """Add what it is to the sums, or with -1 take it off them."""
        self._tenants[session.tenant].round_ticks += sign * session.round_ticks
        self._num_known += sign * session.footprint
        if session.is_in:
            self._num_inside += sign * session.footprint
        if session.num_running:
            self._num_held += sign * session.footprint

    def _due_s(self, request: WaitingRequest, first_come_s: float, latest_s: float) -> float:
        """first_come_s: when those that came earlier, and it, would be served. latest_s: of the earlier ones."""
        return max(request.arrived_s + self._longest_s(request) * len(self._at_work), first_come_s, latest_s)

    def _longest_s(self, request: WaitingRequest) -> float:
        """Seconds that it may wait, beside one tenant."""
        longest_s = FIRST_COME_SHARE * self._tenants[request.tenant].shadow.longest_s(request.arrived_s)
        if self._all_fit:
            return longest_s
        return max(longest_s, ROUND_SHARE * self.round_s(request.tenant))

    @property
    def _all_fit(self) -> bool:
        return self._num_known <= self.capacity

    def _date(self, now_s: float, prices: Mapping[str, float]) -> None:
        """Give requests that have just been priced their due times. If all sessions fit, first come, first
        served would serve them after the work ahead of them: they are due by then."""
        if not any(not r.is_dated and r.rid in prices for r in self.waiting.values()):
            return
        work_s, latest_s = dict[str, float](), dict[str, float]()  # by tenant, of those that came earlier
        for request in self.waiting.values():
            tenant, is_priced = request.tenant, request.rid in prices
            price_s = prices[request.rid] if is_priced and self._is_in(request) else request.cold_price_s
            work_s[tenant] = work_s.get(tenant, 0.0) + price_s
            if is_priced and not request.is_dated:
                request.is_dated = True
                if self._all_fit:
                    first_come_s = now_s + work_s[tenant] * len(self._at_work)
                    due_s = self._due_s(request, first_come_s, latest_s.get(tenant, -_NEVER_S))
                    request.deadline_s = min(request.deadline_s, due_s)
            latest_s[tenant] = request.deadline_s

    def start(self, rid: str, now_s: float) -> None:
        request = self.waiting[rid]
        for name in self._leavers(request, now_s):
            self._go_out(name)
            self._left[name] = None
        session = self._sessions[request.session]
        self._weigh(session, -1)
        session.is_in = True
        session.num_running += 1
        self._weigh(session, 1)
        self._inside[request.session] = session
        self._left.pop(request.session, None)
        request.has_started = True
        self._num_running += 1

    def _go_out(self, name: str) -> None:
        session = self._inside.pop(name)
        session.is_in = False
        self._num_inside -= session.footprint

    def computed(self, rid: str, served_s: float) -> None:
        request = self._taken(rid)
        self._sessions[request.session].answering_s = self._now_s
        self._service.add(request.tenant, served_s)

    def _taken(self, rid: str) -> WaitingRequest:
        """Remove a request from those that wait, and return it."""
        request = self.waiting.pop(rid)
        own = self._tenants[request.tenant]
        del own.waiting[rid]
        own.work_ticks -= _ticks(request.cold_price_s)
        return request

    def end(self, session: str, now_s: float, stop: str = "") -> None:
        began_s = self._sessions[session].answering_s
        if began_s is not None:
            self._answer_s += (1 - KEPT) * (max(now_s - began_s, 0.0) - self._answer_s)
        self._ended(session, now_s, stop, 1)

    def remove(self, rid: str, now_s: float) -> None:
        request = self._taken(rid)
        self._ended(request.session, now_s, "abort", int(request.has_started))
        if not self._sessions[request.session].num_active:
            self._tenants[request.tenant].shadow.remove(request.session)

    def _ended(self, name: str, now_s: float, stop: str, num_running: int) -> None:
        session = self._sessions[name]
        own = self._tenants[session.tenant]
        self._weigh(session, -1)
        session.num_active -= 1
        session.num_running -= num_running
        self._weigh(session, 1)
        self._num_running -= num_running
        if not session.num_active:
            session.idle_since_s, session.stop = now_s, stop
            self._idle[name] = now_s
            own.num_active -= 1
            if not own.num_active:
                del self._at_work[session.tenant]

    def forget(self, session: str) -> None:
        known = self._sessions.get(session)
        if known is None or known.num_active:
            return
        own = self._tenants[known.tenant]
        if known.is_in:
            self._go_out(session)
        self._weigh(known, -1)
        del self._sessions[session], self._idle[session]
        own.shadow.forget(session)
        own.num_sessions -= 1
        if not own.num_sessions:
            del self._tenants[known.tenant]
        self._left[session] = None

    def _drop_ended(self, now_s: float) -> None:
        while self._idle:
            name, since_s = next(iter(self._idle.items()))
            if now_s - since_s <= FORGET_S:
                break
            self.forget(name)

    def is_in(self, session: str) -> bool:
        return session in self._inside

    @property
    def num_in(self) -> int:
        return len(self._inside)

    def take_left(self) -> list[str]:
        left, self._left = list(self._left), {}
        return left

    # -- what is decided --------------------------------------------------------------------

    def round_s(self, tenant: str) -> float:
        """Seconds to compute each of the tenant's sessions once from nothing."""
        own = self._tenants.get(tenant)
        return 0.0 if own is None else own.round_ticks / _TICKS

    def order(self, now_s: float, prices: Mapping[str, float]) -> list[str]:
        self._now_s, self._rooms, self.next_due_s = now_s, None, _NEVER_S
        self._date(now_s, prices)
        behind, waiting = self._over_share(), [r for r in self.waiting.values() if r.rid in prices]
        before, is_due = self._chosen([r for r in waiting if r.tenant not in behind], [], now_s, prices)
        if not behind:
            return before
        behind_them = self._chosen(waiting, before, now_s, prices)[0]
        return before + [rid for rid in behind_them if not is_due or self.waiting[rid].has_started]

    def _chosen(
        self, waiting: list[WaitingRequest], before: list[str], now_s: float, prices: Mapping[str, float]
    ) -> tuple[list[str], bool]:
        """Whom of them to serve, the next first, once those `before` are served; and whether that ends with one
        that is due, for which the others are held."""
        due = sorted(waiting, key=lambda r: r.deadline_s)
        slack_s, least_s = self._slack(due, now_s, prices)
        if least_s >= 0:
            self.next_due_s = min(self.next_due_s, now_s + least_s + BEHIND_S)
        already = set(before)
        due = [request for request in due if request.rid not in already]
        best = sorted(due, key=lambda r: (not self._is_in(r), prices[r.rid]))
        chosen: list[str] = []
        spent_s = 0.0
        for request in best:
            price_s = prices[request.rid]
            if least_s < 0 or spent_s + price_s > slack_s[request.rid]:
                return self._with_due(chosen, due, best), True
            if self._is_in(request) or self._may_enter(request, now_s):
                chosen.append(request.rid)
                spent_s += price_s
        return chosen, False

    def _with_due(
        self, chosen: list[str], due: list[WaitingRequest], best: list[WaitingRequest]
    ) -> list[str]:
        """`chosen`, and behind them the request that is due first. Behind that only prefills under way go on,
        so that nobody takes the room that is given back before it."""
        taken = set(chosen)
        first = next(r for r in due if r.rid not in taken)
        taken.add(first.rid)
        rest = [r.rid for r in best if r.has_started and r.rid not in taken]
        return [*chosen, first.rid, *rest]

    def _slack(
        self, due: list[WaitingRequest], now_s: float, prices: Mapping[str, float]
    ) -> tuple[dict[str, float], float]:
        """By request, the seconds that may be spent on it before a request with an earlier due time is late;
        and the seconds until any is. A request that is not in counts with its cold price, as the rest of its
        prefix may be evicted."""
        found: dict[str, float] = {}
        at_s, least_s = now_s, _NEVER_S
        for request in due:
            found[request.rid] = least_s
            at_s += prices[request.rid] if self._is_in(request) else request.cold_price_s
            least_s = min(least_s, request.deadline_s - at_s - self._pages_s(request))
        return found, least_s

    def _pages_s(self, request: WaitingRequest) -> float:
        """Seconds until there are pages for it: where it does not fit beside those that run."""
        if request.has_started or self._num_held <= self.capacity - request.footprint:
            return 0.0
        session = self._sessions[request.session]
        held = self._num_held - (session.footprint if session.num_running else 0)
        return ANSWERS * self._answer_s if held + request.footprint > self.capacity else 0.0

    def _is_in(self, request: WaitingRequest) -> bool:
        return request.has_started or self._sessions[request.session].is_in

    def _may_enter(self, request: WaitingRequest, now_s: float) -> bool:
        """Whether enough leaves for it: idle sessions that are far, or that wait and are of a tenant with more
        than its share, for one with less. Nobody of such a one leaves for one with more. Where nothing runs it
        may, whatever fits."""
        over = self._num_inside + request.footprint - self.capacity
        if over <= 0 or not self._num_running:
            return True
        if self._rooms is None:
            self._rooms = Rooms(self.capacity, (self._seen(s, now_s) for s in self._inside.values()))
        return self._rooms.room_for(request.tenant, request.footprint, self._far_s(request)) >= over

    def _seen(self, session: _Session, now_s: float) -> Inside:
        away_s = None if session.idle_since_s is None else self._away_s(session, now_s)
        return Inside(session.tenant, session.footprint, session.num_running > 0, away_s)

    def _leavers(self, request: WaitingRequest, now_s: float) -> list[str]:
        """Sessions that leave as this one enters, the last expected back first: idle, or as in `_may_enter`."""
        own = self._inside.get(request.session)
        over = self._num_inside - (0 if own is None else own.footprint) + request.footprint - self.capacity
        if over <= 0:
            return []
        inside = {name: s for name, s in self._inside.items() if name != request.session}
        rich = self._over_room(request, inside)
        is_poor = request.tenant not in rich
        may = [
            (s.tenant not in rich, -self._away_s(s, now_s), name)
            for name, s in inside.items()
            if not s.num_running and (is_poor or s.tenant in rich)
        ]
        leaving = list[str]()
        for holds_little, _, name in sorted(may):
            if (is_poor and not holds_little) or inside[name].idle_since_s is not None:
                leaving.append(name)
                over -= inside[name].footprint
                if over <= 0:
                    break
        return leaving

    def _far_s(self, request: WaitingRequest) -> float:
        """Seconds of absence from which a session counts as far. With several tenants no share of the
        request's wait counts: what one tenant recomputes to let its own in and out delays the others."""
        if len(self._tenants) > 1:
            return FAR_S
        return min(FAR_S, FAR_SHARE * self._longest_s(request))

    def _away_s(self, session: _Session, now_s: float) -> float:
        """Seconds until a session is expected back; 0 where it is."""
        if session.idle_since_s is None:
            return 0.0
        return self._returns.expected_s(session.stop, now_s - session.idle_since_s)

    # -- tenants ----------------------------------------------------------------------------

    def _over_share(self) -> set[str]:
        tenants = self._at_work
        if len(tenants) < 2:
            return set()
        served_s = [self._service.recent_s(tenant) for tenant in tenants]
        most_s = OVER_SHARE * sum(served_s) / len(tenants)
        return {tenant for tenant, had_s in zip(tenants, served_s) if had_s > most_s}

    def _over_room(self, request: WaitingRequest, inside: Mapping[str, _Session]) -> set[str]:
        """Tenants that would hold more than their share of the capacity if this request entered."""
        held: dict[str, int] = {request.tenant: request.footprint}
        for session in inside.values():
            held[session.tenant] = held.get(session.tenant, 0) + session.footprint
        return {tenant for tenant, num_tokens in held.items() if num_tokens > self.capacity / len(held)}


_POLICIES: dict[str, type[AdmissionPolicy]] = {
    policy.name: policy for policy in (AdmissionPolicy, LongestPrefixMatch, CachedAdmission)
}


def admission_policies() -> list[str]:
    """Their names."""
    return list(_POLICIES)


def make_admission(name: str, capacity: int) -> AdmissionPolicy:
    """ConfigError for an unknown name."""
    if name not in _POLICIES:
        raise ConfigError(f"--schedule-policy: {name!r} is not one of {', '.join(_POLICIES)}")
    return _POLICIES[name](capacity)

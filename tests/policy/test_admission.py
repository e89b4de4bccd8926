"""Who is served next: a bound for each request, equal decisions from equal numbers, and shares of tenants."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.errors import ConfigError, Misuse
from hiradix.policy.admission import (
    FAR_S,
    FORGET_S,
    AdmissionPolicy,
    CachedAdmission,
    Returns,
    WaitingRequest,
    admission_policies,
    make_admission,
)
from hiradix.policy.first_come import FirstComeShadow

CHUNK_S, WARM_S, ASK_S = 0.5, 0.1, 1.0


class Client(NamedTuple):
    """An agent: when it starts, how much more each turn's prompt costs, seconds of answers and of thought."""

    start_s: float
    turns: int
    cold_s: float
    growth_s: float
    answer_s: float
    think_s: float
    stop: str = "tool_use"
    tenant: str = ""


@dataclass
class Bench:
    """One server, whose cache keeps exactly the sessions that are in: those are warm, others cold."""

    policy: AdmissionPolicy
    clients: list[Client]
    shuffle: Callable[[list[str]], None] = lambda names: None
    waits: dict[str, tuple[float, float]] = field(default_factory=dict)  # by request: waited, due after
    log: list[tuple[float, list[str]]] = field(default_factory=list)

    def play(self) -> Bench:
        events: list[tuple[float, int, tuple]] = []
        for number, client in enumerate(self.clients):
            heapq.heappush(events, (client.start_s, len(events), ("arrive", number, 0)))
        count, self.remaining_s, self.served_s, self.warm = len(events), {}, {}, {}
        busy, now_s, asking_s = False, 0.0, -1.0
        while events:
            now_s, _, (what, number, turn) = heapq.heappop(events)
            client, rid = self.clients[number], f"{number}/{turn}"
            if what == "arrive":
                self._arrive(rid, number, turn, now_s)
            elif what == "chunk":
                busy = False
                if self.remaining_s[rid] <= 1e-9:
                    self._computed(rid, now_s)
                    count += 1
                    heapq.heappush(events, (now_s + client.answer_s, count, ("end", number, turn)))
            elif what == "end":
                self.policy.end(str(number), now_s, client.stop)
                if turn + 1 < client.turns:
                    count += 1
                    heapq.heappush(events, (now_s + client.think_s, count, ("arrive", number, turn + 1)))
            if not busy and self.policy.waiting:
                chosen = self._next(now_s)
                count += 1
                if chosen is not None:
                    busy, step_s = True, min(CHUNK_S, self.remaining_s[chosen])
                    self.remaining_s[chosen] -= step_s
                    n, k = map(int, chosen.split("/"))
                    heapq.heappush(events, (now_s + step_s, count, ("chunk", n, k)))
                elif asking_s <= now_s or self.policy.next_due_s < asking_s:
                    asking_s = min(now_s + ASK_S, self.policy.next_due_s)
                    heapq.heappush(events, (asking_s, count, ("ask", 0, 0)))
        assert not self.policy.waiting
        return self

    def _arrive(self, rid: str, number: int, turn: int, now_s: float) -> None:
        client = self.clients[number]
        cold_s = client.cold_s + turn * client.growth_s
        self.policy.add(WaitingRequest(rid, str(number), now_s, cold_s, round(1000 * cold_s), client.tenant))

    def _next(self, now_s: float) -> str | None:
        waiting = self.policy.waiting
        names = list(waiting)
        self.shuffle(names)
        prices = {rid: self.remaining_s.get(rid, self._price_s(waiting[rid])) for rid in names}
        order = self.policy.order(now_s, prices)
        assert len(order) == len(set(order)) and set(order) <= set(waiting)
        self.log.append((now_s, order))
        if not order:
            return None
        rid = order[0]
        if rid not in self.remaining_s:
            self.remaining_s[rid] = self.served_s[rid] = self._price_s(waiting[rid])
            self.policy.start(rid, now_s)
            self.warm[waiting[rid].session] = waiting[rid].cold_price_s
            for session in self.policy.take_left():
                self.warm.pop(session, None)
        return rid

    def _price_s(self, request: WaitingRequest) -> float:
        return min(request.cold_price_s, request.cold_price_s - self.warm.get(request.session, 0.0) + WARM_S)

    def _computed(self, rid: str, now_s: float) -> None:
        request = self.policy.waiting[rid]
        self.waits[rid] = (now_s - request.arrived_s, request.deadline_s - request.arrived_s)
        self.policy.computed(rid, self.served_s[rid])


def client(tenant: str = "") -> st.SearchStrategy[Client]:
    tenths = st.integers(1, 300).map(lambda n: n / 10)
    return st.builds(
        Client, st.integers(0, 400).map(lambda n: n / 10), st.integers(1, 6), tenths,
        st.sampled_from((0.1, 1.0)), tenths, st.sampled_from((0.5, 5.0, 30.0, 300.0)),
        st.sampled_from(("tool_use", "end_turn")), st.just(tenant),
    )  # fmt: skip


def late(bench: Bench) -> float:
    """The most seconds that a first token came after it was due."""
    return max(waited - due for waited, due in bench.waits.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(client(), min_size=1, max_size=12), st.integers(1, 200_000))
def test_every_first_token_comes_when_it_is_due(clients: list[Client], capacity: int) -> None:
    """One that is held is asked for again when it is due, and no second later."""
    bench = Bench(CachedAdmission(capacity), clients).play()
    assert len(bench.waits) == sum(one.turns for one in clients)
    assert late(bench) <= 1e-5


@settings(max_examples=60, deadline=None)
@given(st.lists(client(), min_size=1, max_size=12), st.integers(1, 200_000))
def test_nobody_is_due_later_than_a_round(clients: list[Client], capacity: int) -> None:
    """A round is what each session costs from nothing, once; of several requests of one, each."""
    bench = Bench(CachedAdmission(capacity), clients).play()
    most_s = sum(one.cold_s + one.turns * one.growth_s for one in clients)
    assert all(due <= most_s + 1e-6 for _, due in bench.waits.values())


@pytest.mark.parametrize("name", admission_policies())
@settings(max_examples=25, deadline=None)
@given(clients=st.lists(client() | client("b"), min_size=1, max_size=10), seed=st.integers(0, 9))
def test_decisions_depend_on_numbers_alone(name: str, clients: list[Client], seed: int) -> None:
    """Not on the order in which prices are told, nor on which object is asked."""
    one = Bench(make_admission(name, 30_000), clients).play()
    two = Bench(make_admission(name, 30_000), clients, random.Random(seed).shuffle).play()
    assert one.log == two.log and one.waits == two.waits


def test_the_greedy_order_starves_and_the_bounded_one_does_not() -> None:
    cheap = [Client(0.2 * k, 120, 0.4, 0.0, 0.1, 1.0) for k in range(14)]
    clients = [*cheap, Client(1.0, 1, 5.0, 0.0, 1.0, 1.0)]
    waits = {
        name: Bench(make_admission(name, 2_000), clients).play().waits["14/0"][0]
        for name in admission_policies()
    }
    assert waits["lpm"] > 4 * waits["cached"] and waits["cached"] < 13


class Searched(CachedAdmission):
    """Finds each sum, and when a request is due, by a walk of all that is known."""

    def add(self, request: WaitingRequest) -> None:
        super().add(request)
        own = [r for r in self.waiting.values() if r.tenant == request.tenant]
        num_at_work = len({s.tenant for s in self._sessions.values() if s.num_active})
        work_s = sum(r.cold_price_s for r in own)
        due_s = request.arrived_s + max(self._longest_s(request), work_s) * num_at_work
        assert request.deadline_s == max(due_s, *(r.deadline_s for r in own if r is not request), 0.0)

    def order(self, now_s: float, prices: Mapping[str, float]) -> list[str]:
        sessions = list(self._sessions.values())
        assert self._all_fit == (sum(s.footprint for s in sessions) <= self.capacity)
        assert self._num_inside == sum(s.footprint for s in sessions if s.is_in)
        assert set(self._idle) == {name for name, s in self._sessions.items() if not s.num_active}
        assert set(self._tenants) == {s.tenant for s in sessions}
        for tenant in self._tenants:
            own = [s for s in sessions if s.tenant == tenant]
            assert self.round_s(tenant) == sum(s.cold_price_s * max(s.num_active, 1) for s in own)
            assert (tenant in self._at_work) == any(s.num_active for s in own)
        return super().order(now_s, prices)

    def _may_enter(self, request: WaitingRequest, now_s: float) -> bool:
        may = super()._may_enter(request, now_s)
        over = self._num_inside + request.footprint - self.capacity
        if over > 0 and self._num_running:
            rich, far_s = self._over_room(request, self._inside), self._far_s(request)
            for session in self._inside.values():
                is_rich = session.tenant in rich
                is_far = session.idle_since_s is not None and self._away_s(session, now_s) >= far_s
                yields = is_rich and request.tenant not in rich
                if not session.num_running and (
                    yields or (is_far and (is_rich or request.tenant not in rich))
                ):
                    over -= session.footprint
            assert may == (over <= 0)
        return may


def binary(tenant: str) -> st.SearchStrategy[Client]:
    """Numbers that add up to the same in any order."""
    times = st.integers(1, 200).map(lambda n: n / 8)
    think_s = st.sampled_from((0.5, 4.0, 32.0, 900.0))
    return st.builds(
        Client, times, st.integers(1, 6), times, st.sampled_from((0.125, 1.0)), times, think_s,
        st.sampled_from(("tool_use", "end_turn")), st.just(tenant),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(binary("") | binary("b") | binary("c"), min_size=1, max_size=12),
    st.integers(1, 200_000) | st.integers(1, 40_000),
)
def test_running_sums_are_what_a_walk_finds(clients: list[Client], capacity: int) -> None:
    searched = Bench(Searched(capacity), clients).play()
    assert searched.log == Bench(CachedAdmission(capacity), clients).play().log


@settings(max_examples=40, deadline=None)
@given(
    st.lists(binary("") | binary("b"), min_size=1, max_size=10),
    st.integers(1, 200_000),
    st.sampled_from([64.0, 2.0**20]),
)
def test_when_the_clock_began_says_nothing(clients: list[Client], capacity: int, begin_s: float) -> None:
    """Found: a second question of a session without an answer came back after as long as the clock had run."""
    later = [one._replace(start_s=one.start_s + begin_s) for one in clients]
    one, two = (Bench(CachedAdmission(capacity), found).play() for found in (clients, later))
    assert [order for _, order in one.log] == [order for _, order in two.log]


def test_questions_side_by_side_are_no_gap_since_the_clock_began() -> None:
    policy = CachedAdmission(1_000_000)
    for rid in ("x", "a", "b"):
        policy.add(WaitingRequest(rid, "x" if rid == "x" else "s", 1e6, 10.0, 1000))
    policy.add(WaitingRequest("c", "t", 1e6 + 40, 1.0, 1000))
    shadow = policy._tenants[""].shadow
    assert not shadow._coming, "both of `s` were answered long ago"


def test_what_comes_costs_the_same_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: 5,000 that came at once took 13.6 s, as each walked through all sessions and all that wait."""
    steps = [0]
    real = FirstComeShadow._price_s

    def counted(self: FirstComeShadow, *args: Any) -> float:
        steps[0] += 1
        return real(self, *args)

    monkeypatch.setattr(FirstComeShadow, "_price_s", counted)
    policy = CachedAdmission(10**9)
    for number in range(3000):
        policy.add(WaitingRequest(f"r{number}", f"s{number}", number / 1024, 1.0, 1000))
    assert steps[0] <= 3 * 3000


def test_an_order_looks_once_at_each_that_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: at each for each that waits; with 1,000 in and 2,000 that waited an order took 1.7 s."""
    looks = [0]
    real = Returns.expected_s

    def counted(self: Returns, stop: str, idle_s: float) -> float:
        looks[0] += 1
        return real(self, stop, idle_s)

    policy = CachedAdmission(100_000)
    for number in range(101):
        name = f"a{number}"
        now_s = 0.0 if number < 100 else 3.0
        policy.add(WaitingRequest(name, name, now_s, 0.01, 1000, "ab"[number % 2]))
        policy.order(now_s, {name: 0.01})
        policy.start(name, now_s)
        if number < 100:
            policy.computed(name, 0.01)
            policy.end(name, 1.0)
    for number in range(200):
        policy.add(WaitingRequest(f"r{number}", f"s{number}", 3.0, 0.01, 1000, "ab"[number % 2]))
    monkeypatch.setattr(Returns, "expected_s", counted)
    policy.order(3.0, {rid: 0.001 for rid in policy.waiting})
    assert 0 < looks[0] <= 101


# -- tenants --------------------------------------------------------------------------------


def test_a_flood_delays_another_tenant_by_its_share() -> None:
    quiet = [Client(5.0 + k, 20, 4.0, 0.1, 1.0, 8.0, tenant="quiet") for k in range(3)]
    flood = [Client(0.05 * k, 20, 4.0, 0.1, 1.0, 0.5, tenant="flood") for k in range(40)]
    alone = Bench(CachedAdmission(40_000), quiet).play().waits
    both = Bench(CachedAdmission(40_000), [*quiet, *flood]).play().waits
    own = [both[rid] for rid in alone]
    mean_alone, mean = (sum(w for w, _ in waits) / len(own) for waits in (alone.values(), own))
    assert mean <= 1.2 * mean_alone + CHUNK_S, (mean, mean_alone)
    # due after twice its own round: half of the server is its share
    assert all(waited <= due + CHUNK_S + ASK_S for waited, due in own)
    assert max(due for _, due in own) <= 2 * 3 * 6.0


def test_equal_tenants_are_served_as_one() -> None:
    rng = random.Random(4)
    clients = [Client(rng.random() * 5, 8, 3.0, 0.1, 1.0, 4.0) for _ in range(12)]
    two = [one._replace(tenant="ab"[number % 2]) for number, one in enumerate(clients)]
    one_mean, two_mean = (
        sum(w for w, _ in Bench(CachedAdmission(15_000), found).play().waits.values())
        for found in (clients, two)
    )
    assert two_mean < 1.5 * one_mean


# -- parts ----------------------------------------------------------------------------------


def test_a_return_is_predicted_by_why_the_answer_ended_and_by_how_long_it_is_away() -> None:
    returns = Returns()
    for _ in range(50):
        returns.saw("tool_use", 6.0)
        returns.saw("end_turn", 250.0)
    assert returns.expected_s("tool_use", 0.0) < 40 < FAR_S < returns.expected_s("end_turn", 0.0)
    assert returns.expected_s("tool_use", 30.0) > returns.expected_s("tool_use", 0.0)
    assert returns.expected_s("never heard of", 2.0) > 0 and returns.expected_s("tool_use", 5000.0) > 1e6


def test_a_session_stays_its_tenants() -> None:
    """Found: where another tenant went on with one, that one's shadow was kept for ever, or gone too early."""
    policy = CachedAdmission(10_000)
    policy.add(WaitingRequest("a", "s", 0.0, 1.0, 100, "one"))
    for tenant in ("two", ""):
        with pytest.raises(Misuse, match="session s is of tenant 'one'"):
            policy.add(WaitingRequest("b", "s", 0.0, 1.0, 100, tenant))
    assert list(policy.waiting) == ["a"] and list(policy._tenants) == ["one"]


def test_while_one_that_is_due_has_no_room_nobody_takes_it_though_he_comes_behind() -> None:
    """Found: requests of a tenant that had more than its share took all that was given back before it."""
    policy = CachedAdmission(100_000)
    for rid, tenant in (("big", "quiet"), *((f"b{number}", "flood") for number in range(5))):
        policy.add(WaitingRequest(rid, rid, 0.0, 1.0, 1000, tenant))
    prices = {rid: 1.0 for rid in policy.waiting}
    for rid in ("b0", "b4"):
        policy.start(rid, 1.0)
    policy.computed("b0", 30.0)
    del prices["b0"]
    due_s = policy.waiting["big"].deadline_s
    assert policy.order(due_s + 1, prices) == ["big", "b4"]
    policy.start("big", due_s + 1)
    policy.computed("big", 40.0)
    del prices["big"]
    assert policy.order(due_s + 2, prices)[0] in prices, "who is behind is served where nobody else waits"


def test_tenants_that_come_once_leave_nothing() -> None:
    policy = CachedAdmission(10_000)
    for number in range(500):
        now_s = number * 10.0
        policy.add(WaitingRequest(f"r{number}", f"s{number}", now_s, 1.0, 100, f"t{number}"))
        policy.order(now_s, {f"r{number}": 1.0})
        policy.start(f"r{number}", now_s)
        policy.computed(f"r{number}", 1.0)
        policy.end(f"s{number}", now_s + 2)
        policy.take_left()
    known = FORGET_S / 10 + 2
    assert len(policy._tenants) <= known and len(policy._sessions) <= known and not policy._at_work
    assert len(policy._service) <= 2 * 600 + 64


@pytest.mark.parametrize("cold_s", [float("nan"), -1.0, float("-inf")])
def test_a_price_that_is_none_is_refused(cold_s: float) -> None:
    policy = CachedAdmission(10_000)
    with pytest.raises(Misuse, match="^a: a cold price"):
        policy.add(WaitingRequest("a", "s", 0.0, cold_s, 100))
    assert not (policy.waiting or policy._sessions or policy._tenants)
    policy.add(WaitingRequest("a", "s", 0.0, float("inf"), 100))
    policy.remove("a", 1.0)
    assert policy._tenants[""].work_ticks == 0


def waiting(rid: str, cold_s: float = 1.0, at_s: float = 0.0, session: str = "") -> WaitingRequest:
    return WaitingRequest(rid, session or rid, at_s, cold_s, 1000)


@pytest.mark.parametrize("name", admission_policies())
def test_a_request_that_is_removed_leaves_nothing_behind(name: str) -> None:
    policy = make_admission(name, 10_000)
    for rid in ("a", "b"):
        policy.add(waiting(rid))
    policy.start("a", 1.0)
    policy.remove("a", 2.0)
    policy.remove("b", 2.0)
    assert not policy.waiting and policy.order(3.0, {}) == []
    policy.add(waiting("c", at_s=3.0))
    assert policy.order(3.0, {"c": 1.0}) == ["c"]
    with pytest.raises(Misuse, match="c waits already"):
        policy.add(waiting("c"))


def test_a_session_that_ended_leaves_its_room_and_its_part_of_the_round() -> None:
    policy = CachedAdmission(1_000)
    policy.add(waiting("a", 7.0))
    policy.start("a", 0.0)
    policy.computed("a", 7.0)
    policy.end("a", 8.0, "tool_use")
    policy.add(waiting("b", 2.0, at_s=9.0))
    assert policy.round_s("") == 9.0
    policy.forget("a")
    assert policy.round_s("") == 2.0 and policy.take_left() == ["a"] and policy.take_left() == []
    policy.remove("b", 9.0)
    policy.add(waiting("c", 3.0, at_s=10.0 + FORGET_S))
    assert policy.round_s("") == 3.0, "who was away for so long has ended"


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="--schedule-policy: 'x' is not one of fcfs, lpm, cached"):
        make_admission("x", 1)

"""The order of service over the real scheduler and cache, on a clock of its own: sessions, tenants, bounds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from hiradix.apps.engine.api import FINISH_LENGTH, SamplingParams, Scope
from hiradix.apps.engine.request import Request
from hiradix.apps.engine.scheduler import Scheduler, SchedulerLimits
from hiradix.apps.engine.turns import Turns
from hiradix.memory import ReqToTokenPool
from hiradix.policy.admission import make_admission
from hiradix.policy.no_regret import NoRegret
from hiradix.policy.prices import Prices
from hiradix.prefix_cache import CacheInitParams, RadixCache
from tests.seeds import seeded, seeds
from tests.simulation.memory import DeviceAllocator, DevicePages, SimStreams

PAGE = 4
TOKEN_S = 0.01
CHUNK = 64


@dataclass
class Turned:
    """What became of a request. waited_s: to its first token; late_s: behind its deadline."""

    waited_s: float
    late_s: float
    hit: int
    tenant: str


@dataclass
class Server:
    """A scheduler whose passes take `TOKEN_S` a token, decodes included."""

    policy: str = "cached"
    num_pages: int = 64
    max_running: int = 4
    chunk: int = CHUNK
    now_s: float = 0.0
    told: list[str] = field(default_factory=list)
    turned: dict[str, Turned] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_tokens = self.num_pages * PAGE
        pool = DevicePages(self.num_pages, PAGE)
        allocator = DeviceAllocator(pool, num_tokens, SimStreams(False), lambda: False)
        rows = ReqToTokenPool(self.max_running, num_tokens)
        self.cache = RadixCache(CacheInitParams(False, rows, allocator, PAGE))
        gate = NoRegret()
        for pages in (1, 2, 4, 8):
            gate.computed(pages, pages * PAGE * TOKEN_S)
        admission = make_admission(self.policy, num_tokens)
        self.turns = Turns(admission, self.cache, Prices(gate, PAGE), lambda: self.now_s)
        limits = SchedulerLimits(self.max_running, 1000, self.chunk, PAGE)
        self.scheduler = Scheduler(self.cache, allocator, rows, limits, self.turns)
        self._arrived: dict[str, float] = {}

    def ask(self, rid: str, prompt: list[int], num_answer: int = 1, **scope: Any) -> Request:
        request = Request(rid, prompt, SamplingParams(max_new_tokens=num_answer), Scope(**scope))
        self.scheduler.add(request)
        self._arrived[rid] = self.now_s
        return request

    def step(self) -> int:
        """One pass; how many tokens it computed."""
        parts = self.scheduler.plan()
        total = sum(part.num_tokens for part in parts)
        due = {rid: waits.deadline_s for rid, waits in self.turns.policy.waiting.items()}
        self.now_s += total * TOKEN_S
        for part in parts:
            request = part.request
            if not self.scheduler.computed(part):
                continue
            request.output_ids.append(1)
            self.scheduler.answered(request)
            if len(request.output_ids) == 1:
                self.told.append(request.rid)
                waited_s = self.now_s - self._arrived[request.rid]
                late_s = self.now_s - due[request.rid]
                hit = request.usage.cached_tokens
                self.turned[request.rid] = Turned(waited_s, late_s, hit, request.cache_salt or "")
            if len(request.output_ids) >= request.max_new_tokens:
                self.scheduler.finish(request, FINISH_LENGTH)
        return total

    def work(self) -> None:
        """Until everybody is answered."""
        while self.scheduler.waiting or self.scheduler.running:
            if not self.step():
                self.now_s += 1.0

    def assert_empty(self) -> None:
        """Nobody waits anywhere, and nothing is kept of who has left."""
        turns = self.turns
        assert not (turns.policy.waiting or turns._calls or turns._fresh or len(turns.controller))
        assert not turns.controller._active and not turns.controller._unanswered
        assert self.cache.protected_size() == 0


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(10, 1000) for i in range(num_tokens)]


def test_who_is_in_the_cache_goes_before_who_came_first() -> None:
    """As long as nobody waits longer for that than somebody would have of late."""
    found = {}
    for policy in ("fcfs", "lpm", "cached"):
        server = Server(policy, num_pages=128)
        server.ask("warm", prompt_of(1, 81), session="a")
        server.work()
        server.ask("longest", prompt_of(3, 161), session="c")
        server.work()
        server.ask("cold", prompt_of(2, 101), session="b")
        server.ask("hit", prompt_of(1, 101), session="a")
        server.work()
        server.assert_empty()
        found[policy] = server.told
    assert found["fcfs"] == ["warm", "longest", "cold", "hit"]
    assert found["lpm"] == found["cached"] == ["warm", "longest", "hit", "cold"]


def test_a_prefill_under_way_gives_way_at_a_chunk_boundary() -> None:
    server = Server("cached", num_pages=160)
    server.ask("longest", prompt_of(3, 241), session="c")
    server.work()
    server.ask("warm", prompt_of(1, 81), session="a")
    server.work()
    server.ask("long", prompt_of(2, 161), session="b")
    server.step()
    assert server.scheduler.running and not server.turned.keys() & {"long"}
    server.ask("short", prompt_of(1, 91), session="a")
    server.step()
    assert server.told[-1] == "short"
    server.work()
    assert server.told[-1] == "long"


def test_sessions_are_told_by_the_beginning_of_their_prompts() -> None:
    server = Server("cached", num_pages=256)
    server.ask("one", prompt_of(1, 300))
    server.work()
    (session,) = server.turns.policy._sessions  # type: ignore[attr-defined]
    server.ask("two", prompt_of(1, 300) + prompt_of(3, 30))
    server.ask("other", prompt_of(2, 300))
    server.turns.begin()
    of = server.turns.controller.session_of
    assert of("two") == session != of("other")
    server.work()
    server.assert_empty()


def test_a_session_is_its_tenants() -> None:
    server = Server("cached")
    server.ask("one", prompt_of(1, 40), session="s", cache_salt="x")
    server.ask("two", prompt_of(1, 40), session="s", cache_salt="y")
    server.turns.begin()
    of = server.turns.controller.session_of
    assert of("one") != of("two")
    server.work()
    assert len(server.turns.policy._sessions) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["field", "call", "prompt"])
def test_a_session_that_ended_leaves_and_its_tail_is_evicted_first(how: str) -> None:
    """Of three sessions the least recently used stays, as another has ended."""
    server = Server("cached", num_pages=64)
    named = {} if how == "prompt" else {"session": "middle"}
    server.ask("old", prompt_of(1, 141 if how == "prompt" else 81), session="old")
    server.work()
    hint = {"hint": "end_of_session"} if how == "field" else {}
    middle = prompt_of(2, 90)
    server.ask("middle", middle, **named, **hint)
    server.work()
    if how == "call":
        server.turns.session_ended((), Scope(hint="end_of_session", session="middle"))
    elif how == "prompt":
        server = Server("cached", num_pages=96)
        server.ask("old", prompt_of(1, 81), session="old")
        server.work()
        middle = prompt_of(2, 140)
        server.ask("middle", middle)
        server.work()
        server.turns.session_ended(middle, Scope(hint="end_of_session"))
    server.ask("new", prompt_of(3, server.num_pages * PAGE - 100), session="new")
    server.work()
    server.ask("again", prompt_of(1, 85), session="old")
    server.work()
    assert server.turned["again"].hit >= 76
    server.assert_empty()


def test_aborts_give_all_back_whenever_they_come() -> None:
    rng = random.Random(5)
    server = Server("cached", num_pages=48, max_running=3)
    for number in range(300):
        if number % 2 == 0:
            length = rng.randint(1, 120)
            server.ask(
                f"r{number}", prompt_of(number % 7, length), rng.randint(1, 6), session=f"s{number % 7}"
            )
        if rng.random() < 0.5:
            server.step()
        if rng.random() < 0.3 and (open_ones := [*server.scheduler.waiting, *server.scheduler.running]):
            server.scheduler.remove(rng.choice(open_ones).rid)
        if rng.random() < 0.05 and server.scheduler.running:
            server.scheduler.retract(rng.choice(server.scheduler.running))
    server.work()
    server.assert_empty()
    assert all(s.num_active == s.num_running == 0 for s in server.turns.policy._sessions.values())  # type: ignore[attr-defined]


class Crowd(Server):
    """Agents in a closed loop, of one tenant or several."""

    def play(self, groups: dict[str, int], turns: int, seed: int, think_s: float = 3.0) -> None:
        rng = random.Random(seed)
        lengths: dict[str, int] = {}
        events: list[tuple[float, str, int]] = []
        for tenant, count in groups.items():
            for number in range(count):
                name = f"{tenant}/{number}"
                lengths[name] = rng.randint(30, 60)
                events.append((rng.random() * 5.0, name, 0))
        thinking = {name: (at_s, turn) for at_s, name, turn in events}
        asked: dict[str, tuple[str, int]] = {}
        while thinking or self.scheduler.waiting or self.scheduler.running:
            for name, (at_s, turn) in sorted(thinking.items()):
                if at_s <= self.now_s:
                    del thinking[name]
                    lengths[name] += rng.randint(4, 12)
                    rid = f"{name}#{turn}"
                    prompt = prompt_of(
                        int(name.split("/")[1]) + 1000 * sorted(groups).index(name.split("/")[0]),
                        lengths[name],
                    )
                    asked[rid] = (name, turn)
                    self.ask(rid, prompt, 2, session=name, cache_salt=name.split("/")[0])
            if not self.step():
                self.now_s = min([at_s for at_s, _ in thinking.values()], default=self.now_s + 1.0)
                self.now_s += 1e-6
            for rid in [rid for rid in asked if self.scheduler.find(rid) is None]:
                name, turn = asked.pop(rid)
                if turn + 1 < turns:
                    thinking[name] = (self.now_s + rng.random() * 2 * think_s, turn + 1)

    def waits(self, tenant: str) -> list[float]:
        return [turned.waited_s for turned in self.turned.values() if turned.tenant == tenant]

    def hits(self, tenant: str) -> float:
        return sum(turned.hit for turned in self.turned.values() if turned.tenant == tenant)


@seeded
@pytest.mark.parametrize("seed", seeds(3))
def test_over_a_cache_too_small_hits_and_waits_are_far_better_than_first_come(seed: int) -> None:
    found = {}
    for policy in ("fcfs", "cached"):
        server = Crowd(policy, num_pages=150, max_running=4)
        server.play({"x": 20}, 8, seed)
        waits = server.waits("x")
        found[policy] = (sum(waits) / len(waits), max(waits), server.hits("x"))
        server.assert_empty()
        if policy == "cached":
            assert max(turned.late_s for turned in server.turned.values()) <= (CHUNK + 8) * TOKEN_S * 4
    assert found["cached"][0] < 0.6 * found["fcfs"][0] and found["cached"][2] > 2 * found["fcfs"][2], found
    assert found["cached"][1] <= found["fcfs"][1], found


@seeded
@pytest.mark.parametrize("seed", seeds(3))
def test_a_flood_costs_other_tenants_little(seed: int) -> None:
    alone = Crowd("cached", num_pages=260, max_running=16, chunk=8)
    alone.play({"calm": 3}, 8, seed, think_s=6.0)
    beside = Crowd("cached", num_pages=260, max_running=16, chunk=8)
    beside.play({"calm": 3, "flood": 25}, 8, seed, think_s=6.0)
    mean = [sum(s.waits("calm")) / len(s.waits("calm")) for s in (alone, beside)]
    assert mean[1] < 1.4 * mean[0] and beside.hits("calm") > 0.94 * alone.hits("calm")


@seeded
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "cached"])
def test_two_runs_decide_identically(policy: str) -> None:
    def run() -> list[str]:
        server = Crowd(policy, num_pages=100, max_running=4)
        server.play({"x": 8, "y": 4}, 5, 7)
        return server.told

    assert run() == run()

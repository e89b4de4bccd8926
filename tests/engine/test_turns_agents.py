"""Recorded agents against the engine's scheduler and cache, in simulated time: what the order of service brings.

As `benchmarks/bench_agents_live.py` plays them, but for the lower tiers: 20 agents, tokens divided by 64, a
device of half of their working set, a pass of so many tokens after so many seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hiradix.apps.bench.agents import Smaller, draw_agents
from hiradix.apps.engine.api import FINISH_LENGTH, SamplingParams, Scope
from hiradix.apps.engine.request import Request
from hiradix.apps.engine.scheduler import Scheduler, SchedulerLimits
from hiradix.apps.engine.turns import Turns
from hiradix.apps.traces.crowd import Agent, Crowd
from hiradix.memory import ReqToTokenPool
from hiradix.policy.admission import make_admission
from hiradix.policy.no_regret import NoRegret
from hiradix.policy.prices import Prices
from hiradix.prefix_cache import CacheInitParams, RadixCache
from tests.simulation.memory import DeviceAllocator, DevicePages, SimStreams

TRACE = Path(__file__).parents[2] / "benchmarks" / "data" / "agentic_sessions.jsonl.xz"
PAGE, CHUNK, MOST = 8, 512, 32
PASS_S, TOKEN_S = 0.005, 1 / 4000  # of a tiny model on one core
WARM_UP = (400, 800, 1600)
HURRY = 24.0


@dataclass
class AgentServer:
    """policy: the order of service. share: of the agents' longest prompts that the device holds."""

    policy: str
    agents: Sequence[Agent]
    share: float
    waits_s: list[float] = field(default_factory=list)
    late_s: float = 0.0
    num_hits: int = 0

    def __post_init__(self) -> None:
        self.smaller = Smaller(hurry=HURRY)
        num_tokens = int(self.share * self.smaller.working_set(self.agents)) // PAGE * PAGE
        allocator = DeviceAllocator(
            DevicePages(num_tokens // PAGE, PAGE), num_tokens, SimStreams(False), lambda: False
        )
        rows = ReqToTokenPool(MOST, num_tokens)
        self.cache = RadixCache(CacheInitParams(False, rows, allocator, PAGE))
        gate = NoRegret(page_size=PAGE)
        for count in WARM_UP:
            gate.computed(count // PAGE, count * TOKEN_S + PASS_S)
        self.now_s = 0.0
        admission = make_admission(self.policy, num_tokens)
        self.turns = Turns(admission, self.cache, Prices(gate, PAGE), lambda: self.now_s)
        self.scheduler = Scheduler(
            self.cache, allocator, rows, SchedulerLimits(MOST, 1000, CHUNK, PAGE), self.turns
        )
        self._arrived_s: dict[str, float] = {}
        self._coming = [(agent.start_s / HURRY, number, 0) for number, agent in enumerate(self.agents)]
        heapq.heapify(self._coming)

    def play(self) -> AgentServer:
        """All turns of all agents."""
        scheduler = self.scheduler
        while self._coming or scheduler.waiting or scheduler.running:
            while self._coming and self._coming[0][0] <= self.now_s:
                self._ask(*heapq.heappop(self._coming))
            if not self._step():
                nexts = [self._coming[0][0]] if self._coming else []
                self.now_s = min([*nexts, self.now_s + 0.02] if scheduler.waiting else nexts)
        return self

    def _ask(self, at_s: float, agent: int, turn: int) -> None:
        rid, what = f"{agent}/{turn}", self.agents[agent].turns[turn]
        answer = SamplingParams(max_new_tokens=self.smaller.answer_tokens(what))
        self._arrived_s[rid] = at_s
        self.scheduler.add(Request(rid, self.smaller.prompt(what), answer, Scope(session=f"s{agent}")))

    def _step(self) -> bool:
        """One pass; whether there was anything to compute."""
        parts = self.scheduler.plan()
        due_s = {rid: waits.deadline_s for rid, waits in self.turns.policy.waiting.items()}
        if parts:
            self.now_s += PASS_S + TOKEN_S * sum(part.num_tokens for part in parts)
        for part in parts:
            request = part.request
            if not self.scheduler.computed(part):
                continue
            request.output_ids.append(1)
            self.scheduler.answered(request)
            if len(request.output_ids) == 1:
                self.waits_s.append(self.now_s - self._arrived_s[request.rid])
                self.late_s = max(self.late_s, self.now_s - due_s[request.rid])
                self.num_hits += request.usage.cached_tokens
            if len(request.output_ids) >= request.max_new_tokens:
                self.scheduler.finish(request, FINISH_LENGTH)
                self._thinks(*map(int, request.rid.split("/")))
        return bool(parts)

    def _thinks(self, agent: int, turn: int) -> None:
        turns = self.agents[agent].turns
        if turn + 1 < len(turns):
            heapq.heappush(self._coming, (self.now_s + turns[turn].think_s / HURRY, agent, turn + 1))


@pytest.fixture(scope="module")
def agents() -> list[Agent]:
    return draw_agents(TRACE, Crowd(20, 8, 60.0, 1, shares_heads=False))


def test_under_overload_a_first_token_comes_five_times_as_soon_and_none_later(agents: list[Agent]) -> None:
    ours, first_come = (AgentServer(policy, agents, 0.5).play() for policy in ("cached", "fcfs"))
    means = [sum(server.waits_s) / len(server.waits_s) for server in (ours, first_come)]
    assert means[0] <= means[1] / 5 and max(ours.waits_s) <= max(first_come.waits_s), means
    assert ours.num_hits > 10 * first_come.num_hits
    assert ours.late_s <= 2 * (PASS_S + CHUNK * TOKEN_S), "a pass takes in several, and its end is all theirs"


def test_where_all_fits_the_order_costs_nothing(agents: list[Agent]) -> None:
    ours, first_come = (AgentServer(policy, agents, 1.3).play() for policy in ("cached", "fcfs"))
    assert sum(ours.waits_s) <= 1.02 * sum(first_come.waits_s)
    assert ours.num_hits == first_come.num_hits

"""Ranks with clocks of their own serve alike: they read rank 0's, each of them as often."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from hiradix.apps.engine.engine import rank_0s_clock
from tests.engine.test_turns import Server, prompt_of
from tests.seeds import seeded, seeds


@dataclass
class Group:
    """What two ranks share: what rank 0 says, the other hears, in turn."""

    rank: int
    said: deque[float]

    def share(self, value: float | None) -> float:
        if self.rank:
            return self.said.popleft()
        assert value is not None
        self.said.append(value)
        return value


@dataclass
class Rank(Server):
    """One of them, whose passes take it a time of its own."""

    plans: list[list[tuple[str, int, bool]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        plan = self.scheduler.plan

        def noted() -> list[object]:
            parts = plan()
            self.plans.append([(part.request.rid, part.num_tokens, part.admitted) for part in parts])
            return parts  # type: ignore[return-value]

        self.scheduler.plan = noted  # type: ignore[method-assign, assignment]


def play(policy: str, seed: int, ranks: list[Rank], said: deque[float]) -> bool:
    """The same requests to both, step by step; whether they did the same until the end."""
    rng, skew = random.Random(seed), random.Random(seed + 1)
    for number in range(120):
        rid, kind, tenant = f"r{number}", rng.randrange(9), rng.choice("xy")
        length, answer, is_end = rng.randint(3, 150), rng.randint(1, 20), rng.random() < 0.1
        named = {"session": f"s{kind}"} if rng.random() < 0.6 else {}
        hint = {"hint": "end_of_session"} if is_end else {}
        is_asked, leaves, is_retracted = rng.random() < 0.5, rng.random() < 0.1, rng.random() < 0.1
        pick, pause_s = rng.randrange(1 << 30), rng.random() * 5 if rng.random() < 0.3 else 0.0
        for rank in ranks:
            scheduler = rank.scheduler
            if is_asked:
                rank.ask(rid, prompt_of(kind, length), answer, cache_salt=tenant, **named, **hint)
            if leaves and (here := [*scheduler.waiting, *scheduler.running]):
                scheduler.remove(here[pick % len(here)].rid)
            if is_retracted and scheduler.running:
                scheduler.retract(scheduler.running[pick % len(scheduler.running)])
            rank.step()
            rank.now_s += pause_s + 20 * skew.random() ** 4
        if len({(str(rank.plans), str(rank.told), rank.cache.total_size()) for rank in ranks}) > 1:
            return False
        assert not said, "a rank has read the clock less often"
    first, *others = (rank.turns.controller.order() for rank in ranks)
    return all(order == first for order in others)


@seeded
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "cached"])
@pytest.mark.parametrize("seed", seeds(6))
def test_ranks_whose_clocks_differ_decide_identically(policy: str, seed: int) -> None:
    said: deque[float] = deque()
    ranks = [Rank(policy, num_pages=60, max_running=3) for _ in range(2)]
    for number, rank in enumerate(ranks):
        group = Group(number, said)
        rank.turns._clock = rank_0s_clock(group, lambda rank=rank: rank.now_s)  # type: ignore[arg-type, misc]
    assert play(policy, seed, ranks, said)


def test_each_by_its_own_clock_they_would_not() -> None:
    """What the test above is worth."""
    same = [
        play("cached", seed, [Rank("cached", num_pages=60, max_running=3) for _ in range(2)], deque())
        for seed in range(6)
    ]
    assert not all(same)

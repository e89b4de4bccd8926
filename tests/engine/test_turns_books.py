"""The policy's books, whatever becomes of a request: each call once, in order, and nothing is kept behind it."""

from __future__ import annotations

import random

import pytest

from hiradix.apps.engine.api import FINISH_LENGTH
from hiradix.policy.admission import make_admission
from tests.engine.test_turns import PAGE, TOKEN_S, Server, prompt_of
from tests.policy.strict import Strict
from tests.seeds import seeded, seeds


class Unlucky(Server):
    """Passes fail now and then, as they do where a load breaks off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.books = Strict(make_admission(self.policy, self.num_pages * PAGE))
        self.turns.policy = self.turns.controller.policy = self.books
        self.rng = random.Random(0)
        self.firsts: list[str] = []
        self.ended: list[str] = []

    def step(self) -> int:
        parts = self.scheduler.plan()
        rids = [part.request.rid for part in parts]
        assert len(rids) == len(set(rids)), "nobody is served twice in a pass"
        total = sum(part.num_tokens for part in parts)
        self.now_s += total * TOKEN_S
        if self.rng.random() < 0.1:
            for part in reversed(parts):
                if part.admitted:
                    self.scheduler.undo_admission(part.request)
            return total
        for part in parts:
            request = part.request
            if not self.scheduler.computed(part):
                continue
            request.output_ids.append(1)
            if len(request.output_ids) == 1:
                self.firsts.append(request.rid)
            self.scheduler.answered(request)
            if len(request.output_ids) >= request.max_new_tokens:
                self.ended.append(request.rid)
                self.scheduler.finish(request, FINISH_LENGTH)
        return total


@seeded
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "cached"])
@pytest.mark.parametrize("seed", seeds(4))
def test_the_books_are_kept_whatever_becomes_of_a_request(policy: str, seed: int) -> None:
    """Failed passes, retractions, clients that leave, sessions that end at any moment, of several tenants."""
    rng = random.Random(seed)
    server = Unlucky(policy, num_pages=48, max_running=3)
    server.rng = random.Random(seed + 1)
    scheduler, aborted, asked = server.scheduler, [], []
    for number in range(250):
        if rng.random() < 0.5:
            kind, tenant = rng.randrange(7), rng.choice("xy")
            named = {"session": f"s{kind}"} if rng.random() < 0.6 else {}
            hint = {"hint": "end_of_session"} if rng.random() < 0.2 else {}
            rid = f"r{number}"
            length = rng.choice([1, 2, rng.randint(3, 150)])
            server.ask(rid, prompt_of(kind, length), rng.randint(1, 30), cache_salt=tenant, **named, **hint)
            asked.append(rid)
        if rng.random() < 0.8:
            server.step()
        if rng.random() < 0.15 and (open_ones := [*scheduler.waiting, *scheduler.running]):
            request = rng.choice(open_ones)
            scheduler.remove(request.rid)
            aborted.append(request.rid)
        if rng.random() < 0.1 and scheduler.running:
            scheduler.retract(rng.choice(scheduler.running))
        if rng.random() < 0.2:
            server.now_s += rng.random() * 5
    server.work()
    server.assert_empty()
    server.books.assert_closed()
    assert len(server.firsts) == len(set(server.firsts))
    assert sorted([*server.ended, *aborted]) == sorted(asked), "each ends once"

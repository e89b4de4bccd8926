"""The policy's books, whatever becomes of a request: each call once, in order, and nothing is kept behind it."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from hiradix.apps.engine.api import FINISH_LENGTH
from hiradix.policy.admission import AdmissionPolicy, WaitingRequest, make_admission
from tests.engine.test_turns import PAGE, TOKEN_S, Server, prompt_of
from tests.seeds import seeded, seeds


class Strict(AdmissionPolicy):
    """Hands on to a real policy what is called in the only order that is right, once each."""

    def __init__(self, real: AdmissionPolicy) -> None:
        self.real = real
        self.capacity = real.capacity
        self.name, self.reads_prices = real.name, real.reads_prices
        self.follows_sessions = real.follows_sessions
        self.state: dict[str, str] = {}
        self.running: dict[str, int] = {}
        self.session: dict[str, str] = {}
        self.now_s = 0.0

    @property
    def waiting(self) -> dict[str, WaitingRequest]:  # type: ignore[override]
        return self.real.waiting

    def _at(self, now_s: float) -> None:
        assert now_s >= self.now_s, "time goes on"
        self.now_s = now_s

    def _move(self, rid: str, before: tuple[str, ...], after: str) -> None:
        assert self.state.get(rid, "new") in before, (rid, self.state.get(rid), after)
        self.state[rid] = after

    def add(self, request: WaitingRequest) -> None:
        self._move(request.rid, ("new",), "waits")
        self._at(request.arrived_s)
        assert request.cold_price_s > 0 and request.footprint > 0
        self.session[request.rid] = request.session
        self.real.add(request)

    def start(self, rid: str, now_s: float) -> None:
        self._move(rid, ("waits",), "started")
        self._at(now_s)
        self.real.start(rid, now_s)

    def computed(self, rid: str, served_s: float) -> None:
        self._move(rid, ("started",), "answering")
        assert served_s > 0
        self.running[self.session[rid]] = self.running.get(self.session[rid], 0) + 1
        self.real.computed(rid, served_s)

    def end(self, session: str, now_s: float, stop: str = "") -> None:
        self._at(now_s)
        assert self.running[session] > 0, "no answer of it was begun"
        assert stop in ("end_turn", "tool_use", "length", "abort", "")
        self.running[session] -= 1
        self.real.end(session, now_s, stop)

    def remove(self, rid: str, now_s: float) -> None:
        self._move(rid, ("waits", "started"), "gone")
        self._at(now_s)
        self.real.remove(rid, now_s)

    def forget(self, session: str) -> None:
        assert not self.running.get(session)
        self.real.forget(session)

    def is_in(self, session: str) -> bool:
        return self.real.is_in(session)

    @property
    def num_in(self) -> int:
        return self.real.num_in

    def take_left(self) -> list[str]:
        return self.real.take_left()

    def order(self, now_s: float, prices: Mapping[str, float]) -> list[str]:
        self._at(now_s)
        assert not self.reads_prices or all(price > 0 for price in prices.values())
        assert set(prices) <= set(self.waiting)
        found = self.real.order(now_s, prices)
        assert len(found) == len(set(found)) and set(found) <= set(self.waiting)
        return found

    def assert_closed(self) -> None:
        """Nobody waits or runs."""
        assert set(self.state.values()) <= {"answering", "gone"}
        assert not any(self.running.values()) and not self.waiting


class Unlucky(Server):
    """Passes fail now and then, as they do where a load breaks off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.books = Strict(make_admission(self.policy, self.num_pages * PAGE))
        self.turns.policy = self.books
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

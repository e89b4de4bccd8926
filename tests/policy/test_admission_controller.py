"""How a scheduler's requests are told to an admission policy, and when it is asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from hiradix.policy.admission import FORGET_S, make_admission
from hiradix.policy.admission_controller import ANSWER_TOKENS, PRICE_SHARE, AdmissionController
from tests.policy.strict import Strict
from tests.seeds import seeded, seeds

RATE = 10_000.0


def controller_of(
    policy: str, capacity: int, price_s: Callable[[str], float], clock: Callable[[], float], **how: Any
) -> AdmissionController:
    how = {"is_preemptive": False} | how
    return AdmissionController(
        make_admission(policy, capacity), lambda num_tokens: num_tokens / RATE, price_s, clock, **how
    )


class World:
    """An AdmissionController with prices that a test sets."""

    def __init__(self, policy: str = "cached", capacity: int = 10_000) -> None:
        self.now_s = 0.0
        self.left: dict[str, float] = {}
        self.admission = controller_of(policy, capacity, self.left.__getitem__, lambda: self.now_s)

    def add(self, rid: str, price_s: float = 0.1, num_tokens: int = 1000, **said: object) -> None:
        self.left[rid] = price_s
        self.admission.add(rid, num_tokens, 4096, **said)  # type: ignore[arg-type]

    def serve(self, rid: str, stop: str = "", answer: int = 10) -> None:
        self.admission.start(rid)
        self.admission.first_token(rid)
        self.admission.end(rid, stop, answer)


def test_a_prompt_that_goes_on_is_of_the_session_before() -> None:
    world = World()
    world.add("a", names=[1, 2, 3, 4])
    world.add("b", names=[1, 2, 3, 4, 5])  # while `a` is at work it is another's
    second = world.admission.session_of("b")
    assert second != world.admission.session_of("a")
    world.serve("b")
    world.add("c", names=[1, 2, 3, 4, 5, 6])
    assert world.admission.session_of("c") == second


def test_a_session_that_is_named_is_its_tenants_own() -> None:
    world = World()
    world.add("a", session="x", tenant="one")
    world.add("b", session="x", tenant="two")
    world.add("c", session="x", tenant="one", names=[9])
    of = world.admission.session_of
    assert of("a") == of("c") != of("b")


def test_nobody_goes_on_with_another_tenants_prompt() -> None:
    """Found: its session was both tenants', and the scheduler ended by a KeyError when one of them had left."""
    world = World()
    world.add("a", names=[1, 2, 3, 4], tenant="one")
    first = world.admission.session_of("a")
    world.serve("a")
    for number in range(20):
        world.add(f"b{number}", names=[1, 2, 3, 4], tenant=f"two{number}")
        world.serve(f"b{number}")
    world.add("c", names=[1, 2, 3, 4, 5], tenant="one")
    world.add("d", names=[1, 2, 3, 4, 5])
    world.add("b0", tenant="one")  # its id has been another's
    of = world.admission.session_of
    assert of("c") == first != of("d")
    for rid in ("c", "d", "b0"):
        world.serve(rid)
    world.now_s += FORGET_S + 1
    world.add("e", tenant="one")
    world.admission.end("e", "abort", 0)
    assert list(world.admission.policy._tenants) == ["one"]  # type: ignore[attr-defined]


def test_a_footprint_has_the_answers_that_have_been_so_far() -> None:
    world = World()
    world.add("a", num_tokens=1000)
    assert world.admission.policy.waiting["a"].footprint == 1000 + ANSWER_TOKENS
    for number in range(60):
        world.add(f"w{number}")
        world.serve(f"w{number}", answer=16)
    world.add("b", num_tokens=1000)
    assert world.admission.policy.waiting["b"].footprint == 1016
    world.add("c", num_tokens=1000)
    assert world.admission.policy.waiting["c"].cold_price_s == 1000 / RATE


def test_an_order_is_made_again_when_something_has_happened() -> None:
    world = World("lpm")
    world.add("a", 2.0)
    world.add("b", 1.0)
    admission = world.admission
    assert admission.is_stale and admission.order() == ["b", "a"]
    world.now_s += 1
    admission._order_cost_s = 0.02  # simulated clocks see no cost
    assert not admission.is_stale
    world.now_s += 1
    assert admission.is_stale
    admission.order()
    admission.start("a")
    assert admission.is_stale and admission.order() == ["b"]
    admission.start("a")  # after a preemption
    admission.end("b", "abort", 0)
    assert admission.is_stale and admission.order() == []
    admission.first_token("a")
    admission.end("a", "length", 5)
    assert not admission._requests and not admission._active and admission.order() == []


def pricey(policy: str, num: int) -> tuple[AdmissionController, list[float], list[str]]:
    """So many wait, and to ask one's price takes 0.1 ms: with the clock, and whose price was asked."""
    now_s, asked = [0.0], list[str]()

    def price_s(rid: str) -> float:
        now_s[0] += 1e-4
        asked.append(rid)
        return 1.0

    admission = controller_of(policy, 10**9, price_s, lambda: now_s[0])
    for number in range(num):
        admission.add(f"r{number}", 100, 100)
    return admission, now_s, asked


@pytest.mark.parametrize("policy", ["cached", "lpm"])
def test_prices_of_many_that_wait_take_a_share_of_the_time(policy: str) -> None:
    """Each start has a new order made: it asks for prices of those alone that have none."""
    admission, now_s, asked = pricey(policy, 500)
    for _ in range(100):
        rid = admission.order()[0]
        admission.start(rid)
        admission.first_token(rid)
        now_s[0] += 0.01
    assert len(asked) == 500
    admission.add("late", 100, 100)
    admission.order()
    assert asked[500:] == ["late"]
    now_s[0] += 500 * 1e-4 / PRICE_SHARE
    admission.order()
    assert len(asked) == 501 + 401


def test_who_came_first_is_known_without_a_price() -> None:
    admission, _, asked = pricey("fcfs", 20)
    assert admission.order()[0] == "r0"
    admission.start("r0")
    assert admission.order()[0] == "r1" and not asked


def test_a_prefill_under_way_delays_those_that_are_due() -> None:
    """It is not interrupted: who may go before whom is decided as of when it has ended."""
    world = World(capacity=10**6)
    for rid in ("known", "due", "cheap"):
        world.add(rid, 0.1)
        world.admission.policy.waiting[rid].deadline_s = 1.0
    world.left["cheap"] = 0.01
    assert world.admission.order()[0] == "cheap"
    world.admission.start("known")
    world.left["known"] = 0.95
    assert world.admission.order() == ["due"]
    world.admission.first_token("known")
    assert world.admission.order()[0] == "cheap"


def test_no_session_is_another_tenants_whatever_its_name() -> None:
    admission = controller_of("cached", 1000, lambda rid: 1.0, lambda: 0.0)
    admission.add("one", 10, 1, tenant="a", session="b/c")
    admission.add("two", 10, 1, tenant="a/b", session="c")
    assert admission.session_of("one") != admission.session_of("two")


@seeded
@pytest.mark.parametrize("is_preemptive", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "cached"])
@pytest.mark.parametrize("seed", seeds(3))
def test_the_policy_hears_of_each_request_once_and_in_order(
    policy: str, is_preemptive: bool, seed: int
) -> None:
    """Against a list of what there is: requests that wait, run and answer, in any order, of two tenants."""
    rng, now_s, asked = random.Random(seed), [0.0], set[str]()

    def price_s(rid: str) -> float:
        asked.add(rid)
        assert rid in waiting or rid in computing, "one whose first token is there has no price"
        return rng.random() + 1e-3

    controller = controller_of(policy, 5000, price_s, lambda: now_s[0], is_preemptive=is_preemptive)
    strict = controller.policy = Strict(make_admission(policy, 5000))
    waiting, computing, answering = list[str](), list[str](), list[str]()

    def some(of: list[str]) -> str:
        return of.pop(rng.randrange(len(of)))

    for number in range(400):
        now_s[0] += rng.random()
        move = rng.randrange(8)
        if move < 3:
            rid = f"r{number}"
            said = (
                {"session": f"s{rng.randrange(9)}"} if rng.random() < 0.5 else {"names": [rng.randrange(5)]}
            )
            waiting.append(rid)
            controller.add(rid, rng.randint(1, 2000), rng.randint(1, 500), rng.choice("xy"), **said)
        elif move == 3 and computing:
            controller.served(rng.choice(computing), rng.random())
            controller.start(rng.choice(computing))  # after a preemption
        elif move == 4 and computing:
            rid = some(computing)
            controller.served(rid, 0.1)
            controller.first_token(rid)
            answering.append(rid)
        elif move == 5 and (group := rng.choice([waiting, computing, answering])):
            controller.end(some(group), rng.choice(["", "abort", "length"]), rng.randrange(9))
        elif move == 6 and answering:
            session = controller.session_of(rng.choice(answering))
            controller.forget(session)
            assert controller._active[session], "it is at work"
        elif controller.is_stale:
            order = controller.order(rng.sample(waiting, len(waiting) // 4))
            here = {*waiting, *computing} if is_preemptive else {*waiting}
            assert {*order, *controller.held(order)} == here
            ready = [rid for rid in order if rid in waiting]
            if ready:
                waiting.remove(ready[0])
                computing.append(ready[0])
                controller.start(ready[0], 0.5)
        assert len(controller) == len(waiting) + len(computing) + len(answering)
        assert all(controller.is_waiting(rid) for rid in waiting)
        assert not any(controller.is_waiting(rid) for rid in (*computing, *answering))
        assert all(rid in controller for rid in (*waiting, *computing, *answering))
    for rid in (*waiting, *computing, *answering):
        controller.end(rid, "", 1)
    strict.assert_closed()
    assert not (controller._requests or controller._active or controller._unanswered)
    assert bool(asked) == strict.reads_prices


def test_a_pace_is_learnt_from_what_service_took() -> None:
    """Prices and cold prices are in the same seconds, so that deadlines and prices compare."""
    world = World()
    controller = controller_of(
        "cached", 10**6, world.left.__getitem__, lambda: world.now_s, is_preemptive=True
    )
    world.admission = controller
    for number in range(5):
        rid = f"r{number}"
        world.add(rid, 0.1)
        controller.order()
        controller.start(rid)
        controller.served(rid, 0.15)
        controller.served(rid, 0.15)
        controller.first_token(rid)
        controller.end(rid, "", 1)
    world.add("next", 0.1, num_tokens=1000)
    assert controller.policy.waiting["next"].cold_price_s == pytest.approx(3 * 1000 / RATE)
    assert controller._prices() == pytest.approx({"next": 0.3})


def test_no_more_sessions_are_followed_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """In vLLM too: what the policy does when a request comes costs all sessions that it follows."""
    monkeypatch.setattr("hiradix.policy.admission_controller.MOST_SESSIONS", 10)
    world = World()
    for number in range(50):
        world.add(f"r{number}", session=f"s{number}")
        world.serve(f"r{number}")
        assert len(world.admission.policy._sessions) <= 10  # type: ignore[attr-defined]

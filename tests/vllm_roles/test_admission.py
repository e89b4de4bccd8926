"""What is beside vLLM's scheduler: how much of a prompt is there, and how requests are told to a policy."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hiradix.adapters.admission import ANSWER_TOKENS, PRICE_SHARE, EngineAdmission
from hiradix.adapters.vllm.residency import DevicePrefixes, IdleBlocks, QueuePrices
from hiradix.cache.pages import CacheCounters
from hiradix.policy.admission import FORGET_S, make_admission
from hiradix.policy.no_regret import NoRegret
from hiradix.policy.prices import UNMEASURED_RATE, Prices

PAGE = 4


@dataclass
class Asked:
    block_hashes: list[bytes]
    num_tokens: int
    request_id: str = "r"
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False


@dataclass
class Device:
    """The first `there` blocks are cached. asked: how often one was looked up."""

    there: int = 0
    asked: int = 0
    names: dict[bytes, int] = field(default_factory=dict)

    def has(self, name: bytes) -> bool:
        self.asked += 1
        return self.names[name] < self.there


def test_a_prefix_on_the_device_is_found_in_few_looks() -> None:
    rng = random.Random(1)
    hashes = [b"%d" % at for at in range(1000)]
    device = Device(names={name: at for at, name in enumerate(hashes)})
    prefixes = DevicePrefixes(PAGE, device.has, lambda names: names)
    asked, last = Asked(hashes, 1000 * PAGE), 0
    for _ in range(300):
        device.there, device.asked = rng.choice([device.there, rng.randrange(1001)]), 0
        same = device.there == last
        found = prefixes.find(asked, last)
        assert found == min(device.there, 999)  # the last token is computed
        assert device.asked <= (2 if same else 13)
        last = found


def test_prices_go_by_where_a_prompt_is() -> None:
    gate = NoRegret(page_size=PAGE)
    gate.computed(1, 0.4)
    prices = Prices(gate, PAGE)
    hashes = [b"%d" % at for at in range(10)]
    device = Device(3, names={name: at for at, name in enumerate(hashes)})
    queue_prices = QueuePrices(
        prices, DevicePrefixes(PAGE, device.has, lambda names: names), None, lambda: 0.0
    )
    asked = Asked(hashes, 40)
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(28))
    asked.num_computed_tokens = 36  # a prefill under way
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(4))
    asked.num_computed_tokens, asked.skip_reading_prefix_cache = 0, True
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(40))


def test_sessions_whose_blocks_are_known_are_bounded_whatever_their_prompts() -> None:
    """Found: one without a whole block was kept for ever by policies that let nobody leave."""
    idle = IdleBlocks(SimpleNamespace(num_gpu_blocks=10, free_block_queue=None, get_cached_block=None), 0)
    idle.ended("s", [b"0", b"1"])
    for number in range(1000):
        idle.ended(f"short {number}", [])
        idle.ended(f"long {number}", [b"%d" % number] * 3)
    assert len(idle._names) <= 3 and len(idle._num_users) <= 3
    idle.ended("long 999", [])
    assert "long 999" not in idle._names


class World:
    """An EngineAdmission with prices that a test sets."""

    def __init__(self, policy: str = "cached", capacity: int = 10_000) -> None:
        self.now_s = 0.0
        self.left: dict[str, float] = {}
        prices = Prices(NoRegret(page_size=PAGE), PAGE)
        policy_ = make_admission(policy, capacity)
        self.admission = EngineAdmission(policy_, prices, self.left.__getitem__, lambda: self.now_s)

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
    assert world.admission.session_of("b") == "b"
    world.serve("b")
    world.add("c", names=[1, 2, 3, 4, 5, 6])
    assert world.admission.session_of("c") == "b"


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
    world.serve("a")
    for number in range(20):
        world.add(f"b{number}", names=[1, 2, 3, 4], tenant=f"two{number}")
        world.serve(f"b{number}")
    world.add("c", names=[1, 2, 3, 4, 5], tenant="one")
    world.add("d", names=[1, 2, 3, 4, 5])
    world.add("b0", tenant="one")  # its id has been another's
    of = world.admission.session_of
    assert of("c") != of("d") == "d" and json.loads(of("c")) == ["one", None, "a"]
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
    assert world.admission.policy.waiting["c"].cold_price_s == 1000 / UNMEASURED_RATE


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


def pricey(policy: str, num: int) -> tuple[EngineAdmission, list[float], list[str]]:
    """So many wait, and to ask one's price takes 0.1 ms: with the clock, and whose price was asked."""
    now_s, asked = [0.0], list[str]()

    def price_s(rid: str) -> float:
        now_s[0] += 1e-4
        asked.append(rid)
        return 1.0

    prices = Prices(NoRegret(page_size=PAGE), PAGE)
    admission = EngineAdmission(make_admission(policy, 10**9), prices, price_s, lambda: now_s[0])
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


@dataclass
class Host:
    """A scheduler role whose host has so many pages of every prompt. looks: how often it was asked."""

    pages: int = 0
    coming: int = 0
    looks: int = 0

    def role(self) -> Any:
        def find(key: int) -> SimpleNamespace:
            self.looks += 1
            return SimpleNamespace(num_pages=min(key, self.pages))

        self.counters = CacheCounters()
        self.tracked = SimpleNamespace(key=lambda num_pages, size: num_pages)
        index = SimpleNamespace(is_open=True, page_size=PAGE, counters=self.counters, find=find)
        prefetcher = SimpleNamespace(
            fetching_pages=lambda rid: self.coming, is_done=lambda rid: not self.coming
        )
        return SimpleNamespace(
            requests={"r": self.tracked}, index=index, has_storage=True, prefetcher=prefetcher
        )


def test_the_host_is_asked_once_a_second_and_when_a_fetch_has_ended() -> None:
    gate, host, now_s = NoRegret(page_size=PAGE), Host(pages=2), [0.0]
    gate.computed(1, 10.0)
    prices, asked = Prices(gate, PAGE), Asked([], 40)
    queue_prices = QueuePrices(prices, None, host.role(), lambda: now_s[0])
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(32, 8))
    host.coming = 3  # storage has answered
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(20, 8, 12))
    host.pages, host.coming = 5, 0  # all of it has come
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(20, 20))
    assert host.looks == 2
    host.pages = 9
    host.counters.written += 1
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(20, 20)) and host.looks == 2
    now_s[0] += 1.0
    assert queue_prices.price_s(asked) == pytest.approx(prices.first_token_s(4, 36)) and host.looks == 3
    now_s[0] += 5.0  # nothing has come or gone
    queue_prices.price_s(asked)
    assert host.looks == 3
    queue_prices.forget("r")
    queue_prices.price_s(asked)
    assert host.looks == 4


def test_no_session_is_another_tenants_whatever_its_name() -> None:
    admission = EngineAdmission(
        make_admission("cached", 1000), Prices(NoRegret(), PAGE), lambda rid: 1.0, lambda: 0.0
    )
    admission.add("one", 10, 1, tenant="a", session="b/c")
    admission.add("two", 10, 1, tenant="a/b", session="c")
    assert admission.session_of("one") != admission.session_of("two")

"""`--hicache-io-backend auto` with a made-up clock: what is chosen costs at most 3 % more than the best."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.memory import KVShape, TorchTransport, make_transport
from hiradix.memory.calibrate import BUDGET_S, MAX_PAGES, CalibratedTransport, Choice, Curve, wall_timer
from hiradix.memory.pools import Pool
from hiradix.memory.transport import PageIds
from tests.memory.pool_cases import device_pool, host_pool

SHAPE = KVShape(4, 1, 8, 8, torch.bfloat16)
NUM_PAGES = 40


class Clock:
    """Seconds pass only in copies. Each `every`-th copy that it times takes fifty times as long."""

    def __init__(self, every: int = 0) -> None:
        self.now = 0.0
        self._every = every
        self._num_timed = 0

    def time(self, copy: Callable[[], None]) -> float:
        before = self.now
        copy()
        self._num_timed += 1
        disturbed = self._every and self._num_timed % self._every == 0
        return (self.now - before) * (50 if disturbed else 1)


@dataclass
class Priced:
    """A transport that copies nothing and takes `setup` + `page` x pages x share of layers seconds."""

    name: str
    setup: float
    page: float
    clock: Clock
    note: str = ""
    num_calls: int = 0
    most_pages: int = 0

    def cost(self, num_pages: int, num_layers: int = SHAPE.num_layers) -> float:
        return self.setup + self.page * num_pages * num_layers / SHAPE.num_layers

    def copy_pages(
        self, src: Pool, dst: Pool, src_pages: PageIds, dst_pages: PageIds, layers: range | None = None, /
    ) -> None:
        self.num_calls += 1
        self.most_pages = max(self.most_pages, len(src_pages))
        assert len(set(src_pages.tolist())) == len(src_pages) and src_pages.min() >= 1
        assert src_pages.max() < min(src.page_limit, dst.page_limit)
        self.clock.now += self.cost(len(src_pages), SHAPE.num_layers if layers is None else len(layers))


def calibrated(prices: list[tuple[float, float]], every: int = 0) -> CalibratedTransport:
    clock = Clock(every)
    found = [Priced(f"t{i}", *price, clock) for i, price in enumerate(prices)]
    transport = CalibratedTransport(found, TorchTransport())
    device, host = device_pool(SHAPE, NUM_PAGES, 1), host_pool(SHAPE, NUM_PAGES, "page_first", 2)
    transport.calibrate(device, host, clock.time)
    transport.pools = (device, host)  # type: ignore[attr-defined]
    return transport


def choice_of(transport: CalibratedTransport, to_host: bool = True) -> Choice:
    device, host = transport.pools  # type: ignore[attr-defined]
    choice = transport._choices.get(*((device, host) if to_host else (host, device)))
    assert choice is not None
    return choice


prices = st.tuples(st.floats(1e-7, 1e-3), st.floats(1e-8, 1e-4))


@settings(max_examples=150, deadline=None)
@given(st.lists(prices, min_size=2, max_size=4), st.integers(1, 4000), st.booleans(), st.sampled_from([1, 4]))
def test_never_worse_than_the_best_by_3_percent(
    each: list[tuple[float, float]], num_pages: int, to_host: bool, num_layers: int
) -> None:
    transport = calibrated(each)
    choice = choice_of(transport, to_host)
    costs = [own.cost(num_pages, num_layers) for own in transport.candidates]  # type: ignore[attr-defined]
    assert costs[choice.best(num_pages, num_layers)] <= 1.03 * min(costs)


def test_a_disturbed_clock_is_measured_again() -> None:
    """One in four takes much too long: the least of three tells the truth."""
    transport = calibrated([(2e-5, 1e-6), (5e-6, 4e-6)], every=4)
    picks = [choice_of(transport).best(n, 4) for n in (1, 2, 12, 30, 1000)]
    assert picks == [1, 1, 0, 0, 0]


def test_each_copy_goes_to_its_winner() -> None:
    """The first needs 20 us to begin, the second 4 us per page: they cross at five pages and more layers."""
    transport = calibrated([(2e-5, 0.0), (0.0, 4e-6)])
    device, host = transport.pools  # type: ignore[attr-defined]
    slow, fast = transport.candidates
    for num_pages, layers, winner in (
        (3, None, fast), (7, None, slow), (7, range(1), fast), (30, range(2, 3), slow), (7, range(4), slow),
    ):  # fmt: skip
        before = [slow.num_calls, fast.num_calls]  # type: ignore[attr-defined]
        pages = np.arange(1, num_pages + 1)
        transport.copy_pages(host, device, pages, pages, layers)
        after = [slow.num_calls, fast.num_calls]  # type: ignore[attr-defined]
        assert after[winner is fast] == before[winner is fast] + 1 and sum(after) == sum(before) + 1


def test_ties_go_to_the_first() -> None:
    transport = calibrated([(1.005e-5, 1e-6), (1e-5, 1e-6)])
    assert {choice_of(transport).best(n, 4) for n in (1, 10, 100)} == {0}


def test_measuring_is_bounded() -> None:
    """Sizes stop at the pool, at 256 pages, and when the time is spent."""
    transport = calibrated([(1e-6, 1e-6), (2e-6, 1e-6)])
    assert all(each.most_pages <= NUM_PAGES - 1 for each in transport.candidates)  # type: ignore[attr-defined]
    transport = calibrated([(BUDGET_S, 0.0), (BUDGET_S, 0.0)])
    assert all(each.most_pages == 1 for each in transport.candidates)  # type: ignore[attr-defined]
    assert MAX_PAGES == 256


def test_pools_that_were_not_measured_have_a_fallback() -> None:
    calls: list[str] = []

    class Fallback(TorchTransport):
        def copy_pages(self, *args: object) -> None:
            calls.append("fallback")

    transport = CalibratedTransport([TorchTransport(), TorchTransport()], Fallback())
    device, host = device_pool(SHAPE, 3, 1), host_pool(SHAPE, 3, "page_first", 2)
    transport.copy_pages(device, host, np.array([1]), np.array([1]), None)
    transport.calibrate(device, host, Clock().time)
    transport.copy_pages(device, host, np.array([1]), np.array([1]), None)
    assert calls == ["fallback"]


def test_real_transports_calibrate_and_say_what_they_chose(caplog: pytest.LogCaptureFixture) -> None:
    device, host = device_pool(SHAPE, 9, 1), host_pool(SHAPE, 9, "page_first", 2)
    transport = CalibratedTransport([TorchTransport(), TorchTransport()], TorchTransport())
    with caplog.at_level(logging.INFO, "hiradix.memory"):
        transport.calibrate(device, host)
    assert [record.getMessage().count("torch (") >= 4 for record in caplog.records] == [True, True]
    assert "to the host" in caplog.text and "to the device" in caplog.text
    assert wall_timer(torch.device("cpu"))(lambda: None) >= 0


def test_on_a_cpu_auto_is_torch_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    device, host = device_pool(SHAPE, 3, 1), host_pool(SHAPE, 3, "page_first", 2)
    before = host.buffer.clone()
    with caplog.at_level(logging.INFO, "hiradix.memory"):
        transport = make_transport("auto", "cpu", (device, host))
    assert transport.name == "torch" and host.buffer.equal(before), "nothing is measured"
    told = "--hicache-io-backend auto on cpu: torch transport, pools on CPU are copied with torch"
    assert told in caplog.text


def test_a_curve_grows_beyond_what_was_measured() -> None:
    curve = Curve((1, 2, 4), (1.0, 1.0, 3.0))
    assert [curve.at(n) for n in (1, 1.5, 2, 3, 4, 6)] == [1.0, 1.0, 1.0, 2.0, 3.0, 5.0]
    assert Curve((2,), (3.0,)).at(4) == 6.0 and Curve((4, 8), (1.0, 9.0)).at(1) == 0.0


def test_beyond_what_was_measured_noise_stays_noise() -> None:
    """Found: it grew as between the last two sizes. The search for where the winner changes puts these close
    together, where 1 % of noise is half of the difference: four times the pages cost 80 % more, or less."""
    sizes = (64, 128, 240, 256)
    for noise in ((1.01, 0.99), (0.99, 1.01)):
        curve = Curve(sizes, (64.0, 128.0, 240.0 * noise[0], 256.0 * noise[1]))
        assert curve.at(1024) == pytest.approx(1024, rel=0.03)


def test_more_pages_never_cost_less_than_were_measured() -> None:
    """Found: a first size that was disturbed had larger copies cost nothing, and so win."""
    curve = Curve((4, 8), (2.0, 1.5))
    assert curve.at(6) == 1.75 and curve.at(16) == curve.at(4000) == 1.5

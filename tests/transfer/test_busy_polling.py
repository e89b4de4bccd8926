"""A scheduler that does nothing but poll leaves the interpreter to the workers it waits for."""

from __future__ import annotations

import pytest

from hiradix.transfer import drivers
from hiradix.transfer.drivers import BREATH_S, BUSY_POLL_S, ThreadDriver
from tests.transfer.rig import Rig


class Clock:
    """Stands for the module `time`: it moves only by hand, and notes how long it was told to sleep."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(drivers, "time", clock)
    return clock


def test_asking_again_at_once_lets_workers_run(clock: Clock) -> None:
    driver = ThreadDriver()
    driver.let_run()
    assert clock.slept == [], "the first time nobody knows that it only polls"
    clock.now_s += BUSY_POLL_S / 2
    driver.let_run()
    assert clock.slept == [BREATH_S]


def test_a_scheduler_that_computes_in_between_is_not_held_up(clock: Clock) -> None:
    driver = ThreadDriver()
    for _ in range(5):
        driver.let_run()
        clock.now_s += BUSY_POLL_S * 2
    assert clock.slept == []


def test_only_a_poll_that_waits_for_jobs_lets_workers_run(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ThreadDriver] = []
    monkeypatch.setattr(ThreadDriver, "let_run", lambda self: asked.append(self))
    assert rig.controller.poll() == [] and not asked
    ticket = rig.controller.load([0], [1])
    assert rig.controller.poll() == [] and len(asked) == 1
    assert rig.controller.cancel_load(ticket)
    assert rig.controller.poll() == [] and len(asked) == 1

"""Writes that wait for a wake which is due anyway: one per step, and none that nobody starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hiradix.transfer import TWO_WORKERS, FailReason, HiCacheController, StepDriver, Ticket, TransferLimits
from hiradix.transfer import drivers as drivers_module
from hiradix.transfer.drivers import IDLE_CHECK_S, ThreadDriver
from tests.seeds import seeded, seeds
from tests.transfer.doubles import NUM_LAYERS
from tests.transfer.rig import DEADLINE_S, Blocker, Rig


class Stepped:
    """A rig whose workers step when told to; all of its threads have been started and sleep."""

    def __init__(self, seed: int = 0, **runtime: Any):
        self.driver = StepDriver(seed)
        self.rig = Rig(driver=self.driver, clock=self.driver.now, **runtime)
        self.controller = self.rig.controller
        first = self.controller.write([1], [1]), self.load()
        self.controller.start_loading()
        self.driver.run()
        assert {r.ticket for r in self.controller.poll()} == set(first)
        self.copies: list[str] = []
        self.rig.transport.before = self._note

    def _note(self, src: Any, dst: Any, s: Any, d: Any, layers: range | None) -> None:
        self.copies.append("write" if layers is None else f"load {layers.start}")

    def load(self) -> Ticket:
        return self.controller.load([5], [6])

    def results(self) -> dict[Ticket, FailReason | None]:
        return {result.ticket: result.reason for result in self.controller.poll()}


def load_and_start(c: HiCacheController) -> None:
    c.load([5], [6])
    assert c.start_loading() >= 0


def poll_twice(c: HiCacheController) -> None:
    assert c.poll() == [] and c.poll() == []


STARTS: dict[str, Callable[[HiCacheController], Any]] = {
    "a load": load_and_start,
    "a step without a load": lambda c: c.start_loading(),
    "the second poll": poll_twice,
    "a wait for other tickets": lambda c: c.wait([c.load([7], [8])], 0.0),
    "a wait for anything": lambda c: c.wait_any(0.0),
    "a write that does not wait": lambda c: c.write([3], [3]),
    "the end of storage": lambda c: c.detach(0.0),
}


@pytest.mark.parametrize("workers", [None, TWO_WORKERS], ids=["four workers", "two"])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_deferred_write_sleeps_until_something_starts_it(start: Any, workers: Any) -> None:
    at = Stepped(**({} if workers is None else {"workers": workers}))
    tickets = [at.controller.defer_write([page], [page + 20]) for page in (1, 2)]
    assert not at.driver.step(), "nobody was woken"
    start(at.controller)
    at.driver.run()
    assert at.driver.num_overslept == 0
    results = at.results()
    assert [results[ticket] for ticket in tickets] == [None, None]


def test_the_first_poll_leaves_it_to_the_load_that_may_follow() -> None:
    at = Stepped()
    at.controller.defer_write([1], [1])
    at.controller.poll()
    assert not at.driver.step()
    at.controller.defer_write([2], [2])
    at.controller.poll()
    assert at.driver.step(), "the oldest counts"


@seeded
@pytest.mark.parametrize("seed", seeds(20))
def test_the_load_that_starts_it_has_its_first_layer_first(seed: int) -> None:
    at = Stepped(seed)
    at.controller.defer_write([1], [1])
    load_and_start(at.controller)
    at.driver.run()
    assert at.copies[0] == "load 0" and sorted(at.copies)[-1] == "write"
    assert len(at.copies) == NUM_LAYERS + 1


def test_a_refused_load_starts_it() -> None:
    at = Stepped(limits=TransferLimits(gate_timeout_s=0.001, num_load_slots=1))
    at.driver.held.add("load")
    load_and_start(at.controller)
    at.controller.defer_write([1], [1])
    load_and_start(at.controller)
    at.driver.run()
    assert at.copies == ["write"] and at.driver.num_overslept == 0


def test_what_nobody_starts_starts_by_itself() -> None:
    at = Stepped()
    at.driver.advance(10 * IDLE_CHECK_S)
    begin_s = at.driver.now()
    ticket = at.controller.defer_write([1], [1])
    at.driver.run()
    assert at.results() == {ticket: None}
    assert at.driver.num_overslept == 1 and at.driver.now() < begin_s + IDLE_CHECK_S + 0.1


@pytest.mark.parametrize("is_first", [True, False])
def test_what_nobody_starts_starts_by_itself_on_threads(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    monkeypatch.setattr(drivers_module, "IDLE_CHECK_S", 0.01)
    rig = Rig()
    if not is_first:
        rig.result(rig.controller.write([1], [1]))
    done = threading.Event()
    rig.controller.wakeup = done.set
    ticket = rig.controller.defer_write([2], [2])
    assert done.wait(DEADLINE_S)
    assert [r.ticket for r in rig.controller.poll()] == [ticket]
    assert rig.controller.close(DEADLINE_S)


def test_the_load_worker_starts_it_while_it_goes_on_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is handed over when the thread that is to start it is busy."""
    monkeypatch.setattr(drivers_module, "IDLE_CHECK_S", 600.0)  # no thread looks by itself
    rig, block = Rig(), Blocker()
    rig.result(rig.controller.write([1], [1]))
    written = threading.Event()

    def watch(src: Any, dst: Any, s: Any, d: Any, layers: range | None) -> None:
        if layers is None:
            written.set()
        elif layers.start == 1:
            block()

    rig.transport.before = watch
    first = rig.controller.defer_write([2], [2])
    loads = [rig.controller.load([5], [6])]
    rig.controller.start_loading()
    assert block.entered.wait(DEADLINE_S) and written.wait(DEADLINE_S)
    written.clear()
    second = rig.controller.defer_write([3], [3])
    loads.append(rig.controller.load([7], [8]))
    rig.controller.start_loading()
    block.release.set()
    assert rig.controller.wait([first, second, *loads], DEADLINE_S)
    assert rig.controller.close(DEADLINE_S)


class Counted(ThreadDriver):
    """Counts the wakes that the scheduler thread pays for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_wakes = 0

    def wake(self, worker: Any, follower: Any = None) -> None:
        self.num_wakes += 1
        super().wake(worker, follower)


class CountedSteps(Counted):
    """Its workers step in this thread: a thread that has given its result may be awake, and look for more."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = StepDriver()

    def wake(self, worker: Any, follower: Any = None) -> None:
        self.num_wakes += 1
        self.steps.wake(worker, follower)

    def announce(self, worker: Any) -> None:
        self.steps.announce(worker)

    def stop(self, worker: Any, timeout_s: float) -> bool:
        return self.steps.stop(worker, timeout_s)

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        return self.steps.wait_for(predicate, timeout_s)

    def let_run(self, has_news: Callable[[], bool]) -> None:
        """Workers run when somebody waits."""


def test_a_step_wakes_once_whatever_ended_and_begins_in_it() -> None:
    driver = CountedSteps()
    rig = Rig(driver=driver, clock=driver.steps.now)
    c = rig.controller
    tickets = [c.write([0], [0])]
    for num_loads in (0, 1, 3, 0, 2):
        assert c.wait(tickets, DEADLINE_S)
        driver.steps.run()
        c.poll()
        tickets = [c.defer_write([page], [page]) for page in range(4)]
        driver.num_wakes = 0
        c.poll()
        tickets += [c.load([page], [page + 10]) for page in range(num_loads)]
        c.start_loading()
        assert driver.num_wakes == 1
    assert c.wait(tickets, DEADLINE_S) and c.close(DEADLINE_S)


def test_no_wake_is_spent_on_writes_that_ended_meanwhile() -> None:
    """As their worker was awake, or they were cancelled."""
    driver = Counted()
    rig, block = Rig(driver=driver), Blocker()
    rig.transport.before = lambda *args: block() and None
    rig.controller.write([1], [1])
    assert block.entered.wait(DEADLINE_S)
    rig.controller.defer_write([2], [2])
    rig.controller.cancel(rig.controller.defer_write([3], [3]))
    assert [r.reason for r in rig.controller.poll()] == [FailReason.CANCELLED]
    begin, posted = driver.num_wakes, threading.Semaphore(0)
    rig.controller.wakeup = posted.release
    block.release.set()
    assert all(posted.acquire(timeout=DEADLINE_S) for _ in range(2))
    rig.controller.start_loading()
    assert driver.num_wakes == begin
    assert rig.controller.close(DEADLINE_S)


@pytest.mark.parametrize("end", ["reset", "close"])
def test_a_reset_fails_what_has_not_begun(end: str) -> None:
    at = Stepped()
    ticket = at.controller.defer_write([1], [1])
    assert getattr(at.controller, end)(1.0)
    assert at.results() == {ticket: FailReason.RESET if end == "reset" else FailReason.CLOSED}
    assert at.controller.is_idle and at.copies == []


class Asked(ThreadDriver):
    """Notes who lets it run workers, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def let_run(self, has_news: Callable[[], bool]) -> None:
        self.num_asked += 1


def test_a_poll_does_not_wait_for_writes_that_nobody_has_started() -> None:
    driver, block = Asked(), Blocker()
    rig = Rig(driver=driver)
    rig.result(rig.controller.write([1], [1]))
    rig.transport.before = lambda *args: block() and None
    rig.controller.defer_write([2], [2])
    assert rig.controller.poll() == [] and driver.num_asked == 0
    assert rig.controller.poll() == [] and driver.num_asked == 1, "it has begun, or is about to"
    block.release.set()
    assert rig.controller.close(DEADLINE_S)

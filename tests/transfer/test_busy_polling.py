"""A scheduler that does nothing but poll leaves the interpreter to the workers it waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from hiradix.transfer import drivers
from hiradix.transfer.drivers import BREATH_S, BUSY_POLL_S, ThreadDriver
from hiradix.transfer.worker import Worker, WorkerContext
from tests.transfer.rig import Rig


class Clock:
    """Moves only by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Watched(ThreadDriver):
    """Notes how long it waited at most, instead of waiting."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock.monotonic)
        self.waited: list[float] = []

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        return predicate()


def no_news() -> bool:
    return False


def test_asking_again_at_once_lets_workers_run() -> None:
    clock = Clock()
    driver = Watched(clock)
    driver.let_run(no_news)
    assert driver.waited == [], "the first time nobody knows that it only polls"
    clock.now_s += BUSY_POLL_S / 2
    driver.let_run(no_news)
    assert driver.waited == [BREATH_S]


def test_a_scheduler_that_computes_in_between_is_not_held_up() -> None:
    clock = Clock()
    driver = Watched(clock)
    for _ in range(5):
        driver.let_run(no_news)
        clock.now_s += BUSY_POLL_S * 2
    assert driver.waited == []


def test_a_result_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a breath of ten minutes: it is the result that ends it."""
    monkeypatch.setattr(drivers, "BREATH_S", 600.0)
    monkeypatch.setattr(drivers, "BUSY_POLL_S", 600.0)
    driver, news = ThreadDriver(), threading.Event()
    driver.let_run(news.is_set)

    def tell() -> None:
        news.set()
        driver.notify()

    timer = threading.Timer(0.01, tell)
    timer.start()
    driver.let_run(news.is_set)
    assert news.is_set()
    timer.join()


class Asked(ThreadDriver):
    """Notes who lets it run workers, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.news: list[Callable[[], bool]] = []

    def let_run(self, has_news: Callable[[], bool]) -> None:
        self.news.append(has_news)


def test_only_a_poll_that_waits_for_jobs_lets_workers_run() -> None:
    driver = Asked()
    rig, asked = Rig(driver=driver), driver.news
    assert rig.controller.poll() == [] and not asked
    ticket = rig.controller.load([0], [1])
    assert rig.controller.poll() == [] and len(asked) == 1
    assert rig.controller.cancel_load(ticket)
    assert rig.controller.poll() == [] and len(asked) == 1


def idle_worker() -> Worker:
    """A worker that has nothing to do."""
    context = WorkerContext({}, lambda task, error: None, lambda: None, threading.Lock(), time.monotonic)
    return Worker("idle", (), context)


@pytest.mark.parametrize("is_same_id", [False, True])
def test_threads_of_workers_that_are_gone_are_forgotten(is_same_id: bool) -> None:
    """Also that of one whose id() the next worker got: it has ended, or is about to."""
    driver, worker = ThreadDriver(), idle_worker()
    gone = drivers._WorkerThread(idle_worker())
    assert gone.worker() is None, "nothing but this line had it"
    driver._threads[id(worker) if is_same_id else 0] = gone
    driver.wake(worker)
    assert gone not in driver._threads.values() and len(driver._threads) == 1
    assert driver.stop(worker, 30.0) and gone.stop(30.0)

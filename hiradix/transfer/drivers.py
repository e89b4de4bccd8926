"""Drivers that run the workers: threads in production, one seeded thread in simulations. Same workers, same
code."""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from hiradix.transfer.worker import Worker
from hiradix.tree.native import mypyc_attr

BUSY_POLL_S = 500e-6  # a scheduler that asks again sooner than that computes nothing in between
BREATH_S = 200e-6  # what it then leaves to the workers: they need the interpreter between their system calls
IDLE_CHECK_S = 1.0  # how often an idle thread looks for work, and whether its controller still exists


@mypyc_attr(allow_interpreted_subclasses=True)
class Driver:
    """Runs workers, and lets the scheduler thread wait for what they do."""

    def wake(self, worker: Worker, follower: Worker | None = None) -> None:
        """There may be work for `worker`; and for `follower`, which is woken after the worker's next step."""
        raise NotImplementedError

    def announce(self, worker: Worker) -> None:
        """There is work for `worker` that may wait for its next `wake`, or for `IDLE_CHECK_S`."""
        raise NotImplementedError

    def stop(self, worker: Worker, timeout_s: float) -> bool:
        """Run the worker no more; False if it is still inside a step at the deadline."""
        raise NotImplementedError

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Block until `predicate` holds (checked after each `notify`) or the deadline; its last value."""
        raise NotImplementedError

    def notify(self) -> None:
        """Something changed that somebody may wait for."""
        raise NotImplementedError

    def let_run(self, has_news: Callable[[], bool]) -> None:
        """The scheduler found no result of jobs under way: if it does nothing but ask, let workers go on."""
        raise NotImplementedError


class _WorkerThread:
    """One daemon thread. It holds its worker weakly, so a forgotten controller ends its threads."""

    def __init__(self, worker: Worker):
        self.worker = weakref.ref(worker)
        self._work: SimpleQueue[None] = SimpleQueue()  # holds something: there may be work
        self._followers: deque[_WorkerThread] = deque()  # to be woken from here
        self._stopping = False
        self.num_loop_errors = 0
        self.thread = threading.Thread(target=self._loop, name=f"hiradix-{worker.name}", daemon=True)
        self.thread.start()

    def wake(self, follower: _WorkerThread | None = None) -> None:
        if follower is not None:
            self._followers.append(follower)  # first: the thread looks at its queue, then here
        if self._work.empty():
            self._work.put(None)

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end after its present step; True if it did within the deadline."""
        self._stopping = True
        self._work.put(None)
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _loop(self) -> None:
        while not self._stopping:
            with suppress(Empty):
                self._work.get(timeout=IDLE_CHECK_S)
            worker = self.worker()
            if worker is None:
                return
            while self._step(worker):  # also when stopping: what is left was told to end
                self._wake_followers()
            self._wake_followers()
            del worker

    def _wake_followers(self) -> None:
        """Wake the workers that wait for this one, after its step: what it was woken for itself goes first."""
        while self._followers:
            self._followers.popleft().wake()

    def _step(self, worker: Worker) -> bool:
        try:
            return worker.step()
        except BaseException:  # the thread is ours and must outlive whatever a backend raises
            self.num_loop_errors += 1
            return True


@mypyc_attr(allow_interpreted_subclasses=True)
class ThreadDriver(Driver):
    """One daemon thread per worker, started with its first job."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._threads: dict[int, _WorkerThread] = {}  # by the worker's id(), which another may get after it
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._asked_s = 0.0

    @property
    def num_loop_errors(self) -> int:
        """Exceptions that reached a thread's loop; the loops went on."""
        return sum(t.num_loop_errors for t in self._threads.values())

    def wake(self, worker: Worker, follower: Worker | None = None) -> None:
        """There may be work for `worker`; and for `follower`, which the worker's thread wakes after its next
        step: to wake a thread that sleeps takes several microseconds. Scheduler thread only."""
        self._thread_of(worker).wake(None if follower is None else self._thread_of(follower))

    def announce(self, worker: Worker) -> None:
        """There is work for `worker` that may wait for its next `wake`, or for `IDLE_CHECK_S`."""
        thread = self._threads.get(id(worker))
        if thread is None or thread.worker() is not worker:
            self.wake(worker)

    def _thread_of(self, worker: Worker) -> _WorkerThread:
        """The worker's thread, started now if it has none."""
        thread = self._threads.get(id(worker))
        if thread is None or thread.worker() is not worker:
            gone = [number for number, thread in self._threads.items() if thread.worker() is None]
            for number in gone:
                del self._threads[number]
            self._threads[id(worker)] = thread = _WorkerThread(worker)
        return thread

    def stop(self, worker: Worker, timeout_s: float) -> bool:
        """End the worker's thread; False if it is still inside a step at the deadline."""
        thread = self._threads.get(id(worker))
        return thread is None or thread.worker() is not worker or thread.stop(timeout_s)

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Block until `predicate` holds (checked after each `notify`) or the deadline; its last value."""
        if predicate():
            return True
        with self._changed:
            self._num_waiting += 1
            try:
                return self._changed.wait_for(predicate, timeout_s)
            finally:
                self._num_waiting -= 1

    def notify(self) -> None:
        """Something changed. A waiter counts itself before it checks, so the unlocked read is safe."""
        if self._num_waiting:
            with self._changed:
                self._changed.notify_all()

    def let_run(self, has_news: Callable[[], bool]) -> None:
        """The scheduler found no result of jobs under way: if it does nothing but ask, let workers go on.

        Until `has_news`, for `BREATH_S` at most: every look at the outbox takes the interpreter from them.
        """
        if self._clock() - self._asked_s < BUSY_POLL_S:
            self.wait_for(has_news, BREATH_S)
        self._asked_s = self._clock()


class StepDriver(Driver):
    """Runs workers one step at a time in one thread; the seed chooses who is next and how long it takes.

    It is also the clock: `now()` is virtual seconds and moves only with steps and waits. As threads do, a
    worker that finds nothing to do sleeps until it is woken, or for `IDLE_CHECK_S`. num_overslept: how often
    that was what it took, with work there.
    """

    def __init__(self, seed: int = 0, max_step_s: float = 0.01):
        self._random = random.Random(seed)
        self._max_step_s = max_step_s
        self._workers: dict[str, Worker] = {}
        self._alarms: dict[str, float] = {}  # of workers that sleep: when they look round
        self._followers: dict[str, list[Worker]] = {}
        self._now_s = 0.0
        self.num_overslept = 0
        self.held: set[str] = set()  # names of workers that make no progress: a hang

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let virtual time pass: what somebody else than a worker takes."""
        self._now_s += seconds

    def wake(self, worker: Worker, follower: Worker | None = None) -> None:
        self._workers[worker.name] = worker
        self._alarms.pop(worker.name, None)
        if follower is not None:
            self._followers.setdefault(worker.name, []).append(follower)

    def announce(self, worker: Worker) -> None:
        if worker.name not in self._workers:
            self.wake(worker)
        elif self._alarms.get(worker.name, math.inf) <= self._now_s:
            self._alarms[worker.name] = self._now_s + IDLE_CHECK_S

    def stop(self, worker: Worker, timeout_s: float) -> bool:
        """Forget the worker; False, after the virtual deadline, if it is held with work in hand."""
        if worker.name in self.held and worker.has_work:
            self._now_s += timeout_s
            return False
        self._workers.pop(worker.name, None)
        self._alarms.pop(worker.name, None)
        return True

    def step(self) -> bool:
        """Let one worker, chosen by the seed, do one step; False if none can."""
        ready = self._ready()
        if not ready:
            return False
        self._now_s += self._random.random() * self._max_step_s
        worker = self._random.choice(ready)
        done = worker.step()
        self._wake_followers(worker.name)
        self._fall_asleep()
        return done

    def _ready(self) -> list[Worker]:
        """The workers that are awake and have work."""
        self._fall_asleep()
        return [worker for name, worker in self._with_work() if name not in self._alarms]

    def _fall_asleep(self) -> None:
        for name, worker in sorted(self._workers.items()):
            if name not in self.held and name not in self._alarms and not worker.has_work:
                self._alarms[name] = self._now_s + IDLE_CHECK_S
                self._wake_followers(name)

    def _with_work(self) -> list[tuple[str, Worker]]:
        return [(n, w) for n, w in sorted(self._workers.items()) if n not in self.held and w.has_work]

    def _wake_followers(self, name: str) -> None:
        for follower in self._followers.pop(name, ()):
            self.wake(follower)

    def _look_round(self, until_s: float = math.inf) -> bool:
        """Nobody who is awake has work: let time pass until somebody who sleeps looks and finds some."""
        alarm_s, name = min(
            ((self._alarms[n], n) for n, _ in self._with_work() if n in self._alarms),
            default=(math.inf, ""),
        )
        if alarm_s == math.inf or alarm_s > until_s:
            return False
        self._now_s = max(self._now_s, alarm_s)
        self.num_overslept += 1
        del self._alarms[name]
        return True

    def run(self, max_steps: int = 1_000_000) -> int:
        """Step until nothing is left to do; the number of steps taken."""
        for num_steps in range(max_steps):
            if not self.step() and not self._look_round():
                return num_steps
        raise AssertionError(f"workers still busy after {max_steps} steps")

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Step until `predicate` holds or virtual time runs out; its last value."""
        deadline_s = self._now_s + timeout_s
        while not predicate():
            if self._now_s >= deadline_s:
                return False
            if not self.step() and not self._look_round(deadline_s):
                self._now_s = deadline_s
        return True

    def notify(self) -> None:
        """Nobody waits in a simulation."""

    def let_run(self, has_news: Callable[[], bool]) -> None:
        """Workers run when the simulation says so."""


def monotonic() -> float:
    """The production clock."""
    return time.monotonic()

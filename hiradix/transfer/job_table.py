"""The table of open tickets, and the one place that ensures "exactly one Result": tickets are handed out
here, and results come in here.

A ticket is open from its submission until its Result is in the outbox. `finish` closes tickets under the
lock and ignores those that are closed already, so a job that returns after `abandon` says nothing twice.

A deferred task is in its queue at once, in its place; only the wake of its worker waits, for the next load,
which its worker's thread then passes on: so that the scheduler wakes one thread in a step. Where no load
comes, the second `poll` after it wakes: the first may be that of a step that is about to load. Whoever waits
for results, and `release`, wake at once; and a thread that nobody wakes looks by itself (`Driver.announce`).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from hiradix.errors import Misuse, described
from hiradix.transfer.counters import TransferCounters
from hiradix.transfer.drivers import Driver
from hiradix.transfer.jobs import FailReason, JobKind, Result, Ticket
from hiradix.transfer.protocols import Clock
from hiradix.transfer.runtime import Runtime
from hiradix.transfer.worker import JobQueue, Steps, Stopped, Task, Worker, WorkerContext


class JobTable:
    """Job queues and their workers, open tickets and the outbox.

    jobs: how each kind of job is done. on_load_end(task, error): called before a load's results are posted,
    on the posting thread; wakeup(): called after any.
    """

    def __init__(
        self,
        runtime: Runtime,
        jobs: Mapping[JobKind, Steps],
        on_load_end: Callable[[Task, str | None], None],
    ):
        self.lock = threading.Lock()  # guards what workers do to _open, and a task's way from queue to active
        self.job_queues = {kind: JobQueue(kind) for kind in JobKind}
        self.counters = TransferCounters(self.lock)
        self.wakeup: Callable[[], None] | None = None
        self._on_load_end = on_load_end
        self._driver: Driver = runtime.driver
        self._clock: Clock = runtime.clock
        self._tickets = itertools.count()
        self._open: dict[Ticket, Task | None] = {}  # None: submitted, but no task yet (a load not started)
        self._pending = dict.fromkeys(JobKind, 0)
        self._outbox: deque[Result] = deque()
        self._num_deferred = 0  # tasks whose worker was not woken for them
        self._num_polls = 0  # since the first of those
        self.workers = self._make_workers(runtime, jobs)

    def _make_workers(self, runtime: Runtime, jobs: Mapping[JobKind, Steps]) -> dict[JobKind, Worker]:
        context = WorkerContext(jobs, self.finish, runtime.driver.notify, self.lock, runtime.clock)
        workers: dict[JobKind, Worker] = {}
        for name, kinds in runtime.workers.items():
            job_queues = [self.job_queues[kind] for kind in kinds]
            workers.update(dict.fromkeys(kinds, Worker(name, job_queues, context)))
        if set(workers) != set(JobKind):
            raise Misuse(f"workers for {list(workers)} only")
        return workers

    # -- in -----------------------------------------------------------------------------

    def new_ticket(self, kind: JobKind) -> Ticket:
        """Open a ticket. From here on it gets a Result, or is withdrawn."""
        ticket = Ticket(next(self._tickets))
        self._pending[kind] += 1
        self._open[ticket] = None
        return ticket

    def withdraw(self, ticket: Ticket, kind: JobKind) -> None:
        """Close a ticket that has no task, without a Result."""
        with self.lock:
            task = self._open.pop(ticket)
        if task is not None:
            raise Misuse(f"ticket {ticket} has a task")
        self._pending[kind] -= 1

    def take_for_granted(self, kind: JobKind, num_pages: int, epoch: int) -> Ticket:
        """A ticket whose Result, all pages done and no bytes moved, is there already."""
        ticket = self.new_ticket(kind)
        self._post(Result(ticket, kind, num_pages, epoch=epoch))
        if self.wakeup is not None:
            self.wakeup()
        return ticket

    def submit(self, task: Task, refused: FailReason | None) -> None:
        """Queue the task for its worker; or, if `refused`, post its failed results at once."""
        if self._queue(task, refused):
            self._driver.wake(self.workers[task.kind])

    def submit_load(self, task: Task, refused: FailReason | None) -> None:
        """`submit`, and have the load worker's thread wake that of deferred writes."""
        if not self._queue(task, refused):
            self.release()
            return
        worker, writer = self.workers[JobKind.LOAD], self.workers[JobKind.WRITE]
        self._driver.wake(worker, writer if self._taken() and writer is not worker else None)

    def defer_write(self, task: Task, refused: FailReason | None) -> None:
        """`submit`, but the worker sleeps on until `submit_load`, or as the module's docstring says."""
        if not self._queue(task, refused):
            return
        if not self._num_deferred:
            self._num_polls = 0
        self._num_deferred += 1
        self._driver.announce(self.workers[JobKind.WRITE])

    def release(self) -> None:
        """Wake the worker of deferred writes, if there are any."""
        if self._taken():
            self._driver.wake(self.workers[JobKind.WRITE])

    def _taken(self) -> bool:
        """Whether a wake is due for deferred writes, which the caller then sees to. Not for those that began
        by themselves, as their worker was awake."""
        num_deferred, self._num_deferred = self._num_deferred, 0
        return num_deferred > 0 and len(self.job_queues[JobKind.WRITE].waiting) > 0

    def _queue(self, task: Task, refused: FailReason | None) -> bool:
        """Open the tickets, then queue the task: each is one step of a dict or a deque, and workers see the
        task with its tickets open. So this takes no lock."""
        opened = self._open
        opened[task.ticket] = task
        for part in task.parts:
            opened[part.ticket] = task
        if refused is None:
            self.job_queues[task.kind].waiting.append(task)
            return True
        self.finish(task, Stopped(refused))
        return False

    def cancel(self, ticket: Ticket, reason: FailReason) -> None:
        """Post a queued job's failed result now; ask a running one to end after its batch."""
        task = self._open.get(ticket)
        if task is None:
            return
        with self.lock:
            queue = self.job_queues[task.kind].waiting
            was_queued = task in queue
            if was_queued:
                queue.remove(task)
            task.stop = reason
        if was_queued:
            self.finish(task, Stopped(reason))

    def stop_all(self, kinds: Iterable[JobKind], reason: FailReason) -> None:
        """Fail all queued jobs of these kinds and ask the running ones to end."""
        unstarted: list[Task] = []
        with self.lock:
            for kind in kinds:
                job_queue = self.job_queues[kind]
                unstarted.extend(job_queue.waiting)
                job_queue.waiting.clear()
                if job_queue.active is not None:
                    job_queue.active.stop = reason
        for task in unstarted:
            self.finish(task, Stopped(reason))

    def abandon_running(self) -> None:
        """Post failed results for jobs that do not come back."""
        for job_queue in self.job_queues.values():
            task = job_queue.active
            if task is not None:
                self.finish(task, Stopped(FailReason.ABANDONED))

    # -- out ----------------------------------------------------------------------------

    def finish(self, task: Task, error: BaseException | None) -> None:
        """Close the task's tickets and post their results. From a worker, or from the scheduler thread."""
        kind, done, asked = task.kind, task.num_pages, task.num_asked
        reason = text = None
        if error is not None:
            reason, text = reason_of(kind, error), describe(error)
        if kind is JobKind.LOAD:
            self._on_load_end(task, text)
        duration_s = 0.0 if task.started_s is None else self._clock() - task.started_s
        hashes, epoch = task.hashes, task.epoch
        if task.parts:
            for ticket, num_pages, num_bytes in task.parts:
                own = (num_pages, num_bytes) if done == asked else (0, 0)
                self._post(Result(ticket, kind, own[0], hashes, text, reason, duration_s, own[1], epoch))
        else:
            num_bytes = task.num_bytes * done // asked if asked else 0
            self._post(
                Result(
                    task.ticket, kind, done, hashes, text, reason, duration_s, num_bytes, epoch,
                    damaged_end=task.damaged_end,
                )
            )  # fmt: skip
        if self.wakeup is not None:
            self.wakeup()

    def _post(self, result: Result) -> None:
        with self.lock:
            if result.ticket in self._open:
                del self._open[result.ticket]
                self._outbox.append(result)
                self.counters.add(result)

    def poll(self, limit: int | None) -> list[Result]:
        """The oldest `limit` results."""
        outbox = self._outbox
        if self._num_deferred:
            self._num_polls += 1
            if self._num_polls > 1:
                self.release()
        if not outbox:
            if len(self._open) > self._num_deferred:
                self._driver.let_run(self._has_results)
            return []
        count = len(outbox) if limit is None else min(limit, len(outbox))
        results = [outbox.popleft() for _ in range(count)]
        for result in results:
            self._pending[result.kind] -= 1
        return results

    def wait(self, tickets: Iterable[Ticket], timeout_s: float) -> bool:
        """Block until none of the tickets is open."""
        waiting = list(tickets)
        self.release()
        return self._driver.wait_for(lambda: not any(t in self._open for t in waiting), timeout_s)

    def wait_any(self, timeout_s: float) -> bool:
        """Block until the outbox has something."""
        self.release()
        return self._driver.wait_for(self._has_results, timeout_s)

    def _has_results(self) -> bool:
        return bool(self._outbox)

    def wait_quiet(self, kinds: Iterable[JobKind], timeout_s: float) -> bool:
        """Block until no job of these kinds is queued or running."""
        job_queues = [self.job_queues[kind] for kind in kinds]
        self.release()
        return self._driver.wait_for(lambda: all(job_queue.is_quiet for job_queue in job_queues), timeout_s)

    def unfinished(self) -> list[Task]:
        """Tasks that are queued, or that a worker has begun and may still be busy with."""
        with self.lock:
            active = [queue.active for queue in self.job_queues.values() if queue.active is not None]
            return active + [task for queue in self.job_queues.values() for task in queue.waiting]

    def pending(self, kind: JobKind) -> int:
        """Tickets whose Result has not been polled."""
        return self._pending[kind]


def reason_of(kind: JobKind, error: BaseException) -> FailReason:
    """The counter an error belongs to."""
    if isinstance(error, Stopped):
        return error.reason
    if isinstance(error, AssertionError):
        return FailReason.BUG
    return FailReason.COPY if kind in (JobKind.WRITE, JobKind.LOAD) else FailReason.BACKEND


def describe(error: BaseException) -> str:
    """The reason why a job ended, in one short line."""
    return error.reason.value if isinstance(error, Stopped) else described(error)

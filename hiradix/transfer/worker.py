"""A worker: queues of jobs, one bounded step at a time. Knows nothing of threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hiradix.errors import Misuse
from hiradix.transfer.jobs import FailReason, JobKind, Payload, Ticket
from hiradix.transfer.protocols import Clock
from hiradix.tree.native import mypyc_attr


class Stopped(Exception):
    """A job ends early because it was told to."""

    def __init__(self, reason: FailReason):
        super().__init__(reason.value)
        self.reason = reason


Size = tuple[int, int]  # pages, bytes


class LoadPart(NamedTuple):
    """One of several loads that were started together."""

    ticket: Ticket
    num_pages: int
    num_bytes: int


class Task:
    """One order to a worker, and how far it is. The worker writes the progress, the scheduler thread `stop`.

    ticket: whose Result it is; with `parts`, of loads that were started together, theirs are. num_asked,
    num_bytes: pages and bytes of all of it. after: what its copies must wait for on the device (an event of
    the compute stream), or None. num_pages, hashes: what is done. damaged_end: as of a Result.
    """

    __slots__ = (
        "after", "damaged_end", "epoch", "hashes", "kind", "num_asked", "num_bytes", "num_pages", "parts",
        "payload", "started_s", "stop", "ticket",
    )  # fmt: skip

    def __init__(
        self, kind: JobKind, ticket: Ticket, size: Size, payload: Payload, epoch: int, after: object = None,
        parts: Sequence[LoadPart] = (),
    ):  # fmt: skip
        self.kind = kind
        self.ticket = ticket
        self.num_asked, self.num_bytes = size
        self.payload = payload
        self.epoch = epoch
        self.after = after
        self.parts = parts
        self.stop: FailReason | None = None
        self.num_pages = self.damaged_end = 0
        self.hashes: tuple[bytes, ...] = ()
        self.started_s: float | None = None

    def check(self) -> None:
        """Raise Stopped if the job was cancelled; called between batches."""
        if self.stop is not None:
            raise Stopped(self.stop)


Steps = Callable[[Task], Iterator[None]]
"""A job's work: each `next` is one bounded piece of it."""


class JobQueue:
    """The FIFO of one job kind and the one job of it that is running."""

    __slots__ = ("active", "kind", "waiting", "steps")

    def __init__(self, kind: JobKind):
        self.kind = kind
        self.waiting: deque[Task] = deque()
        self.active: Task | None = None
        self.steps: Iterator[None] | None = None

    @property
    def is_quiet(self) -> bool:
        return self.active is None and not self.waiting


@dataclass(frozen=True)
class WorkerContext:
    """The callbacks of a worker: `jobs` gives a job's steps, `finish` posts its results, `ended` follows when
    the queue is free again. `lock` guards the passage of a task from a queue to `active`."""

    jobs: Mapping[JobKind, Steps]
    finish: Callable[[Task, BaseException | None], None]
    ended: Callable[[], None]
    lock: threading.Lock
    clock: Clock


@mypyc_attr(native_class=False)  # the drivers hold it weakly
class Worker:
    """Serves its queues in order of priority; a job of a more urgent queue goes between two steps of a less
    urgent one.
    """

    def __init__(self, name: str, job_queues: Sequence[JobQueue], context: WorkerContext):
        self.name = name
        self.job_queues = tuple(job_queues)
        self._context = context

    @property
    def has_work(self) -> bool:
        return any(not job_queue.is_quiet for job_queue in self.job_queues)

    def step(self) -> bool:
        """Do one step of the most urgent queue that has work; False if none has."""
        for job_queue in self.job_queues:
            if job_queue.active is not None or self._begin(job_queue):
                self._advance(job_queue)
                return True
        return False

    def _begin(self, job_queue: JobQueue) -> bool:
        with self._context.lock:
            if not job_queue.waiting:
                return False
            task = job_queue.waiting.popleft()
            job_queue.active = task
        task.started_s = self._context.clock()
        return True

    def _advance(self, job_queue: JobQueue) -> None:
        task = job_queue.active
        if task is None:
            raise Misuse(f"a step of {job_queue.kind.value}, of which no job is active")
        try:
            if job_queue.steps is None:
                job_queue.steps = self._context.jobs[job_queue.kind](task)
            next(job_queue.steps)
        except StopIteration:
            self._end(job_queue, None)
        except Exception as error:  # whatever a backend raises is a failed job
            self._end(job_queue, error)
        except BaseException as error:
            self._end(job_queue, error)
            raise

    def _end(self, job_queue: JobQueue, error: BaseException | None) -> None:
        task = job_queue.active
        if task is None:
            raise Misuse(f"the end of {job_queue.kind.value}, of which no job is active")
        try:
            self._context.finish(task, error)
        finally:
            job_queue.steps = None
            job_queue.active = None
            self._context.ended()

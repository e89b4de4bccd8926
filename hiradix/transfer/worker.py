"""A worker: lanes of jobs, one bounded step at a time. Knows nothing of threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hiradix.transfer.jobs import FailReason, Job, JobKind
from hiradix.transfer.ports import Clock
from hiradix.tree.native import mypyc_attr


class Stopped(Exception):
    """A job ends early because it was told to."""

    def __init__(self, reason: FailReason):
        super().__init__(reason.value)
        self.reason = reason


class BadAnswer(Exception):
    """A storage backend returned something that is no answer."""


class Task:
    """A job on its way. The worker writes the progress, the scheduler thread `stop`."""

    __slots__ = ("hashes", "job", "num_pages", "started_s", "stop")

    def __init__(self, job: Job):
        self.job = job
        self.stop: FailReason | None = None
        self.num_pages = 0
        self.hashes: tuple[bytes, ...] = ()
        self.started_s: float | None = None

    def check(self) -> None:
        """Raise Stopped if the job was cancelled; called between batches."""
        if self.stop is not None:
            raise Stopped(self.stop)


Steps = Callable[[Task], Iterator[None]]
"""A job's work: each `next` is one bounded piece of it."""


class Lane:
    """The FIFO of one job kind and the one job of it that is running."""

    __slots__ = ("active", "kind", "queue", "steps")

    def __init__(self, kind: JobKind):
        self.kind = kind
        self.queue: deque[Task] = deque()
        self.active: Task | None = None
        self.steps: Iterator[None] | None = None

    @property
    def is_quiet(self) -> bool:
        return self.active is None and not self.queue


@dataclass(frozen=True)
class Crew:
    """What a worker calls: `jobs` gives a job's steps, `finish` posts its results, `ended` follows when the
    lane is free again. `lock` guards the passage of a task from a lane's queue to `active`."""

    jobs: Mapping[JobKind, Steps]
    finish: Callable[[Task, BaseException | None], None]
    ended: Callable[[], None]
    lock: threading.Lock
    clock: Clock


@mypyc_attr(native_class=False)  # the drivers hold it weakly
class Worker:
    """Serves its lanes in order of priority; a job of a higher lane goes between two steps of a lower one."""

    def __init__(self, name: str, lanes: Sequence[Lane], crew: Crew):
        self.name = name
        self.lanes = tuple(lanes)
        self._crew = crew

    @property
    def has_work(self) -> bool:
        return any(not lane.is_quiet for lane in self.lanes)

    def step(self) -> bool:
        """Do one step of the most urgent lane that has work; False if none has."""
        for lane in self.lanes:
            if lane.active is not None or self._begin(lane):
                self._advance(lane)
                return True
        return False

    def _begin(self, lane: Lane) -> bool:
        with self._crew.lock:
            if not lane.queue:
                return False
            task = lane.queue.popleft()
            lane.active = task
        task.started_s = self._crew.clock()
        return True

    def _advance(self, lane: Lane) -> None:
        assert lane.active is not None
        try:
            if lane.steps is None:
                lane.steps = self._crew.jobs[lane.kind](lane.active)
            next(lane.steps)
        except StopIteration:
            self._end(lane, None)
        except Exception as error:  # whatever a backend raises is a failed job
            self._end(lane, error)
        except BaseException as error:
            self._end(lane, error)
            raise

    def _end(self, lane: Lane, error: BaseException | None) -> None:
        task = lane.active
        assert task is not None
        try:
            self._crew.finish(task, error)
        finally:
            lane.steps = None
            lane.active = None
            self._crew.ended()

"""A few worker threads, each with its own staging memory, so that a caller can walk away from a hung call.

A call thread is a daemon thread with a staging buffer. Backends only ever see staging memory: when a caller
gives up, the call thread stays out of the pool until the call ends, so a late read or write can touch
nobody's pages. That is what the copy between staging and pages buys; it runs at memory speed and outside the
interpreter lock.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import numpy as np

from hiradix.errors import StorageError
from hiradix.os_memory import staging_memory
from hiradix.storage.protocol import Page

T = TypeVar("T")


class CallTimeout(Exception):
    """The call did not end in time; its call thread is gone until it does."""


class NoFreeThread(Exception):
    """No worker came free in time."""


class OthersBusy(NoFreeThread):
    """No worker came free in time, and none was abandoned in a call of this kind: it says nothing of it."""


class _Call:
    def __init__(self, work: Callable[[], Any]):
        self.work = work
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.abandoned = False
        self.value: Any = None
        self.error: Exception | None = None


class CallThread:
    """One worker thread and its staging memory. Used by one caller at a time."""

    def __init__(
        self,
        on_return: Callable[[CallThread], None],
        on_abandon: Callable[[CallThread], None] = lambda thread: None,
    ):
        self._on_return, self._on_abandon = on_return, on_abandon
        self._inbox: SimpleQueue[_Call | None] = SimpleQueue()
        self._memory = [memoryview(b""), memoryview(b"")]
        self.kind: Hashable = None  # of the call that it is in; read when that is abandoned and ends late
        threading.Thread(target=self._work, name="hiradix-storage", daemon=True).start()

    def staging(self, num_bytes: int, which: int = 0) -> memoryview:
        """`num_bytes` of page-aligned memory of the call thread, which has two such areas; contents are left
        from earlier."""
        if len(self._memory[which]) < num_bytes:
            self._memory[which] = staging_memory(num_bytes)
        return self._memory[which][:num_bytes]

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """Run `work` on the thread; returns or raises what it does. CallTimeout: the call thread is no longer
        the caller's."""
        return cast(T, self.finish(self.start(work), timeout_s))

    def start(self, work: Callable[[], Any]) -> _Call:
        """Begin `work` on the thread. `finish` is to be called before the call thread is given back."""
        call = _Call(work)
        self._inbox.put(call)
        return call

    def finish(self, call: _Call, timeout_s: float) -> Any:
        """Wait for a call: `run`'s second half."""
        call.ended.wait(max(0.0, timeout_s))
        with call.lock:
            if not call.ended.is_set():
                call.abandoned = True
                self._on_abandon(self)  # before it can end late, and be another caller's with another kind
                raise CallTimeout(f"no answer within {timeout_s:.3f} s")
        if call.error is not None:
            raise call.error
        return call.value

    def stop(self) -> None:
        """End the thread once it is idle."""
        self._inbox.put(None)

    def _work(self) -> None:
        while (call := self._inbox.get()) is not None:
            try:
                call.value = call.work()
            except CallTimeout as error:  # the work's own: the call thread is not abandoned
                call.error = StorageError(f"{type(error).__name__}: {error}")
            except Exception as error:  # the caller's to handle
                call.error = error
            except (
                BaseException
            ) as error:  # a worker is no place to exit from, and its caller must hear of it
                call.error = StorageError(f"{type(error).__name__}: {error}")
            with call.lock:
                call.ended.set()
                abandoned = call.abandoned
            del call
            if abandoned:
                self._on_return(self)


class AbandonedThreads:
    """Counts, over this process, the call threads of closed pools whose calls have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_threads = 0

    def add(self, number: int) -> None:
        with self._lock:
            self.num_threads += number


ABANDONED = AbandonedThreads()


class CallThreadPool:
    """At most `num_threads` call threads in calls that somebody waits for, made when first needed.

    Calls that were abandoned count for those of their own kind only: with `num_threads` reads hung no
    further read is begun, and lookups and writes go on.
    """

    def __init__(self, num_threads: int):
        self._num_threads = num_threads
        self._free: list[CallThread] = []
        self._num_made = 0
        self._abandoned: Counter[Hashable] = Counter()  # calls by kind that nobody waits for any more
        self._changed = threading.Condition()
        self._closed = False
        self._in_process = ABANDONED
        self.num_ended_abandoned = 0

    @property
    def num_busy(self) -> int:
        """Call threads in use, those in calls that nobody waits for any more included."""
        with self._changed:
            return self._num_made - len(self._free)

    @contextmanager
    def thread(self, timeout_s: float, extra: bool = False, kind: Hashable = None) -> Iterator[CallThread]:
        """A call thread of one's own; NoFreeThread when all stay busy for `timeout_s` or the pool is closed.

        extra: where all stay busy it is one more. kind: of the call it is for. After a CallTimeout in the
        body the call thread comes back by itself when its call ends.
        """
        thread = self._acquire(timeout_s, extra, kind)
        try:
            yield thread
        except CallTimeout:  # counted when it was abandoned; it may be another caller's by now
            raise
        except BaseException:
            self._put_back(thread)
            raise
        self._put_back(thread)

    def is_full(self, kind: Hashable) -> bool:
        """Whether as many calls of a kind were abandoned as there may be calls at once."""
        return self._abandoned[kind] >= self._num_threads

    def close(self) -> None:
        """End all threads: idle ones now, the others when their call ends. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            free, self._free = self._free, []
            self._in_process.add(self._num_made - len(free))
            self._changed.notify_all()
        for thread in free:
            thread.stop()

    def _acquire(self, timeout_s: float, extra: bool, kind: Hashable) -> CallThread:
        with self._changed:
            self._changed.wait_for(lambda: self._may_acquire(kind), max(0.0, timeout_s))
            if self._closed or not (extra or self._may_acquire(kind)):
                is_own = self._closed or self._abandoned[kind] > 0
                raise (NoFreeThread if is_own else OthersBusy)("all workers are in calls that have not ended")
            thread = self._free.pop() if self._free else None
            self._num_made += thread is None
        thread = thread or CallThread(self._returned, lambda thread: self._count_abandoned(thread.kind, 1))
        thread.kind = kind
        return thread

    def _may_acquire(self, kind: Hashable) -> bool:
        if self._closed:
            return True
        num_waited_for = self._num_made - len(self._free) - self._abandoned.total()
        return num_waited_for + self._abandoned[kind] < self._num_threads

    def _count_abandoned(self, kind: Hashable, number: int) -> None:
        with self._changed:
            self._abandoned[kind] += number
            self._changed.notify_all()

    def _returned(self, thread: CallThread) -> None:
        with self._changed:
            self.num_ended_abandoned += 1
        self._count_abandoned(thread.kind, -1)
        self._put_back(thread)

    def _put_back(self, thread: CallThread) -> None:
        with self._changed:
            if not self._closed:
                self._free.append(thread)
                self._changed.notify_all()
                return
        self._in_process.add(-1)
        thread.stop()


def gather(page: Page, into: memoryview) -> None:
    """Copy a page's buffers one after the other into `into`, which has exactly their length."""
    start = 0
    for view in page:
        if view.nbytes:
            np.copyto(_bytes(into[start : start + view.nbytes]), _bytes(view))
            start += view.nbytes


def scatter(source: memoryview, page: Page) -> None:
    """The reverse of `gather`."""
    start = 0
    for view in page:
        if view.nbytes:
            np.copyto(_bytes(view), _bytes(source[start : start + view.nbytes]))
            start += view.nbytes


def fill_head(source: memoryview, page: Page) -> None:
    """Copy `source`, no longer than the page, to the page's beginning."""
    head: list[memoryview] = []
    remaining = source.nbytes
    for view in page:
        head.append(view.cast("B")[:remaining])
        remaining -= head[-1].nbytes
    scatter(source, head)


def _bytes(view: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(view, np.uint8)


def chunks(sizes: Sequence[int], limit_bytes: int) -> list[range]:
    """Runs of `sizes` that fit into `limit_bytes` together; at least one of them each."""
    if sizes and sum(sizes) <= limit_bytes:
        return [range(len(sizes))]
    runs: list[range] = []
    start = used = 0
    for index, size in enumerate(sizes):
        if index > start and used + size > limit_bytes:
            runs.append(range(start, index))
            start, used = index, 0
        used += size
    return [*runs, range(start, len(sizes))] if sizes else []


def growing(run: range, sizes: Sequence[int], short_bytes: int) -> list[range]:
    """A run in ever longer ones, the first of which fits into `short_bytes` if one page does."""
    half = len(run) // 2
    if not half or sum(sizes[run.start : run.stop]) <= short_bytes:
        return [run]
    return [*growing(run[:half], sizes, short_bytes), run[half:]]

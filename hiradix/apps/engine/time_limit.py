"""A limit on how long a piece of Python may run: for programs that others have written: chat templates."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Overrun(BaseException):
    """Raised in a piece that runs for too long, wherever it is. No Exception: a piece should not catch it."""


class TimeLimit:
    """Runs pieces of Python for at most `seconds` each, on the threads of their callers.

    One thread of its own, from the first piece on, looks at the clock. A single call of a function in C is
    not cut short: the exception comes at the next step of Python's.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}  # of the threads that run a piece
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._has_watch = self._is_idle = False

    def run(self, piece: Callable[[], T]) -> T:
        """What `piece` gives; TimeoutError where it has not ended in time.

        One within another has what is left of the outer one's time, and ends it too.
        """
        thread = threading.get_ident()
        if thread in self._ends:
            return piece()
        try:
            try:
                self._begin(thread)
                return piece()
            finally:
                self._end(thread)
        except Overrun:
            self._end(thread)
            raise TimeoutError(f"not done within {self.seconds:g} s") from None

    def _begin(self, thread: int) -> None:
        with self._lock:
            if not self._has_watch:
                threading.Thread(target=self._watch, name="hiradix-time-limit", daemon=True).start()
                self._has_watch = True
            self._ends[thread] = time.monotonic() + self.seconds
            if self._is_idle:  # else it wakes before this end
                self._is_idle = False
                self._woken.put(None)

    def _end(self, thread: int) -> None:
        with self._lock:
            self._ends.pop(thread, None)
            _raise_in(thread, None)

    def _watch(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                for thread, end in self._ends.items():
                    if end <= now:
                        _raise_in(thread, Overrun)
                        self._ends[thread] = now + self.seconds  # if it has caught it
                self._is_idle = not self._ends
                wait_s = min(self._ends.values()) - now if self._ends else None
            try:
                self._woken.get(timeout=wait_s)
            except Empty:
                pass


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Have another thread raise `kind` at its next step; None: not any more, if it has not yet."""
    raised = ctypes.py_object() if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)

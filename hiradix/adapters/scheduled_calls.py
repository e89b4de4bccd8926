"""Calls of other threads that wait for the scheduler's turn: an engine has one thread for its cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

WAIT_S = 10.0  # longest that a call waits for a step
MAX_WAITING = 256


class ScheduledCalls:
    """Functions to be called with what `serve` is given, by whoever calls that."""

    def __init__(self, wait_s: float = WAIT_S):
        self._wait_s = wait_s
        self._waiting: deque[tuple[Callable[[Any], Any], Future[Any]]] = deque()

    @property
    def num_waiting(self) -> int:
        """Calls that nobody has made yet."""
        return len(self._waiting)

    def ask(self, do: Callable[[Any], Any]) -> Any:
        """Run `do` on the scheduler's thread at its next step, and return its result or raise its error. Call
        on any thread but the scheduler's. TimeoutError: no step came in time; `do` is then never called."""
        if len(self._waiting) >= MAX_WAITING:
            raise TimeoutError(f"{MAX_WAITING} calls wait for the scheduler's next step already")
        answer: Future[Any] = Future()
        self._waiting.append((do, answer))
        try:
            return answer.result(self._wait_s)
        except TimeoutError:
            if answer.cancel():
                raise TimeoutError(f"the scheduler took no step in {self._wait_s:g} s") from None
            return answer.result(self._wait_s)  # it has begun

    def serve(self, subject: Any) -> None:
        """Make the calls that wait, in their order. Scheduler thread; next to nothing without any."""
        for _ in range(len(self._waiting)):
            do, answer = self._waiting.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(do(subject))
            except BaseException as error:  # it is the caller's, not the scheduler's
                answer.set_exception(error)

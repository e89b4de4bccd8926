"""Circuit breaker: stop asking a store that keeps failing, and find out when it is back.

closed     every call passes; `failures_to_open` failures in a row open it
open       calls are refused for `retry_after_s`
half-open  one call passes as a probe; its success closes, its failure opens again
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NewType

Admission = NewType("Admission", int)


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_CLOSED = BreakerState.CLOSED


@dataclass(frozen=True)
class BreakerLimits:
    """When to open, and how many seconds to stay open before the next probe."""

    failures_to_open: int = 3
    retry_after_s: float = 5.0


class Breaker:
    """Thread-safe. Every admission must be answered with `record`, once. No lock while nothing fails."""

    def __init__(self, limits: BreakerLimits, clock: Callable[[], float]):
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._opened_at_s = 0.0
        self._epoch = 0  # moves with every change of state; answers of an earlier epoch say nothing now
        self.num_opened = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    def admit(self) -> Admission | None:
        """A receipt for one call, or None: refused. In half-open the first caller becomes the probe."""
        epoch = self._epoch  # read before the state: one that has passed meanwhile makes the answer void
        if self._state is _CLOSED:
            return Admission(epoch)
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return Admission(self._epoch)
            waited_s = self._clock() - self._opened_at_s
            if self._state is BreakerState.HALF_OPEN or waited_s < self._limits.retry_after_s:
                return None
            self._enter(BreakerState.HALF_OPEN)
            return Admission(self._epoch)

    def record(self, admission: Admission, ok: bool) -> bool:
        """How an admitted call ended. True when this changed the state to open or closed."""
        if ok and not self._failures and self._state is _CLOSED:
            return False
        with self._lock:
            if admission != self._epoch:
                return False
            if ok:
                self._failures = 0
                return self._state is BreakerState.HALF_OPEN and self._enter(BreakerState.CLOSED)
            self._failures += 1
            if self._state is BreakerState.CLOSED and self._failures < self._limits.failures_to_open:
                return False
            self.num_opened += 1
            self._opened_at_s = self._clock()
            return self._enter(BreakerState.OPEN)

    def _enter(self, state: BreakerState) -> bool:
        self._state = state
        self._epoch += 1
        self._failures = 0
        return True

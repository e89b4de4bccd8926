"""Circuit breakers, one per kind of call: stop asking for what keeps failing, and find out when it is well.

closed     every call passes; `failures_to_open` failures in a row open it
open       calls are refused for the retry interval
half-open  one call of this kind passes as a probe; its success closes, its failure opens again

The retry interval is `retry_after_s` and doubles with each probe that fails, up to `retry_max_s`. A breaker
that a probe has closed is on trial: until `failures_to_open` calls in a row have ended well one failure opens
it, and the interval goes on doubling. So a store whose probes work and whose calls do not costs one call per
interval, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

from hiradix.settings import MAX_COUNT, OPEN, Type, setting
from hiradix.storage.kit.meters import Op

Admission = NewType("Admission", int)


class Troubles(NamedTuple):
    """Counts of a store's breakers since it was opened, for whoever measures its lookups and reads.

    changes: how often these were found to work no longer, to work again, or not to work yet.
    lookups, reads: how many of them failed.
    """

    changes: int = 0
    lookups: int = 0
    reads: int = 0

    def and_those(self, other: Troubles) -> Troubles:
        """The sum of the troubles of two stores."""
        return Troubles(*(a + b for a, b in zip(self, other, strict=True)))


NO_TROUBLES = Troubles()


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_CLOSED = BreakerState.CLOSED


@dataclass(frozen=True)
class BreakerLimits:
    """Limits of a breaker: failures until it opens, and the seconds it stays open before its first probe and,
    at most, before a later one.

    A `retry_max_s` below `retry_after_s` means `retry_after_s`.
    """

    failures_to_open: int = setting(
        "breaker_failures",
        Type.INTEGER,
        3,
        "failed calls of a kind (lookup, read, write, deletion) in a row after which no more of that kind "
        "are made",
        minimum=1,
        maximum=MAX_COUNT,
        over_http=OPEN,
    )
    retry_after_s: float = setting(
        "breaker_retry_s",
        Type.SECONDS,
        5.0,
        "until one call of that kind is let through to see whether it works again; twice as long after each "
        "that does not",
        over_http=OPEN,
    )
    retry_max_s: float = setting(
        "breaker_retry_max_s",
        Type.SECONDS,
        60.0,
        "the most that this becomes; less than `breaker_retry_s` means that",
        over_http=OPEN,
    )


class Breaker:
    """The circuit breaker of one kind of call. Thread-safe. Every admission must be answered with `record`,
    once. Takes no lock while nothing fails."""

    def __init__(self, limits: BreakerLimits, clock: Callable[[], float]):
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._trial = 0  # calls that have to end well before a failure alone does not open it
        self._retry_at_s = 0.0
        self._epoch = 0  # moves with every change of state; answers of an earlier epoch say nothing now
        self.retry_s = limits.retry_after_s
        self.num_opened = 0
        self._num_failed = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def num_changes(self) -> int:
        """The number of changes of the state."""
        return self._epoch

    @property
    def num_failed(self) -> int:
        """The number of calls recorded as failures."""
        return self._num_failed

    @property
    def may_pass(self) -> bool:
        """Whether `admit` would let a call pass now, as a probe or otherwise. Changes nothing."""
        if self._state is _CLOSED:
            return True
        return self._state is BreakerState.OPEN and self._clock() >= self._retry_at_s

    def admit(self) -> Admission | None:
        """A receipt for one call, or None: refused. In half-open the first caller becomes the probe."""
        epoch = self._epoch  # read before the state: one that has passed meanwhile makes the answer void
        if self._state is _CLOSED:
            return Admission(epoch)
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return Admission(self._epoch)
            if self._state is BreakerState.HALF_OPEN or self._clock() < self._retry_at_s:
                return None
            self._enter(BreakerState.HALF_OPEN)
            return Admission(self._epoch)

    def record(self, admission: Admission, ok: bool | None) -> bool:
        """Record how an admitted call ended; None: it ended before this could be told.

        True when this is news: it works no longer, or again. A probe that failed is none.
        """
        if ok and not self._failures and not self._trial and self._state is _CLOSED:
            return False
        with self._lock:
            if admission != self._epoch:
                return False
            is_probe = self._state is BreakerState.HALF_OPEN
            if ok is None:
                if is_probe:  # the next call is the probe
                    self._enter(BreakerState.OPEN)
                return False
            if ok:
                return self._succeeded(is_probe)
            self._num_failed += 1
            self._failures += 1
            if not is_probe and not self._trial and self._failures < self._limits.failures_to_open:
                return False
            self._open(longer=is_probe or self._trial > 0)
            return not is_probe

    def trip(self) -> None:
        """Open it without a call that failed, for one who knows that none can succeed. The first probe is due
        after `retry_after_s`."""
        with self._lock:
            self._open(longer=False)

    def retry_now(self) -> None:
        """If the breaker is open, make the next call a probe: for a caller that has reason to think that the
        store works again."""
        with self._lock:
            self._retry_at_s = self._clock()

    def _succeeded(self, is_probe: bool) -> bool:
        self._failures = 0
        if is_probe:
            self._trial = self._limits.failures_to_open
            return self._enter(BreakerState.CLOSED)
        self._trial = max(0, self._trial - 1)
        if not self._trial:
            self.retry_s = self._limits.retry_after_s
        return False

    def _open(self, longer: bool) -> None:
        limits = self._limits
        most_s = max(limits.retry_after_s, limits.retry_max_s)
        self.retry_s = min(2 * self.retry_s, most_s) if longer else limits.retry_after_s
        self._retry_at_s = self._clock() + self.retry_s
        self._trial = 0
        self.num_opened += 1
        self._enter(BreakerState.OPEN)

    def _enter(self, state: BreakerState) -> bool:
        self._state = state
        self._epoch += 1
        self._failures = 0
        return True


class Breakers:
    """One breaker for each kind of call to a store: what fails for the one says nothing of the others."""

    def __init__(self, limits: BreakerLimits, clock: Callable[[], float]):
        self._of = {op: Breaker(limits, clock) for op in Op}

    def of(self, op: Op) -> Breaker:
        return self._of[op]

    @property
    def states(self) -> Mapping[Op, BreakerState]:
        return {op: breaker.state for op, breaker in self._of.items()}

    @property
    def state(self) -> BreakerState:
        """The worst of all kinds: open, half-open, closed."""
        found = {breaker.state for breaker in self._of.values()}
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            if state in found:
                return state
        return BreakerState.CLOSED

    def trip(self) -> None:
        """Open all of them."""
        for breaker in self._of.values():
            breaker.trip()

    def retry_now(self) -> None:
        """The next call of each kind is let through."""
        for breaker in self._of.values():
            breaker.retry_now()

    def figures(self) -> dict[str, float]:
        """The breakers' states and how often each opened, by metric name."""
        return breaker_figures(self.states, {op: breaker.num_opened for op, breaker in self._of.items()})


def breaker_figures(states: Mapping[Op, BreakerState], num_opened: Mapping[Op, int]) -> dict[str, float]:
    """`breaker_open`: whether calls of some kind are kept away, as a probe's are not known to end well, and
    `breaker_opened`, how often that began; `get_breaker_open` and so on: the same of one kind."""
    is_open = {op: float(state is not BreakerState.CLOSED) for op, state in states.items()}
    return {
        "breaker_open": max(is_open.values()),
        "breaker_opened": sum(num_opened.values()),
        **{f"{op.value}_breaker_open": value for op, value in is_open.items()},
        **{f"{op.value}_breaker_opened": number for op, number in num_opened.items()},
    }

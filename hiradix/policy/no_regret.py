"""Whether moving pages is worth it: predicted to take no longer than computing them again.

What computing and moving cost is measured while serving, as a fixed part and one per page, and forgotten:
numbers in, decisions out, no clock. The fixed part of a forward is paid with every hit too, that of a
transfer is not. A fetch is followed by a load, so both together must be worth it. Until a cost is known it
counts as nothing.

A tier that was refused is not measured, so now and then a refused transfer is taken: when what it is
predicted to lose is at most `PROBE_SHARE` of the computing that refusals stood for since the last one. One
that takes less than half of what was predicted makes the gate forget that the tier was slow.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

KEPT = 0.9  # share of the old measurements that each new one leaves
PROBE_SHARE = 0.01
MIN_SPREAD = 0.2  # of the mean length: with less, lengths are too alike to tell a fixed part
MIN_SLOPE = 0.1  # of the mean cost: computing a page costs no less than that
FASTEST = 1e12  # pages per second

Source = Callable[[], float]


class Move(Enum):
    """What may be refused."""

    LOAD = "load"  # host to device
    FETCH = "fetch"  # storage to host

    __hash__ = object.__hash__  # asked at each load; an enum's own is slow


class Cost:
    """Seconds by number of units: a line through the last few measurements."""

    __slots__ = ("_min_slope", "_seconds", "_seconds_units", "_squares", "_units", "_weight")
    _weight: float  # measurements, units and so on, summed up with older ones counting less
    _units: float
    _seconds: float
    _squares: float
    _seconds_units: float

    def __init__(self, min_slope: float = 0.0) -> None:
        self._min_slope = min_slope
        self.forget()

    def add(self, units: float, seconds: float) -> None:
        """One measurement; those without length or duration say nothing."""
        if units > 0 and seconds > 0:
            self._weight = KEPT * self._weight + 1
            self._units = KEPT * self._units + units
            self._seconds = KEPT * self._seconds + seconds
            self._squares = KEPT * self._squares + units * units
            self._seconds_units = KEPT * self._seconds_units + units * seconds

    def forget(self) -> None:
        """Begin anew."""
        self._weight = self._units = self._seconds = self._squares = self._seconds_units = 0.0

    def rate(self) -> float:
        """Units per second over all, fixed parts included; 0 while there is no measurement."""
        return self._units / self._seconds if self._seconds else 0.0

    def speed(self) -> float:
        """Units per second beside the fixed part; 0 while there is no measurement."""
        if not self._weight:
            return 0.0
        slope = self._slope()
        return min(FASTEST, 1 / slope) if slope > 0 else FASTEST

    def fixed_s(self) -> float:
        """Seconds of the fixed part."""
        if not self._weight:
            return 0.0
        return max(0.0, (self._seconds - self._slope() * self._units) / self._weight)

    def _slope(self) -> float:
        """Seconds per unit: least squares, between a share of the mean cost and that."""
        mean = self._units / self._weight
        whole = self._seconds / self._units
        variance = self._squares / self._weight - mean * mean
        if variance < (MIN_SPREAD * mean) ** 2:
            return whole
        covariance = self._seconds_units / self._weight - mean * self._seconds / self._weight
        return min(max(covariance / variance, self._min_slope * whole), whole)


class NoRegret:
    """The gate of a cache. Scheduler thread only.

    share: makes a measured number one that all ranks agree on (the least); called at construction, in fixed
    order. num_refused: pages of refused transfers since start.
    """

    def __init__(self, enabled: bool = True, share: Callable[[Source], Source] = lambda source: source):
        self.enabled = enabled
        self.num_refused = dict.fromkeys(Move, 0)
        self.num_probes = 0
        self._computed = Cost(MIN_SLOPE)
        self._moved = {move: Cost() for move in Move}
        self._allowance_s = 0.0
        self._computing = share(self._computed.speed)
        self._speed = {move: share(cost.speed) for move, cost in self._moved.items()}
        self._lead = {move: share(_negative(cost.fixed_s)) for move, cost in self._moved.items()}

    def computed(self, num_pages: float, seconds: float) -> None:
        """A forward computed that many pages of prompts."""
        self._computed.add(num_pages, seconds)

    def moved(self, move: Move, num_pages: int, seconds: float) -> None:
        """A transfer of that many pages worked for so long."""
        cost = self._moved[move]
        if num_pages and cost.rate() and 0 < 2 * seconds < cost.fixed_s() + num_pages / cost.speed():
            cost.forget()
        cost.add(num_pages, seconds)

    def takes(self, move: Move, num_pages: int) -> bool:
        """The decision, from agreed numbers alone: whether `num_pages` are moved and not computed again."""
        speed = self._computing()
        if not self.enabled or speed <= 0 or self._speed[move]() <= 0:
            return True
        computing_s = num_pages / speed
        moving_s = sum(self.predicted_s(m, num_pages) for m in {move, Move.LOAD})
        if moving_s <= computing_s:
            return True
        self._allowance_s += PROBE_SHARE * computing_s
        if moving_s - computing_s <= self._allowance_s:
            self._allowance_s = 0.0
            self.num_probes += 1
            return True
        self.num_refused[move] += num_pages
        return False

    def predicted_s(self, move: Move, num_pages: int) -> float:
        """What a transfer is predicted to take, of agreed numbers; 0 if nothing is known."""
        speed = self._speed[move]()
        return num_pages / speed - self._lead[move]() if speed > 0 else 0.0

    def rates(self) -> dict[str, float]:
        """Pages per second, as measured here: computed, and moved by kind. 0: not known yet."""
        return {"compute": self._computed.rate()} | {
            move.value: cost.rate() for move, cost in self._moved.items()
        }


def _negative(source: Source) -> Source:
    return lambda: -source()

"""Whether moving pages is worth it: predicted to take no longer than computing them again.

Rates are measured while serving and forget: numbers in, decisions out, no clock. Until both rates are known
the transfer is taken. One in `PROBE_EVERY` refusals is taken too, or a tier that has become fast again would
never be found out.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

KEPT = 0.9  # share of the old measurements that each new one leaves
PROBE_EVERY = 64

Source = Callable[[], float]


class Move(Enum):
    """What may be refused."""

    LOAD = "load"  # host to device
    FETCH = "fetch"  # storage to host


class Rate:
    """Units per second over the last few measurements, weighted by their length; 0 while there is none."""

    __slots__ = ("_seconds", "_units")

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """One measurement; those without length or duration say nothing."""
        if units > 0 and seconds > 0:
            self._units = KEPT * self._units + units
            self._seconds = KEPT * self._seconds + seconds

    def value(self) -> float:
        return self._units / self._seconds if self._seconds else 0.0


class NoRegret:
    """The gate of a cache. Scheduler thread only.

    share: makes a measured number one that all ranks agree on; called at construction, in fixed order.
    num_refused: pages of refused transfers since start.
    """

    def __init__(self, enabled: bool = True, share: Callable[[Source], Source] = lambda source: source):
        self.enabled = enabled
        self.num_refused = dict.fromkeys(Move, 0)
        self._computed = Rate()
        self._moved = {move: Rate() for move in Move}
        self._num_refusals = 0
        self._computing = share(self._computed.value)
        self._moving = {move: share(rate.value) for move, rate in self._moved.items()}

    def computed(self, num_pages: float, seconds: float) -> None:
        """A forward computed that many pages of prompts."""
        self._computed.add(num_pages, seconds)

    def moved(self, move: Move, num_pages: int, seconds: float) -> None:
        """A transfer of that many pages worked for so long."""
        self._moved[move].add(num_pages, seconds)

    def takes(self, move: Move, num_pages: int) -> bool:
        """The decision, from agreed numbers alone: whether `num_pages` are moved and not computed again."""
        computing, moving = self._computing(), self._moving[move]()
        if not self.enabled or computing <= 0 or moving <= 0 or moving >= computing:
            return True
        self._num_refusals += 1
        if self._num_refusals % PROBE_EVERY == 0:
            return True
        self.num_refused[move] += num_pages
        return False

    def rates(self) -> dict[str, float]:
        """Pages per second, as measured here: computed, and moved by kind. 0: not known yet."""
        return {"compute": self._computed.value()} | {
            move.value: rate.value() for move, rate in self._moved.items()
        }

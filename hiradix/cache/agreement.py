"""Keeps the trees of several ranks (tensor or pipeline parallel) identical.

Every rank runs the same scheduler on the same requests, so whatever follows from requests alone is the same on
all of them. Whatever depends on time, speed, health, allocation or a backend's answer may differ, and therefore
enters a cache only through `Agreement`: per exchange each rank gives one vector of fixed shape, and all get the
elementwise minimum.

    tick:  poll own results -> exchange -> the results all ranks have, in ticket order, cut to the least pages

    vector (int64):  digest, -digest | ok | shared values | per job kind: ready, whole, outcomes of the next

 1. An exchange is a collective call: all ranks make the same ones in the same order. Whether one is made may
    depend on agreed data only.
 2. A result is applied when it is the oldest of its kind and every rank has it. Its pages are the least of
    any rank; a rank that got more gives the rest back.
 3. Clocks, and other measured numbers that decisions use, are read from the last exchange (`share`).
 4. The digest is over what must be equal; where it is not, every rank raises `RanksDiverged`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from hiradix.cache.in_flight import InFlightJobs
from hiradix.errors import CacheError, Misuse
from hiradix.transfer import JobKind, Result, Ticket

Vector = npt.NDArray[np.int64]
Agree = Callable[[Vector], Vector]
"""int64 [WIDTH] of a rank -> the least over all ranks, elementwise. Raises CacheError if a rank is lost."""

KINDS = tuple(JobKind)
NUM_SHARED = 10
AHEAD = 16  # of each kind, results whose number of pages is in one vector; complete ones need no number
_OK, _SHARED = 2, 3
_KINDS_AT = _SHARED + NUM_SHARED
_KIND_WIDTH = 2 + AHEAD
WIDTH = _KINDS_AT + len(KINDS) * _KIND_WIDTH
_PER_UNIT = 1_000_000  # shared values travel as millionths
_LARGEST = 1 << 62


class RanksDiverged(CacheError):
    """The ranks are no longer in the same state: a bug, or ranks that were started differently."""


class Agreement:
    """One rank's side of the agreement. Scheduler thread only.

    state: gives integers that must be equal on all ranks; called at every exchange.
    """

    def __init__(self, agree: Agree, in_flight: InFlightJobs, state: Callable[[], Sequence[int]]):
        self.has_more = False  # whether all ranks have results that did not fit into the last vector
        self.num_exchanges = 0
        self._agree = agree
        self._in_flight = in_flight
        self._state = state
        self._sources: list[Callable[[], float]] = []
        self._shared = [0.0] * NUM_SHARED
        self._held: dict[Ticket, Result] = {}  # own results that wait until every rank has theirs

    def share(self, source: Callable[[], float]) -> Callable[[], float]:
        """A function that gives the ranks' minimum of `source()` as of the last exchange, to a millionth.

        Call it while the cache is built, in the same order on every rank.
        """
        index = len(self._sources)
        if self.num_exchanges != 0 or index >= NUM_SHARED:
            raise Misuse(f"number {index} shared after {self.num_exchanges} exchanges")
        self._sources.append(source)
        return lambda: self._shared[index]

    def exchange(self, results: Iterable[Result], ok: bool) -> tuple[list[Result], bool]:
        """Offer this rank's new results. Returns the results that all ranks have, oldest first, and whether all
        ranks are `ok`. A collective call. Raises RanksDiverged."""
        for result in results:
            self._held[result.ticket] = result
        own = np.zeros(WIDTH, np.int64)
        own[_OK] = ok
        for index, source in enumerate(self._sources):
            own[_SHARED + index] = round(max(-_LARGEST, min(_LARGEST, source() * _PER_UNIT)))
        for number, kind in enumerate(KINDS):
            self._fill_kind(own, _KINDS_AT + number * _KIND_WIDTH, kind)
        agreed = self._exchange(own)
        for index in range(len(self._sources)):
            self._shared[index] = agreed[_SHARED + index] / _PER_UNIT
        self.has_more = False
        common: list[Result] = []
        for number, kind in enumerate(KINDS):
            common += self._read_kind(agreed, _KINDS_AT + number * _KIND_WIDTH, kind)
        common.sort(key=lambda result: result.ticket)
        return common, bool(agreed[_OK])

    def least(self, *values: int) -> tuple[int, ...]:
        """The ranks' minimum of each value. A collective call of its own, which applies no results."""
        return least(self._agree, *values)

    def _exchange(self, own: Vector) -> list[int]:
        state = np.array([self.num_exchanges, *self._state()], np.int64)
        own[0] = zlib.crc32(state.tobytes())
        own[1] = -own[0]
        agreed: list[int] = self._agree(own).tolist()
        self.num_exchanges += 1
        if agreed[0] != -agreed[1]:
            raise RanksDiverged(f"the ranks differ at exchange {self.num_exchanges}; here: {state.tolist()}")
        return agreed

    def _fill_kind(self, own: Vector, at: int, kind: JobKind) -> None:
        """Write one kind's part of the vector: how many of the oldest tickets have results, how many of these
        are complete, and the pages of the first AHEAD."""
        ready = whole = 0
        for ticket, job in self._in_flight.of_kind(kind).items():
            result = self._held.get(ticket)
            if result is None:
                break
            is_done = result.error is None and result.num_pages == job.num_pages
            is_whole = kind not in (JobKind.QUERY, JobKind.DELETE) and is_done
            whole += is_whole and whole == ready
            if ready < AHEAD:
                own[at + 2 + ready] = 2 * result.num_pages + (result.error is None)
            ready += 1
        own[at], own[at + 1] = ready, whole

    def _read_kind(self, agreed: list[int], at: int, kind: JobKind) -> list[Result]:
        ready, whole = agreed[at], agreed[at + 1]
        count = max(whole, min(ready, AHEAD))
        self.has_more |= ready > count
        found = []
        for index, ticket in enumerate(islice(self._in_flight.of_kind(kind), count)):
            own = self._held.pop(ticket)
            found.append(own if index < whole else _cut(own, agreed[at + 2 + index]))
        return found


def _cut(own: Result, outcome: int) -> Result:
    """This rank's result cut to the agreed number of pages, with an error only where an error was agreed."""
    num_pages, fine = divmod(outcome, 2)
    if num_pages > own.num_pages:
        raise Misuse(f"ticket {own.ticket}: {num_pages} agreed of {own.num_pages}")
    if fine:
        return own._replace(num_pages=num_pages, error=None, reason=None)
    return own._replace(num_pages=num_pages, error=own.error or "another rank has fewer pages")


def least(agree: Agree, *values: int) -> tuple[int, ...]:
    """The ranks' minimum of each value: one collective call of the usual shape, outside a cache's exchanges."""
    own = np.zeros(WIDTH, np.int64)
    own[_OK : _OK + len(values)] = values
    return tuple(agree(own)[_OK : _OK + len(values)].tolist())


class CommonClock:
    """The ranks' least clock as of the last `look`, where a cache without lower tiers makes no exchange."""

    def __init__(self, agree: Agree, clock: Callable[[], float]):
        self._agree = agree
        self._clock = clock
        self._now = 0.0

    def look(self) -> None:
        """Look at the clock. A collective call."""
        (now,) = least(self._agree, round(self._clock() * _PER_UNIT))
        self._now = now / _PER_UNIT

    def __call__(self) -> float:
        return self._now

"""Whether moving pages is worth it: predicted to take no longer than computing them again.

What computing and moving cost is measured while serving, as a fixed part and one per page, and forgotten:
numbers in, decisions out, no clock. The fixed part of a forward is paid with every hit too, that of a
transfer is not. A fetch is followed by a load, so both together must be worth it. Until a cost is known it
counts as nothing.

What a fetch took that brought nothing is charged all the same: on average of the last few, to each of them;
one that brought a part took its seconds for that. After several in a row that brought nothing, fetches are
taken ever more rarely (`Drought`). Without a measured cost of computing, as inside other engines, those that
brought a part too late for it count likewise (`worth_s`).
Lookups are measured, too: one that takes more of what computing the prompt would than lookups have saved
lately is not made.

A tier that was refused is not measured, so now and then a refused transfer is taken: when what it is
predicted to lose is at most `PROBE_SHARE` of the computing that refusals stood for since the last one. One
that takes less than half of what was predicted makes the gate forget that the tier was slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

KEPT = 0.9  # share of the old measurements that each new one leaves
PROBE_SHARE = 0.01
MIN_SPREAD = 0.2  # of the mean length: with less, lengths are too alike to tell a fixed part
MIN_SLOPE = 0.1  # of the mean cost: computing a page costs no less than that
FASTEST = 1e12  # pages per second
MIN_USE = 1 / 16  # of what lookups may take: such a share of computing, however little they have saved
DRY_FETCHES = 3  # in a row that brought less than they took: then some are left out
HIT_S = 1.0  # what a hit is worth where nobody measures computing: half of a store's default deadline
HIT_TOKENS = 16384  # or of a longer one so many tokens: few engines compute more of them in that time
MOST_OWED = 16  # failures in a row that are charged at most
MOST_LEFT_OUT = 32  # between two that find out whether fetches bring something again

Source = Callable[[], float]


class GatedTransfer(Enum):
    """The kinds of transfer that the gate may refuse."""

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

    def page_s(self) -> float:
        """Seconds per unit beside the fixed part; 0 while there is no measurement."""
        return self._slope() if self._weight else 0.0

    def predicted_s(self, units: float) -> float:
        """Seconds of so many units, fixed part included; 0 while there is no measurement."""
        if not self._weight:
            return 0.0
        slope = self._slope()
        return max(0.0, (self._seconds - slope * self._units) / self._weight) + units * slope

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
        spread = MIN_SPREAD * mean
        if variance < spread * spread:
            return whole
        covariance = self._seconds_units / self._weight - mean * self._seconds / self._weight
        return min(max(covariance / variance, self._min_slope * whole), whole)


class Drought:
    """Fetches in a row that brought less than they took: after `DRY_FETCHES` one is left out, after each
    further one twice as many, at most `MOST_LEFT_OUT`.

    share: as of `NoRegret`; ranks leave out the same fetches, by the one that has had most dry ones.
    """

    def __init__(self, share: Callable[[Source], Source] = lambda source: source) -> None:
        self._num_dry = self._num_left_out = 0
        self._fewest = share(lambda: -float(self._num_dry))

    def ended(self, seconds: float, saved_s: float) -> None:
        """A fetch took `seconds`, and what it brought saves so many."""
        self._num_dry = 0 if seconds < saved_s else self._num_dry + 1

    def refuses(self) -> bool:
        """Whether the next fetch is left out. To be asked once for each."""
        over = round(-self._fewest()) - DRY_FETCHES
        if over >= 0 and self._num_left_out < min(1 << min(over, 30), MOST_LEFT_OUT):
            self._num_left_out += 1
            return True
        self._num_left_out = 0
        return False

    def forget(self) -> None:
        """Other storage is there."""
        self._num_dry = self._num_left_out = 0


def worth_s(asked: int, num_pages: int, num_tokens: int) -> float:
    """Seconds that `num_pages` of `asked` are taken to save where computing is not measured: all, which are
    `num_tokens`, would save `HIT_S`, or that for every `HIT_TOKENS`."""
    return HIT_S * max(1.0, num_tokens / HIT_TOKENS) * num_pages / asked if asked else 0.0


class _Calls:
    """Lookups, or reads, in a row that failed. place: where troubles have how many did."""

    def __init__(self, place: int):
        self._place = place
        self._num_failed = 0
        self._took_s: list[float] = []

    def begin_anew(self, troubles: tuple[int, int, int]) -> None:
        self._num_failed = troubles[self._place]
        self._took_s.clear()

    def failed_before(self, troubles: tuple[int, int, int], seconds: float) -> list[float] | None:
        """The seconds of the failed calls before this one, if this one has not failed; None if it has."""
        before, self._num_failed = self._num_failed, troubles[self._place]
        if before != self._num_failed:
            self._took_s = [*self._took_s[1 - MOST_OWED :], seconds]
            return None
        found, self._took_s = self._took_s, []
        return found


class NoRegret:
    """The gate of a cache. Scheduler thread only.

    share: makes a measured number one that all ranks agree on (the least); called at construction, in fixed
    order. num_refused: pages of refused transfers since start; num_unasked: of lookups that were not made.
    troubles: how often storage became another, as its breakers opened or closed, and how many lookups and
    how many reads failed. page_size: tokens of a page.
    What was measured across a change says nothing, and storage's costs are measured anew from there on. A
    call that failed is charged only when one after it has not: failures in a row are for the breaker.
    """

    def __init__(
        self,
        enabled: bool = True,
        share: Callable[[Source], Source] = lambda source: source,
        troubles: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
        page_size: int = 1,
    ):
        self.enabled = enabled
        self.num_refused = dict.fromkeys(GatedTransfer, 0)
        self.num_probes = 0
        self._computed = Cost(MIN_SLOPE)
        self._moved = {move: Cost() for move in GatedTransfer}
        self._asked = Cost()
        self._troubles = troubles
        self._page_size = page_size
        self._num_changes = 0
        self._lookups, self._reads = _Calls(1), _Calls(2)
        self._waste_s = 0.0  # of a fetch: what those that brought nothing took, on average of the last few
        self.num_unasked = 0
        self._use = 1.0  # which share of the pages asked for was read, of late
        self._allowance_s = self._ask_allowance_s = 0.0
        self._computing = share(self._computed.speed)
        self._speed = {move: share(cost.speed) for move, cost in self._moved.items()}
        leads = {move: cost.fixed_s for move, cost in self._moved.items()} | {
            GatedTransfer.FETCH: self._fetch_lead_s
        }
        self._lead = {move: share(_negative(lead_s)) for move, lead_s in leads.items()}
        self._asking = share(_negative(self._ask_s))
        self._drought = Drought(share)

    def computed(self, num_pages: float, seconds: float) -> None:
        """A forward computed that many pages of prompts."""
        self._computed.add(num_pages, seconds)

    def moved(self, move: GatedTransfer, num_pages: int, seconds: float) -> None:
        """A transfer of that many pages worked for so long."""
        cost = self._moved[move]
        if num_pages and 0 < 2 * seconds < cost.predicted_s(num_pages):
            cost.forget()
        cost.add(num_pages, seconds)

    def ended(self, asked: int, num_pages: int, seconds: float) -> None:
        """Judge a fetch once all of its reads are back. num_pages: of `asked`, as agreed by the ranks;
        seconds: measured here.

        Where computing is measured, a part that came is charged by the page (`fetched`).
        """
        if self._computing() > 0:
            saved_s = math.inf if num_pages else 0.0
        else:
            saved_s = worth_s(asked, num_pages, asked * self._page_size)
        self._drought.ended(seconds, saved_s)

    def attached(self) -> None:
        """Forget the record of fetches, as other storage was attached, on all ranks at the same step."""
        self._drought.forget()

    def fetched(self, asked: int, num_pages: int, seconds: float) -> None:
        """Learn the cost of a read of `asked` pages that brought `num_pages`, in seconds as measured here."""
        failed = self._failed_before(self._reads, seconds)
        if failed is None:
            return
        for wasted_s in (*failed, 0.0 if num_pages else seconds):
            self._waste_s = KEPT * self._waste_s + (1 - KEPT) * wasted_s
        cost = self._moved[GatedTransfer.FETCH]
        if num_pages >= asked or (num_pages and seconds > cost.fixed_s() + num_pages * cost.page_s()):
            self.moved(GatedTransfer.FETCH, num_pages, seconds)

    def answered(self, asked: int, read: int, seconds: float) -> None:
        """Learn the cost of a lookup of `asked` pages, after which a fetch of `read` of them was taken."""
        self._use = KEPT * self._use + (1 - KEPT) * min(1.0, read / asked if asked else 0.0)
        failed = self._failed_before(self._lookups, seconds)
        if failed is None:
            return
        if 0 < 2 * seconds < self._ask_s():
            self._asked.forget()
        for took_s in (*failed, seconds):
            self._asked.add(1, took_s)

    def asks(self, num_pages: int) -> bool:
        """The decision, likewise: whether storage is asked for `num_pages`."""
        speed, asking_s = self._computing(), -self._asking()
        if not self.enabled or speed <= 0 or asking_s <= 0:
            return True
        computing_s = num_pages / speed
        if asking_s <= computing_s * max(MIN_USE, self._use):
            return True
        self._ask_allowance_s += PROBE_SHARE * computing_s
        if asking_s <= self._ask_allowance_s:
            self._ask_allowance_s = 0.0
            self.num_probes += 1
            return True
        self.num_unasked += num_pages
        return False

    def _ask_s(self) -> float:
        rate = self._asked.rate()
        return 1 / rate if rate else 0.0

    def _fetch_lead_s(self) -> float:
        return self._moved[GatedTransfer.FETCH].fixed_s() + self._waste_s

    def _failed_before(self, calls: _Calls, seconds: float) -> list[float] | None:
        """The seconds of the calls in a row that failed before this one, which did not. None: it has failed,
        or what storage costs has changed."""
        troubles = self._troubles()
        if troubles[0] != self._num_changes:
            self._num_changes, self._waste_s = troubles[0], 0.0
            for cost in (self._asked, self._moved[GatedTransfer.FETCH]):
                cost.forget()
            for one in (self._lookups, self._reads):
                one.begin_anew(troubles)
            return None
        return calls.failed_before(troubles, seconds)

    def takes(self, move: GatedTransfer, num_pages: int) -> bool:
        """The decision, from agreed numbers alone: whether `num_pages` are moved and not computed again."""
        if move is GatedTransfer.FETCH and self.enabled and self._drought.refuses():
            self.num_refused[move] += num_pages
            return False
        speed = self._computing()
        if not self.enabled or speed <= 0 or not (self._speed[move]() > 0 or self._lead[move]() < 0):
            return True
        computing_s = num_pages / speed
        moving_s = sum(self.predicted_s(m, num_pages) for m in {move, GatedTransfer.LOAD})
        if moving_s <= computing_s:
            return True
        self._allowance_s += PROBE_SHARE * computing_s
        if moving_s - computing_s <= self._allowance_s:
            self._allowance_s = 0.0
            self.num_probes += 1
            return True
        self.num_refused[move] += num_pages
        return False

    def computing_s(self, num_pages: float) -> float:
        """Predicted seconds to compute so many pages, without a forward's fixed part, from numbers that all
        ranks agree on; 0 if nothing is known."""
        speed = self._computing()
        return num_pages / speed if speed > 0 else 0.0

    def predicted_s(self, move: GatedTransfer, num_pages: int) -> float:
        """Predicted seconds of a transfer of so many pages, from numbers that all ranks agree on; 0 if
        nothing is known."""
        speed = self._speed[move]()
        return (num_pages / speed if speed > 0 else 0.0) - self._lead[move]()

    def rates(self) -> dict[str, float]:
        """Pages per second, as measured here: computed, and moved by kind. 0: not known yet."""
        return {"compute": self._computed.rate()} | {
            move.value: cost.rate() for move, cost in self._moved.items()
        }


def _negative(source: Source) -> Source:
    return lambda: -source()

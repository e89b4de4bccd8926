"""A shadow queue: the waits that first come, first served would give to sessions, beside the server that
orders them otherwise."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass

KEPT_WAITS = 32.0  # a wait counts for so many times its own length
_FEW = 64


@dataclass(slots=True)
class _Shadow:
    """A session in the shadow queue. cold_price_s, footprint: of its newest request. ticket: the valid entry
    of its request in the queue; others are void. next_gap_s: the time from the begin of its answer to its
    next request; None: there is none yet. cached_s: the price of the part of its prompt that is cached.
    is_over: it sends no more."""

    cold_price_s: float = 0.0
    footprint: int = 0
    arrived_s: float | None = None
    ticket: int = 0
    next_gap_s: float | None = None
    cached_s: float = 0.0
    is_over: bool = False


class FirstComeShadow:
    """One server that takes requests as they come, over a cache of whole sessions that forgets the least
    recently used. Of a session one request waits at a time, as its next one follows the answer: one that
    comes sooner than the shadow answers is taken as its next, with the newest prompt.

    O(log n) for what comes and is served; O(n) to look where somebody waits whose price is another since.
    """

    def __init__(self, capacity: int) -> None:
        """capacity: tokens of the cache."""
        self.capacity = capacity
        self._sessions: dict[str, _Shadow] = {}
        self._coming: list[tuple[float, int, str]] = []
        self._num_comings = 0
        self._queue: deque[tuple[int, str]] = deque()
        self._cached: OrderedDict[str, int] = OrderedDict()  # footprints, the least recently used first
        self._num_cached = 0  # tokens
        self._free_s = 0.0
        self._waits: deque[tuple[float, float]] = deque()  # (until when it counts, seconds), falling
        self._ahead: deque[tuple[int, float]] = deque()  # (ticket, seconds) of the queue's waits, falling
        self._last_s = 0.0  # when the last of the queue will be served
        self._is_known = True  # whether these two are right

    def arrive(self, name: str, now_s: float, cold_price_s: float, footprint: int, gap_s: float) -> None:
        """A request; gap_s: since the session's answer before began."""
        self._run(now_s)
        session = self._sessions.setdefault(name, _Shadow())
        session.cold_price_s, session.footprint, session.is_over = cold_price_s, footprint, False
        if session.arrived_s is None:
            self._come(name, session, now_s)
        else:
            session.next_gap_s = max(gap_s, 0.0)
            self._is_known = False
        self._run(now_s)

    def remove(self, name: str) -> None:
        """Withdraw the request that the session has in the queue, if any."""
        session = self._sessions.get(name)
        if session is not None and session.arrived_s is not None:
            session.arrived_s = session.next_gap_s = None
            self._is_known = False
            if len(self._coming) > 2 * len(self._sessions) + _FEW:
                self._coming = [one for one in self._coming if self._asking(one[1], one[2]) is not None]
                heapq.heapify(self._coming)

    def forget(self, name: str) -> None:
        """The session asks no more; what waits of it here is still answered."""
        session = self._sessions.get(name)
        if session is not None:
            session.is_over, session.next_gap_s = True, None
            if session.arrived_s is None:
                del self._sessions[name]

    def longest_s(self, now_s: float) -> float:
        """The longest wait of late, that of whoever waits included."""
        self._run(now_s)
        while self._waits and self._waits[0][0] < now_s:
            self._waits.popleft()
        if not self._is_known:
            self._look_ahead()
        longest_s = self._waits[0][1] if self._waits else 0.0
        return max(longest_s, self._ahead[0][1]) if self._ahead else longest_s

    def _look_ahead(self) -> None:
        """Compute the waits of all in the queue as things stand, and take void entries out of it."""
        queue, self._queue = self._queue, deque()
        self._ahead.clear()
        self._is_known = True
        for ticket, name in queue:
            session = self._asking(ticket, name)
            if session is not None:
                self._queue_up(ticket, name, session)

    def _queue_up(self, ticket: int, name: str, session: _Shadow) -> None:
        arrived_s = session.arrived_s or 0.0
        at_s = self._last_s if self._queue else max(self._free_s, arrived_s)
        self._queue.append((ticket, name))
        self._last_s = at_s + self._price_s(name, session)
        wait_s = self._last_s - arrived_s
        while self._ahead and self._ahead[-1][1] <= wait_s:
            self._ahead.pop()
        self._ahead.append((ticket, wait_s))

    def _asking(self, ticket: int, name: str) -> _Shadow | None:
        """The session that waits by this ticket; None: it is void."""
        session = self._sessions.get(name)
        if session is None or session.arrived_s is None or session.ticket != ticket:
            return None
        return session

    def _come(self, name: str, session: _Shadow, at_s: float) -> None:
        self._num_comings += 1
        session.arrived_s, session.ticket = at_s, self._num_comings
        heapq.heappush(self._coming, (at_s, session.ticket, name))

    def _run(self, now_s: float) -> None:
        """Up to now."""
        while True:
            at_s = self._free_s
            if not self._queue and self._coming:
                at_s = max(at_s, self._coming[0][0])
            while self._coming and self._coming[0][0] <= min(at_s, now_s):
                _, ticket, name = heapq.heappop(self._coming)
                session = self._asking(ticket, name)
                if session is not None:
                    self._queue_up(ticket, name, session)
            if at_s > now_s or not (self._queue or self._coming):
                return
            if self._queue:
                self._serve(*self._queue.popleft(), at_s)

    def _serve(self, ticket: int, name: str, at_s: float) -> None:
        if self._ahead and self._ahead[0][0] == ticket:
            self._ahead.popleft()
        session = self._asking(ticket, name)
        if session is None or session.arrived_s is None:
            return
        self._free_s = at_s + self._price_s(name, session)
        self._waited(self._free_s - session.arrived_s)
        session.arrived_s, session.cached_s = None, session.cold_price_s
        self._num_cached += session.footprint - self._cached.pop(name, 0)
        self._cached[name] = session.footprint
        while self._num_cached > self.capacity:
            self._evict(next(iter(self._cached)))
        gap_s, session.next_gap_s = session.next_gap_s, None
        if gap_s is not None:
            self._come(name, session, self._free_s + gap_s)
        elif session.is_over:
            del self._sessions[name]

    def _evict(self, name: str) -> None:
        self._num_cached -= self._cached.pop(name)
        session = self._sessions.get(name)
        if session is not None and session.arrived_s is not None:
            self._is_known = False  # it waits, and has another price

    def _price_s(self, name: str, session: _Shadow) -> float:
        if name not in self._cached:
            return session.cold_price_s
        return max(session.cold_price_s - session.cached_s, 0.0)

    def _waited(self, wait_s: float) -> None:
        while self._waits and self._waits[-1][1] <= wait_s:
            self._waits.pop()
        self._waits.append((self._free_s + KEPT_WAITS * wait_s, wait_s))

"""Counters and latency figures of guarded storage. Plain numbers; the metrics floor names and exports them.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

LATENCY_BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Op(Enum):
    """The calls that are measured. Each is itself only, which is a quicker key than its name is."""

    __hash__ = object.__hash__

    EXISTS = "exists"
    GET = "get"
    PUT = "put"


_DONE = {op: (f"{op.value}_pages", f"{op.value}_bytes") for op in Op}


class MissReason(Enum):
    """Why a page was not read, or not stored. Few enough to label a metric."""

    ABSENT = "absent"  # the backend said no: not there, damaged as it saw it, or no room
    DAMAGED = "damaged"  # the seal says these are not the bytes that were stored
    FOREIGN = "foreign"  # the seal is another key's, model's or format's
    ERROR = "error"  # the backend raised
    TIMEOUT = "timeout"  # the deadline passed
    BUSY = "busy"  # no worker came free before the deadline
    BAD_ANSWER = "bad_answer"  # the backend returned something that is no answer
    BREAKER_OPEN = "breaker_open"
    BAD_KEY = "bad_key"
    CLOSED = "closed"


@dataclass(frozen=True)
class Histogram:
    """Calls by duration: `counts[i]` took at most `bounds_s[i]`, the last count is of all slower ones."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    total_s: float

    def quantile_s(self, q: float) -> float:
        """Upper bound of the bucket that holds quantile `q`; 0 without calls."""
        wanted = q * sum(self.counts)
        seen = 0
        for bound_s, count in zip(self.bounds_s, self.counts):
            seen += count
            if seen >= wanted:
                return bound_s if seen else 0.0
        return self.bounds_s[-1]


class Meters:
    """Thread-safe counters. One call is counted once, with what became of its pages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._buckets = {op: [0] * (len(LATENCY_BOUNDS_S) + 1) for op in Op}
        self._seconds = dict.fromkeys(Op, 0.0)

    def call(self, op: Op, duration_s: float) -> None:
        """One call that reached the backend's workers."""
        bucket = bisect.bisect_left(LATENCY_BOUNDS_S, duration_s)
        with self._lock:
            self._buckets[op][bucket] += 1
            self._seconds[op] += duration_s

    def pages(
        self, op: Op, num_done: int, num_bytes: int, missed: Iterable[tuple[MissReason, int]]
    ) -> None:
        """A call's pages: those that were found, read or stored, their bytes, and why others were not."""
        pages, of_bytes = _DONE[op]
        with self._lock:
            self._counts[pages] += num_done
            self._counts[of_bytes] += num_bytes
            for reason, num_pages in missed:
                if num_pages:
                    self._counts[f"{op.value}_missed_{reason.value}"] += num_pages

    def count(self, name: str, number: int = 1) -> None:
        """Anything else worth a counter."""
        with self._lock:
            self._counts[name] += number

    def histogram(self, op: Op) -> Histogram:
        """Durations of `op`'s calls so far."""
        with self._lock:
            return Histogram(LATENCY_BOUNDS_S, tuple(self._buckets[op]), self._seconds[op])

    def snapshot(self) -> Mapping[str, float]:
        """Every figure by name: `get_pages`, `get_missed_timeout`, `get_calls`, `get_seconds`, `get_p95_s`,
        ..."""
        figures: dict[str, float] = {}
        for op in Op:
            histogram = self.histogram(op)
            figures |= {f"{op.value}_pages": 0, f"{op.value}_bytes": 0}
            figures[f"{op.value}_calls"] = sum(histogram.counts)
            figures[f"{op.value}_seconds"] = histogram.total_s
            figures[f"{op.value}_p50_s"] = histogram.quantile_s(0.5)
            figures[f"{op.value}_p95_s"] = histogram.quantile_s(0.95)
        with self._lock:
            return figures | dict(self._counts)

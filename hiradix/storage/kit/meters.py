"""Counters and latency figures of guarded storage. Plain numbers; the metrics floor names and exports them."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

LATENCY_BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Op(Enum):
    """The kinds of calls, measured each for itself. Each is itself only, which is a quicker key than its name
    is."""

    __hash__ = object.__hash__

    EXISTS = "exists"
    GET = "get"
    PUT = "put"
    DELETE = "delete"


class MissReason(Enum):
    """The reason why a page was not read, or not stored. Few enough to label a metric."""

    ABSENT = "absent"  # the backend said no, and no more: it is not there
    DAMAGED = "damaged"  # seal or checksum say that these are not the bytes that were stored
    FOREIGN = "foreign"  # the seal is another key's, model's or format's
    ERROR = "error"  # the backend raised
    TIMEOUT = "timeout"  # the deadline passed
    BUSY = "busy"  # no worker came free before the deadline
    BAD_ANSWER = "bad_answer"  # the backend returned something that is no answer
    BREAKER_OPEN = "breaker_open"
    BAD_KEY = "bad_key"
    CLOSED = "closed"
    NOT_JOINED = "not_joined"  # the store could not be reached since it was opened
    FULL = "full"  # a put: the store has no room
    REFUSED = "refused"  # a put: the backend did not take it, and says no more
    LOST = "lost"  # what the store keeps its pages in was taken away from under it
    READ_ONLY = "read_only"  # a put: the store's folder cannot be written


FAULTS = frozenset(
    {
        MissReason.ERROR, MissReason.TIMEOUT, MissReason.BUSY, MissReason.BAD_ANSWER,
        MissReason.BREAKER_OPEN, MissReason.CLOSED, MissReason.NOT_JOINED, MissReason.LOST,
    }
)  # fmt: skip
"""Reasons that say nothing of whether the store has a page."""


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


class OpMeter:
    """Figures of the calls of one kind. Thread-safe."""

    __slots__ = ("_buckets", "_lock", "_missed", "_num_bytes", "_num_pages", "_seconds")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_pages = self._num_bytes = 0
        self._seconds = 0.0
        self._buckets = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._missed: Counter[MissReason] = Counter()

    def ended(
        self,
        duration_s: float | None,
        num_done: int,
        num_bytes: int,
        missed: Iterable[tuple[MissReason, int]],
    ) -> None:
        """One call: the pages that were found, read or stored, their bytes, and why others were not.

        duration_s: None for a call that did not reach the backend.
        """
        with self._lock:
            if duration_s is not None:
                self._buckets[bisect.bisect_left(LATENCY_BOUNDS_S, duration_s)] += 1
                self._seconds += duration_s
            self._num_pages += num_done
            self._num_bytes += num_bytes
            for reason, num_pages in missed:
                if num_pages:
                    self._missed[reason] += num_pages

    def histogram(self) -> Histogram:
        """Durations so far."""
        with self._lock:
            return Histogram(LATENCY_BOUNDS_S, tuple(self._buckets), self._seconds)

    def figures(self) -> dict[str, float]:
        """`pages`, `missed_timeout`, `calls`, `seconds`, `p95_s`, ..."""
        histogram = self.histogram()
        with self._lock:
            return {
                "pages": self._num_pages,
                "bytes": self._num_bytes,
                "calls": sum(histogram.counts),
                "seconds": histogram.total_s,
                "p50_s": histogram.quantile_s(0.5),
                "p95_s": histogram.quantile_s(0.95),
                **{f"missed_{reason.value}": count for reason, count in self._missed.items()},
            }


class Meters:
    """Thread-safe counters. One call is counted once, with what became of its pages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._ops = {op: OpMeter() for op in Op}

    def of(self, op: Op) -> OpMeter:
        """The meter of one kind of call."""
        return self._ops[op]

    def count(self, name: str, number: int = 1) -> None:
        """Anything else worth a counter."""
        with self._lock:
            self._counts[name] += number

    def snapshot(self) -> Mapping[str, float]:
        """Every figure by name: `get_pages`, `get_missed_timeout`, `get_calls`, `get_seconds`, `get_p95_s`,
        ..."""
        figures = {
            f"{op.value}_{name}": value
            for op, meter in self._ops.items()
            for name, value in meter.figures().items()
        }
        with self._lock:
            return figures | dict(self._counts)

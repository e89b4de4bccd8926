"""Monotonic counts of what the workers did, for metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from hiradix.transfer.jobs import FailReason, JobKind, Result


@dataclass(frozen=True)
class KindStats:
    """One job kind since start: results, pages and bytes done, seconds worked, failed results by reason."""

    num_results: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    failures: Mapping[FailReason, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TransferStats:
    """A snapshot: `kinds` counts, `queued` jobs waiting, `running_s` seconds the running job has taken."""

    kinds: Mapping[JobKind, KindStats]
    queued: Mapping[JobKind, int]
    running_s: Mapping[JobKind, float]
    storage_attached: bool
    detaching: bool


class _Count:
    def __init__(self) -> None:
        self.num_results = 0
        self.num_pages = 0
        self.num_bytes = 0
        self.busy_s = 0.0
        self.failures: dict[FailReason, int] = {}


class TransferCounters:
    """Written by workers and the scheduler thread. lock: whoever calls `add` has it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._counts = {kind: _Count() for kind in JobKind}

    def add(self, result: Result) -> None:
        """Count one result."""
        count = self._counts[result.kind]
        count.num_results += 1
        count.num_pages += result.num_pages
        count.num_bytes += result.num_bytes
        count.busy_s += result.duration_s
        if result.reason is not None:
            count.failures[result.reason] = count.failures.get(result.reason, 0) + 1

    def snapshot(self) -> dict[JobKind, KindStats]:
        """Frozen copies, one per kind."""
        with self._lock:
            return {
                kind: KindStats(c.num_results, c.num_pages, c.num_bytes, c.busy_s, dict(c.failures))
                for kind, c in self._counts.items()
            }

"""Bytes and seconds of a worker's transfers since the last report, by kind of job."""

from __future__ import annotations

from dataclasses import dataclass, field

from hiradix.transfer import JobKind, Result


@dataclass
class Traffic:
    """Pages, bytes, seconds and failures per kind of job; names as they appear in vLLM's log and metrics."""

    counts: dict[str, float] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        name = _NAMES[result.kind]
        self._count(f"{name}_pages", result.num_pages)
        self._count(f"{name}_bytes", result.num_bytes)
        self._count(f"{name}_seconds", result.duration_s)
        self._count(f"{name}_failures", result.error is not None)

    def _count(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0) + value

    def take(self) -> dict[str, float]:
        """Counts since the last call; empty if nothing moved."""
        if not self.counts:
            return {}
        counts, self.counts = self.counts, {}
        return counts


_NAMES = {
    JobKind.WRITE: "write_through",
    JobKind.LOAD: "load_back",
    JobKind.QUERY: "query",
    JobKind.READ: "prefetch",
    JobKind.STORE: "backup",
    JobKind.DELETE: "deletion",
}

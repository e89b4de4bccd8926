"""Figures in vLLM's formats: its periodic log line and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hiradix.explain import PUBLIC_REASONS

FIGURES = {
    "hit_tokens": "Prompt tokens loaded from the host",
    "saved_pages": "Pages copied to the host",
    "save_failed_pages": "Pages whose copy to the host failed",
    "no_host_page": "Pages not saved for want of a free host page",
    "loaded_pages": "Pages copied from the host",
    "load_failed": "Loads that failed and were computed again",
    "not_text": "Requests of which nothing is cached: their cache_salt is no text",
    "load_too_slow_pages": "Pages not loaded as computing them was predicted to be faster",
    "fences": "Copies that a step waited for because it writes to their blocks",
    "prefetch_asked_pages": "Pages asked of storage",
    "prefetch_found_pages": "Pages storage had",
    "prefetch_read_pages": "Pages of prompts that the host could not have given without reads from storage",
    "prefetch_late_pages": "Of these, pages that came when nobody waited for them any more",
    "prefetch_refetched_pages": "Pages read again for a request that waits, as one before it had the room",
    "prefetch_left_out_pages": "Pages not read as computing is faster, or reads before brought too little",
    "prefetch_missed_deadline_pages": "Pages that had not come when their request went on",
    "prefetch_missed_host_capacity_pages": "Pages not read for want of host pages",
    "prefetch_missed_storage_transfer_pages": "Pages whose read failed",
    "stored_pages": "Pages put into storage",
    "store_failed_pages": "Pages storage did not take",
    "write_through_bytes": "Bytes copied to the host, over all workers",
    "write_through_seconds": "Seconds of copies to the host, over all workers",
    "load_back_bytes": "Bytes copied from the host, over all workers",
    "load_back_seconds": "Seconds of copies from the host, over all workers",
    "prefetch_bytes": "Bytes read from storage, over all workers",
    "prefetch_seconds": "Seconds of reads from storage, over all workers",
    "backup_bytes": "Bytes put into storage, over all workers",
    "backup_seconds": "Seconds of puts into storage, over all workers",
    **{
        f"computed_{reason}_tokens": f"Prompt tokens that were computed, for the reason {reason}"
        for reason in dict.fromkeys(PUBLIC_REASONS.values())
    },
}
GAUGES = {
    "waiting_reserved_pages": "Host pages held for requests that wait, or being fetched for them",
    "waiting_reserved_pages_cap": "Of these, at most",
    "requests_waiting_for_host_room": "Requests whose pages storage has and that have no host room for them",
}


class HiRadixStats(KVConnectorStats):
    """Counts since the last report and gauges that have changed, by name; adding a later report adds its
    counts, and its gauges take the place of those before."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        names: set[str] = {*self.data, *other.data}
        counts = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in names}
        gauges = {**self.data, **other.data}
        return HiRadixStats({name: gauges[name] if name in GAUGES else counts[name] for name in names})

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 4) for name, value in sorted(self.data.items()) if value}

    def is_empty(self) -> bool:
        return not any(value or name in GAUGES for name, value in self.data.items())


class HiRadixPromMetrics(KVConnectorPromMetrics):
    """A counter or gauge per figure: `vllm:hiradix_<figure>`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {name: self._each(self._counter_cls, name, text) for name, text in FIGURES.items()}
        self._gauges = {
            name: self._each(self._gauge_cls, name, text, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }

    def _each(self, kind: Any, name: str, text: str, **more: Any) -> dict[int, Any]:
        """One metric, by engine."""
        metric = kind(name=f"vllm:hiradix_{name}", documentation=text, labelnames=self._labelnames, **more)
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
            elif name in self._counters and value > 0:
                self._counters[name][engine_idx].inc(value)

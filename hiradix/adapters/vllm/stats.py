"""Figures in vLLM's formats: its periodic log line and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

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
}


class HiRadixStats(KVConnectorStats):
    """Counts since the last report, by name; adding two reports adds their counts."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        names: set[str] = {*self.data, *other.data}
        return HiRadixStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 4) for name, value in sorted(self.data.items()) if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class HiRadixPromMetrics(KVConnectorPromMetrics):
    """A counter per figure: `vllm:hiradix_<figure>`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in FIGURES.items():
            counter = self._counter_cls(
                name=f"vllm:hiradix_{name}", documentation=text, labelnames=self._labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._counters[name][engine_idx].inc(value)

"""Adds our counters, by their growth since the last step, to SGLang's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.observability.metrics_collector import (
    STAT_LOGGER_ROLE_STORAGE,
    StorageMetricsCollector,
    radix_cache_metric_labels,
    resolve_collector_class,
)
from sglang.srt.runtime_context import get_observability, get_parallel

from hiradix.transfer import JobKind, KindStats
from hiradix.tree import BACKBONE

POOL = "kv"
COMPUTED_TEXT = "Prompt tokens that were computed, by why."
# SGLang's reasons for unused storage hits; those of ours that it has no name for count as the last one
_REASONS = ("below_threshold", "host_capacity", "storage_transfer", "deadline", "dropped")
# host room of waiting requests: held or being filled, its cap, and the number of requests without any yet
ROOM_GAUGES = {
    "hiradix:waiting_reserved_tokens": "Host tokens held for requests that wait, or being fetched for them.",
    "hiradix:waiting_reserved_tokens_cap": "Of these, at most.",
    "hiradix:requests_waiting_for_host_room": (
        "Requests whose tokens storage has and that have no host room for them yet."
    ),
}


class MetricsFeed:
    """Feeds `cache.metrics_collector` and a storage collector. is_on: whether anybody asked for metrics."""

    def __init__(self, cache: Any, is_on: bool):
        self._cache = cache
        self.is_on = is_on
        self._storage: Any = None
        self._seen: dict[str, int] = {}
        self._kinds: dict[JobKind, KindStats] = {}
        self._num_results = -1
        self._room_gauges: list[Any] = []
        self._room: tuple[int, ...] = ()  # as it was shown
        self._computed: Any = None  # counter of computed tokens by reason, once there are some
        self._num_explained = 0

    def show_storage(self, name: str | None) -> None:
        """Label the series of storage with the name of a backend that was attached. May be called again, as
        the set of labels stays the same."""
        if not self.is_on or name is None:
            return
        parallel = get_parallel()
        labels = radix_cache_metric_labels(name, parallel, is_dp_attention_enabled())
        labels = {"storage_backend": labels.pop("cache_type"), **labels, "pp_size": parallel.pp_size}
        labels |= {"attn_cp_rank": 0, "attn_cp_size": 1} | dict(get_observability().extra_metric_labels or {})
        if self._storage is None:
            collector = resolve_collector_class(STAT_LOGGER_ROLE_STORAGE, StorageMetricsCollector)
            self._storage = collector(labels=labels)
            kind = collector._gauge_cls or _prometheus().Gauge
            self._room_gauges = [
                kind(gauge, text, labelnames=list(labels), multiprocess_mode="mostrecent")
                for gauge, text in ROOM_GAUGES.items()
            ]
        else:
            self._show_room((0, 0, 0))  # of the storage there was
            self._storage.labels = labels

    def update(self) -> None:
        """Add what happened since the last call. Next to free when no transfer has ended."""
        inner = self._cache.inner
        if self._storage is not None:
            prefetcher, size = inner.cache.prefetcher, self._cache.page_size
            self._show_room(
                (prefetcher.room.num_held * size, prefetcher.caps[BACKBONE] * size, prefetcher.room.num_short)
            )
        explainer = self._cache.explainer
        if explainer is not None and explainer.num_explained != self._num_explained:
            self._num_explained = explainer.num_explained
            self._add_computed(explainer.computed_tokens)
        stats = inner.controller.stats()
        num_results = sum(kind.num_results for kind in stats.kinds.values())
        if num_results == self._num_results:
            return
        self._num_results = num_results
        self._add_copies(stats.kinds)
        if self._storage is not None:
            self._add_storage(inner.cache.counters)
        self._kinds = dict(stats.kinds)

    def _show_room(self, room: tuple[int, ...]) -> None:
        if room == self._room:
            return
        self._room = room
        for gauge, value in zip(self._room_gauges, room, strict=True):
            gauge.labels(**self._storage.labels).set(value)

    def _add_computed(self, computed: Mapping[str, int]) -> None:
        """Prompt tokens that were computed, by why."""
        labels = self._cache.metrics_collector.labels
        if self._computed is None:
            names = [*labels, "reason"]
            kind = self._cache.metrics_collector._counter_cls or _prometheus().Counter
            self._computed = kind("hiradix:computed_tokens", COMPUTED_TEXT, labelnames=names)
        for reason, total in computed.items():
            self._computed.labels(**labels, reason=reason).inc(self._growth("computed " + reason, total))

    def _add_copies(self, kinds: Any) -> None:
        """Copies between device and host: SGLang's collector counts tokens, bytes and seconds."""
        out, size = self._cache.metrics_collector, self._cache.page_size
        load, write = self._new_counts(kinds, JobKind.LOAD), self._new_counts(kinds, JobKind.WRITE)
        if load.num_pages:
            out.increment_load_back_num_tokens(load.num_pages * size, POOL)
            out.increment_load_back_num_bytes(load.num_bytes)
            out.observe_load_back_duration(load.busy_s)
        if write.num_pages:
            out.increment_backup_num_tokens(write.num_pages * size, POOL)
            out.increment_backup_num_bytes(write.num_bytes)
            out.observe_backup_duration(write.busy_s)

    def _add_storage(self, counters: Any) -> None:
        """Transfers between host and storage."""
        size, out = self._cache.page_size, self._storage
        out.log_prefetched_tokens(self._growth("prefetched", counters.prefetched) * size)
        out.log_backuped_tokens(self._growth("backed_up", counters.backed_up) * size)
        for reason, total in counters.unfulfilled.items():
            known = reason if reason in _REASONS else "dropped"
            out.log_storage_prefetch_unfulfilled_tokens(self._growth("not " + reason, total) * size, known)

    def _growth(self, name: str, total: int) -> int:
        """The growth of a counter since the last call."""
        before = self._seen.get(name, 0)
        self._seen[name] = total
        return total - before

    def _new_counts(self, kinds: Any, kind: JobKind) -> KindStats:
        """One kind's counts since the last call."""
        new, old = kinds[kind], self._kinds.get(kind, KindStats())
        return KindStats(
            new.num_results - old.num_results,
            new.num_pages - old.num_pages,
            new.num_bytes - old.num_bytes,
            new.busy_s - old.busy_s,
        )


def _prometheus() -> Any:
    """Prometheus's client, imported only now: SGLang must first set where processes share their figures."""
    import prometheus_client

    return prometheus_client

"""Prometheus metrics: upstream's names where upstream has the figure, `hiradix:` names for the rest.

Label names never change, so attaching storage at runtime only changes a label's value. What requests did is
counted here as they run; what engine and cache hold is read from a `Snapshot` at each scrape.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hiradix.apps.engine.api import Output
from hiradix.apps.server.errors import ApiError
from hiradix.apps.server.generation import ClientGone
from hiradix.apps.server.refusals import REFUSALS
from hiradix.apps.server.service import Snapshot, TransferReport
from hiradix.explain import Explanation, public_counts

TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
LATENCY_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_RANKS = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}

Figure = tuple[str, str, Callable[[Snapshot], float]]

ENGINE_GAUGES: tuple[Figure, ...] = (
    ("sglang:num_running_reqs", "Requests in the running batch.", lambda s: s.engine.num_running),
    ("sglang:num_queue_reqs", "Requests that wait.", lambda s: s.engine.num_waiting),
    ("sglang:num_used_tokens", "Device tokens held by requests.", lambda s: _used(s)),
    ("sglang:token_usage", "Share of the device pool held by requests.", lambda s: _used(s) / _total(s)),
    ("sglang:max_total_num_tokens", "Device pool size in tokens.", lambda s: s.engine.max_total_tokens),
    ("sglang:kv_available_tokens", "Free device tokens.", lambda s: s.engine.available_tokens),
    ("sglang:kv_evictable_tokens", "Cached device tokens nobody holds.", lambda s: s.engine.evictable_tokens),
    ("sglang:kv_used_tokens", "Device tokens held by requests.", lambda s: _used(s)),
    (
        "hiradix:protected_tokens",
        "Cached device tokens that are locked.",
        lambda s: s.engine.protected_tokens,
    ),
    (
        "hiradix:sessions_in",
        "Sessions that the order of service has let in.",
        lambda s: s.engine.num_sessions_in,
    ),
    (
        "hiradix:transfers_in_flight",
        "Transfers between tiers not ended yet.",
        lambda s: s.cache.num_in_flight,
    ),
)
ENGINE_COUNTERS: tuple[Figure, ...] = (
    (
        "sglang:num_retractions",
        "Requests put back because pages ran out.",
        lambda s: s.engine.num_retractions,
    ),
    (
        "hiradix:late_first_tokens",
        "First tokens behind the bound of the order of service.",
        lambda s: s.engine.num_late,
    ),
    ("hiradix:engine_steps", "Scheduler steps.", lambda s: s.engine.num_steps),
)
CACHE_GAUGES: tuple[Figure, ...] = (
    ("sglang:hicache_host_used_tokens", "Host pool tokens in use.", lambda s: s.cache.host_used),
    ("sglang:hicache_host_total_tokens", "Host pool size in tokens.", lambda s: s.cache.host_total),
)
STORAGE_GAUGES: tuple[Figure, ...] = (
    (
        "hiradix:storage_joined",
        "1 where the attached storage has answered since it was opened, else 0.",
        lambda s: float(s.storage.get("joined", 0)),
    ),
    (
        "hiradix:storage_read_only",
        "1 where the attached storage serves its pages and can store none, else 0.",
        lambda s: float(s.storage.get("read_only", 0)),
    ),
    (
        "hiradix:waiting_reserved_tokens",
        "Host tokens held for requests that wait, or being fetched for them.",
        lambda s: s.cache.waiting_reserved,
    ),
    ("hiradix:waiting_reserved_tokens_cap", "Of these, at most.", lambda s: s.cache.waiting_cap),
    (
        "hiradix:requests_waiting_for_host_room",
        "Requests whose tokens storage has and that have no host room for them yet.",
        lambda s: s.cache.num_waiting_for_room,
    ),
)
CACHE_COUNTERS: tuple[Figure, ...] = (
    ("sglang:evicted_tokens", "Tokens evicted from the device.", lambda s: s.cache.evicted_device),
    ("sglang:load_back_tokens", "Tokens copied from host to device.", lambda s: s.cache.loaded),
    ("sglang:load_back_bytes", "Bytes copied from host to device.", lambda s: _num_bytes(s, "load")),
    ("sglang:hicache_backup_tokens", "Tokens copied from device to host.", lambda s: s.cache.written),
    ("sglang:hicache_backup_bytes", "Bytes copied from device to host.", lambda s: _num_bytes(s, "write")),
    (
        "hiradix:load_too_slow_tokens",
        "Host hits computed again because that was predicted to be faster.",
        lambda s: s.cache.load_too_slow,
    ),
    ("hiradix:host_evicted_tokens", "Tokens evicted from the host.", lambda s: s.cache.evicted_host),
)
STORAGE_COUNTERS: tuple[Figure, ...] = (
    ("sglang:prefetched_tokens", "Tokens fetched from storage.", lambda s: s.cache.prefetched),
    (
        "hiradix:refetched_tokens",
        "Tokens fetched again for a request that waits, as one nearer to its turn had the room.",
        lambda s: s.cache.refetched,
    ),
    ("sglang:backuped_tokens", "Tokens stored.", lambda s: s.cache.backed_up),
    ("sglang:hicache_backup_dropped_tokens", "Tokens not stored.", lambda s: s.cache.backup_failed),
)


TRANSFER_COUNTERS: tuple[tuple[str, str, Callable[[TransferReport], float]], ...] = (
    ("hiradix:transfer_jobs", "Transfers that ended.", lambda t: t.num_jobs),
    ("hiradix:transfer_failures", "Transfers that failed or were cut short.", lambda t: t.num_failed),
    ("hiradix:transfer_bytes", "Bytes moved.", lambda t: t.num_bytes),
    ("hiradix:transfer_busy_seconds", "Time the workers worked.", lambda t: t.busy_s),
)


def _total(snapshot: Snapshot) -> int:
    return max(1, snapshot.engine.max_total_tokens)


def _num_bytes(snapshot: Snapshot, kind: str) -> int:
    return snapshot.transfers.get(kind, TransferReport()).num_bytes


def _used(snapshot: Snapshot) -> int:
    engine = snapshot.engine
    return max(0, engine.max_total_tokens - engine.available_tokens - engine.evictable_tokens)


class SnapshotCollector:
    """The metric families of one snapshot, for one scrape."""

    def __init__(self, snapshot: Snapshot, labels: Mapping[str, str]):
        self._snapshot = snapshot
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        """All families, always the same ones with the same label names."""
        snapshot = self._snapshot
        engine = {"model_name": snapshot.engine.model_name}
        cache = {"cache_type": snapshot.cache_type, **_RANKS}
        pool = {**cache, "pool": "full"}
        storage = {"storage_backend": snapshot.storage_backend or "none", **_RANKS, "pp_size": "1"}
        yield from self._families(GaugeMetricFamily, ENGINE_GAUGES, engine)
        yield from self._families(CounterMetricFamily, ENGINE_COUNTERS, engine)
        yield from self._families(GaugeMetricFamily, CACHE_GAUGES, cache)
        yield from self._families(CounterMetricFamily, CACHE_COUNTERS, pool)
        yield from self._families(CounterMetricFamily, STORAGE_COUNTERS, storage)
        yield from self._families(GaugeMetricFamily, STORAGE_GAUGES, storage)
        yield self._by_reason(
            "sglang:hicache_dropped_tokens", pool, {"host_pressure": snapshot.cache.write_dropped}
        )
        yield self._by_reason(
            "sglang:storage_prefetch_unfulfilled_tokens", storage, snapshot.cache.unfulfilled
        )
        yield self._figures(
            "hiradix:storage_figure",
            "The attached storage backend's own figures, by name.",
            storage,
            snapshot.storage,
        )
        yield self._figures(
            "hiradix:window_tokens",
            "Tokens of sliding-window pools, by what they are.",
            cache,
            snapshot.window,
        )
        yield self._figures(
            "hiradix:state_records",
            "Records of recurrent states and slots for them, by what they are.",
            cache,
            snapshot.state,
        )
        yield self._figures(
            "hiradix:intents",
            "Wishes, leases and what became of them, by what they are.",
            cache,
            snapshot.intents,
        )
        yield from self._transfers(cache)

    def _transfers(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        labels = {**labels, **self._labels}
        for name, text, value in TRANSFER_COUNTERS:
            metric = CounterMetricFamily(name, text, labels=[*labels, "kind"])
            for kind, figures in self._snapshot.transfers.items():
                metric.add_metric([*labels.values(), kind], value(figures))
            yield metric

    def _families(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        figures: Iterable[Figure],
        labels: Mapping[str, str],
    ) -> Iterator[Metric]:
        labels = {**labels, **self._labels}
        for name, text, value in figures:
            metric = family(name, text, labels=list(labels))
            metric.add_metric(list(labels.values()), value(self._snapshot))
            yield metric

    def _by_reason(self, name: str, labels: Mapping[str, str], values: Mapping[str, int]) -> Metric:
        labels = {**labels, **self._labels}
        metric = CounterMetricFamily(name, "Tokens lost, by reason.", labels=[*labels, "reason"])
        for reason, value in values.items():
            metric.add_metric([*labels.values(), reason], value)
        return metric

    def _figures(self, name: str, text: str, labels: Mapping[str, str], values: Mapping[str, Any]) -> Metric:
        labels = {**labels, **self._labels}
        metric = GaugeMetricFamily(name, text, labels=[*labels, "figure"])
        for figure, value in sorted(values.items()):
            if isinstance(value, int | float):
                metric.add_metric([*labels.values(), figure], float(value))
        return metric


class _Tally:
    """Prompt and cached tokens so far, for the hit rate."""

    def __init__(self) -> None:
        self.prompt = 0
        self.cached = 0


class RequestMetrics:
    """Counts requests as their outputs pass by; used on the event loop only.

    explained: is told of each that has ended and can be explained.
    """

    def __init__(
        self,
        model_name: str,
        labels: Mapping[str, str],
        explained: Callable[[Explanation], None] = lambda _: None,
    ):
        self._labels = {"model_name": model_name, **labels}
        self._extra = dict(labels)
        self._registry = CollectorRegistry(auto_describe=False)
        self._tally = _Tally()
        self._requests = self._counter("sglang:num_requests", "Requests that ended.", ["finish_reason"])
        self._prompt = self._counter("sglang:prompt_tokens", "Prompt tokens.")
        self._generated = self._counter("sglang:generation_tokens", "Generated tokens.")
        self._cached = self._counter("sglang:cached_tokens", "Prompt tokens reused.", ["cache_source"])
        self._computed = self._counter(
            "hiradix:computed_tokens", "Prompt tokens that were computed, by why.", ["reason"]
        )
        self._explained = explained
        self._ttft = self._histogram(
            "sglang:time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS_S
        )
        self._e2e = self._histogram(
            "sglang:e2e_request_latency_seconds", "Request latency.", LATENCY_BUCKETS_S
        )

    def _counter(self, name: str, text: str, more: Iterable[str] = ()) -> Counter:
        return Counter(name, text, [*self._labels, *more], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, list(self._labels), buckets=buckets, registry=self._registry)

    async def observed(self, outputs: AsyncIterator[Output]) -> AsyncIterator[Output]:
        """`outputs`, timed and counted on their way, however they end."""
        labels, started, waiting = self._labels.values(), time.monotonic(), True
        output: Output | None = None
        try:
            async for output in outputs:
                if waiting and output.token_ids:
                    waiting = False
                    self._ttft.labels(*labels).observe(time.monotonic() - started)
                if output.finish_reason is not None:
                    self._e2e.labels(*labels).observe(time.monotonic() - started)
                    self._count(output.finish_reason, output)
                yield output
        except ClientGone:
            self._count("client_gone", output)
            raise
        except ApiError as error:
            self._count("error" if error.status == 500 else "refused", output)
            raise

    def _count(self, finish_reason: str, last: Output | None) -> None:
        """A request ended; `last`: its last output, if there was one."""
        labels = tuple(self._labels.values())
        self._requests.labels(*labels, finish_reason).inc()
        if last is None:
            return
        usage = last.usage
        self._prompt.labels(*labels).inc(usage.prompt_tokens)
        self._generated.labels(*labels).inc(usage.completion_tokens)
        sources = {
            "device": usage.cached_device,
            "host": usage.cached_host,
            "storage": usage.cached_storage,
            "total": usage.cached_tokens,
        }
        for source, count in sources.items():
            self._cached.labels(*labels, source).inc(count)
        if usage.explanation is not None:
            self._explained(usage.explanation)
            for reason, count in public_counts(usage.explanation.tokens_by_reason()).items():
                self._computed.labels(*labels, reason).inc(count)
        self._tally.prompt += usage.prompt_tokens
        self._tally.cached += usage.cached_tokens

    def exposition(self, snapshot: Snapshot | None) -> bytes:
        """The text of /metrics; without a snapshot only what was counted here."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_HitRate(self._labels, self._tally))
        registry.register(_Refusals(self._labels))
        if snapshot is not None:
            registry.register(SnapshotCollector(snapshot, self._extra))
        text: bytes = generate_latest(self._registry) + generate_latest(registry)
        return text


class _HitRate:
    def __init__(self, labels: Mapping[str, str], tally: _Tally):
        self._labels = labels
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        """Share of all prompt tokens that were reused, since the start."""
        metric = GaugeMetricFamily(
            "sglang:cache_hit_rate", "Share of prompt tokens reused.", labels=list(self._labels)
        )
        metric.add_metric(list(self._labels.values()), self._tally.cached / max(1, self._tally.prompt))
        yield metric


class _Refusals:
    def __init__(self, labels: Mapping[str, str]):
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Connections that were refused before there was a request, since the process started."""
        names = [*self._labels, "reason"]
        metric = CounterMetricFamily("hiradix:refused_connections", "Connections refused.", labels=names)
        for reason, count in REFUSALS.items():
            metric.add_metric([*self._labels.values(), reason], count)
        yield metric

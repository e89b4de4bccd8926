"""Gauges of the host room of requests that wait, among SGLang's metrics; no server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from hiradix.adapters.sglang import metrics_feed
from hiradix.adapters.sglang.metrics_feed import ROOM_GAUGES, MetricsFeed
from hiradix.transfer import JobKind, KindStats


def test_gauges_follow_the_room_and_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that is there no more has none."""
    parallel, none = SimpleNamespace(pp_size=1), SimpleNamespace(extra_metric_labels=None)
    monkeypatch.setattr(metrics_feed, "get_parallel", lambda: parallel)
    monkeypatch.setattr(metrics_feed, "get_observability", lambda: none)
    monkeypatch.setattr(metrics_feed, "is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr(metrics_feed, "radix_cache_metric_labels", lambda name, *_: {"cache_type": name})
    prefetcher = SimpleNamespace(room=SimpleNamespace(num_held=3, num_short=1), caps=[10])
    stats = SimpleNamespace(kinds={kind: KindStats() for kind in JobKind})
    counters = SimpleNamespace(prefetched=0, backed_up=0, unfulfilled={})
    inner = SimpleNamespace(
        cache=SimpleNamespace(prefetcher=prefetcher, counters=counters),
        controller=SimpleNamespace(stats=lambda: stats),
    )
    feed = MetricsFeed(
        SimpleNamespace(inner=inner, page_size=4, metrics_collector=None, explainer=None), True
    )

    def shown(name: str) -> list[float | None]:
        labels = {"storage_backend": name, "pp_size": "1", "attn_cp_rank": "0", "attn_cp_size": "1"}
        return [REGISTRY.get_sample_value(gauge, labels) for gauge in ROOM_GAUGES]

    feed.show_storage("one")
    feed.update()
    assert shown("one") == [12, 40, 1]
    prefetcher.room.num_held = prefetcher.room.num_short = 0
    feed.update()
    assert shown("one") == [0, 40, 0], "though no transfer has ended"
    feed.show_storage("other")
    feed.update()
    assert (shown("one"), shown("other")) == ([0, 0, 0], [0, 40, 0])

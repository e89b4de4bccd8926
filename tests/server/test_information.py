"""Health, server information and metrics over a scripted engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from hiradix.apps.engine.api import EngineBusy
from hiradix.apps.server.app import AppSettings, create_app
from hiradix.apps.server.flags import OWN_LABELS
from hiradix.apps.server.refusals import REFUSALS
from hiradix.apps.server.service import CacheReport
from tests.server.scripted import INFO, MODEL, ScriptedService, application, piece

Samples = dict[str, list[tuple[dict[str, str], float]]]


def scrape(http: TestClient) -> Samples:
    reply = http.get("/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
    samples: Samples = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    [found] = [v for have, v in samples[name] if labels.items() <= have.items()]
    return found


def test_health_follows_the_engine() -> None:
    service = ScriptedService()
    http = TestClient(application(service))
    for path in ("/health", "/ready"):
        for method in ("GET", "HEAD"):  # HEAD: what some load balancers ask
            service.healthy = True
            assert http.request(method, path).status_code == 200
            service.healthy = False
            assert http.request(method, path).status_code == 503


def test_server_info_under_both_names() -> None:
    http = TestClient(application(ScriptedService(), page_size=32, hicache_ratio=1.5))
    info = http.get("/server_info").json()
    assert info == http.get("/get_server_info").json()
    assert (info["served_model_name"], info["page_size"], info["hicache_ratio"]) == (MODEL, 32, 1.5)
    assert info["engine"]["num_running"] == 2 and info["cache"]["host_used"] == 7
    assert info["hicache_write_policy"] == "write_through"


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_failed_are_counted_with_what_they_cost(stream: bool) -> None:
    """A server whose every request failed had no request at all in its metrics."""
    failed = replace(piece("", "error", num_done=3), error="a step failed")
    service = ScriptedService([piece("x", num_done=2), failed])
    http = TestClient(application(service))
    http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    service.script = (EngineBusy("the queue is full"),)
    assert http.post("/v1/completions", json={"prompt": "a", "stream": stream}).status_code == 503
    samples = scrape(http)
    assert value(samples, "sglang:num_requests_total", finish_reason="error") == 1
    assert value(samples, "sglang:num_requests_total", finish_reason="refused") == 1
    assert value(samples, "sglang:prompt_tokens_total") == 50
    assert value(samples, "sglang:generation_tokens_total") == 2
    assert value(samples, "sglang:cached_tokens_total", cache_source="total") == 35
    assert "sglang:e2e_request_latency_seconds_count" not in samples, "of answers that were complete"


def test_requests_are_counted_by_source() -> None:
    http = TestClient(application(ScriptedService()))
    for stream in (False, True):
        http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    samples = scrape(http)
    assert value(samples, "sglang:num_requests_total", finish_reason="stop") == 2
    assert value(samples, "sglang:prompt_tokens_total", model_name=MODEL) == 100
    assert value(samples, "sglang:generation_tokens_total") == 12
    cached = {
        s: value(samples, "sglang:cached_tokens_total", cache_source=s) for s in ("device", "host", "storage")
    }
    assert cached == {"device": 20, "host": 40, "storage": 10}
    assert value(samples, "sglang:cached_tokens_total", cache_source="total") == 70
    assert value(samples, "sglang:cache_hit_rate") == 0.7
    assert value(samples, "sglang:time_to_first_token_seconds_count") == 2


def test_engine_and_cache_figures() -> None:
    samples = scrape(TestClient(application(ScriptedService())))
    assert value(samples, "sglang:num_running_reqs") == 2
    assert value(samples, "sglang:num_queue_reqs") == 3
    assert value(samples, "sglang:num_used_tokens") == 100
    assert value(samples, "sglang:token_usage") == 0.1
    assert value(samples, "sglang:hicache_host_used_tokens", cache_type="HiRadixCache") == 7
    reason = value(samples, "sglang:storage_prefetch_unfulfilled_tokens_total", reason="deadline")
    assert reason == 3
    assert value(samples, "sglang:load_back_bytes_total", pool="full") == 512
    assert value(samples, "sglang:hicache_backup_bytes_total", pool="full") == 1024
    assert value(samples, "hiradix:transfer_failures_total", kind="load") == 1


def test_attaching_storage_changes_no_label_name() -> None:
    service = ScriptedService()
    http = TestClient(application(service))
    before = scrape(http)
    service.state = replace(
        service.state,
        engine=INFO,
        cache=CacheReport(prefetched=640, backed_up=64, unfulfilled={"deadline": 1}),
        storage_backend="file",
        storage={"num_errors": 2, "state": "closed"},
    )
    after = scrape(http)
    names = {name: {frozenset(labels) for labels, _ in samples} for name, samples in before.items()}
    assert all({frozenset(labels) for labels, _ in after[name]} == labels_ for name, labels_ in names.items())
    assert value(before, "sglang:prefetched_tokens_total", storage_backend="none") == 0
    assert value(after, "sglang:prefetched_tokens_total", storage_backend="file") == 640
    assert value(after, "hiradix:storage_figure", figure="num_errors") == 2


def test_windows_have_figures_of_their_own() -> None:
    service = ScriptedService()
    http = TestClient(application(service))
    assert not scrape(http).get("hiradix:window_tokens")
    service.state = replace(service.state, window={"device_total": 64, "host_used": 8})
    assert value(scrape(http), "hiradix:window_tokens", figure="host_used") == 8


def test_states_have_figures_of_their_own() -> None:
    service = ScriptedService()
    http = TestClient(application(service))
    assert not scrape(http).get("hiradix:state_records")
    service.state = replace(service.state, state={"device_total": 64, "host_used": 8})
    assert value(scrape(http), "hiradix:state_records", figure="host_used") == 8


def test_extra_labels_are_on_every_metric() -> None:
    app = create_app(ScriptedService(), AppSettings(MODEL, metric_labels={"zone": "a"}))
    http = TestClient(app)
    http.post("/v1/completions", json={"prompt": "a"})
    assert all(labels["zone"] == "a" for samples in scrape(http).values() for labels, _ in samples)


def test_a_busy_engine_does_not_break_the_scrape() -> None:
    service = ScriptedService()
    http = TestClient(application(service), raise_server_exceptions=False)
    assert value(scrape(http), "sglang:num_running_reqs") == 2

    async def busy() -> None:
        raise TimeoutError

    service.snapshot = busy  # type: ignore[method-assign, assignment]
    assert value(scrape(http), "sglang:num_running_reqs") == 2
    reply = http.get("/server_info")
    assert reply.status_code == 503 and reply.headers["retry-after"] == "1"


def test_the_labels_that_tell_values_apart_are_those_a_start_refuses() -> None:
    service, two = ScriptedService(), {"one": 1, "two": 2}
    service.state = replace(
        service.state, cache=CacheReport(unfulfilled=two), storage=two, window=two, state=two
    )
    with TestClient(application(service)) as http:
        for finish_reason in ("stop", "length"):
            service.script = (piece("x", finish_reason),)
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        samples = scrape(http)
    found = set()
    for same_name in samples.values():
        for label in same_name[0][0]:
            if len({labels[label] for labels, _ in same_name}) > 1:
                found.add(label)
    assert found == OWN_LABELS


def test_refused_connections_are_counted_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, reason in enumerate(("invalid", "late", "full"), 1):
        monkeypatch.setitem(REFUSALS, reason, number)
    samples = scrape(TestClient(application(ScriptedService())))
    for number, reason in enumerate(("invalid", "late", "full"), 1):
        name = "hiradix:refused_connections_total"
        assert value(samples, name, reason=reason, model_name=MODEL) == number

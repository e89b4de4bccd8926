"""The HTTP server over the real engine with a tiny seeded Llama: hits by tier, administration, a process."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from hiradix.apps.bench.workload import long_text
from hiradix.apps.demo.process import ServerProcess
from hiradix.apps.engine.api import Output
from hiradix.apps.engine.async_engine import EngineThread
from hiradix.apps.engine.engine import Engine
from hiradix.apps.server.app import AppSettings, create_app
from hiradix.apps.server.auth import Keys
from hiradix.apps.server.engine_service import EngineService
from hiradix.apps.server.flags import parse_serve_args
from hiradix.apps.server.serve import build_service
from hiradix.cli import main
from hiradix.transfer.process_group import RankLost
from tests.e2e.tiny_model import write_tiny_model
from tests.server.live import DEADLINE_S, running

PAGE = 16
STORAGE = "/hicache/storage-backend"
ADMIN = {"Authorization": "Bearer admin"}
TIERS = ("device", "host", "storage")
SLOW_DISK = {"prefetch_threshold": PAGE, "deadline_s": DEADLINE_S}  # it may be one that others keep busy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def flags(model: Path, *more: str) -> list[str]:
    return [
        *("--model-path", str(model), "--served-model-name", "tiny", "--admin-api-key", "admin"),
        *("--enable-hierarchical-cache", "--hicache-no-regret", "off"),
        *("--page-size", str(PAGE), "--max-total-tokens", "1024"),
        *("--hicache-ratio", "2", "--hicache-storage-prefetch-policy", "wait_complete", "--check-invariants"),
        *more,
    ]


@contextmanager
def real_application(arguments: list[str]) -> Iterator[FastAPI]:
    """The application over a real engine in this process."""
    config = parse_serve_args(arguments)
    service = build_service(config)
    settings = AppSettings(
        config.model_name,
        config.engine.cache,
        Keys(None, config.admin_api_key),
        {},
        config.extra_config_text,
        config.attach,
    )
    try:
        yield create_app(service, settings)
    finally:
        assert service.close(DEADLINE_S)
        assert not service.healthy


@contextmanager
def serving(model: Path, *more: str) -> Iterator[TestClient]:
    """A client of such an application."""
    with real_application(flags(model, *more)) as app, TestClient(app) as http:
        yield http


def ask(http: TestClient | httpx.Client, prompt: object, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    reply = http.post("/v1/completions", json={**body, "return_token_ids": True})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def cached(answer: dict[str, Any]) -> dict[str, int]:
    tiers: dict[str, int] = answer["usage"]["cached_tokens_details"]
    assert sum(tiers.values()) == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tiers


def tokens(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def flush(http: TestClient) -> None:
    assert http.post("/flush_cache?timeout=60", headers=ADMIN).status_code == 200


PROMPT = [5 + i % 400 for i in range(300)]


def test_answers_hits_and_namespaces(model: Path) -> None:
    with serving(model) as http:
        first, again = ask(http, PROMPT), ask(http, PROMPT)
        assert cached(first) == dict.fromkeys(TIERS, 0)
        assert cached(again) == {"device": len(PROMPT) // PAGE * PAGE, "host": 0, "storage": 0}
        assert tokens(again) == tokens(first) and len(tokens(first)) == 4
        other = ask(http, PROMPT, cache_salt="tenant")
        assert sum(cached(other).values()) == 0 and tokens(other) == tokens(first)
        assert sum(cached(ask(http, PROMPT, extra_key="adapter")).values()) == 0
        assert cached(ask(http, PROMPT, cache_salt="tenant"))["device"] > 0
        flush(http)
        assert sum(cached(ask(http, PROMPT)).values()) == 0


def test_host_hits_after_device_eviction(model: Path) -> None:
    with serving(model) as http:
        first = ask(http, PROMPT)
        for start in range(1, 5):
            ask(http, [start, *PROMPT])
        again = ask(http, PROMPT)
        assert cached(again)["host"] > 0 and tokens(again) == tokens(first)


def test_chat_text_is_the_same_whole_and_streamed(model: Path) -> None:
    body = {
        "messages": [{"role": "user", "content": long_text(600)[:600]}],
        "max_tokens": 12,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    with serving(model) as http:
        whole = http.post("/v1/chat/completions", json=body).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        text = http.post("/v1/chat/completions", json={**body, **options}).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert (
        "".join(c["delta"].get("content", "") for c in choices) == whole["choices"][0]["message"]["content"]
    )
    streamed = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    listed = whole["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in streamed] == [e["token"] for e in listed] and len(listed) == 12
    assert all(len(e["top_logprobs"]) == 3 for e in listed)
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert cached({"usage": chunks[-1]["usage"]})["device"] > 0


@pytest.mark.parametrize("path", ["completions", "chat/completions", "end_of_session"])
def test_text_that_is_none_is_the_clients_mistake(model: Path, path: str) -> None:
    field = "messages" if path.startswith("chat") else "prompt"
    half = {"messages": '[{"role": "user", "content": "a\\ud83d"}]', "prompt": '"a\\ud83d"'}[field]
    with serving(model) as http:
        reply = http.post(f"/v1/{path}", content=f'{{"{field}": {half}}}')
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field, reply.text
        ask(http, "a\U0001f600")


def test_requests_that_can_never_run(model: Path) -> None:
    with serving(model) as http:
        too_long = http.post("/v1/completions", json={"prompt": [7] * 5000})
        foreign = http.post("/v1/completions", json={"prompt": [10**6]})
        ask(http, "still serving")
    for reply in (too_long, foreign):
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt"
    assert "5000" in too_long.json()["error"]["message"]


def test_storage_attached_while_serving(model: Path, tmp_path: Path) -> None:
    """The sequence of upstream's runtime attach test."""
    extra = json.dumps({"file_storage_path": str(tmp_path / "pages"), **SLOW_DISK})
    body = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": extra}
    prepared = json.dumps({"backend": "disk", "disk_storage_path": str(tmp_path / "disk")})
    allowed = ("--attach-allow", f"backend=file,path={tmp_path}", "--attachable", f"other={prepared}")
    with serving(model, *allowed) as http:

        def put(**changes: Any) -> httpx.Response:
            flush(http)  # idle: attach and detach are refused while pages are on their way
            return http.put(STORAGE, json={**body, **changes}, headers=ADMIN)

        assert http.get(STORAGE).status_code == 401
        assert http.get(STORAGE, headers=ADMIN).json()["hicache_storage_backend"] is None
        assert "Invalid hicache_write_policy" in put(hicache_write_policy="x").text
        unknown = put(hicache_storage_backend="nosuch")
        assert unknown.status_code == 400 and "hicache_storage_backend: not allowed" in unknown.text
        assert put(hicache_storage_backend_extra_config_json="{").status_code == 400
        attached = put()
        assert attached.text == (
            "HiCache storage backend attached.\nAttached HiCache storage backend successfully.\n"
        )
        assert http.get(STORAGE, headers=ADMIN).json()["hicache_storage_backend_extra_config"] == extra
        assert "policies updated" in put().text
        other = http.put(STORAGE, json={"name": "other"}, headers=ADMIN)
        assert other.status_code == 400 and "Cannot attach different backend" in other.text
        first = ask(http, PROMPT)
        flush(http)
        hit = ask(http, PROMPT)
        assert cached(hit)["storage"] > 0 and tokens(hit) == tokens(first)
        for _ in range(2):
            flush(http)
            assert http.delete(STORAGE, headers=ADMIN).status_code == 200
        assert sum(cached(ask(http, PROMPT)).values()) == 0
        assert put().status_code == 200
        assert cached(ask(http, PROMPT))["storage"] > 0
        flush(http)
        assert http.post(f"{STORAGE}/clear", headers=ADMIN).status_code == 200
        assert sum(cached(ask(http, PROMPT)).values()) == 0
        assert 'storage_backend="file"' in http.get("/metrics").text
        assert http.get("/server_info").json()["storage"]["backend"] == "file"


def test_admin_operations_on_a_busy_engine_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first token the request stays where it is until they were: on no machine it ends before."""
    body = {"prompt": PROMPT, "max_tokens": 50, "stream": True, "ignore_eos": True, "temperature": 0}
    step, has_begun, go_on = Engine.step, threading.Event(), threading.Event()

    def held(engine: Engine) -> list[Output]:
        if has_begun.is_set() and not go_on.is_set():
            return []
        outputs = step(engine)
        if outputs:
            has_begun.set()
        return outputs

    monkeypatch.setattr(Engine, "step", held)

    async def story(app: FastAPI) -> list[httpx.Response]:
        async with (
            running(app) as url,
            httpx.AsyncClient(base_url=url, headers=ADMIN, trust_env=False, timeout=DEADLINE_S) as http,
        ):
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.aiter_lines()
                await anext(lines)
                return [
                    await http.put(STORAGE, json={"name": "pages"}),
                    await http.post("/flush_cache"),
                ]

    with real_application(flags(model, "--attachable", 'pages={"backend": "file"}')) as app:
        try:
            refused, flushed = asyncio.run(story(app))
        finally:
            go_on.set()
    assert refused.status_code == 400
    assert "Reject attach: scheduler is not idle. #queue-req=0 #running-req=1" in refused.text
    assert (flushed.status_code, flushed.text) == (400, "Flush cache failed.\n")


def test_without_a_host_tier_there_is_no_storage_to_administer(model: Path) -> None:
    plain = [*("--model-path", str(model), "--disable-radix-cache"), *("--admin-api-key", "admin")]
    plain += ["--attachable", 'pages={"backend": "file"}']
    with real_application(plain) as app, TestClient(app) as http:
        for method in ("PUT", "DELETE"):
            body = {"name": "pages"} if method == "PUT" else None
            refused = http.request(method, STORAGE, json=body, headers=ADMIN)
            assert refused.status_code == 400
            assert refused.text.endswith("HiCache storage backend.\nHierarchical cache is not enabled.")
        assert http.post(f"{STORAGE}/clear", headers=ADMIN).status_code == 400
        for _ in range(2):
            assert sum(cached(ask(http, PROMPT)).values()) == 0
        assert "sglang:num_requests_total" in http.get("/metrics").text
        assert http.get("/server_info").json()["cache"]["host_total"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--context-length 99999", "--context-length 99999"),
        ("--enable-hicache --max-total-tokens 10", "--max-total-tokens 10"),
        ("--device banana", "--device banana"),
        ("--enable-hicache --hicache-size 1000000", "--hicache-size"),
        (
            "--enable-hicache --hicache-storage-backend file --file-storage-path {file}/x",
            "--file-storage-path",
        ),
    ],
)
def test_what_the_engine_refuses_is_one_line(
    model: Path, tmp_path: Path, arguments: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    given = arguments.format(file=file).split()
    assert main(["serve", "--model-path", str(model), "--port", "0", *given]) == 2
    assert words in the_error(capfd)


def test_damaged_weights_are_one_line(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damaged = shutil.copytree(model, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["serve", "--model-path", str(damaged), "--port", "0"]) == 2
    assert f"--model-path {damaged}" in the_error(capfd)


def the_error(capfd: pytest.CaptureFixture[str]) -> str:
    """The one line a failed start ends with."""
    err = capfd.readouterr().err
    assert "Traceback" not in err
    [line] = [line for line in err.splitlines() if line.startswith("hiradix serve: error: ")]
    return line


def test_storage_survives_an_orderly_end_and_a_process_stops_with_status_0(
    model: Path, tmp_path: Path
) -> None:
    storage = [
        *("--hicache-storage-backend", "file", "--file-storage-path", str(tmp_path / "pages")),
        *("--hicache-storage-backend-extra-config", json.dumps(SLOW_DISK)),
    ]
    with serving(model, *storage) as http:
        first = ask(http, PROMPT)
    process = ServerProcess(flags(model, *storage), tmp_path / "server.log")
    process.launch()
    with httpx.Client(base_url=process.url, trust_env=False, timeout=DEADLINE_S) as http:
        again = ask(http, PROMPT)
    assert process.stop() == 0, process.tail()
    assert cached(again)["storage"] == len(PROMPT) // PAGE * PAGE
    assert tokens(again) == tokens(first)
    log = (tmp_path / "server.log").read_text()
    assert "tiny ready at" in log and "page size 16" in log and "Traceback" not in log


class RankIsLost:
    """An engine whose other rank died before the drain."""

    has_work = is_blocked = closed = False

    def __init__(self) -> None:
        self._news = threading.Event()
        self.notify = self._news.set
        self.wait = self._news.wait

    def step(self) -> list[Output]:
        self._news.clear()
        return []

    def is_idle(self) -> bool:
        return True

    def drain(self, timeout_s: float) -> bool:
        raise RankLost("rank 1 of 2 is gone")

    def close(self) -> None:
        self.closed = True


def test_an_engine_that_cannot_drain_is_closed_all_the_same() -> None:
    engine: Any = RankIsLost()
    thread = EngineThread(engine)
    thread.start()
    assert not EngineService(engine, thread).close(1.0)
    assert engine.closed and not thread.is_alive

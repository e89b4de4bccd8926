"""Servers that are away when a store is opened, and come: really refused connections, passwords, names."""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hiradix.apps.demo.process import ServerProcess
from hiradix.errors import ConfigError, Unreachable
from hiradix.storage import StorageContext, StoragePart, open_storage
from tests.contracts.storage import FINGERPRINT, PAGE_BYTES, hits, keys_of, put
from tests.e2e.tiny_model import write_tiny_model
from tests.server.test_real_engine import (
    ADMIN,
    PAGE,
    PROMPT,
    STORAGE,
    ask,
    cached,
    flags,
    flush,
    serving,
    tokens,
)
from tests.storage_servers.servers import PATIENT, Server, free_port, redis_like, wait_for

QUICK = {"join_retry_s": 0.05, "deadline_s": 30.0}
FEW = {"timeout_s": 0.3, "connect_timeout_s": 0.3}


def store(name: str, keys: dict[str, Any], required: bool = False) -> StoragePart:
    return open_storage(name, StorageContext(FINGERPRINT, {**QUICK, **keys}, PAGE_BYTES, required=required))


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Server]:
    """A redis that is not started yet."""
    server = redis_like("redis-server", tmp_path / "redis")
    yield server
    server.kill()


def url(server: Server, rest: str = "") -> str:
    return f"redis://{rest}127.0.0.1:{server.port}/0"


def test_a_redis_that_comes_later_is_joined(away: Server) -> None:
    with contextlib.closing(store("redis", {"url": url(away), **PATIENT})) as found:
        assert not found.is_joined and not any(put(found, keys_of(2)))
        away.start()
        wait_for(lambda: found.is_joined)
        assert all(put(found, keys_of(2))) and all(hits(found, keys_of(2)))


def test_a_password_that_is_wrong_once_it_answers_is_said_once(
    away: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO),
        contextlib.closing(store("redis", {"url": url(away), "password": "guess", **PATIENT})) as found,
    ):
        away.start()
        wait_for(lambda: found.stats()["join_refused"] == 1)
        before = found.stats()["join_attempts"]
        wait_for(lambda: found.stats()["join_attempts"] > before + 2)
        assert not found.is_joined and sum("refuses" in line.message for line in caplog.records) == 1
        assert "guess" not in caplog.text
    with pytest.raises(ConfigError, match="url: cannot use the redis server") as raised:
        store("redis", {"url": url(away), "password": "guess", **PATIENT})
    assert not isinstance(raised.value, Unreachable), "a start with it ends"


def test_what_a_redis_refuses_ends_the_start(away: Server) -> None:
    away.start()
    for keys in (
        {"url": f"redis://127.0.0.1:{away.port}/9999"},
        {"url": url(away), "cluster": True},
    ):
        with pytest.raises(ConfigError, match="cannot use the redis server") as raised:
            store("redis", {**keys, **PATIENT})
        assert not isinstance(raised.value, Unreachable)


@contextlib.contextmanager
def answering(status: int) -> Iterator[int]:
    """The port of a server that answers with that status."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """The port of a server that says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


def bucket(port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    return {
        "url": "s3://pages/x", "endpoint": f"http://{host}:{port}", "region": "us-east-1",
        "access_key_id": "a", "secret_access_key": "b", "request_retries": 0, **FEW,
    }  # fmt: skip


@pytest.mark.parametrize("what", ["refused", "no such name", "silent", "mooncake", "sentinels", "cluster"])
def test_a_world_that_does_not_answer_ends_no_start(what: str) -> None:
    port = free_port()
    redis = {"url": f"redis://127.0.0.1:{port}", **FEW}
    with silent() as quiet:
        cases: dict[str, list[tuple[str, dict[str, Any]]]] = {
            "refused": [("redis", redis), ("s3", bucket(port))],
            "no such name": [
                ("redis", {"url": "redis://no-such-host.invalid", **FEW}),
                ("s3", bucket(port, "no-such-host.invalid")),
            ],
            "silent": [("redis", {"url": f"redis://127.0.0.1:{quiet}", **FEW}), ("s3", bucket(quiet))],
            "mooncake": [("mooncake", {"master_server_address": f"127.0.0.1:{port}"})],
            "sentinels": [("redis", {"sentinels": f"127.0.0.1:{port}", **FEW})],
            "cluster": [("redis", {**redis, "cluster": True})],
        }
        for name, keys in cases[what]:
            if name == "mooncake":
                pytest.importorskip("mooncake")
            with contextlib.closing(store(name, keys)) as found:
                assert not found.is_joined and found.stats()["joined"] == 0
            with pytest.raises(Unreachable):
                store(name, keys, required=True)


@pytest.mark.parametrize(
    ("status", "is_away"), [(500, 1), (503, 1), (429, 1), (400, 0), (401, 0), (403, 0), (404, 0)]
)
def test_what_an_s3_answers(status: int, is_away: bool) -> None:
    with answering(status) as port:
        if is_away:
            with contextlib.closing(store("s3", bucket(port))) as found:
                assert not found.is_joined
        else:
            with pytest.raises(ConfigError, match="url: cannot use s3://pages/x") as raised:
                store("s3", bucket(port))
            assert not isinstance(raised.value, Unreachable)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", ["redis", "tier"])
def test_a_server_starts_in_an_outage_and_hits_after_it(
    model: Path, away: Server, name: str, tmp_path: Path
) -> None:
    """`hiradix serve` with its redis away serves; with it there, what is stored is found."""
    far: dict[str, Any] = {"url": url(away), **PATIENT, **QUICK}
    near = {"backend": "file", "file_storage_path": str(tmp_path / "near"), "min_free_space": 0}
    keys = far if name == "redis" else {"upper": {**near, **QUICK}, "lower": {"backend": "redis", **far}}
    text = json.dumps({"prefetch_threshold": PAGE, **QUICK, **keys})
    chosen = ("--hicache-storage-backend", name, "--hicache-storage-backend-extra-config", text)
    whole = len(PROMPT) // PAGE * PAGE
    figure = "joined" if name == "redis" else "backend_lower_joined"

    def figures(http: Any) -> dict[str, float]:
        found: dict[str, float] = http.get("/server_info", headers=ADMIN).json()["storage"]["figures"]
        return found

    with serving(model, *chosen) as http:
        assert cached(ask(http, PROMPT))["storage"] == 0
        if name == "tier":
            wait_for(lambda: figures(http).get("put_pages", 0) >= whole // PAGE)
        assert figures(http).get(figure, 0) == 0
        gauge = "hiradix:storage_joined{"
        line = next(one for one in http.get("/metrics").text.splitlines() if one.startswith(gauge))
        assert line.endswith("0.0" if name == "redis" else "1.0")
        flush(http)
        assert cached(ask(http, PROMPT))["storage"] == (0 if name == "redis" else whole)
        away.start()
        other = PROMPT[::-1]

        def is_joined() -> bool:
            ask(http, [*map(int, time.monotonic_ns().to_bytes(8, "big")), *other[:40]])  # no page of `other`
            return figures(http).get(figure, 0) == 1

        wait_for(is_joined)
        before = figures(http).get("put_pages", 0)
        ask(http, other)
        wait_for(lambda: figures(http)["put_pages"] >= before + whole // PAGE - 2)
        flush(http)
        assert cached(ask(http, other))["storage"] == whole
    text = json.dumps({"prefetch_threshold": PAGE, **far})
    chosen = ("--hicache-storage-backend", "redis", "--hicache-storage-backend-extra-config", text)
    nobody = {**far, "backend": "redis", "url": f"redis://127.0.0.1:{free_port()}"}
    later = {**nobody, "hicache_storage_required": False}
    prepared = ("--attachable", f"now={json.dumps(nobody)}", "--attachable", f"later={json.dumps(later)}")
    with serving(model, *chosen, *prepared) as http:
        assert cached(ask(http, other))["storage"] == whole, "it was in redis"
        assert http.delete(STORAGE + "?wait=60", headers=ADMIN).status_code == 200
        refused = http.put(STORAGE + "?wait=60", headers=ADMIN, json={"name": "now"})
        assert refused.status_code == 400, refused.text
        assert http.put(STORAGE + "?wait=60", headers=ADMIN, json={"name": "later"}).status_code == 200
        assert figures(http)["joined"] == 0


def test_two_ranks_join_each_by_itself(model: Path, away: Server, tmp_path: Path) -> None:
    """A hit is what both have: right answers before, between and after, and hits once both have joined."""
    keys = {"prefetch_threshold": PAGE, "url": url(away), **PATIENT, **QUICK, "deadline_s": 60}
    more = ("--hicache-storage-backend", "redis", "--hicache-storage-backend-extra-config", json.dumps(keys))
    server = ServerProcess(flags(model, "--tp-size", "2", *more), tmp_path / "server.log")
    with server, httpx.Client(base_url=server.url, trust_env=False, timeout=60.0) as http:
        expected = tokens(ask(http, PROMPT))
        away.start()

        def is_found() -> bool:
            assert http.post("/flush_cache?timeout=60", headers=ADMIN).status_code == 200
            answer = ask(http, PROMPT)
            assert tokens(answer) == expected
            return cached(answer)["storage"] == len(PROMPT) // PAGE * PAGE

        wait_for(is_found)

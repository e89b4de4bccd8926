"""A real engine on every backend: the demo with a restart, and backends swapped at runtime."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hiradix.apps.bench.report import compare
from hiradix.apps.bench.workload import Size, make_workload
from hiradix.apps.demo.driver import Demo, DemoConfig
from hiradix.apps.demo.view import View
from tests.e2e.tiny_model import write_tiny_model
from tests.e2e.warm import WarmServer
from tests.server.test_real_engine import ADMIN, PAGE, PROMPT, STORAGE, ask, cached, flush, serving, tokens
from tests.storage_servers.servers import (
    Server,
    free_port,
    mooncake_master,
    mooncake_member,
    rclone,
    redis_keys,
    redis_like,
    s3_keys,
)

BACKENDS = ["file", "disk", "redis", "valkey", "s3", "mooncake", "nixl", "tier", "dynamic"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("servers")
    started = {
        "redis": redis_like("redis-server", folder / "redis").start(),
        "valkey": redis_like("valkey-server", folder / "valkey").start(),
        "s3": rclone(folder / "s3").start(),
        "mooncake": mooncake_master(folder / "mooncake").start(),
    }
    started["member"] = mooncake_member(started["mooncake"], folder / "member").start()
    yield started
    for server in reversed(started.values()):
        server.kill()


def keys_of_backend(name: str, servers: dict[str, Server], folder: Path) -> dict[str, Any]:
    """The keys a user would give; every key of the guard as it comes."""
    near = {"disk_storage_path": str(folder / "disk"), "max_size": "256MiB", "min_free_space": 0}
    far = s3_keys(servers["s3"], folder.name)
    local, patient = "127.0.0.1", {"deadline_s": 20.0}
    return {
        "file": {"file_storage_path": str(folder / "file"), "min_free_space": 0},
        "disk": near,
        "redis": {**redis_keys(servers["redis"]), "compression": "zstd"},
        "valkey": redis_keys(servers["valkey"]),
        "s3": far,
        "mooncake": {
            "master_server_address": f"127.0.0.1:{servers['mooncake'].port}",
            "global_segment_size": 0, "key_prefix": folder.name,
        },
        "nixl": {"file_storage_path": str(folder / "nixl"), "min_free_space": 0},
        "tier": {
            "upper": {"backend": "disk", **near, "disk_storage_path": str(folder / "near"), **patient},
            "lower": {"backend": "s3", **far, "url": f"{far['url']}-far", **patient},
        },
        "dynamic": {
            "backend_name": "peercache", "module_path": "peercache.store", "class_name": "PeerCacheStore",
            "interface_v1": True, "discovery_addr": f"{local}:{free_port()}", "protocol": "tcp",
            "local_hostname": local, "rdma_bind_host": local, "control_bind_host": local,
            "meta_bind_host": local, "metrics_enabled": False, "disk_enabled": False,
            "global_segment_size": "64mb",
        },
    }[name]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "dynamic"])
def test_demo_on(
    name: str, model: Path, servers: dict[str, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six conversations, a restart of the server, and the answers of a server with the cache off."""
    monkeypatch.setattr("hiradix.apps.demo.driver.ServerProcess", WarmServer)
    out = io.StringIO()
    view = View(Console(file=out, force_terminal=False, width=100, highlight=False))
    workload = make_workload(Size(6, 2, 1, 2, 1, 1))
    text = json.dumps(keys_of_backend(name, servers, tmp_path) | {"deadline_s": 20.0})
    config = DemoConfig(model, tmp_path, 9216, num_threads=1, storage_backend=name, storage_config=text)
    demo = Demo(config, workload, view)
    asyncio.run(demo.run())
    shown, log = out.getvalue(), (tmp_path / "server.log").read_text()
    assert compare(demo.answers, demo.reference).holds, shown + log[-2000:]
    assert len(demo.answers) == workload.num_requests and demo.num_restored_tokens > 0, shown + log[-2000:]
    assert "answers identical to cache-off" in shown


@pytest.mark.timeout(300)
def test_backends_swapped_while_serving(model: Path, servers: dict[str, Server], tmp_path: Path) -> None:
    """Attach, store, hit, detach, one after the other, in one process; then each finds its pages again."""
    prepared = []
    for name in BACKENDS:
        keys = keys_of_backend(name, servers, tmp_path) | {"prefetch_threshold": PAGE, "deadline_s": 20.0}
        prepared += ["--attachable", f"my-{name}={json.dumps({'backend': name, **keys})}"]
    with serving(model, *prepared) as http:

        def attach(name: str) -> None:
            flush(http)
            reply = http.put(STORAGE, json={"name": f"my-{name}"}, headers=ADMIN)
            assert reply.status_code == 200, f"{name}: {reply.text}"

        def detach() -> None:
            flush(http)
            assert http.delete(STORAGE, headers=ADMIN).status_code == 200

        first = ask(http, PROMPT)
        for name in BACKENDS:
            attach(name)
            assert sum(cached(ask(http, PROMPT)).values()) == 0, f"{name} began with pages"
            flush(http)
            hit = ask(http, PROMPT)
            assert cached(hit)["storage"] > 0 and tokens(hit) == tokens(first), name
            detach()
            assert sum(cached(ask(http, PROMPT)).values()) == 0
        for name in BACKENDS[:-1]:
            attach(name)
            hit = ask(http, PROMPT)
            assert cached(hit)["storage"] > 0 and tokens(hit) == tokens(first), name
            assert http.get("/server_info").json()["storage"]["backend"] == name
            detach()

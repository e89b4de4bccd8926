"""Two servers for the whole lane: ours over small pools, and one without any cache to compare with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiradix.apps.demo.process import free_port
from tests.e2e.tiny_model import write_tiny_model
from tests.sglang.server import ADMIN_KEY, Reference, Server, WarmServer

PAGE_SIZE = 16
DEVICE_TOKENS = 2048
LENGTH = 300  # of most prompts
WHOLE = LENGTH // PAGE_SIZE * PAGE_SIZE  # what of them can be cached
# Small pools, chunks shorter than prompts, overlap scheduling (SGLang's default): all of it at work at once.
HIRADIX = (
    *("--radix-cache-backend", "hiradix", "--page-size", str(PAGE_SIZE)),
    *("--max-total-tokens", str(DEVICE_TOKENS), "--max-running-requests", "8"),
    *("--chunked-prefill-size", "128"),
)
HOST = (
    "--enable-hierarchical-cache",
    "--hicache-ratio",
    "4",
    "--enable-metrics",
    "--admin-api-key",
    ADMIN_KEY,
)
EVENTS_PORT = free_port()
EVENTS = json.dumps({"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{EVENTS_PORT}", "bind": True})


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    plain = ("--disable-radix-cache", "--max-total-tokens", "8192", "--max-running-requests", "8")
    pair = (
        WarmServer(model, tmp_path_factory.mktemp("ours"), (*HIRADIX, *HOST, "--kv-events-config", EVENTS)),
        WarmServer(model, tmp_path_factory.mktemp("plain"), (*plain, "--page-size", str(PAGE_SIZE))),
    )
    try:
        for server in pair:
            server.launch()
        for server in pair:
            server.wait()
        yield pair
    finally:
        for server in pair:
            server.stop()


@pytest.fixture(scope="session")
def reference(servers: tuple[Server, Server]) -> Reference:
    return Reference(servers[1])


@pytest.fixture
def ours(servers: tuple[Server, Server]) -> Iterator[Server]:
    """Our server: empty and without storage at the begin, healthy and able to become idle at the end."""
    server = servers[0]
    server.detach()
    server.flush()
    yield server
    server.detach()
    server.flush()
    server.assert_healthy()

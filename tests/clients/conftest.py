"""One real server for all clients: a tiny model behind device and host, on a port of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from hiradix.apps.server.app import AppSettings, create_app
from hiradix.apps.server.auth import Keys
from hiradix.apps.server.flags import parse_serve_args
from hiradix.apps.server.serve import build_service
from tests.e2e.tiny_model import write_tiny_model
from tests.server.live import running

KEY, ADMIN_KEY = "secret", "admin"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
DEADLINE_S = 120.0


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it is served; it asks for KEY and knows its model as `tiny`."""
    flags = [
        *("--model-path", str(write_tiny_model(tmp_path_factory.mktemp("model")))),
        *("--enable-hierarchical-cache", "--hicache-no-regret", "off", "--page-size", "16"),
        *("--max-total-tokens", "4096", "--hicache-ratio", "2", "--served-model-name", "tiny"),
    ]
    config = parse_serve_args(flags)
    service = build_service(config)
    app = create_app(service, AppSettings("tiny", config.engine.cache, Keys(KEY, ADMIN_KEY)))
    told: SimpleQueue[str] = SimpleQueue()
    stop = threading.Event()

    async def serve() -> None:
        async with running(app) as served:
            told.put(served)
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield told.get(timeout=DEADLINE_S)
    finally:
        stop.set()
        thread.join(DEADLINE_S)
        assert service.close(DEADLINE_S)

"""An application on a real port, inside the test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from hiradix.apps.server.connection import http_settings
from hiradix.apps.server.serve import bind

DEADLINE_S = 60.0


@asynccontextmanager
async def running(app: FastAPI, keep_alive_s: float = DEADLINE_S) -> AsyncIterator[str]:
    """The application's URL while it is served."""
    with bind("127.0.0.1", 0) as listener:
        config = uvicorn.Config(app, log_level="critical", **http_settings(keep_alive_s))
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, DEADLINE_S)

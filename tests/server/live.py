"""An application on a real port, inside the test's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

DEADLINE_S = 60.0


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[str]:
    """The application's URL while it is served."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, lifespan="off", log_config=None, log_level="critical")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, DEADLINE_S)

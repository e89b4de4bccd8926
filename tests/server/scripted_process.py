"""`hiradix serve` as its own process with a scripted engine: `python -m tests.server.scripted_process ...`.

The environment's SCRIPT says how the engine behaves: `answer`, `hold` (answers only when aborted) or `fail`
(dies at the first request). SIGNAL `start` signals the process while the engine is being built.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator

from hiradix.engine.api import EngineStopped, Output
from hiradix.server import serve as serve_module
from hiradix.server.flags import ServeConfig
from hiradix.server.service import Generation
from tests.server.scripted import ScriptedService


class ProcessService(ScriptedService):
    """The scripted engine with the calls that only the process makes."""

    def __init__(self, kind: str):
        super().__init__(hold=kind == "hold")
        self._fails = kind == "fail"

    async def generate(self, generation: Generation) -> AsyncIterator[Output]:
        if self._fails:
            self.healthy = False
            raise EngineStopped("the engine failed")
        async for output in super().generate(generation):
            yield output

    def abort_all(self) -> None:
        for generation in self.requests:
            self.abort(generation.rid)

    def close(self, timeout_s: float) -> bool:
        print(f"closed within {timeout_s:g} s after {len(self.aborted)} aborts", flush=True)
        return True


def build_service(config: ServeConfig) -> ProcessService:
    """In place of the real engine."""
    if os.environ.get("SIGNAL") == "start":
        signal.raise_signal(signal.SIGTERM)
    return ProcessService(os.environ["SCRIPT"])


if __name__ == "__main__":
    serve_module.build_service = build_service  # type: ignore[assignment]
    serve_module.ABORT_GRACE_S = serve_module.SECOND_GRACE_S = 30.0  # a busy machine says it late
    sys.exit(serve_module.serve(sys.argv[1:]))

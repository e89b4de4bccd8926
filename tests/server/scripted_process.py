"""`hiradix serve` as its own process with a scripted engine: `python -m tests.server.scripted_process ...`.

The environment's SCRIPT says how the engine behaves: `answer`, `hold` (answers only when aborted), `deaf`
(does not even when aborted), `flood` (does not stop answering), `hang` (its end never comes) or `fail`
(dies at the first request). SIGNAL `start` signals the process while the engine is being built. PUNCTUAL:
with the product's times.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from hiradix.apps.engine.api import EngineStopped, Output
from hiradix.apps.server import serve as serve_module
from hiradix.apps.server.flags import ServeConfig
from hiradix.apps.server.service import Generation
from tests.server.scripted import ScriptedService, piece


class ProcessService(ScriptedService):
    """The scripted engine with the calls that only the process makes."""

    def __init__(self, kind: str):
        super().__init__(hold=kind in ("hold", "deaf", "hang"))
        self._kind, self._fails = kind, kind == "fail"

    async def generate(self, generation: Generation) -> AsyncIterator[Output]:
        if self._fails:
            self.healthy = False
            raise EngineStopped("the engine failed")
        while self._kind == "flood":
            yield replace(piece("x" * 100_000), rid=generation.rid)
        async for output in super().generate(generation):
            yield output

    def abort_all(self) -> None:
        if self._kind != "deaf":
            for generation in self.requests:
                self.abort(generation.rid)

    def close(self, timeout_s: float) -> bool:
        print(f"closed within {timeout_s:g} s after {len(self.aborted)} aborts", flush=True)
        if self._kind == "hang":
            threading.Thread(
                target=time.sleep, args=(1000,)
            ).start()  # no daemon: the interpreter waits for it
            time.sleep(1000)
        return True


def build_service(config: ServeConfig) -> ProcessService:
    """In place of the real engine."""
    if os.environ.get("SIGNAL") == "start":
        signal.raise_signal(signal.SIGTERM)
    return ProcessService(os.environ["SCRIPT"])


if __name__ == "__main__":
    serve_module.build_service = build_service  # type: ignore[assignment]
    if "PUNCTUAL" not in os.environ:  # a busy machine says it late
        serve_module.ANSWERS_SHARE, serve_module.SECOND_GRACE_S, serve_module.HARD_END_S = 150.0, 30.0, 60.0
    sys.exit(serve_module.serve(sys.argv[1:]))

"""A controller with real threads on watchable pools, and a way to make calls block."""

from __future__ import annotations

import threading
from typing import Any

from hiradix.transfer import (
    HiCacheController,
    Result,
    Runtime,
    Ticket,
    TransferLimits,
)
from tests.transfer.doubles import NORMAL, MemoryStorage, Pool, Transport

DEADLINE_S = 60.0  # only keeps a bug from hanging; no test waits for it to pass


class Rig:
    """A controller on watchable pools."""

    def __init__(self, **runtime: Any):
        self.device, self.host = Pool(64), Pool(512)
        self.transport, self.storage = Transport(), MemoryStorage()
        runtime.setdefault("limits", TransferLimits(gate_timeout_s=DEADLINE_S))
        self.controller = HiCacheController(
            self.device,
            self.host,
            transport=self.transport,
            storage=self.storage,
            runtime=Runtime(**runtime),
        )

    def result(self, ticket: Ticket) -> Result:
        assert self.controller.wait([ticket], DEADLINE_S)
        (found,) = [r for r in self.controller.poll() if r.ticket == ticket]
        return found


class Blocker:
    """Makes a call block until released; `entered` tells that it is inside."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.entered.set()
        assert self.release.wait(DEADLINE_S)
        return NORMAL

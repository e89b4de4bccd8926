"""The controller with real threads. Blocking is done with events; deadlines only keep a bug from hanging."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hiradix.transfer import (
    FOUR_WORKERS,
    TWO_WORKERS,
    Result,
    Runtime,
    Ticket,
    TransferController,
    TransferLimits,
)  # fmt: skip
from tests.transfer.doubles import NORMAL, NUM_LAYERS, MemoryStorage, Pool, Transport, hash_rows, rows_of

DEADLINE_S = 20.0


class Rig:
    """A controller on watchable pools."""

    def __init__(self, **runtime: Any):
        self.device, self.host = Pool(64), Pool(512)
        self.transport, self.storage = Transport(), MemoryStorage()
        runtime.setdefault("limits", TransferLimits(gate_timeout_s=DEADLINE_S))
        self.controller = TransferController(
            self.device,
            self.host,
            transport=self.transport,
            storage=self.storage,
            runtime=Runtime(hash_pages=hash_rows, **runtime),
        )

    def result(self, ticket: Ticket) -> Result:
        assert self.controller.wait([ticket], DEADLINE_S)
        (found,) = [r for r in self.controller.poll() if r.ticket == ticket]
        return found


@pytest.fixture(params=[FOUR_WORKERS, TWO_WORKERS], ids=["four", "two"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(workers=request.param)
    yield made
    made.transport.before = lambda *args: None
    made.storage.before = lambda call, keys: NORMAL
    made.controller.close(DEADLINE_S)


class Blocker:
    """Makes a call block until released; `entered` tells that it is inside."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.entered.set()
        assert self.release.wait(DEADLINE_S)
        return NORMAL


def test_a_page_goes_down_to_storage_and_up_again(rig: Rig) -> None:
    c = rig.controller
    rig.device.data[1:4] = np.arange(12).reshape(3, 4) + 100
    assert rig.result(c.write([1, 2, 3], [10, 11, 12])).num_pages == 3
    stored = rig.result(c.store(rows_of(0, 3), [10, 11, 12]))
    assert (stored.num_pages, stored.error, len(stored.hashes)) == (3, None, 3)
    found = rig.result(c.query(rows_of(0, 5)))
    assert (found.num_pages, found.hashes[:3], len(found.hashes)) == (3, stored.hashes, 5)
    read = rig.result(c.read(found.hashes[:3], [20, 21, 22]))
    assert (read.num_pages, read.num_bytes) == (3, 3 * NUM_LAYERS * 8)
    ticket = c.load([20, 21, 22], [31, 32, 33])
    index = c.start_loading()
    rig.device.gate.set_consumer(index)
    for layer in range(NUM_LAYERS):
        rig.device.gate.wait_until(layer)
        assert (rig.device.data[31:34, layer] == rig.device.data[1:4, layer]).all()
    assert rig.result(ticket).num_pages == 3
    assert c.is_idle and c.poll() == []

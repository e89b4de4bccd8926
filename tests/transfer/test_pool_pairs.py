"""Several pairs of pools under one controller: one ticket, all its pages or none; one gate, all layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hiradix.transfer import Copy, HiCacheController, LoadFailed, PoolPair, Runtime, StepDriver
from tests.transfer.doubles import Pool, Transport

FULL_LAYERS, WINDOW_LAYERS = (1, 3), (0, 2, 4)  # a model that alternates


class Pairs:
    """Full and window pools, one step at a time."""

    def __init__(self) -> None:
        self.driver = StepDriver(0)
        self.transport = Transport()
        self.full = Pool(16, 2), Pool(16, 2)
        self.window = Pool(8, 3), Pool(8, 3)
        pairs = (
            PoolPair(*self.full, self.transport, FULL_LAYERS),
            PoolPair(*self.window, self.transport, WINDOW_LAYERS),
        )
        self.controller = HiCacheController.over(pairs, Runtime(self.driver, self.driver.now))

    def result(self) -> Any:
        self.driver.run()
        (result,) = self.controller.poll()
        return result


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_one_ticket_writes_pages_of_both_pairs_and_counts_their_bytes() -> None:
    rig = Pairs()
    rig.full[0].data[[3, 4]] = 34
    rig.window[0].data[2] = 2
    rig.controller.write(ids(3, 4), ids(7, 8), [Copy(ids(2), ids(5), 1)])
    result = rig.result()
    assert (result.num_pages, result.num_bytes) == (3, 2 * 16 + 24) and result.error is None
    assert (rig.full[1].data[[7, 8]] == 34).all() and (rig.window[1].data[5] == 2).all()


def test_a_copy_that_fails_in_one_pair_fails_the_ticket() -> None:
    rig = Pairs()

    def fail(src: Any, *_: Any) -> None:
        if src is rig.window[0]:
            raise RuntimeError("injected")

    rig.transport.before = fail
    rig.controller.write(ids(3), ids(7), [Copy(ids(2), ids(5), 1)])
    assert rig.result().num_pages == 1, "less than asked: not done"
    rig.transport.before = lambda *_: None
    rig.controller.write(ids(), ids(), [Copy(ids(2), ids(5), 1)])
    assert rig.result().num_pages == 1, "nothing of the first pair"


def test_the_gate_goes_through_the_models_layers_whichever_pool_has_them() -> None:
    rig = Pairs()
    order: list[int] = []

    def note(src: Any, dst: Any, sources: Any, targets: Any, layers: range) -> None:
        order.append((FULL_LAYERS if dst is rig.full[0] else WINDOW_LAYERS)[layers.start])

    rig.transport.before = note
    rig.full[1].data[:], rig.window[1].data[:] = 1, 2
    rig.controller.load(ids(1), ids(2), [Copy(ids(3), ids(4), 1)])
    rig.controller.load(ids(5), ids(6))
    slot = rig.controller.start_loading()
    gate = rig.controller.layer_done_counter
    gate.set_consumer(slot)
    assert gate.num_layers == 5
    for model_layer in range(5):
        full = model_layer in FULL_LAYERS
        pool, layers = (rig.full[0], FULL_LAYERS) if full else (rig.window[0], WINDOW_LAYERS)
        own = layers.index(model_layer)
        pool.gate.wait_until(own)
        pages = [2, 6] if full else [4]
        assert (pool.data[pages, own] == (1 if full else 2)).all(), f"layer {model_layer} read too early"
    rig.driver.run()
    assert order == [0, 1, 2, 3, 4]
    assert [result.num_pages for result in rig.controller.poll()] == [2, 1]


def test_a_load_that_fails_in_one_pair_raises_for_readers_of_the_other() -> None:
    rig = Pairs()

    def fail(src: Any, dst: Any, sources: Any, targets: Any, layers: range) -> None:
        if dst is rig.window[0] and layers.start == 1:
            raise RuntimeError("injected")

    rig.transport.before = fail
    rig.controller.load(ids(1), ids(2), [Copy(ids(3), ids(4), 1)])
    gate = rig.controller.layer_done_counter
    gate.set_consumer(rig.controller.start_loading())
    rig.window[0].gate.wait_until(0)
    rig.full[0].gate.wait_until(0)
    with pytest.raises(LoadFailed):
        rig.full[0].gate.wait_until(1)
    assert rig.result().num_pages == 0

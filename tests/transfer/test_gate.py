"""The layer gate on its own: indices, several consumers, events, standing alone."""

from __future__ import annotations

from typing import Any

import pytest

from hiradix.transfer import LayerDoneCounter, LoadFailed


class FakeEvent:
    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def finish(gate: LayerDoneCounter, index: int, events: Any = None) -> None:
    for layer in range(gate.num_layers):
        gate.layer_done(index, layer, events[layer] if events else None)
    gate.end(index)


def test_no_consumer_waits_for_nothing() -> None:
    gate = LayerDoneCounter(3, timeout_s=0.0)
    gate.wait_until(0)
    gate.update_producer()
    gate.set_consumer(-1)
    gate.wait_until(2)


def test_a_waiter_goes_on_layer_by_layer_and_orders_its_stream() -> None:
    gate, events = LayerDoneCounter(2, timeout_s=0.0), [FakeEvent(), FakeEvent()]
    index = gate.update_producer()
    gate.set_consumer(index)
    gate.layer_done(index, 0, events[0])
    gate.wait_until(0)
    assert [e.num_waits for e in events] == [1, 0]
    with pytest.raises(LoadFailed, match="layer 1 did not arrive"):
        gate.wait_until(1)
    gate.layer_done(index, 1, events[1])
    gate.end(index)
    gate.wait_until(1)
    assert [e.num_waits for e in events] == [1, 1]


def test_several_consumers_all_count() -> None:
    gate = LayerDoneCounter(1, timeout_s=0.0)
    first, second = gate.update_producer(), gate.update_producer()
    finish(gate, first)
    gate.set_consumer(first, second, -1)
    with pytest.raises(LoadFailed):
        gate.wait_until(0)
    finish(gate, second)
    gate.wait_until(0)


def test_slots_are_used_in_turn_and_an_index_never_twice() -> None:
    gate = LayerDoneCounter(1, num_slots=2, timeout_s=0.0)
    first, second = gate.update_producer(), gate.update_producer()
    third = gate.update_producer()
    assert len({first, second, third}) == 3
    assert gate.is_open(first) and gate.is_open(second) and not gate.is_open(third)
    finish(gate, second)
    fourth = gate.update_producer()
    assert gate.is_open(fourth), "the slot of `second` is free"
    gate.set_consumer(second)
    gate.wait_until(0)
    gate.set_consumer(third)
    with pytest.raises(LoadFailed, match="no load slot"):
        gate.wait_until(0)


def test_a_failure_is_remembered_after_its_slot_is_used_again() -> None:
    gate = LayerDoneCounter(2, num_slots=1, timeout_s=0.0)
    bad = gate.update_producer()
    gate.layer_done(bad, 0)
    gate.end(bad, "bus error")
    finish(gate, good := gate.update_producer())
    gate.set_consumer(bad)
    with pytest.raises(LoadFailed, match="bus error"):
        gate.wait_until(0)
    assert gate.error(bad) == "bus error" and gate.error(good) is None
    gate.reset()
    gate.wait_until(0)


def test_layers_come_in_order_and_before_the_end() -> None:
    gate = LayerDoneCounter(2)
    index = gate.update_producer()
    with pytest.raises(AssertionError, match="layer 1 after 0"):
        gate.layer_done(index, 1)
    with pytest.raises(AssertionError, match="ended at layer 0"):
        gate.end(index)
    finish(gate, index)
    with pytest.raises(AssertionError, match="has ended"):
        gate.layer_done(index, 0)


def test_engines_that_replay_a_whole_pass_see_whether_to_wait() -> None:
    """Found: SGLang's full prefill graphs read `consumer_index`, then wait for the last layer."""
    gate = LayerDoneCounter(3, timeout_s=0.0)
    assert gate.consumer_index == -1
    first, second = gate.update_producer(), gate.update_producer()
    gate.set_consumer(first, second)
    assert gate.consumer_index == second
    with pytest.raises(LoadFailed):
        gate.wait_until(gate.num_layers - 1)
    gate.set_consumer(-1)
    assert gate.consumer_index == -1

"""The layer gate on its own: indices, several consumers, events, standing alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hiradix.transfer import LayerDoneCounter, LoadFailed
from hiradix.transfer.drivers import Driver
from hiradix.transfer.gate import MAX_REMEMBERED_FAILURES


class FakeEvent:
    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


class FakeDriver(Driver):
    """Waits by doing what is to happen meanwhile, and counts who is told."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.meanwhile = meanwhile
        self.waits: list[float] = []
        self.num_told = 0

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        self.meanwhile()
        return predicate()

    def notify(self) -> None:
        self.num_told += 1


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
    gate.set_consumer(bad)
    gate.wait_until(0)


def test_a_wait_that_gave_up_is_known_though_its_batch_ended_well() -> None:
    """What was computed behind it was computed on missing pages, and no success of the copy changes that."""
    gate = LayerDoneCounter(2, num_slots=1, timeout_s=0.0)
    late = gate.update_producer()
    gate.layer_done(late, 0)
    gate.set_consumer(late)
    gate.wait_until(0)
    assert gate.gave_up(late) is None
    with pytest.raises(LoadFailed):
        gate.wait_until(1)
    gate.layer_done(late, 1)
    gate.end(late)
    gate.wait_until(1)
    assert gate.error(late) is None and gate.gave_up(late) == "layer 1 did not arrive within 0.0 s"
    finish(gate, good := gate.update_producer())
    gate.set_consumer(good)
    gate.wait_until(1)
    assert gate.gave_up(good) is None and gate.gave_up(late) is not None, "whoever has its slot now"
    gate.reset()
    assert gate.gave_up(late) is None


def test_failures_are_remembered_so_many_and_no_more() -> None:
    gate = LayerDoneCounter(1, num_slots=1, timeout_s=0.0)
    gate.update_producer()
    failed = [gate.update_producer() for _ in range(MAX_REMEMBERED_FAILURES + 3)]
    known = [index for index in failed if gate.error(index) is not None]
    assert known == failed[3:], "the oldest are forgotten"


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


def test_a_batch_waits_for_the_slot_it_shares() -> None:
    """A slot that comes free in time is one: the loads behind it are not failed."""
    gate = LayerDoneCounter(1, num_slots=1, timeout_s=7.0, driver=(waiter := FakeDriver()))
    first = gate.update_producer()
    waiter.meanwhile = lambda: finish(gate, first)
    second = gate.update_producer()
    assert waiter.waits == [7.0] and gate.is_open(second) and gate.error(second) is None
    finish(gate, second)
    assert gate.is_open(gate.update_producer()) and waiter.waits == [7.0], "the slot was free already"


def test_whoever_waits_is_told_of_each_layer_and_of_the_end() -> None:
    gate = LayerDoneCounter(2, timeout_s=7.0, driver=(waiter := FakeDriver()))
    index = gate.update_producer()
    gate.layer_done(index, 0)
    assert waiter.num_told == 1
    gate.end(index, "bus error")
    assert waiter.num_told == 2, "the waiter of layer 1 would sleep until its deadline"


def test_consumers_of_any_batch_wait_for_all_that_are_readable() -> None:
    gate = LayerDoneCounter(1, timeout_s=0.0)
    first, second = gate.update_producer(), gate.update_producer()
    finish(gate, second)
    gate.set_readable([first])
    gate.set_consumer(-1)
    gate.wait_until(0)
    gate.set_consumer(second)
    with pytest.raises(LoadFailed, match=f"load {first}: layer 0 did not arrive"):
        gate.wait_until(0)
    gate.set_readable([])
    gate.set_consumer(second)
    gate.wait_until(0)


def test_after_a_reset_nobody_waits_for_what_was_readable() -> None:
    gate = LayerDoneCounter(1, num_slots=2, timeout_s=0.0)
    first, second = gate.update_producer(), gate.update_producer()
    gate.set_readable([first])
    gate.set_consumer(first)
    gate.reset()
    gate.wait_until(0)
    gate.set_consumer(second)
    finish(gate, second)
    gate.wait_until(0)
    assert not gate.is_open(gate.update_producer()), "the slot of `first` is busy until its copies end"


def test_a_pool_with_some_of_the_layers_waits_for_those() -> None:
    gate = LayerDoneCounter(4, timeout_s=0.0)
    view = gate.view([1, 3])
    index = gate.update_producer()
    gate.set_consumer(index)
    for layer in range(3):
        gate.layer_done(index, layer)
    view.wait_until(0)
    with pytest.raises(LoadFailed, match="layer 3 did not arrive"):
        view.wait_until(1)

"""Jobs and their results with real threads. Blocking is done with events, never with time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hiradix.transfer import (
    TWO_WORKERS,
    FailReason,
    LoadFailed,
    TransferLimits,
)
from hiradix.tree.hashing import hash_pages
from tests.transfer.doubles import NORMAL, NUM_LAYERS, rows_of
from tests.transfer.rig import DEADLINE_S, Blocker, Rig


def test_a_page_goes_down_to_storage_and_up_again(rig: Rig) -> None:
    c = rig.controller
    rig.device.data[1:4] = np.arange(12).reshape(3, 4) + 100
    assert rig.result(c.write([1, 2, 3], [10, 11, 12])).num_pages == 3
    stored = rig.result(c.write_storage(rows_of(0, 3), [10, 11, 12]))
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


@pytest.mark.parametrize("answer", [None, [True], [1, 1, 1], [True] * 4, 3], ids=str)
@pytest.mark.parametrize("call", ["exists", "get", "put"])
def test_an_answer_that_is_none_is_a_miss(rig: Rig, call: str, answer: Any) -> None:
    """Its guard says so: what reaches a job are answers."""
    if call == "exists" and answer == 3:
        answer = 4
    rig.storage.before = lambda name, keys: answer if name == call else NORMAL
    rows = rows_of(0, 3)
    submit = {
        "exists": lambda: rig.controller.query(rows),
        "get": lambda: rig.controller.read(hash_pages(rows), [1, 2, 3]),
        "put": lambda: rig.controller.write_storage(rows, [1, 2, 3]),
    }[call]
    result = rig.result(submit())
    assert (result.num_pages, result.reason) == (0, None if call == "exists" else FailReason.BACKEND)
    assert len(result.hashes) == (0 if call == "get" else 3), "worth keeping whatever the backend says"
    rig.storage.before = lambda name, keys: NORMAL
    assert rig.result(submit()).error is None


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error",
    [OSError("gone"), MemoryError(), SystemExit(1), KeyboardInterrupt(), StopIteration(), Unprintable()],
)
def test_a_backend_that_raises_anything_gives_a_failed_result_and_the_worker_lives(
    rig: Rig, error: BaseException
) -> None:
    def fail(call: str, keys: Any) -> Any:
        raise error

    rows = rows_of(0, 2)
    rig.storage.before = fail
    c = rig.controller
    tickets = [c.read(hash_pages(rows), [1, 2]), c.write_storage(rows, [1, 2])]
    assert rig.controller.wait(tickets, DEADLINE_S)
    assert {(r.num_pages, r.reason) for r in rig.controller.poll()} == {(0, FailReason.BACKEND)}
    assert rig.result(c.query(rows)).num_pages == 0
    rig.storage.before = lambda call, keys: NORMAL
    assert rig.result(rig.controller.write_storage(rows, [1, 2])).num_pages == 2


def test_storage_calls_have_at_most_128_pages_and_stop_at_the_first_gap(rig: Rig) -> None:
    stored = rig.result(rig.controller.write_storage(rows_of(0, 300), range(300)))
    assert stored.num_pages == 300
    del rig.storage.pages[stored.hashes[200].hex()]
    rig.storage.calls.clear()
    assert rig.result(rig.controller.query(rows_of(0, 300))).num_pages == 200
    read = rig.result(rig.controller.read(stored.hashes, range(300)))
    assert (read.num_pages, read.error) == (200, None), "a page that is not there is a miss, not an error"
    assert rig.storage.calls == [("exists", 128), ("exists", 128), ("get", 128), ("get", 128)]


def test_rows_may_reach_back_before_the_pages_they_name(rig: Rig) -> None:
    rows = rows_of(0, 5)
    stored = rig.result(rig.controller.write_storage(rows, [7, 8]))
    assert (stored.num_pages, stored.hashes) == (2, tuple(hash_pages(rows)))
    assert set(rig.storage.pages) == {d.hex() for d in stored.hashes[3:]}
    found = rig.result(rig.controller.query(rows, 2))
    assert (found.num_pages, len(found.hashes)) == (2, 5)


def test_a_cancelled_read_keeps_the_pages_of_its_first_batch(rig: Rig) -> None:
    stored = rig.result(rig.controller.write_storage(rows_of(0, 300), range(300)))
    block = rig.storage.before = Blocker()
    running = rig.controller.read(stored.hashes, range(300))
    assert block.entered.wait(DEADLINE_S)
    queued = rig.controller.read(stored.hashes[:1], [400])
    rig.controller.cancel(queued)
    (early,) = rig.controller.poll()
    assert (early.ticket, early.num_pages, early.reason) == (queued, 0, FailReason.CANCELLED)
    rig.controller.cancel(running)
    assert not rig.controller.poll(), "its pages are still being written"
    block.release.set()
    result = rig.result(running)
    assert (result.num_pages, result.reason) == (128, FailReason.CANCELLED)


def test_a_full_queue_refuses_with_a_result() -> None:
    rig = Rig(limits=TransferLimits(queued_jobs=2))
    block = rig.storage.before = Blocker()
    first = rig.controller.query(rows_of(0, 1))
    assert block.entered.wait(DEADLINE_S)
    queued = [rig.controller.query(rows_of(0, 1)) for _ in range(3)]
    assert [(r.ticket, r.reason) for r in rig.controller.poll()] == [(queued[2], FailReason.QUEUE_FULL)]
    loads = [rig.controller.load([i], [i]) for i in range(3)]
    assert [(r.ticket, r.reason) for r in rig.controller.poll()] == [(loads[2], FailReason.QUEUE_FULL)]
    block.release.set()
    assert rig.controller.wait([first, *queued], DEADLINE_S)
    assert rig.controller.close(DEADLINE_S)


def test_a_reader_waits_for_its_layer_only(rig: Rig) -> None:
    rig.host.data[5] = [1, 2, 3, 4]
    block = Blocker()
    rig.transport.before = lambda src, dst, s, d, layers: block() if layers and layers.start == 2 else None
    ticket = rig.controller.load([5], [6])
    gate = rig.controller.layer_done_counter
    gate.set_consumer(rig.controller.start_loading())
    gate.wait_until(1)
    assert rig.device.data[6, :2].tolist() == [1, 2]
    seen: list[int] = []

    def read_layer_2() -> None:
        gate.wait_until(2)
        seen.append(int(rig.device.data[6, 2]))

    reader = threading.Thread(target=read_layer_2, daemon=True)
    reader.start()
    assert block.entered.wait(DEADLINE_S) and not seen
    block.release.set()
    reader.join(DEADLINE_S)
    assert seen == [3]
    assert rig.result(ticket).num_pages == 1
    gate.set_consumer(-1)
    gate.wait_until(3)


def test_a_failed_load_is_seen_by_waiters_and_in_its_results(rig: Rig) -> None:
    def fail(src: Any, dst: Any, s: Any, d: Any, layers: range | None) -> None:
        if layers is not None and layers.start == 1:
            raise RuntimeError("bus error")

    c, gate = rig.controller, rig.controller.layer_done_counter
    rig.transport.before = fail
    tickets = [c.load([1], [1]), c.load([2, 3], [2, 3])]
    gate.set_consumer(bad := c.start_loading())
    with pytest.raises(LoadFailed, match="bus error"):
        gate.wait_until(1)
    assert c.wait(tickets, DEADLINE_S)
    assert [(r.num_pages, r.reason) for r in c.poll()] == [(0, FailReason.COPY)] * 2
    rig.transport.before = lambda *args: None
    for _ in range(4):  # every slot is used again
        ticket = c.load([1], [1])
        gate.set_consumer(c.start_loading())
        gate.wait_until(NUM_LAYERS - 1)
        assert rig.result(ticket).error is None
    gate.set_consumer(bad)
    with pytest.raises(LoadFailed):
        gate.wait_until(0)
    assert c.start_loading() == -1


def test_a_producer_slot_is_not_used_again_before_its_copies_ended() -> None:
    rig = Rig(limits=TransferLimits(gate_timeout_s=0.01))
    c, gate = rig.controller, rig.controller.layer_done_counter
    block = Blocker()
    rig.transport.before = lambda *args: block() and None
    tickets = []
    for page in range(4):
        tickets.append(c.load([page], [page]))
        index = c.start_loading()
    assert [(r.ticket, r.reason) for r in c.poll()] == [(tickets[3], FailReason.GATE_TIMEOUT)]
    gate.set_consumer(index)
    with pytest.raises(LoadFailed, match="no load slot"):
        gate.wait_until(0)
    gate.set_consumer(0)
    with pytest.raises(LoadFailed, match="did not arrive"):
        gate.wait_until(0)
    block.release.set()
    assert c.wait(tickets, DEADLINE_S) and [r.error for r in c.poll()] == [None] * 3
    assert c.close(DEADLINE_S)


def test_a_load_that_has_not_started_can_be_undone(rig: Rig) -> None:
    c = rig.controller
    undone, cancelled, kept = c.load([1], [1]), c.load([2], [2]), c.load([3], [3])
    assert c.cancel_load(undone)
    c.cancel(cancelled)
    assert [(r.ticket, r.reason) for r in c.poll()] == [(cancelled, FailReason.CANCELLED)]
    assert c.start_loading() >= 0 and not c.cancel_load(kept)
    assert rig.result(kept).error is None
    assert c.is_idle and not c.cancel_load(undone)


def test_a_load_goes_before_queued_writes_where_they_share_a_worker() -> None:
    rig = Rig(workers=TWO_WORKERS)
    block, order = Blocker(), []

    def watch(src: Any, dst: Any, s: Any, d: Any, layers: range | None) -> None:
        order.append("write" if layers is None else f"load{layers.start}")
        if len(order) == 1:
            block()

    rig.transport.before = watch
    first = rig.controller.write([1], [1])
    assert block.entered.wait(DEADLINE_S)
    rest = [rig.controller.write([2], [2]), rig.controller.load([5], [5])]
    rig.controller.start_loading()
    block.release.set()
    assert rig.controller.wait([first, *rest], DEADLINE_S)
    assert order == ["write", "load0", "load1", "load2", "load3", "write"]
    assert rig.controller.close(DEADLINE_S)


def test_a_job_keeps_its_own_copy_of_the_page_ids(rig: Rig) -> None:
    block = Blocker()
    rig.transport.before = lambda *args: block() and None
    rig.device.data[1:3] = 5
    pages = np.array([1, 2], np.int32)
    ticket = rig.controller.write(pages, pages)
    pages[:] = 9
    block.release.set()
    assert rig.result(ticket).num_pages == 2
    assert (rig.host.data[1:3] == 5).all() and not rig.host.data[9].any()


def test_our_own_broken_assertion_is_told_from_a_fault(rig: Rig) -> None:
    def bug(*args: Any) -> None:
        raise AssertionError("page 99 of 64")

    rig.transport.before = bug
    assert rig.result(rig.controller.write([1], [1])).reason is FailReason.BUG

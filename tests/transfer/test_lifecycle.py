"""Attach, detach, reset, close and hangs with real threads; waking, counting, the cost of an idle poll."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest

from hiradix.errors import StorageError
from hiradix.transfer import (
    FailReason,
    JobKind,
)
from hiradix.transfer.jobs import DeletePayload
from hiradix.tree.hashing import hash_pages
from tests.transfer.doubles import MemoryStorage, guarded, rows_of
from tests.transfer.rig import DEADLINE_S, Blocker, Rig


def test_detach_fails_queued_jobs_waits_for_running_ones_and_can_be_retried(rig: Rig) -> None:
    c, old = rig.controller, rig.storage
    block = old.before = Blocker()
    running = c.read(hash_pages(rows_of(0, 1)), [1])
    assert block.entered.wait(DEADLINE_S)
    queued = [c.read(hash_pages(rows_of(0, 1)), [2]), c.query(rows_of(0, 1)), c.query(rows_of(5, 1))]
    assert not c.detach(0.0)
    assert c.poll(0) == [] and len(first := c.poll(2)) == 2, "as many as wanted"
    done = [*first, *c.poll(9)]
    assert {(r.ticket, r.reason) for r in done} == {(t, FailReason.DETACHED) for t in queued}
    assert [r.duration_s for r in done] == [0.0] * 3, "they never began"
    assert not c.storage_attached
    with pytest.raises(StorageError, match="still detaching"):
        c.attach(guarded(MemoryStorage()))
    refused = c.query(rows_of(0, 1))
    assert [(r.ticket, r.reason) for r in c.poll()] == [(refused, FailReason.DETACHED)]
    assert rig.result(c.write([1], [1])).num_pages == 1, "copies go on"
    block.release.set()
    assert c.detach(DEADLINE_S) and c.detach(0.0)
    assert rig.result(running).ticket == running
    assert c.stats().detaching is False
    assert rig.result(c.query(rows_of(0, 1))).reason is FailReason.NO_STORAGE
    c.attach(guarded(MemoryStorage()))
    with pytest.raises(StorageError, match="attached already"):
        c.attach(guarded(MemoryStorage()))
    assert rig.result(c.write_storage(rows_of(0, 1), [1])).num_pages == 1
    assert old.pages == {}


def test_a_backend_that_never_returns_blocks_neither_poll_nor_close() -> None:
    rig = Rig()
    block = rig.storage.before = Blocker()
    hung = rig.controller.read(hash_pages(rows_of(0, 1)), [1])
    assert block.entered.wait(DEADLINE_S)
    queued = rig.controller.read(hash_pages(rows_of(0, 1)), [2])
    assert rig.controller.poll() == [] and JobKind.READ in rig.controller.stats().running_s
    assert not rig.controller.reset(0.0)
    assert not rig.controller.close(0.0)
    results = {r.ticket: r.reason for r in rig.controller.poll()}
    assert results == {hung: FailReason.ABANDONED, queued: FailReason.RESET}
    assert rig.controller.is_idle
    after = rig.controller.query(rows_of(0, 1))
    assert [(r.ticket, r.reason) for r in rig.controller.poll()] == [(after, FailReason.CLOSED)]
    block.release.set()
    assert rig.controller.close(DEADLINE_S)
    assert rig.controller.poll() == [], "the late return says nothing more"


def test_reset_begins_an_epoch_and_late_results_carry_the_old_one(rig: Rig) -> None:
    c = rig.controller
    block = rig.storage.before = Blocker()
    running = c.read(hash_pages(rows_of(0, 1)), [1])
    assert block.entered.wait(DEADLINE_S)
    never = [c.read(hash_pages(rows_of(0, 1)), [2]), c.load([3], [3])]
    assert not c.reset(0.0)
    assert {(r.ticket, r.reason, r.epoch) for r in c.poll()} == {(t, FailReason.RESET, 0) for t in never}
    written = c.write([1], [1])
    assert rig.result(written).epoch == 1
    block.release.set()
    assert rig.result(running).epoch == 0
    assert c.reset(DEADLINE_S) and c.is_idle


def test_wakeup_tells_of_every_result(rig: Rig) -> None:
    woken = threading.Event()
    rig.controller.wakeup = woken.set
    assert not rig.controller.wait_any(0.0)
    rig.controller.write([1], [1])
    assert woken.wait(DEADLINE_S) and rig.controller.wait_any(0.0)
    assert len(rig.controller.poll(limit=1)) == 1


def test_a_wakeup_that_raises_costs_no_result(rig: Rig) -> None:
    def broken() -> None:
        raise RuntimeError

    rig.controller.wakeup = broken
    tickets = [rig.controller.write([i], [i]) for i in range(3)]
    assert rig.controller.wait(tickets, DEADLINE_S) and len(rig.controller.poll()) == 3
    rig.controller.wakeup = None


def test_stats_count_what_was_done(rig: Rig) -> None:
    rig.result(rig.controller.write([1, 2], [1, 2]))

    def end(call: str, keys: Any) -> Any:
        raise KeyboardInterrupt

    rig.storage.before = end
    rig.result(rig.controller.query(rows_of(0, 1)))
    stats = rig.controller.stats()
    write, query = stats.kinds[JobKind.WRITE], stats.kinds[JobKind.QUERY]
    assert (write.num_results, write.num_pages, write.num_bytes) == (1, 2, 2 * rig.host.page_bytes)
    assert dict(query.failures) == {FailReason.BACKEND: 1}
    assert not any(stats.queued.values()) and not stats.running_s and stats.storage_attached


def test_a_rank_that_another_one_stores_for_is_done_with_its_puts_and_deletions_at_once(rig: Rig) -> None:
    c, rows = rig.controller, rows_of(0, 2)
    c.reset(DEADLINE_S)
    c.backs_up = False
    put, deletion = c.write_storage(rows, [1, 2]), c.delete(DeletePayload(rows, 2))
    done = [(r.ticket, r.kind, r.num_pages, r.epoch, r.error) for r in c.poll()]
    assert done == [(put, JobKind.STORE, 2, c.epoch, None), (deletion, JobKind.DELETE, 2, c.epoch, None)]
    assert rig.storage.pages == {} and c.is_idle


def test_close_ends_the_threads() -> None:
    rig = Rig()
    rig.result(rig.controller.write([1], [1]))
    names = {t.name for t in threading.enumerate()}
    assert "hiradix-write" in names
    before = [t for t in threading.enumerate() if t.name == "hiradix-write"]
    assert rig.controller.close(DEADLINE_S) and rig.controller.close(DEADLINE_S)
    assert any(not t.is_alive() for t in before)


def test_a_forgotten_controller_ends_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiradix.transfer.drivers.IDLE_CHECK_S", 0.01)
    known = set(threading.enumerate())
    rig = Rig()
    rig.result(rig.controller.write([1], [1]))
    threads = [t for t in threading.enumerate() if t not in known]
    alive = weakref.ref(rig.transport)  # as long as its controller, which may be compiled, is
    del rig
    assert threads
    until_s = time.monotonic() + DEADLINE_S
    for thread in threads:
        while thread.is_alive():  # one that looks for work at that moment keeps all of it
            gc.collect()
            thread.join(0.01)
            assert time.monotonic() < until_s
    gc.collect()
    assert alive() is None


ENDINGS = [
    ("detach", 128, FailReason.DETACHED),
    ("reset", 128, FailReason.RESET),
    ("close", 0, FailReason.ABANDONED),
]


@pytest.mark.parametrize("end,num_pages,reason", ENDINGS)
def test_a_long_running_job_ends_after_its_batch(
    rig: Rig, end: str, num_pages: int, reason: FailReason
) -> None:
    c = rig.controller
    stored = rig.result(c.write_storage(rows_of(0, 300), range(300)))
    block = rig.storage.before = Blocker()
    running = c.read(stored.hashes, range(300))
    assert block.entered.wait(DEADLINE_S)
    assert not getattr(c, end)(0.0)
    block.release.set()
    assert getattr(c, end)(DEADLINE_S)
    (result,) = [r for r in c.poll() if r.ticket == running]
    assert (result.num_pages, result.reason) == (num_pages, reason)

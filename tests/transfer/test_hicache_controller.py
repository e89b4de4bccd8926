"""HiCacheController on real pools, driven by hand: bytes checked, and who has which pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hiradix.errors import Misuse
from hiradix.memory import DevicePool, HostPool, KVShape, PageAllocator, TorchTransport
from hiradix.transfer import (
    FailReason,
    HiCacheController,
    JobKind,
    PrefetchOperation,
    Result,
    Runtime,
    StepDriver,
)
from hiradix.tree.hashing import PageRows, hash_pages
from tests.transfer.doubles import NORMAL, MemoryStorage, guarded

S = 4
NUM_LAYERS = 3
HOST_PAGES = 320


class WholePages(MemoryStorage):
    """Pages of several views are joined and cut."""

    def get(self, keys, into):  # type: ignore[no-untyped-def]
        flat = [[memoryview(bytearray(sum(v.nbytes for v in views)))] for views in into]
        done = super().get(keys, flat)
        for views, (data,) in zip(into, flat, strict=True):
            at = 0
            for view in views:
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes
        return done

    def put(self, keys, pages):  # type: ignore[no-untyped-def]
        return super().put(keys, [[memoryview(b"".join(bytes(v) for v in views))] for views in pages])


class Bench:
    """A controller over real CPU pools, stepped."""

    def __init__(self) -> None:
        shape = KVShape(NUM_LAYERS, 2, 8, 8, torch.float32)
        self.pool, self.host = DevicePool(shape, 32, S), HostPool(shape, HOST_PAGES, S)
        self.device_free, self.host_free = PageAllocator(32), PageAllocator(HOST_PAGES)
        self.storage = WholePages()
        self.driver = StepDriver(1)
        self.controller = HiCacheController(
            self.pool,
            self.host,
            transport=TorchTransport(),
            storage=guarded(self.storage, self.driver.now),
            runtime=Runtime(driver=self.driver, clock=self.driver.now),
            device_free=self.device_free,
            host_free=self.host_free,
        )

    def settle(self) -> list[Result]:
        results: list[Result] = []
        while self.driver.run() or self.controller.wait_any(0.0):
            results += self.controller.poll()
        return results

    def result(self) -> Result:
        (result,) = self.settle()
        return result

    def device_pages(self, num_pages: int) -> np.ndarray:
        """Pages of the device with random content."""
        pages = self.device_free.alloc(num_pages)
        assert pages is not None
        for buffers in (self.pool.k_buffer, self.pool.v_buffer):
            for buffer in buffers:
                buffer[slots(pages)] = torch.randn(num_pages * S, 2, 8)
        return pages

    def host_pages(self, num_pages: int) -> np.ndarray:
        pages = self.host_free.alloc(num_pages)
        assert pages is not None
        return pages

    def contents(self, pages: np.ndarray) -> list[torch.Tensor]:
        buffers = (*self.pool.k_buffer, *self.pool.v_buffer)
        return [buffer[slots(pages)].clone() for buffer in buffers]

    def stored(self, num_pages: int) -> tuple[PageRows, Result]:
        """Rows of so many pages that storage has, and the host not."""
        rows, pages = rows_of(num_pages), self.host_pages(num_pages)
        self.controller.write_storage(rows, pages)
        result = self.result()
        self.controller.evict_host(pages)
        return rows, result


def slots(pages: Sequence[int] | np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(pages)[:, None] * S + np.arange(S)).flatten()


def rows_of(num_pages: int, prior: bytes = b"", first: int = 0) -> PageRows:
    tokens = np.arange(first * S, (first + num_pages) * S).reshape(-1, S)
    return PageRows(prior, tokens, start=first)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.driver.held.clear()
    assert made.controller.close(1.0)


def test_pages_go_down_and_come_back_the_same(bench: Bench) -> None:
    c, device, host = bench.controller, bench.device_pages(3), bench.host_pages(3)
    before = bench.contents(device)
    ticket = c.write(device, host)
    result = bench.result()
    assert (result.ticket, result.kind, result.num_pages) == (ticket, JobKind.WRITE, 3)
    assert c.evict_device(device) == 3 and bench.device_free.available == 32
    loaded = bench.device_pages(3)
    ticket = c.load(host, loaded)
    c.layer_done_counter.set_consumer(c.start_loading())
    for layer in range(NUM_LAYERS):
        bench.pool.get_key_buffer(layer)
    assert all(torch.equal(a, b) for a, b in zip(before, bench.contents(loaded), strict=True))
    assert bench.result().ticket == ticket
    assert c.evict_host(host) == 3 and bench.host_free.available == HOST_PAGES


def test_a_prefetch_says_whose_pages_it_reads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    c, get, told = bench.controller, bench.storage.get, []

    def noting(batch: Any, into: Any) -> list[bool]:
        told.append((batch.tenant, batch.extra_key))
        return get(batch, into)

    monkeypatch.setattr(bench.storage, "get", noting)
    rows, host = dataclasses.replace(rows_of(3), tenant="salt:alice", extra_key="x"), bench.host_pages(3)
    c.write_storage(rows, host)
    bench.settle()
    operation = c.prefetch(rows, bench.host_pages(3))
    bench.settle()
    assert operation.num_pages == 3 and told == [("salt:alice", "x")]


def test_a_prompt_goes_to_storage_and_is_prefetched(bench: Bench) -> None:
    c, device, host = bench.controller, bench.device_pages(30), bench.host_pages(30)
    before = bench.contents(device)
    c.write(device, host)
    bench.settle()
    c.write_storage(rows_of(30), host)
    stored = bench.result()
    assert (stored.kind, stored.num_pages, len(stored.hashes)) == (JobKind.STORE, 30, 30)
    c.evict_host(host)
    c.evict_device(device)
    operation = c.prefetch(rows_of(31), bench.host_pages(31))
    assert bench.settle() == [], "a prefetch's jobs are its own"
    assert (operation.is_done, operation.num_hit_pages, operation.num_pages) == (True, 30, 30)
    assert operation.hashes[:30] == stored.hashes
    loaded = bench.device_pages(30)
    c.load(operation.host_pages[:30], loaded)
    c.start_loading()
    bench.settle()
    assert all(torch.equal(a, b) for a, b in zip(before, bench.contents(loaded), strict=True))
    tail = c.prefetch(rows_of(20, stored.hashes[9], first=10), bench.host_pages(20))
    bench.settle()
    assert tail.num_pages == 20, "the chain goes on from the page before"
    behind = c.prefetch(rows_of(30), bench.host_pages(4))
    bench.settle()
    assert behind.num_pages == 4 and behind.hashes == stored.hashes[26:], "the last pages of the rows"
    other = c.prefetch(rows_of(30, b"x" * 32), bench.host_pages(30))
    bench.settle()
    assert (other.num_hit_pages, other.is_done, other.error) == (0, True, None)


def test_a_prefetch_fills_the_leading_pages_that_come(bench: Bench) -> None:
    c = bench.controller
    rows, stored = bench.stored(300)
    del bench.storage.pages[stored.hashes[200].hex()]
    bench.storage.before = lambda call, keys: len(keys) if call == "exists" else NORMAL
    operation = c.prefetch(rows, bench.host_pages(300))
    bench.settle()
    assert (operation.num_hit_pages, operation.num_pages, operation.is_done) == (300, 200, True)
    assert c.evict_host(operation.host_pages[200:]) == 100
    assert bench.host_free.available == HOST_PAGES - 200


def test_a_stopped_prefetch_has_what_its_batch_brought(bench: Bench) -> None:
    c = bench.controller
    rows, _ = bench.stored(300)
    operation = c.prefetch(rows, bench.host_pages(300))
    while ("get", 128) not in bench.storage.calls:
        assert bench.driver.step()
        c.poll()
    c.terminate_prefetch(operation)
    assert not operation.is_done, "storage may still write into its pages"
    bench.settle()
    assert operation.is_done and 0 < operation.num_pages < 300
    assert operation.error == FailReason.CANCELLED.value
    c.evict_host(operation.host_pages)
    c.terminate_prefetch(operation)
    assert bench.host_free.available == HOST_PAGES and c.is_idle


def test_a_terminated_prefetch_asks_storage_for_no_more(bench: Bench) -> None:
    c = bench.controller
    operation = c.prefetch(rows_of(6), bench.host_pages(6))
    assert not c.is_idle
    c.terminate_prefetch(operation)
    assert bench.settle() == [] and c.is_idle and operation.is_done and operation.num_pages == 0
    assert c.stats().kinds[JobKind.QUERY].failures == {FailReason.CANCELLED: 1}


def test_a_prefetch_told_to_end_between_query_and_read_reads_nothing(bench: Bench) -> None:
    c = bench.controller
    rows, _ = bench.stored(6)
    operation = c.prefetch(rows, bench.host_pages(6))
    bench.driver.run()
    c.terminate_prefetch(operation)
    assert bench.settle() == []
    assert (operation.is_done, operation.num_hit_pages, operation.num_pages) == (True, 6, 0)
    assert [call for call, _ in bench.storage.calls].count("get") == 0


def test_pages_in_flight_are_not_given_back(bench: Bench) -> None:
    c, device, host = bench.controller, bench.device_pages(2), bench.host_pages(2)
    c.write(device, host)
    with pytest.raises(Misuse, match=r"device pages \[.*\] are in flight"):
        c.evict_device(device)
    with pytest.raises(Misuse, match=r"host pages \[.*\] are in flight"):
        c.evict_host(host[1:])
    bench.settle()
    c.load(host, device)
    for _ in range(2):  # queued, then begun
        with pytest.raises(Misuse, match="device pages"):
            c.evict_device(device)
        with pytest.raises(Misuse, match="host pages"):
            c.evict_host(host)
        c.start_loading()
        bench.driver.step()
    bench.settle()
    c.write_storage(rows_of(2), host)
    with pytest.raises(Misuse, match="host pages"):
        c.evict_host(host)
    assert c.evict_device(device) == 2, "storage has nothing to do with these"
    bench.settle()
    asked = c.prefetch(rows_of(2), host)
    while not asked.is_done:  # also between the two jobs of it
        with pytest.raises(Misuse, match="host pages"):
            c.evict_host(host)
        bench.driver.step()
        c.poll()
    assert c.evict_host(host) == 2
    assert (bench.device_free.available, bench.host_free.available) == (32, HOST_PAGES)


def test_a_controller_without_allocators_gives_nothing_back() -> None:
    bench = Bench()
    c = HiCacheController(bench.pool, bench.host, transport=TorchTransport())
    with pytest.raises(Misuse, match="device pages cannot be given back: the controller has no device_free"):
        c.evict_device([1])
    with pytest.raises(Misuse, match="host_free"):
        c.evict_host([1])


def test_pages_of_two_lengths_are_refused_and_change_nothing(bench: Bench) -> None:
    c = bench.controller
    with pytest.raises(Misuse, match="3 pages onto 2"):
        c.write([1, 2, 3], [1, 2])
    with pytest.raises(Misuse, match="0 of 3 pages of 2 rows"):
        c.prefetch(rows_of(2), [1, 2, 3])
    assert c.is_idle


def test_detach_and_attach(bench: Bench) -> None:
    c = bench.controller
    rows, _ = bench.stored(4)
    assert c.detach(1.0)
    operation = c.prefetch(rows, bench.host_pages(4))
    c.poll()
    assert operation.is_done and operation.error == FailReason.NO_STORAGE.value
    c.attach(guarded(bench.storage))
    operation = c.prefetch(rows, operation.host_pages)
    bench.settle()
    assert operation.num_pages == 4


def test_a_reset_ends_prefetches_but_not_under_a_hung_transfer(bench: Bench) -> None:
    c = bench.controller
    rows, _ = bench.stored(6)
    operation = c.prefetch(rows, bench.host_pages(6))
    while JobKind.READ not in c.stats().running_s:
        assert bench.driver.step()
        c.poll()
    bench.driver.held.add("fetch")
    c.write(bench.device_pages(1), bench.host_pages(1))
    assert not c.reset(0.1)
    assert [(r.kind, r.reason) for r in c.poll()] == [(JobKind.WRITE, FailReason.RESET)]
    with pytest.raises(Misuse, match="host pages"):
        c.evict_host(operation.host_pages)  # storage may still write into these
    bench.driver.held.clear()
    assert bench.settle() == [] and operation.is_done
    assert c.evict_host(operation.host_pages) == 6 and c.reset(0.1)


def test_pages_of_a_job_that_close_gave_up_stay_taken() -> None:
    bench = Bench()
    c = bench.controller
    rows, _ = bench.stored(6)
    operation = c.prefetch(rows, bench.host_pages(6))
    while JobKind.READ not in c.stats().running_s:
        assert bench.driver.step()
        c.poll()
    bench.driver.held.add("fetch")
    assert not c.close(0.1)
    assert c.poll() == [] and operation.is_done and operation.error == FailReason.ABANDONED.value
    with pytest.raises(Misuse, match="host pages"):
        c.evict_host(operation.host_pages)


def test_a_prefetch_is_carried_on_by_its_own_results_only() -> None:
    operation = PrefetchOperation(rows_of(1), np.zeros(1, np.int32), ticket=3)  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="ticket 4 for a prefetch that waits for 3"):
        operation.ended(Result(4, JobKind.QUERY, 1, tuple(hash_pages(rows_of(1)))))  # type: ignore[arg-type]

"""HiCacheController on real pools: slots in, slots out, bytes checked, ownership of host pages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hiradix.memory.allocator import SlotAllocator
from hiradix.memory.pools import DevicePool, HostPool
from hiradix.memory.shape import KVShape
from hiradix.memory.transport import TorchTransport
from hiradix.transfer import FailReason, JobKind, Runtime, StepDriver
from hiradix.transfer.hicache_controller import Ack, HiCacheController
from tests.transfer.doubles import NORMAL, MemoryStorage, guarded

S = 4
NUM_LAYERS = 3


class Bench:
    """A controller over real CPU pools, stepped."""

    def __init__(self, num_pages: int = 32, num_host_pages: int = 320):
        shape = KVShape(NUM_LAYERS, 2, 8, 8, torch.float32)
        self.pool = DevicePool(shape, num_pages, S)
        self.host = HostPool(shape, num_host_pages, S)
        self.slots = SlotAllocator(num_pages * S, S, "cpu", self.pool)
        self.storage = WholePages()
        self.driver = StepDriver(1)
        self.controller = HiCacheController(
            self.slots,
            self.host,
            transport=TorchTransport(),
            storage=guarded(self.storage, self.driver.now),
            runtime=Runtime(driver=self.driver, clock=self.driver.now),
        )

    def settle(self) -> list[Ack]:
        acks = []
        while self.driver.run() or self.controller.transfers.wait_any(0.0):
            acks += self.controller.poll()
        return acks

    def fill(self, slots: torch.Tensor) -> list[torch.Tensor]:
        for layer in range(NUM_LAYERS):
            self.pool.k_buffer[layer][slots] = torch.randn(len(slots), 2, 8)
            self.pool.v_buffer[layer][slots] = torch.randn(len(slots), 2, 8)
        return self.contents(slots)

    def contents(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [b[slots].clone() for buffers in (self.pool.k_buffer, self.pool.v_buffer) for b in buffers]


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


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.driver.held.clear()
    assert made.controller.close(1.0)


def test_slots_go_down_and_come_back_the_same(bench: Bench) -> None:
    c = bench.controller
    device = bench.slots.alloc(3 * S)
    assert device is not None
    before = bench.fill(device)
    host = c.write(device, node_id=7)
    assert host is not None and host.dtype == torch.int64
    assert bench.settle() == [Ack(JobKind.WRITE, 7, 3 * S)]
    assert c.evict_device(device) == 3 * S
    bench.fill(device)
    loaded = c.load(host, node_id=8)
    assert loaded is not None
    c.layer_done_counter.set_consumer(c.start_loading())
    for layer in range(NUM_LAYERS):
        bench.pool.get_key_buffer(layer)
    after = bench.contents(loaded)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert bench.settle() == [Ack(JobKind.LOAD, 8, 3 * S)]
    assert c.evict_host(host) == 3 * S and c.host_allocator.available == 320


def test_a_prompt_goes_to_storage_and_is_prefetched(bench: Bench) -> None:
    c = bench.controller
    tokens = np.arange(30 * S + 2)
    device = bench.slots.alloc(30 * S)
    assert device is not None
    before = bench.fill(device)
    host = c.write(device)
    assert host is not None
    bench.settle()
    c.write_storage(host, tokens, node_id=3)
    (ack,) = bench.settle()
    assert (ack.kind, ack.node_id, ack.num_tokens, len(ack.hashes)) == (JobKind.STORE, 3, 30 * S, 30)
    c.evict_host(host)
    c.evict_device(device)
    operation = c.prefetch("r", np.concatenate([tokens[: 30 * S], [1] * S]))
    assert c.host_allocator.available == 320, "nothing is reserved before the hits are known"
    bench.settle()
    assert (operation.is_done, operation.num_hit_pages, operation.num_pages) == (True, 30, 30)
    fetched, hashes = c.terminate_prefetch(operation)
    assert hashes == ack.hashes and len(fetched) == 30 * S
    loaded = c.load(fetched)
    assert loaded is not None
    c.start_loading()
    bench.settle()
    assert all(torch.equal(a, b) for a, b in zip(before, bench.contents(loaded), strict=True))
    tail = c.prefetch("t", tokens[10 * S :], last_hash=hashes[9])
    bench.settle()
    assert tail.num_pages == 20, "the chain goes on from the page before"
    other = c.prefetch("o", tokens, last_hash=b"x" * 32)
    bench.settle()
    assert (other.num_hit_pages, other.is_done) == (0, True)


def test_a_partial_or_stopped_prefetch_gives_every_other_page_back(bench: Bench) -> None:
    c = bench.controller
    tokens = np.arange(300 * S)
    host = torch.arange(300 * S)
    taken = c.host_allocator.alloc(300)
    assert taken is not None and (np.sort(taken) == np.arange(300)).all()
    c.write_storage(host, tokens)
    (ack,) = bench.settle()
    c.evict_host(host)
    gap = bench.storage.pages.pop(ack.hashes[200].hex())
    bench.storage.before = lambda call, keys: len(keys) if call == "exists" else NORMAL
    partial = c.prefetch("partial", tokens)
    bench.settle()
    assert (partial.num_hit_pages, partial.num_pages, partial.is_done) == (300, 200, True)
    assert c.host_allocator.available == 120
    c.evict_host(c.terminate_prefetch(partial)[0])
    bench.storage.pages[ack.hashes[200].hex()] = gap
    stopped = c.prefetch("stopped", tokens)
    while stopped.num_pages == 0:
        assert bench.driver.step()
        c.poll()
    arrived, hashes = c.terminate_prefetch(stopped)
    assert len(arrived) == len(hashes) * S > 0
    bench.settle()
    assert c.host_allocator.available == 320 - len(hashes)


def test_pages_in_flight_cannot_be_evicted(bench: Bench) -> None:
    c = bench.controller
    device = bench.slots.alloc(2 * S)
    assert device is not None
    host = c.write(device)
    assert host is not None
    with pytest.raises(AssertionError, match="device_pages .* are in flight"):
        c.evict_device(device)
    with pytest.raises(AssertionError, match="host_pages .* are in flight"):
        c.evict_host(host)
    bench.settle()
    assert c.evict_device(device) + c.evict_host(host) == 4 * S
    with pytest.raises(AssertionError, match="whole pages"):
        c.write(torch.tensor([4, 5, 7, 6]))


def test_a_full_pool_says_none_and_changes_nothing() -> None:
    bench = Bench(num_pages=4, num_host_pages=2)
    c = bench.controller
    device = bench.slots.alloc(3 * S)
    assert device is not None and c.write(device) is None
    assert c.host_allocator.available == 2 and c.transfers.is_idle
    host = c.write(device[: 2 * S])
    assert host is not None
    bench.settle()
    assert c.load(host) is None and bench.slots.available_size() == S
    bench.controller.close(1.0)


def test_detach_and_attach(bench: Bench) -> None:
    c = bench.controller
    assert c.detach_storage_backend(1.0)
    operation = c.prefetch("r", range(4 * S))
    c.poll()
    assert operation.is_done and operation.error == FailReason.NO_STORAGE.value
    c.attach_storage_backend(guarded(bench.storage))
    assert c.prefetch("r", range(4 * S)).error is None


def test_reset_frees_the_host_pool_but_not_under_a_hung_transfer(bench: Bench) -> None:
    c = bench.controller
    host = torch.arange(6 * S)
    c.host_allocator.alloc(6)
    c.write_storage(host, range(6 * S))
    bench.settle()
    operation = c.prefetch("r", range(6 * S))
    while JobKind.READ not in c.transfers.stats().running_s:
        assert bench.driver.step()
        c.poll()
    bench.driver.held.add("fetch")
    device = bench.slots.alloc(S)
    assert device is not None and c.write(device) is not None
    assert not c.reset(0.1)
    assert c.host_allocator.available == 320 - 6, "storage may still write into these"
    assert operation.is_done and len(c.terminate_prefetch(operation)[0]) == 0
    bench.driver.held.clear()
    assert bench.settle() == [] and c.host_allocator.available == 320
    assert c.reset(0.1)


def test_what_a_prefetch_had_brought_before_a_reset_is_nobodys(bench: Bench) -> None:
    """Found: one that had ended was not told, and gave its caller pages that the reset had freed."""
    c = bench.controller
    c.host_allocator.alloc(6)
    c.write_storage(torch.arange(6 * S), range(6 * S))
    bench.settle()
    operation = c.prefetch("r", range(6 * S))
    bench.settle()
    assert operation.is_done and operation.num_pages == 6
    assert c.reset(0.1) and c.host_allocator.available == 320
    host_slots, hashes = c.terminate_prefetch(operation)
    assert len(host_slots) == 0 and hashes == ()


def test_a_terminated_prefetch_asks_storage_for_no_more(bench: Bench) -> None:
    c = bench.controller
    operation = c.prefetch("r", range(6 * S))
    assert not c.transfers.is_idle
    c.terminate_prefetch(operation)
    assert bench.settle() == [] and c.transfers.is_idle
    assert c.transfers.stats().kinds[JobKind.QUERY].failures == {FailReason.CANCELLED: 1}
    with pytest.raises(AssertionError, match="terminated twice"):
        c.terminate_prefetch(operation)

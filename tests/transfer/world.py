"""A simulated world around the controller: one seed decides everything, and every byte is accounted for.

Each page belongs either to the world's free lists or to exactly one open ticket. Freed pages are poisoned.
Whenever a worker touches a page, the page must belong to a ticket that has no Result yet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hiradix.transfer import (
    FailReason,
    HiCacheController,
    JobKind,
    LoadFailed,
    Result,
    Runtime,
    StepDriver,
    Ticket,
    TransferLimits,
)
from hiradix.tree.hashing import PageRows, hash_pages
from tests.transfer.doubles import (
    NORMAL,
    NUM_LAYERS,
    LateStreams,
    MemoryStorage,
    Pool,
    Transport,
    guarded,
    rows_of,
)

POISON = -7
NEVER_RAN = {
    FailReason.QUEUE_FULL,
    FailReason.NO_STORAGE,
    FailReason.GATE_TIMEOUT,
    FailReason.ABANDONED,
    FailReason.CANCELLED,
    FailReason.DETACHED,
    FailReason.RESET,
    FailReason.CLOSED,
}
BATCH_PAGES = 4


class Broken(BaseException):
    """A rule is broken inside a worker's step; no Exception, which the worker would take for a backend's."""


def stamp(digest: bytes) -> Any:
    """What a page named `digest` must contain: one number per layer."""
    return int.from_bytes(digest[:6], "little") * 8 + np.arange(NUM_LAYERS)


@dataclass(eq=False)
class Flight:
    """What the world expects of an open ticket."""

    kind: JobKind
    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    hashes: tuple[bytes, ...] = ()
    wanted: tuple[bytes, ...] = ()  # what a query asks for
    content: Any = None  # [pages, layers] that the target must hold
    epoch: int = 0


class World:
    """The controller, its neighbours, and the rules they must keep. Methods named do_* are the moves."""

    def __init__(self, seed: int, workers: Any, is_late: bool = False):
        self.random = random.Random(seed)
        self.driver = StepDriver(seed)
        self.device, self.host = Pool(24), Pool(48)
        self.free_device, self.free_host = list(range(24)), list(range(48))
        self.late = LateStreams() if is_late else None
        self.transport = Transport()
        self.transport.before = self._on_copy
        self.transport.late = self.late
        self.host.on_view = self._on_view
        self.storage: MemoryStorage | None = None
        self.fault_rate = 0.0
        self.open: dict[Ticket, Flight] = {}
        self.last_ran = dict.fromkeys(JobKind, -1)
        self.num_results = 0
        self.num_tickets = 0
        self.known: list[tuple[bytes, ...]] = []
        limits = TransferLimits(
            queued_jobs=6, batch_pages=BATCH_PAGES, copy_pages=3, gate_timeout_s=0.3, num_load_slots=3
        )
        self.controller = HiCacheController(
            self.device,
            self.host,
            transport=self.transport,
            runtime=Runtime(
                driver=self.driver,
                clock=self.driver.now,
                limits=limits,
                workers=workers,
                hash_pages=self._hash,
                streams=self.late,
            ),
        )
        self.controller.wakeup = self._collect
        self.wakeups = 0

    # -- the neighbours' side: faults and checks -----------------------------------------

    def _faulty(self) -> bool:
        return self.random.random() < self.fault_rate

    def _hash(self, rows: PageRows) -> list[bytes]:
        if self._faulty():
            raise ValueError("hash")
        return hash_pages(rows)

    def _on_copy(self, src: Any, dst: Any, src_pages: Any, dst_pages: Any, layers: Any) -> None:
        device_pages, host_pages = (src_pages, dst_pages) if src is self.device else (dst_pages, src_pages)
        kind = JobKind.WRITE if src is self.device else JobKind.LOAD
        self._assert_owned(kind, device_pages, lambda f: f.device)
        self._assert_owned(kind, host_pages, lambda f: f.host)
        if self._faulty():
            raise RuntimeError("copy")

    def _on_view(self, page: int) -> None:
        kinds = (JobKind.READ, JobKind.STORE)
        if not any(page in flight.host for flight in self.open.values() if flight.kind in kinds):
            raise Broken(f"storage touches page {page} that no open ticket has")

    def _assert_owned(self, kind: JobKind, pages: Any, of: Callable[[Flight], list[int]]) -> None:
        owned = {page for flight in self.open.values() if flight.kind is kind for page in of(flight)}
        stray = {int(page) for page in pages} - owned
        if stray:
            raise Broken(f"{kind} touches pages {stray} that no open ticket has")

    def _storage_call(self, call: str, keys: Sequence[str]) -> Any:
        if len(keys) > BATCH_PAGES:
            raise Broken(f"{call} of {len(keys)} pages")
        if not self._faulty():
            return NORMAL
        if self.random.random() < 0.4:
            raise OSError(call)
        n = len(keys)
        if call == "exists":
            return self.random.choice([None, -1, n + 1, "x", True])
        return self.random.choice([None, [], [True] * (n + 1), ["ok"] * n, [False] * n, 5])

    # -- results -------------------------------------------------------------------------

    def _collect(self) -> None:
        self.wakeups += 1
        for result in self.controller.poll():
            self._apply(result)

    def _apply(self, result: Result) -> None:
        flight = self.open.pop(result.ticket, None)
        assert flight is not None, f"second or unknown result {result}"
        self.num_results += 1
        assert result.kind is flight.kind and result.epoch == flight.epoch
        assert (result.error is None) == (result.reason is None)
        assert "AssertionError" not in (result.error or ""), result
        if result.reason not in NEVER_RAN or result.num_pages:
            assert self.last_ran[result.kind] < result.ticket, f"{result} overtook another"
            self.last_ran[result.kind] = result.ticket
        self._check_content(result, flight)
        if result.reason is not FailReason.ABANDONED:
            self._free(flight)

    def _check_content(self, result: Result, flight: Flight) -> None:
        n = result.num_pages
        if flight.kind is JobKind.WRITE:
            assert (self.host.data[flight.host[:n]] == flight.content[:n]).all(), result
            assert result.error is not None or n == len(flight.host)
        elif flight.kind is JobKind.LOAD:
            assert (self.device.data[flight.device[:n]] == flight.content[:n]).all(), result
            assert n == (0 if result.error else len(flight.device))
        elif flight.kind is JobKind.READ:
            for page, digest in zip(flight.host[:n], flight.hashes[:n], strict=True):
                assert (self.host.data[page] == stamp(digest)).all(), result
        elif flight.kind is JobKind.QUERY:
            assert n <= len(flight.wanted)
            if n and self.storage is not None:
                assert all(digest.hex() in self.storage.pages for digest in flight.wanted[:n])
        assert not result.hashes or result.hashes == flight.hashes or flight.kind is JobKind.READ
        assert result.num_bytes == (0 if flight.kind is JobKind.QUERY else n * self.host.page_bytes)

    def _free(self, flight: Flight) -> None:
        self._set_device(flight.device, np.full((len(flight.device), NUM_LAYERS), POISON))
        self.host.data[flight.host] = POISON
        self.free_device += flight.device
        self.free_host += flight.host

    # -- moves ---------------------------------------------------------------------------

    def _take(self, free: list[int], limit: int) -> list[int]:
        self.random.shuffle(free)
        n = min(self.random.randint(0, limit), len(free))
        taken, free[:] = free[:n], free[n:]
        return taken

    def _submit(self, submit: Callable[[], Ticket], flight: Flight) -> None:
        """Register the flight under the ticket it will get, since a refusal posts before the call returns."""
        expected = Ticket(self.num_tickets)
        flight.epoch = self.controller.epoch
        self.open[expected] = flight
        assert submit() == expected
        self.num_tickets += 1

    def do_write(self) -> None:
        device, host = self._pair()
        content = self.random.getrandbits(40) + np.arange(len(device) * NUM_LAYERS).reshape(-1, NUM_LAYERS)
        self._set_device(device, content)
        flight = Flight(JobKind.WRITE, device, host, content=content)
        write = self.random.choice([self.controller.write, self.controller.defer_write])
        self._submit(lambda: write(device, host), flight)

    def do_load(self) -> None:
        device, host = self._pair()
        self.host.data[host] = self.random.getrandbits(40) + np.arange(len(host) * NUM_LAYERS).reshape(
            -1, NUM_LAYERS
        )
        flight = Flight(JobKind.LOAD, device, host, content=self.host.data[host].copy())
        self._submit(lambda: self.controller.load(host, device), flight)

    def _set_device(self, pages: list[int], content: Any) -> None:
        """What a forward pass does: on a late device it happens some time after it was ordered."""

        def work() -> None:
            self.device.data[pages] = content

        if self.late is None:
            work()
        else:
            self.late.compute(work)

    def _pair(self) -> tuple[list[int], list[int]]:
        device = self._take(self.free_device, 7)
        host = self._take(self.free_host, 7)
        n = min(len(device), len(host))
        self.free_device += device[n:]
        self.free_host += host[n:]
        return device[:n], host[:n]

    def do_query(self) -> None:
        rows = rows_of(self.random.randint(0, 5), self.random.randint(0, 9))
        asked = self.random.randint(0, len(rows))
        hashes = tuple(hash_pages(rows))
        flight = Flight(JobKind.QUERY, hashes=hashes, wanted=hashes[len(hashes) - asked :])
        self._submit(lambda: self.controller.query(rows, asked), flight)

    def do_store(self) -> None:
        host = self._take(self.free_host, 9)
        rows = rows_of(self.random.randint(0, 5), len(host) + self.random.randint(0, 3))
        hashes = tuple(hash_pages(rows))
        for page, digest in zip(host, hashes[len(hashes) - len(host) :], strict=True):
            self.host.data[page] = stamp(digest)
        self.known.append(hashes)
        self._submit(
            lambda: self.controller.write_storage(rows, host), Flight(JobKind.STORE, [], host, hashes)
        )

    def do_read(self) -> None:
        host = self._take(self.free_host, 9)
        source = self.random.choice(self.known) if self.known else tuple(hash_pages(rows_of(0, 9)))
        hashes = source[len(source) - len(host) :] if len(source) >= len(host) else ()
        if len(hashes) != len(host):
            self.free_host += host
            return
        self._submit(lambda: self.controller.read(hashes, host), Flight(JobKind.READ, [], host, hashes))

    def do_start_loading(self) -> None:
        queued = list(self.controller._queued_loads)
        flights = [self.open[ticket] for ticket in queued]
        producer = self.controller.start_loading()
        assert (producer >= 0) == bool(queued)
        gate = self.controller.layer_done_counter
        gate.set_consumer(producer)
        if self.random.random() < 0.5:
            return
        try:
            layer = self.random.randrange(NUM_LAYERS)
            gate.wait_until(layer)
        except LoadFailed:
            return
        for ticket, flight in zip(queued, flights, strict=True):
            if ticket in self.open:  # else its pages are free and poisoned by now
                got = self.device.data[flight.device, : layer + 1]
                assert (got == flight.content[:, : layer + 1]).all(), "the gate opened early"

    def do_cancel(self) -> None:
        if self.open:
            self.controller.cancel(self.random.choice(sorted(self.open)))

    def do_cancel_load(self) -> None:
        loads = sorted(t for t, f in self.open.items() if f.kind is JobKind.LOAD)
        if loads:
            ticket = self.random.choice(loads)
            if self.controller.cancel_load(ticket):
                self._free(self.open.pop(ticket))
                self.num_results += 1  # none will come: settled

    def do_attach(self) -> None:
        if self.storage is None:
            self.storage = MemoryStorage()
            self.storage.before = self._storage_call
            self.controller.attach(guarded(self.storage, self.driver.now))

    def do_detach(self) -> None:
        if self.controller.detach(self.random.choice([0.0, 0.01, 0.2])):
            self.storage = None
            kinds = (JobKind.QUERY, JobKind.READ, JobKind.STORE)
            assert not any(f.kind in kinds for f in self.open.values())

    def do_reset(self) -> None:
        if self.controller.reset(self.random.choice([0.0, 0.2])):
            assert not self.open

    def do_hang(self) -> None:
        self.driver.held.add(
            self.random.choice(sorted({w.name for w in self.controller._job_table.workers.values()}))
        )

    def do_unhang(self) -> None:
        self.driver.held.clear()

    def do_wait(self) -> None:
        chosen = [t for t in sorted(self.open) if self.random.random() < 0.3]
        if self.controller.wait(chosen, self.random.choice([0.0, 0.1])):
            assert not set(chosen) & set(self.open)

    def do_steps(self) -> None:
        for _ in range(self.random.randint(1, 12)):
            self.driver.step()
            if self.late is not None:
                self.late.advance_any(self.random)

    # -- what must hold --------------------------------------------------------------------

    def check(self) -> None:
        """Conservation, and the controller's counts agree with the world's."""
        device = self.free_device + [p for f in self.open.values() for p in f.device]
        host = self.free_host + [p for f in self.open.values() for p in f.host]
        assert sorted(device) == list(range(len(self.device.data)))
        assert sorted(host) == list(range(len(self.host.data)))
        for kind in JobKind:
            num_open = sum(f.kind is kind for f in self.open.values())
            assert self.controller.pending(kind) == num_open, kind
        assert self.num_results + len(self.open) == self.num_tickets
        for job_queue in self.controller._job_table.job_queues.values():
            assert len(job_queue.waiting) <= self.controller.runtime.limits.queued_jobs + 1

    def drain(self) -> None:
        """Faults stop: everything comes to an end."""
        self.fault_rate = 0.0
        self.driver.held.clear()
        num_overslept = self.driver.num_overslept
        self.controller.start_loading()
        self.driver.run()
        self.controller.start_loading()
        self.driver.run()
        assert self.driver.num_overslept == num_overslept, "jobs that nobody woke their worker for"
        self.check()
        assert not self.open and self.controller.is_idle
        assert not self.controller._job_table._open

    def close(self) -> None:
        """Whatever hangs, every ticket gets its Result."""
        is_clean = self.controller.close(0.1)
        assert not self.open and self.controller.is_idle
        assert is_clean or self.driver.held
        self.driver.held.clear()
        self.driver.run()
        assert self.controller.poll() == []


MOVES = {
    "write": 4,
    "load": 4,
    "start_loading": 4,
    "query": 4,
    "read": 5,
    "store": 5,
    "cancel": 3,
    "cancel_load": 1,
    "attach": 2,
    "detach": 0.4,
    "reset": 0.2,
    "hang": 0.3,
    "unhang": 1,
    "wait": 1,
    "steps": 12,
}

"""The controller that moves pages between tiers: tickets out, results back, exactly one each.

    write, load, query, read, write_storage -> ticket -> queue (FIFO per kind) -> worker -> Result -> poll()

Rules:
 1. Every ticket gets exactly one Result, whatever happens, except a load undone by `cancel_load`.
 2. Once a Result is posted, no worker touches the ticket's pages. Only a job that hangs until `close`
    gives up breaks this, and its Result says so (FailReason.ABANDONED).
 3. Jobs of a kind run one at a time in the order of submission, and so come their results. A job that never
    ran (refused, cancelled, detached, reset, closed) is reported at once.
 4. No call blocks the scheduler thread, but those that take a timeout, and `start_loading` while all
    producer slots are busy (bounded by the gate's timeout).

Pages are the caller's: whoever orders a move has allocated what it fills, and frees what it no longer needs,
with `evict_device` and `evict_host` if the controller was given the pools' allocators. What pages contain, it
does not know: `hiradix.cache` does. All public methods but `introduce` belong to one thread, the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hiradix.errors import Misuse, StorageError
from hiradix.storage import Stores
from hiradix.transfer.counters import TransferStats
from hiradix.transfer.gate import LayerDoneCounter
from hiradix.transfer.job_table import JobTable
from hiradix.transfer.jobs import (
    BACKBONE_PAIR,
    NO_PAGES,
    STORAGE_KINDS,
    AllTrailingPages,
    Chain,
    Copies,
    Copy,
    DeletePayload,
    FailReason,
    JobKind,
    LoadBatch,
    PageIds,
    Pages,
    Payload,
    QueryPayload,
    ReadPayload,
    Result,
    StorePayload,
    Ticket,
    TrailingPages,
    TrailingWindow,
    as_copies,
    as_pages,
    as_trailing_pages,
    joined,
    pages_in_use,
)
from hiradix.transfer.pool_pair import PoolPair
from hiradix.transfer.prefetch_operation import PrefetchOperation
from hiradix.transfer.protocols import PageSource
from hiradix.transfer.runners import CopyRunner
from hiradix.transfer.runtime import Runtime
from hiradix.transfer.storage_runner import StorageRunner
from hiradix.transfer.streams import make_streams
from hiradix.transfer.worker import LoadPart, Size, Task
from hiradix.tree.hashing import PageRows
from hiradix.tree.native import mypyc_attr

if TYPE_CHECKING:
    from hiradix.memory.pools import DevicePool, HostPool
    from hiradix.memory.strided_pool import StridedPool
    from hiradix.memory.transport import Transport


@mypyc_attr(allow_interpreted_subclasses=True)
class HiCacheController:
    """Moves pages between the device pool, the host pool and storage. See the module's rules.

    device_free, host_free: the pools' free pages, for `evict_device` and `evict_host`.

    >>> import torch
    >>> from hiradix.memory import DevicePool, HostPool, KVShape, PageAllocator, TorchTransport
    >>> shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=4, v_head_dim=4, dtype=torch.float32)
    >>> device, host = DevicePool(shape, 8, 16), HostPool(shape, 8, 16)  # 8 pages of 16 tokens
    >>> controller = HiCacheController(device, host, transport=TorchTransport(), host_free=PageAllocator(8))
    >>> ticket = controller.write([3, 4], [0, 1])  # device pages 3 and 4 to host pages 0 and 1
    >>> controller.wait([ticket], timeout_s=10.0)
    True
    >>> [(result.kind.value, result.num_pages) for result in controller.poll()]
    [('write', 2)]
    >>> ticket = controller.load([0, 1], [5, 6])
    >>> controller.layer_done_counter.set_consumer(controller.start_loading())
    >>> keys = device.get_key_buffer(0)  # waits until layer 0 of pages 5 and 6 is there
    >>> controller.close(timeout_s=10.0)
    True
    """

    def __init__(
        self,
        device_pool: DevicePool | StridedPool,
        host_pool: HostPool,
        *,
        transport: Transport,
        storage: Stores | None = None,
        runtime: Runtime | None = None,
        device_free: PageSource | None = None,
        host_free: PageSource | None = None,
    ):
        pair = PoolPair(device_pool, host_pool, transport, None, device_free, host_free)
        self._start((pair,), runtime or Runtime())
        if storage is not None:
            self._storage_jobs.use(storage)

    @classmethod
    def over(cls, pairs: Sequence[PoolPair], runtime: Runtime | None = None) -> HiCacheController:
        """A controller over several pairs of pools, such as full attention's and a sliding window's.

        A ticket may move pages of several pairs, and succeeds or fails as one; the gate counts the model's
        layers. Storage has a part for each pair.
        """
        controller = cls.__new__(cls)
        controller._start(tuple(pairs), runtime or Runtime())
        return controller

    def _start(self, pairs: tuple[PoolPair, ...], runtime: Runtime) -> None:
        self.runtime = runtime
        self.limits = limits = runtime.limits
        self._max_queued: int = limits.queued_jobs
        self.epoch = 0
        self.backs_up = True  # False: another rank stores the same pages; a `write_storage` is done at once
        self._driver = runtime.driver
        self._pairs = pairs
        self._streams = runtime.streams or make_streams(pairs[0].device.device)
        self.layer_done_counter = gate = LayerDoneCounter(
            1 + max(layer for pair in pairs for layer in pair.model_layers),
            limits.num_load_slots,
            driver=self._driver,
            timeout_s=limits.gate_timeout_s,
            wait_event=self._streams.wait_event,
        )
        for pair in pairs:
            counter = gate if pair.layers is None else gate.view(pair.layers)
            pair.device.register_layer_transfer_counter(counter)
        self.page_bytes = tuple(pair.host.page_bytes for pair in pairs)
        self._copies = CopyRunner(pairs, self._streams, gate, limits.copy_pages)
        self._storage_jobs = StorageRunner([pair.host for pair in pairs], runtime)
        self.introduce = self._storage_jobs.introduce  # may take long: to be done on another thread
        self._detaching = False
        self._closed = False
        self._num_attached = 0
        self._queued_loads: dict[Ticket, Copies] = {}
        self._prefetches: dict[Ticket, PrefetchOperation] = {}  # under way, by the ticket each waits for
        jobs = {**self._copies.jobs, **self._storage_jobs.jobs}
        self._job_table = JobTable(runtime, jobs, self._end_load_batch)

    # -- jobs ---------------------------------------------------------------------------

    def write(self, device_pages: PageIds, host_pages: PageIds, others: Iterable[Copy] = ()) -> Ticket:
        """Copy device pages to host pages, behind all work given to the compute stream. Starts at once.

        others: what goes along between further pairs of pools; all arrives or the ticket fails.
        """
        copies = as_copies(device_pages, host_pages, others)
        return self._submit(JobKind.WRITE, self._size(copies), copies, self._streams.mark())

    def defer_write(self, device_pages: PageIds, host_pages: PageIds, others: Iterable[Copy] = ()) -> Ticket:
        """`write`, started by what wakes a thread anyway: the next `start_loading`; else by the second `poll`
        from here, by any wait, or by itself within `IDLE_CHECK_S`. For engines, which go step by step."""
        copies = as_copies(device_pages, host_pages, others)
        ticket = self._job_table.new_ticket(JobKind.WRITE)
        task = Task(JobKind.WRITE, ticket, self._size(copies), copies, self.epoch, self._streams.mark())
        self._job_table.defer_write(task, self._refusal(JobKind.WRITE))
        return ticket

    def load(self, host_pages: PageIds, device_pages: PageIds, others: Iterable[Copy] = ()) -> Ticket:
        """Copy host pages to device pages, and `others` along, with the next `start_loading`."""
        copies = as_copies(host_pages, device_pages, others)
        ticket = self._job_table.new_ticket(JobKind.LOAD)
        refused = self._refusal(JobKind.LOAD)
        if refused is None:
            self._queued_loads[ticket] = copies
        else:
            self._fail_load(ticket, copies, refused)
        return ticket

    def start_loading(self) -> int:
        """Launch all queued loads as one batch, layer by layer. Gives the batch's index for the gate, or -1.

        They succeed or fail together. If no producer slot comes free in time they fail, and waiters raise.
        Deferred writes start too, behind the batch's first layer."""
        if not self._queued_loads:
            self._job_table.release()
            return -1
        loads, self._queued_loads = self._queued_loads, {}
        batch = joined([copy for copies in loads.values() for copy in copies])
        producer = self.layer_done_counter.update_producer()
        parts = (
            [LoadPart(ticket, *self._size(copies)) for ticket, copies in loads.items()]
            if len(loads) > 1
            else ()
        )
        task = Task(
            JobKind.LOAD, next(iter(loads)), self._size(batch), LoadBatch(batch, producer), self.epoch,
            self._streams.mark(), parts,
        )  # fmt: skip
        has_slot = self.layer_done_counter.is_open(producer)
        self._job_table.submit_load(task, None if has_slot else FailReason.GATE_TIMEOUT)
        return producer

    def cancel_load(self, ticket: Ticket) -> bool:
        """Undo a load that has not started: True, and no Result will come. False: it runs or has run."""
        if self._queued_loads.pop(ticket, None) is None:
            return False
        self._job_table.withdraw(ticket, JobKind.LOAD)
        return True

    def query(
        self,
        rows: PageRows,
        num_pages: int | None = None,
        windows: Sequence[TrailingWindow] = (),
        known: int = 0,
    ) -> Ticket:
        """Hash `rows`, ask storage for the last `num_pages` of them (default: all); leading hits count.
        windows: what must end the hits in further components; of those the most that do end so count. Then
        `known` of the pages asked for need not be there in the backbone.
        """
        asked = len(rows) if num_pages is None else num_pages
        return self._submit(JobKind.QUERY, (asked, 0), QueryPayload(rows, asked, tuple(windows), known))

    def read(
        self,
        hashes: Sequence[bytes],
        host_pages: PageIds,
        chain: Chain = None,
        others: Iterable[TrailingPages] = (),
        extra_key: str | None = None,
        tenant: str = "",
        after: bytes = b"",
    ) -> Ticket:
        """Bring the named pages from storage into host pages; what lies behind `num_pages` is undefined.

        Each component's pages, `others` those of further ones, are for the last of `hashes`, all of which one
        of them wants. They come one component after the other and count on. The rest is as `ReadPayload` has
        it.
        """
        trailing = as_trailing_pages(host_pages, others)
        payload = ReadPayload(tuple(hashes), trailing, chain, extra_key, tenant, after)
        return self._submit(JobKind.READ, self._size(trailing), payload)

    def write_storage(
        self, rows: PageRows, host_pages: PageIds, others: Iterable[TrailingPages] = (), store: str = ""
    ) -> Ticket:
        """Put host pages, the last ones of `rows`, into storage; earlier rows only carry the hash chain.

        others: likewise of further components. They follow and count on. store: of `other_stores`; "": the
        attached one.
        """
        payload = StorePayload(rows, as_trailing_pages(host_pages, others), store)
        size = self._size(payload.trailing)
        if self.backs_up or self._storage_jobs.wants_computed:
            return self._submit(JobKind.STORE, size, payload)
        return self._job_table.take_for_granted(JobKind.STORE, size[0], self.epoch)

    def delete(self, payload: DeletePayload) -> Ticket:
        """Have storage forget pages, behind all that is to be stored by now. `num_pages` of the Result: those
        whose names storage was told, or of a tenant those it had."""
        if self.backs_up:
            return self._submit(JobKind.DELETE, (payload.num_pages, 0), payload)
        return self._job_table.take_for_granted(JobKind.DELETE, payload.num_pages, self.epoch)

    def prefetch(self, rows: PageRows, host_pages: PageIds) -> PrefetchOperation:
        """Look for the last pages of `rows` in storage, as many as `host_pages`, and read the leading ones
        that are there into the first of these: `query` and `read` as one. `poll` carries it on, and hands
        out no Result of it.
        """
        pages = as_pages(host_pages)
        operation = PrefetchOperation(rows, pages, self.query(rows, len(pages)))
        self._prefetches[operation.ticket] = operation
        return operation

    def terminate_prefetch(self, operation: PrefetchOperation) -> None:
        """Have a prefetch end early, with what the batch it is in brings. It is done by a later `poll`."""
        operation.is_terminated = True
        if not operation.is_done:
            self.cancel(operation.ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Ask a job to end early. Its Result comes all the same: at once if it has not begun, else after the
        batch it is in. Loads that were started run to their end; an unknown or finished ticket is ignored."""
        copies = self._queued_loads.pop(ticket, None)
        if copies is not None:
            self._fail_load(ticket, copies, FailReason.CANCELLED)
        else:
            self._job_table.cancel(ticket, FailReason.CANCELLED)

    # -- pages ----------------------------------------------------------------------------

    def evict_device(self, pages: PageIds, pair: int = BACKBONE_PAIR) -> int:
        """Give device pages back to their pool's free ones; how many. Misuse, and nothing freed, while a job
        uses one of them, or without `device_free`. O(jobs not ended)."""
        return self._give_back("device", self._pairs[pair].device_free, pages, self._in_use(pair)[0])

    def evict_host(self, pages: PageIds, pair: int = BACKBONE_PAIR) -> int:
        """Give host pages back to their pool's free ones, as `evict_device`. Those of a prefetch are in use
        until it is done."""
        return self._give_back("host", self._pairs[pair].host_free, pages, self._in_use(pair)[1])

    def _give_back(self, name: str, free: PageSource | None, pages: PageIds, in_use: Sequence[Pages]) -> int:
        if free is None:
            raise Misuse(f"{name} pages cannot be given back: the controller has no {name}_free")
        given = as_pages(pages)
        used = np.intersect1d(given, np.concatenate([NO_PAGES, *in_use]))
        if len(used):
            raise Misuse(f"{name} pages {used[:16].tolist()} are in flight")
        free.free(given)
        return len(given)

    def _in_use(self, pair: int) -> tuple[list[Pages], list[Pages]]:
        """Device pages and host pages of jobs that have not ended; also of those that `close` gave up."""
        device: list[Pages] = []
        host: list[Pages] = []
        for task in self._job_table.unfinished():
            of_device, of_host = pages_in_use(task.payload, task.kind, pair)
            device += of_device
            host += of_host
        for copies in self._queued_loads.values():
            of_device, of_host = pages_in_use(copies, JobKind.LOAD, pair)
            device += of_device
            host += of_host
        if pair == BACKBONE_PAIR:
            host += [operation.host_pages for operation in self._prefetches.values()]
        return device, host

    # -- results ------------------------------------------------------------------------

    def poll(self, limit: int | None = None) -> list[Result]:
        """Results that have come, oldest first; at most `limit`. Next to free when there are none. Carries
        prefetches on."""
        results = self._job_table.poll(limit)
        if results and self._prefetches:
            return [result for result in results if not self._is_of_prefetch(result)]
        return results

    def wait(self, tickets: Iterable[Ticket], timeout_s: float) -> bool:
        """Block until all these tickets have Results (for `poll` to fetch); False at the deadline.

        A load has none before `start_loading`."""
        return self._job_table.wait(tickets, timeout_s)

    def wait_any(self, timeout_s: float) -> bool:
        """Block until `poll` has something to give; False at the deadline."""
        return self._job_table.wait_any(timeout_s)

    def pending(self, kind: JobKind) -> int:
        """Tickets of that kind whose Result `poll` has not handed out."""
        return self._job_table.pending(kind)

    @property
    def is_idle(self) -> bool:
        """Whether every ticket's Result has been handed out."""
        return not any(self._job_table.pending(kind) for kind in JobKind)

    @property
    def wakeup(self) -> Callable[[], None] | None:
        """Called after each posted Result, on the thread that posts it; set it to end an idle wait."""
        return self._job_table.wakeup

    @wakeup.setter
    def wakeup(self, callback: Callable[[], None] | None) -> None:
        self._job_table.wakeup = callback

    # -- lifecycle ----------------------------------------------------------------------

    @property
    def storage_attached(self) -> bool:
        """Whether storage jobs are accepted."""
        return bool(self._storage_jobs.parts) and not self._detaching and not self._closed

    @property
    def storage_troubles(self) -> tuple[int, int, int]:
        """Counters of the attached storage: changes after which its calls may cost something else (an attach
        is one), failed lookups, failed reads; see `storage.guard.breaker.Troubles`."""
        changes, lookups, reads = self._num_attached << 32, 0, 0
        for part in self._storage_jobs.parts:
            more = part.troubles
            changes, lookups, reads = changes + more.changes, lookups + more.lookups, reads + more.reads
        return changes, lookups, reads

    @property
    def num_adopted(self) -> int:
        """How many generations of stored pages the attached storage has found to be of these weights and
        adopted. After each, lookups may find more than before."""
        return sum([part.num_adopted for part in self._storage_jobs.parts])

    @property
    def attach_refusal(self) -> str | None:
        """The reason why no storage can be attached at the moment, or None."""
        if not self._storage_jobs.parts:
            return None
        return "storage is still detaching" if self._detaching else "storage is attached already"

    def attach(self, storage: Stores) -> None:
        """Serve storage jobs with `storage`, a part per pair of pools, introduced if it was not before.

        StorageError if there is one.
        """
        if self.attach_refusal is not None:
            raise StorageError(self.attach_refusal)
        self._storage_jobs.use(storage)
        self._num_attached += 1

    @property
    def other_stores(self) -> tuple[str, ...]:
        """Names of stores beside the attached one, to which pages may be copied."""
        return tuple(self._storage_jobs.others)

    def open_other(self, name: str, storage: Stores) -> None:
        """Have `storage`, a part per pair of pools, as a store of that name beside the attached one, to copy
        pages to. It is the controller's until `close_other`. StorageError: there is one of that name."""
        if name in self._storage_jobs.others:
            raise StorageError(f"a store {name!r} is open already")
        self._storage_jobs.use_other(name, storage)

    def close_other(self, name: str) -> Stores | None:
        """Let go of a store, which is the caller's to close; None: there is none of that name. Jobs for it
        fail."""
        return self._storage_jobs.release_other(name)

    def detach(self, timeout_s: float) -> bool:
        """Fail queued storage jobs, wait for running ones, let go of the backend (its owner closes it).

        False: one still ran at the deadline. New storage jobs stay refused; call again to go on.
        """
        if not self._storage_jobs.parts:
            return True
        self._detaching = True
        self._job_table.stop_all(STORAGE_KINDS, FailReason.DETACHED)
        if not self._job_table.wait_quiet(STORAGE_KINDS, timeout_s):
            return False
        self._storage_jobs.release()
        self._detaching = False
        return True

    def reset(self, timeout_s: float) -> bool:
        """Begin a new epoch: fail what is queued, stop what runs, wait for it up to the deadline.

        False: something still runs. Its Result comes later, with the old epoch.
        """
        self._stop_everything(FailReason.RESET)
        self.epoch += 1
        self.layer_done_counter.reset()
        return self._job_table.wait_quiet(JobKind, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Refuse new jobs, end all others, stop the workers. May be called again.

        False: a job hung. Its tickets get a Result with reason ABANDONED: their pages must not be reused.
        """
        deadline_s = self.runtime.clock() + timeout_s
        self._closed = True
        self._stop_everything(FailReason.CLOSED)
        is_quiet = self._job_table.wait_quiet(JobKind, timeout_s)
        if not is_quiet:
            self._job_table.abandon_running()
        for worker in {worker.name: worker for worker in self._job_table.workers.values()}.values():
            self._driver.stop(worker, max(0.0, deadline_s - self.runtime.clock()))
        return is_quiet

    def stats(self) -> TransferStats:
        """Counts since start and what is under way; for metrics and health."""
        now_s, tasks = (
            self.runtime.clock(),
            [job_queue.active for job_queue in self._job_table.job_queues.values()],
        )
        running = {task.kind: task.started_s for task in tasks if task is not None}
        return TransferStats(
            kinds=self._job_table.counters.snapshot(),
            queued={kind: len(job_queue.waiting) for kind, job_queue in self._job_table.job_queues.items()},
            running_s={kind: now_s - start_s for kind, start_s in running.items() if start_s is not None},
            storage_attached=self.storage_attached,
            detaching=self._detaching,
        )

    # -- inside -------------------------------------------------------------------------

    def _submit(self, kind: JobKind, size: Size, payload: Payload, after: object = None) -> Ticket:
        ticket = self._job_table.new_ticket(kind)
        task = Task(kind, ticket, size, payload, self.epoch, after)
        self._job_table.submit(task, self._refusal(kind))
        return ticket

    def _is_of_prefetch(self, result: Result) -> bool:
        """Whether a prefetch waited for this; if so, carry it on."""
        operation = self._prefetches.pop(result.ticket, None)
        if operation is None:
            return False
        if num_pages := operation.ended(result):
            hashes, rows = operation.hashes[:num_pages], operation.rows
            first = len(result.hashes) - len(operation.hashes)
            before = rows.prior if rows.start else b""
            chain = None if rows.start else result.hashes
            operation.ticket = self.read(
                hashes,
                operation.host_pages[:num_pages],
                chain,
                extra_key=rows.extra_key,
                tenant=rows.tenant,
                after=result.hashes[first - 1] if first else before,
            )
            self._prefetches[operation.ticket] = operation
        return True

    def _size(self, moved: Copies | AllTrailingPages) -> Size:
        num_pages = num_bytes = 0
        for one in moved:
            count = len(one[0])
            num_pages += count
            num_bytes += count * self.page_bytes[one.pair]
        return num_pages, num_bytes

    def _refusal(self, kind: JobKind) -> FailReason | None:
        if self._closed:
            return FailReason.CLOSED
        if kind is JobKind.LOAD:
            num_queued = len(self._queued_loads)
        else:
            if kind is not JobKind.WRITE:
                if self._detaching:
                    return FailReason.DETACHED
                if not self._storage_jobs.parts:
                    return FailReason.NO_STORAGE
            num_queued = len(self._job_table.job_queues[kind].waiting)
        return FailReason.QUEUE_FULL if num_queued >= self._max_queued else None

    def _fail_load(self, ticket: Ticket, copies: Copies, reason: FailReason) -> None:
        task = Task(JobKind.LOAD, ticket, self._size(copies), copies, self.epoch)
        self._job_table.submit(task, reason)

    def _stop_everything(self, reason: FailReason) -> None:
        self._job_table.stop_all(JobKind, reason)
        loads, self._queued_loads = self._queued_loads, {}
        for ticket, copies in loads.items():
            self._fail_load(ticket, copies, reason)

    def _end_load_batch(self, task: Task, error: str | None) -> None:
        """A batch of loads has ended, or never began: free its slot and tell its waiters."""
        payload = task.payload
        if isinstance(payload, LoadBatch) and self.layer_done_counter.is_open(payload.producer):
            self.layer_done_counter.end(payload.producer, error)

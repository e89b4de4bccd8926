"""The worker role: orders in, outcomes out. Copies, storage and threads are the transfer controller's.

    before_forward(orders)   saves that do not wait for the step; waits for those a fence names
    start_loads(orders)      host to device, layer by layer
    wait_layer(layer)        until the forward may read the layer
    after_forward(orders)    saves, queries and reads are handed over; nothing is waited for but this step's
                             own loads, which its layers have waited for already
    collect(orders)          what has ended since

The controller's results are taken in by a thread of this role, so that what was saved goes on to storage
while the engine is idle. `_lock` makes that thread and the model's one caller for the controller.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hiradix.adapters.vllm.orders import Orders, Outcome, StorageOrder, StorageSwitched
from hiradix.adapters.vllm.switch import OpenStorage, StorageSwitch
from hiradix.adapters.vllm.traffic import Traffic
from hiradix.storage import Stores
from hiradix.transfer import (
    FailReason,
    HiCacheController,
    JobKind,
    LoadFailed,
    PoolPair,
    Result,
    Runtime,
    Ticket,
    TransferLimits,
)
from hiradix.transfer.jobs import NO_PAGES, DeletePayload, QueryPayload, ReadPayload
from hiradix.transfer.step_executor import LoadOrder, SaveOrder, StorageJob

logger = logging.getLogger(__name__)

LIMITS = TransferLimits(queued_jobs=4096, num_load_slots=256)
AWAIT_S = 0.002  # what a step without a forward gives to transfers that requests wait for
IDLE_S = 1.0

Order = SaveOrder | LoadOrder | StorageJob


@dataclass
class Collected:
    """The report to vLLM at a step's end. failed_blocks: of loads for that very step."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


NOTHING = Collected()


@dataclass
class StepLoads:
    """The loads whose blocks the step under way reads. results: of those whose copies have ended.

    error: why something is not there that the step computes from. It stays until the step's saves have been
    refused: a copy that ends well after its layers gave up on it changes nothing of what they read.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    results: dict[Ticket, Result] = field(default_factory=dict)
    error: str | None = None

    @property
    def have_ended(self) -> bool:
        return len(self.results) == len(self.loads)

    def ended(self, load: LoadOrder, result: Result) -> None:
        """The copy of one of them has ended."""
        self.results[load.ticket] = result
        if result.error is not None:
            self.fail(result.error)

    def fail(self, error: str) -> None:
        """A load for the step has failed: its results must not be kept."""
        self.error = self.error or error

    def forget(self) -> None:
        """Forget the error of the step's loads."""
        self.error = None

    def take(self) -> list[tuple[LoadOrder, Result]]:
        """All of them, ended as one: where one has failed, or layers have given up, all have."""
        ends = [(load, self.results[load.ticket]) for load in self.loads]
        self.loads, self.results = [], {}
        if self.error is None:
            return ends
        return [(load, _failed(load, self.error)) for load, _ in ends]


def _failed(load: LoadOrder, error: str) -> Result:
    return Result(load.ticket, JobKind.LOAD, 0, error=error, reason=FailReason.COPY)


class WorkerRole:
    """Carries out the scheduler role's orders and reports outcomes. Public methods belong to the model's
    thread.

    pairs: device and host pool per component, the backbone's first, as orders count them.
    """

    def __init__(
        self, pairs: Sequence[PoolPair], open_storage: OpenStorage, runtime: Runtime | None = None
    ) -> None:
        self._controller = HiCacheController.over(pairs, runtime or Runtime(limits=LIMITS))
        self._lock = threading.RLock()
        self.switch = StorageSwitch(self._controller, self._lock, open_storage, self._take_in)
        self._changed = threading.Condition(self._lock)
        self._jobs: dict[Ticket, Order] = {}  # by the controller's ticket
        self._saving: set[Ticket] = set()  # tickets whose blocks are still read
        self._overwritten: set[Ticket] = set()  # of these, whose blocks were written to meanwhile
        self._storing: set[Ticket] = set()  # and of what goes on to storage when it is saved, until it has
        self._unstored: set[Ticket] = set()  # of these, of pages that the storage they were for has left
        self._step = StepLoads()
        self._gone: list[LoadOrder] = []  # of this step, which can load nothing: said with its own loads
        self._outcomes: list[Outcome] = []
        self._reported: list[Outcome] = []  # of `collect`, for `take_outcomes`
        self._collected = NOTHING
        self._closing = False
        self.traffic = Traffic()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        if runtime is None:
            self._controller.wakeup = self._wake.set
            self._thread = threading.Thread(target=self._pump_on, name="hiradix-vllm", daemon=True)
            self._thread.start()

    # -- storage --------------------------------------------------------------------------------

    def attach(self, name: str, keys: Mapping[str, Any]) -> None:
        """Open a backend and use it. Raises CacheError; takes as long as the backend does."""
        self.switch.attach(name, keys)

    @property
    def has_storage(self) -> bool:
        return self._controller.storage_attached

    @property
    def storage(self) -> Stores | None:
        return self.switch.storage

    def _follow(self, order: StorageOrder) -> None:
        """Attach or detach beside the model's thread, and answer. What is being saved is not stored."""

        def answer(error: str | None) -> None:
            with self._changed:
                self._outcomes.append(StorageSwitched(order.ticket, self.has_storage, error))
                self._changed.notify_all()

        with self._lock:
            self._unstored |= self._storing
        self.switch.follow(order, answer)

    # -- one step -------------------------------------------------------------------------------

    def before_forward(self, orders: Orders) -> None:
        """Make the saves that must precede the step, and wait for those whose blocks it writes to. Call
        before anything of the step is written to the device."""
        saves = [save for save in orders.jobs.saves if save.before_forward]
        if orders.fences or saves:
            with self._changed:
                for save in saves:
                    self._save(save)
                self._wait_for_saves(set(orders.fences))
        for order in orders.storage:
            self._follow(order)

    def _wait_for_saves(self, fenced: set[Ticket]) -> None:
        """Wait until the saves `fenced` have read their blocks. Call with `_lock` held. A save that does not
        end in time is given up: whatever it copies is then discarded, however it ends."""
        limit_s = self._controller.limits.gate_timeout_s
        if fenced & self._saving and not self._wait_for(lambda: not fenced & self._saving, limit_s):
            self._overwritten |= fenced & self._saving
            logger.warning("saves %s did not end in %g s: a step writes to their blocks", fenced, limit_s)

    def start_loads(self, orders: Orders) -> bool:
        """Launch the step's loads. Whether some are for the step itself: layers `wait_layer` for those."""
        loads = orders.jobs.loads
        if not loads:
            return False
        with self._lock:
            for load in loads:
                if load.error is not None:
                    self._gone.append(load)
                    continue
                self._jobs[self._controller.load(NO_PAGES, NO_PAGES, load.copies)] = load
                if load.in_step:
                    self._step.loads.append(load)
            producer = self._controller.start_loading()
            if self._step.loads:
                self._controller.layer_done_counter.set_consumer(producer)
            return bool(self._step.loads)

    def wait_layer(self, layer: int) -> None:
        """Return when the step's loads of model layer `layer` are there, or have failed."""
        if not self._step.loads or self.step_failed:
            return
        try:
            self._controller.layer_done_counter.wait_until(layer)
        except LoadFailed as error:
            logger.warning("a load for this step failed: %s", error)
            self._step.fail(str(error))

    @property
    def step_failed(self) -> bool:
        """Whether what this step computes may rest on a load that failed, or that its layers gave up on."""
        return self._step.error is not None

    def after_forward(self, orders: Orders) -> None:
        """End the step's loads and begin its saves and storage jobs. Call when the step's forward is
        launched, or would have been."""
        jobs = orders.jobs
        if not (jobs or self._step.loads or self._gone or self.step_failed):
            return
        with self._changed:
            self._end_step_loads()
            for save in jobs.saves:
                if not save.before_forward:
                    self._save(save, "a load for this step failed" if self.step_failed else None)
            self._step.forget()
            for job in jobs.storage_jobs:
                self._jobs[self._hand_over(job)] = job
            if jobs.cancels:
                self._cancel(set(jobs.cancels))

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing is left to report. Any thread may ask."""
        waiting = self._jobs or self._step.loads or self._gone or self._outcomes or self._reported
        return not waiting and self._collected is NOTHING

    def collect(self, orders: Orders) -> Collected:
        """Requests whose loads have ended since, and what failed: of the step's own loads all.

        With speculative decoding vLLM asks before `after_forward`, as the draft model comes between.
        """
        if self.is_idle and not orders.is_awaited:
            return NOTHING
        with self._lock:
            self._end_step_loads()
            self._take_in()
            if orders.is_awaited and not orders.computes:
                self._wait_for(lambda: bool(self._outcomes), AWAIT_S)
            collected, self._collected = self._collected, NOTHING
            self._reported, self._outcomes = self._reported + self._outcomes, []
            return collected

    def take_outcomes(self) -> tuple[Outcome, ...]:
        """Answers since the last call, as of `collect`: the scheduler hears of a load's end with vLLM."""
        outcomes, self._reported = tuple(self._reported), []
        return outcomes

    def settle(self, timeout_s: float) -> bool:
        """Wait until no copy reads or writes the device; False if one still does after so long."""
        with self._changed:
            return self._wait_for(lambda: not self._copies_run, timeout_s)

    @property
    def _copies_run(self) -> bool:
        return bool(self._saving) or any(isinstance(order, LoadOrder) for order in self._jobs.values())

    def close(self, drain_timeout_s: float) -> None:
        """Let what is on its way to storage arrive, then end everything. Idempotent."""
        with self._changed:
            if self._closing:
                return
            if not self._wait_for(lambda: not self._saving and not self._storing, drain_timeout_s):
                logger.warning("%d saves were not stored in %g s", len(self._storing), drain_timeout_s)
            self._closing = True
            self._controller.close(2.0)
        self._wake.set()
        self.switch.close()

    # -- inside ---------------------------------------------------------------------------------

    def _end_step_loads(self) -> None:
        """Wait for the step's own loads, and tell vLLM and the scheduler role how they ended. Call with
        `_lock` held.

        They fail together. Where layers have given up on one, a copy that ends well makes nothing good.
        """
        if self._step.loads:
            self._wait_for(lambda: self._step.have_ended)
            self._controller.layer_done_counter.set_consumer()
            for load, result in self._step.take():
                self._loaded(load, result)
        gone, self._gone = self._gone, []
        for load in gone:
            error = load.error or "nothing to load"
            self._loaded(load, _failed(load, error))
            if load.in_step:
                self._step.fail(error)

    def _save(self, save: SaveOrder, refusal: str | None = None) -> None:
        if save.store is not None:
            self._storing.add(save.store.ticket)
        if refusal is not None:
            self._written(save, Result(save.ticket, JobKind.WRITE, 0, error=refusal, reason=FailReason.COPY))
            return
        self._jobs[self._controller.write(NO_PAGES, NO_PAGES, save.copies)] = save
        self._saving.add(save.ticket)

    def _hand_over(self, job: StorageJob) -> Ticket:
        """Submit the job to the controller unchanged; the controller's ticket for it."""
        asked = job.payload
        if isinstance(asked, QueryPayload):
            return self._controller.query(asked.rows, asked.num_pages, asked.windows, asked.known)
        if isinstance(asked, DeletePayload):
            return self._controller.delete(asked)
        backbone, *others = asked.trailing
        if isinstance(asked, ReadPayload):
            return self._controller.read(
                asked.hashes,
                backbone.pages,
                asked.chain,
                others,
                asked.extra_key,
                asked.tenant,
                asked.after,
            )
        return self._controller.write_storage(asked.rows, backbone.pages, others)

    def _cancel(self, tickets: set[Ticket]) -> None:
        for own, order in list(self._jobs.items()):
            if order.ticket in tickets and isinstance(order, StorageJob):
                self._controller.cancel(own)

    def _pump_on(self) -> None:
        while not self._closing:
            self._wake.wait(IDLE_S)
            self._wake.clear()
            self._take_in()

    def _wait_for(self, wanted: Callable[[], bool], timeout_s: float = math.inf) -> bool:
        """Wait until `wanted` is true or the deadline has passed; whether it is. Call with `_lock` held.
        Without a thread of its own it works itself."""
        self._take_in()
        if self._thread is not None:
            return self._changed.wait_for(wanted, None if timeout_s == math.inf else timeout_s)
        clock = self._controller.runtime.clock
        deadline_s = clock() + timeout_s
        while not wanted() and clock() < deadline_s:
            self._controller.wait_any(AWAIT_S)
            self._take_in()
        return wanted()

    def _take_in(self) -> None:
        with self._changed:
            results = self._controller.poll()
            for result in results:
                self.traffic.add(result)
                self._apply(result)
            if results:
                self._changed.notify_all()

    def _apply(self, result: Result) -> None:
        order = self._jobs.pop(result.ticket)
        result = result._replace(ticket=order.ticket)
        if isinstance(order, SaveOrder):
            self._written(order, result)
        elif isinstance(order, StorageJob):
            self._storing.discard(order.ticket)
            self._unstored.discard(order.ticket)
            self._outcomes.append(result._replace(num_adopted=self._controller.num_adopted))
        elif order.in_step:
            self._step.ended(order, result)
        else:
            self._loaded(order, result)

    def _written(self, save: SaveOrder, result: Result) -> None:
        """A save's copy has ended: what follows in storage begins, or is answered at once."""
        self._saving.discard(save.ticket)
        if save.ticket in self._overwritten:
            self._overwritten.discard(save.ticket)
            text = "a step wrote to its blocks before they were copied"
            result = result._replace(num_pages=0, error=text, reason=FailReason.COPY)
        self._outcomes.append(result)
        store, error = save.store, result.error
        if store is None:
            return
        if error is None and store.ticket in self._unstored:
            error = "storage was switched"
        self._unstored.discard(store.ticket)
        if error is None:
            self._jobs[self._hand_over(store)] = store
        else:
            self._storing.discard(store.ticket)
            reason = result.reason or FailReason.DETACHED
            self._outcomes.append(Result(store.ticket, JobKind.STORE, 0, error=error, reason=reason))

    def _loaded(self, load: LoadOrder, result: Result) -> None:
        self._outcomes.append(result)
        if self._collected is NOTHING:
            self._collected = Collected()
        if load.in_step:
            if result.error is not None:
                blocks = np.concatenate([copy.target for copy in load.copies])
                self._collected.failed_blocks.update(blocks.tolist())
            return
        self._collected.loaded.add(load.request_id)
        if result.error is not None:
            self._collected.failed.add(load.request_id)

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hiradix.adapters.vllm.orders import (
    GroupCopy,
    LoadOrder,
    OrderOutcome,
    Orders,
    OrderStage,
    QueryOrder,
    ReadOrder,
    SaveOrder,
    StorageOrder,
)
from hiradix.adapters.vllm.switch import OpenStorage, StorageSwitch
from hiradix.adapters.vllm.traffic import Traffic
from hiradix.storage import Stores
from hiradix.transfer import (
    Copy,
    JobKind,
    LoadFailed,
    PoolPair,
    Result,
    Runtime,
    TransferController,
    TransferLimits,
)
from hiradix.transfer import Ticket as JobTicket
from hiradix.transfer.jobs import BACKBONE_PAIR, NO_PAGES, TrailingPages, TrailingWindow
from hiradix.tree import Pages

logger = logging.getLogger(__name__)

LIMITS = TransferLimits(queued_jobs=4096, num_load_slots=256)
AWAIT_S = 0.002  # what a step without a forward gives to transfers that requests wait for
IDLE_S = 1.0

Order = SaveOrder | LoadOrder | QueryOrder | ReadOrder


@dataclass
class Collected:
    """What a step's end reports to vLLM itself. failed_blocks: of loads for that very step."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


NOTHING = Collected()


@dataclass
class StepLoads:
    """The loads whose blocks the step under way reads. running: tickets of copies that have not ended.

    error: why something is not there that the step computes from. It stays until the step's saves have been
    refused: a copy that ends well after its layers gave up on it changes nothing of what they read.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    error: str | None = None

    def add(self, load: LoadOrder) -> None:
        """The step reads what this load brings."""
        self.loads.append(load)
        self.running.add(load.ticket)

    def ended(self, load: LoadOrder, error: str | None) -> None:
        """Its copy has ended."""
        self.running.discard(load.ticket)
        self.error = self.error or error


class WorkerRole:
    """Carries out the scheduler role's orders and reports outcomes. Public methods belong to the model's
    thread.

    pairs: device and host pool per component, the backbone's first; groups: their KV cache groups.
    """

    def __init__(
        self,
        pairs: Sequence[PoolPair],
        groups: Sequence[int],
        open_storage: OpenStorage,
        runtime: Runtime | None = None,
    ) -> None:
        self._pair_of = {group: pair for pair, group in enumerate(groups)}
        self._controller = TransferController.over(pairs, runtime or Runtime(limits=LIMITS))
        self._lock = threading.RLock()
        self.switch = StorageSwitch(self._controller, self._lock, open_storage, self._take_in)
        self._changed = threading.Condition(self._lock)
        self._jobs: dict[JobTicket, Order] = {}
        self._stores: dict[JobTicket, SaveOrder] = {}
        self._saving: set[int] = set()  # tickets whose blocks are still read
        self._unstored: set[int] = set()  # of these, of pages that the storage they were for has left
        self._step = StepLoads()
        self._gone: list[LoadOrder] = []  # of this step, which can load nothing: said with its own loads
        self._outcomes: list[OrderOutcome] = []
        self._told: list[OrderOutcome] = []  # of `collect`, for `take_outcomes`
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
                attached = int(self.has_storage)
                self._outcomes.append(OrderOutcome(order.ticket, OrderStage.ATTACHED, attached, error=error))
                self._changed.notify_all()

        with self._lock:
            self._unstored |= self._saving
        self.switch.follow(order, answer)

    # -- one step -------------------------------------------------------------------------------

    def before_forward(self, orders: Orders) -> None:
        """To be called before anything of the step is written to the device."""
        if not (orders.fences or orders.saves or orders.storage):
            return
        with self._changed:
            for save in orders.saves:
                if save.before_forward:
                    self._save(save)
            fenced = set(orders.fences)
            if fenced & self._saving:
                self._wait_for(lambda: not fenced & self._saving)
        for order in orders.storage:
            self._follow(order)

    def start_loads(self, orders: Orders) -> bool:
        """Launch the step's loads. Whether some are for the step itself: layers `wait_layer` for those."""
        if not orders.loads:
            return False
        with self._lock:
            for load in orders.loads:
                if load.error is not None:
                    self._gone.append(load)
                    continue
                job = self._controller.load(NO_PAGES, NO_PAGES, self._copies(load.copies, to_host=False))
                self._jobs[job] = load
                if load.in_step:
                    self._step.add(load)
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
            self._step.error = str(error)

    @property
    def step_failed(self) -> bool:
        """Whether what this step computes may rest on a load that failed, or that its layers gave up on."""
        return self._step.error is not None

    def after_forward(self, orders: Orders) -> None:
        """To be called when the step's forward is launched, or would have been."""
        if not (self._step.loads or self._gone or self.step_failed or orders.brings_work):
            return
        with self._changed:
            self._end_step_loads()
            for save in orders.saves:
                if not save.before_forward:
                    self._save(save, "a load for this step failed" if self.step_failed else None)
            self._step.error = None
            for query in orders.queries:
                windows = [TrailingWindow(self._pair_of[group], reach) for group, reach in query.windows]
                self._jobs[self._controller.query(query.rows, query.num_pages, windows)] = query
            for read in orders.reads:
                backbone, others = self._trailing(read.host)
                job = self._controller.read(read.hashes, backbone, others=others, extra_key=read.extra_key)
                self._jobs[job] = read
            if orders.cancels:
                self._cancel(set(orders.cancels))

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing is left to report. Any thread may ask."""
        waiting = self._jobs or self._stores or self._step.loads or self._gone or self._outcomes or self._told
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
            self._told, self._outcomes = self._told + self._outcomes, []
            return collected

    def take_outcomes(self) -> tuple[OrderOutcome, ...]:
        """Answers since the last call, as of `collect`: the scheduler hears of a load's end with vLLM."""
        outcomes, self._told = tuple(self._told), []
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
            if not self._wait_for(lambda: not self._saving and not self._stores, drain_timeout_s):
                logger.warning("%d saves were not stored in %g s", len(self._stores), drain_timeout_s)
            self._closing = True
            self._controller.close(2.0)
        self._wake.set()
        self.switch.close()

    # -- inside ---------------------------------------------------------------------------------

    def _end_step_loads(self) -> None:
        """With `_lock` held: the step's own loads have ended, and vLLM and the scheduler role are told how.

        They fail together. Where layers have given up on one, a copy that ends well makes nothing good.
        """
        loads = self._step.loads
        if loads:
            self._wait_for(lambda: not self._step.running)
            self._controller.layer_done_counter.set_consumer()
            self._step.loads = []
            for load in loads:
                self._loaded(load, self._step.error)
        gone, self._gone = self._gone, []
        for load in gone:
            self._loaded(load, load.error)
            if load.in_step:
                self._step.error = load.error

    def _save(self, save: SaveOrder, refusal: str | None = None) -> None:
        if refusal is not None:
            self._written(save, refusal)
            return
        job = self._controller.write(NO_PAGES, NO_PAGES, self._copies(save.copies, to_host=True))
        self._jobs[job] = save
        self._saving.add(save.ticket)

    def _copies(self, copies: Sequence[GroupCopy], *, to_host: bool) -> list[Copy]:
        return [
            Copy(copy.device, copy.host, self._pair_of[copy.group])
            if to_host
            else Copy(copy.host, copy.device, self._pair_of[copy.group])
            for copy in copies
        ]

    def _trailing(self, host: Iterable[tuple[int, Pages]]) -> tuple[Pages, list[TrailingPages]]:
        """Host pages by group as the controller has them: the backbone's, if any, and the others."""
        trailing = [TrailingPages(pages, self._pair_of[group]) for group, pages in host]
        backbone = next(
            (pages_of_pair.pages for pages_of_pair in trailing if pages_of_pair.pair == BACKBONE_PAIR),
            NO_PAGES,
        )
        return backbone, [pages_of_pair for pages_of_pair in trailing if pages_of_pair.pair != BACKBONE_PAIR]

    def _cancel(self, tickets: set[int]) -> None:
        for job, order in list(self._jobs.items()):
            if order.ticket in tickets and isinstance(order, QueryOrder | ReadOrder):
                self._controller.cancel(job)

    def _pump_on(self) -> None:
        while not self._closing:
            self._wake.wait(IDLE_S)
            self._wake.clear()
            self._take_in()

    def _wait_for(self, wanted: Callable[[], bool], timeout_s: float = math.inf) -> bool:
        """With `_lock` held: until `wanted` or the deadline. Without a thread of its own, it works itself."""
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
        if result.kind is JobKind.STORE:
            save = self._stores.pop(result.ticket)
            (backbone, _) = self._trailing([(copy.group, copy.host) for copy in save.copies])
            self._answer(
                save, OrderStage.STORED, result._replace(num_pages=min(result.num_pages, len(backbone)))
            )
            return
        order = self._jobs.pop(result.ticket)
        if isinstance(order, SaveOrder):
            self._written(order, result.error)
        elif isinstance(order, LoadOrder):
            if order.in_step:
                self._step.ended(order, result.error)
            else:
                self._loaded(order, result.error)
        else:
            self._answer(
                order, OrderStage.FOUND if isinstance(order, QueryOrder) else OrderStage.READ, result
            )

    def _answer(self, order: Order, stage: OrderStage, result: Result) -> None:
        done = result.num_pages, result.hashes, result.error, result.duration_s
        self._outcomes.append(OrderOutcome(order.ticket, stage, *done))

    def _written(self, save: SaveOrder, error: str | None) -> None:
        self._saving.discard(save.ticket)
        self._outcomes.append(OrderOutcome(save.ticket, OrderStage.WRITTEN, 0, error=error))
        is_unstored = save.ticket in self._unstored
        self._unstored.discard(save.ticket)
        if save.rows is None:
            return
        if error is None and is_unstored:
            error = "storage was switched"
        if error is None:
            backbone, others = self._trailing([(copy.group, copy.host) for copy in save.copies])
            self._stores[self._controller.write_storage(save.rows, backbone, others)] = save
        else:
            self._outcomes.append(OrderOutcome(save.ticket, OrderStage.STORED, 0, error=error))

    def _loaded(self, load: LoadOrder, error: str | None) -> None:
        self._outcomes.append(OrderOutcome(load.ticket, OrderStage.LOADED, 0, error=error))
        if self._collected is NOTHING:
            self._collected = Collected()
        if load.in_step:
            if error is not None:
                self._collected.failed_blocks.update(
                    np.concatenate([copy.device for copy in load.copies]).tolist()
                )
            return
        self._collected.loaded.add(load.request_id)
        if error is not None:
            self._collected.failed.add(load.request_id)

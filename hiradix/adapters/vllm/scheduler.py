"""The scheduler role: what may be promised, and the orders that keep the promise.

    arrived(request)     storage is asked for what the host lacks
    lookup(request, n)   tokens the host can bring beyond vLLM's own n; nothing is pinned
    allocated(...)       what was promised is locked, and its load ordered
    step(...)            full blocks are saved; one step's orders
    apply(outcomes)      what every worker has done enters the index
    finished(request)    the last full blocks are saved; nothing holds the request back

One thread, vLLM's scheduler. Shares nothing with the workers but orders and outcomes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

from hiradix.adapters.vllm.fetches import FetchTracker
from hiradix.adapters.vllm.finished_requests import FinishedRequest, NextStepSaves, WriteBackSaves, learn
from hiradix.adapters.vllm.loads import LoadTracker
from hiradix.adapters.vllm.orders import OrderOutcome, Orders, OrderStage, SaveOrder, Ticket
from hiradix.adapters.vllm.requests import EngineRequest, Tracked, track
from hiradix.adapters.vllm.saves import BlockTable, SaveTracker
from hiradix.adapters.vllm.scheduler_plan import Changes, SchedulerCounters, SchedulerPlan, StepRequest
from hiradix.adapters.vllm.stores import StorageTracker
from hiradix.adapters.vllm.worker_quorum import WorkerQuorum
from hiradix.errors import BadNamespace
from hiradix.tree import BACKBONE, Pages

logger = logging.getLogger(__name__)

ARRIVAL_WAIT_S = 0.5  # longest a request asks again for pages that another one is just saving
NO_ORDERS = {  # for a step that has none: (computes, is_awaited)
    (computes, is_awaited): Orders(computes=computes, is_awaited=is_awaited)
    for computes in (False, True)
    for is_awaited in (False, True)
}


class SchedulerRole:
    """Decides what is promised to vLLM's scheduler, and orders the copies and reads that keep the promise."""

    def __init__(self, plan: SchedulerPlan) -> None:
        self.plan = plan
        self.index = plan.index
        self.figures = SchedulerCounters()
        self.requests: dict[str, Tracked] = {}
        self._tickets = count(1)
        self.quorum = WorkerQuorum(plan.num_workers)
        self.saves = SaveTracker(plan.index, plan.groups)
        self.fetches = FetchTracker(plan.index, plan.prefetch, plan.clock, self._ticket, plan.groups)
        self.storage = StorageTracker(self.fetches, self._ticket, plan.clock)
        self.loads = LoadTracker(plan.index, plan.groups, plan.load_async, self._ticket)
        self._saves_new = plan.writes.is_due(1)  # when pages are computed, not only when they are used again
        self._saves_lost = plan.writes.writes_on_evict  # and not before vLLM takes their blocks
        self._finished: NextStepSaves | WriteBackSaves = (
            WriteBackSaves() if self._saves_lost else NextStepSaves()
        )
        self._changes = Changes()
        self._is_told = False  # nothing has happened since `take_figures`
        self._quiet: Orders | None = None  # of the next step, if nothing happens before it

    def _ticket(self) -> Ticket:
        return next(self._tickets)

    def open(self, num_pages: Sequence[int], has_storage: bool) -> None:
        """Before the first request: host pages per component that every worker has."""
        self.index.open(num_pages)
        self.storage.opened(self.plan.stored if has_storage else None)

    @property
    def has_storage(self) -> bool:
        return self.storage.is_attached

    # -- one request's life -------------------------------------------------------------------

    def arrived(self, request: EngineRequest) -> None:
        """A request entered vLLM's queue."""
        self._happened()
        try:
            tracked = track(request, self.index.page_size)
        except BadNamespace as error:
            if not self.figures.not_text:
                logger.warning("request %s: nothing is cached of its like: %s", request.request_id, error)
            self.figures.not_text += 1
            return
        if tracked is None:
            return
        self.requests[request.request_id] = tracked
        if self.has_storage and self.index.is_open and not request.skip_reading_prefix_cache:
            self.fetches.start(tracked, self._loadable_pages(request))

    def lookup(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Tokens the host can bring beyond vLLM's own `local_tokens`; None: ask again with the next step.

        Changes nothing but what is remembered of the request: a lookup without a load pins nothing.
        """
        tracked = self.requests.get(request.request_id)
        if tracked is None or not self.index.is_open or request.skip_reading_prefix_cache:
            return 0
        tracked.local_tokens, tracked.is_promised = local_tokens, False
        self._happened()
        limit = self._loadable_pages(request)
        if limit * self.index.page_size <= local_tokens:
            return 0
        if self.fetches.is_awaited(tracked):
            return None
        found = self.index.find(tracked.key(limit, self.index.page_size))
        if found.is_arriving and self._may_wait(tracked):
            return None
        num_tokens = max(0, found.num_pages * self.index.page_size - local_tokens)
        tracked.is_promised = num_tokens > 0
        return num_tokens

    def _loadable_pages(self, request: EngineRequest) -> int:
        """Whole pages before the last known token, which is computed to have something to sample from."""
        return (request.num_tokens - 1) // self.index.page_size

    def _may_wait(self, tracked: Tracked) -> bool:
        now_s = self.plan.clock()
        if tracked.waiting_since is None:
            tracked.waiting_since = now_s
        return now_s - tracked.waiting_since < ARRIVAL_WAIT_S

    def allocated(self, request: EngineRequest, table: Callable[[], BlockTable], num_tokens: int) -> None:
        """vLLM has given a request its blocks, those of `num_tokens` for what `lookup` promised.

        It may do so steps after that lookup: then it counts these tokens as computed already, and what was
        promised may have gone.
        """
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return
        self._happened()
        self._give_up(tracked)
        self.fetches.abandon(tracked)
        if tracked.request.num_computed_tokens == 0:
            tracked.num_saved, tracked.is_stale = 0, False
        tracked.is_promised = False
        if num_tokens and self.loads.order(tracked, table(), num_tokens):
            self.figures.hit_tokens += num_tokens

    def finished(self, request: EngineRequest, table: BlockTable) -> None:
        """A request has ended, however it did. Its blocks are vLLM's to free at once."""
        tracked = self.requests.pop(request.request_id, None)
        if tracked is None:
            return
        self._happened()
        self._give_up(tracked)
        self.fetches.abandon(tracked)
        computed = tracked.local_tokens if tracked.is_promised else request.num_computed_tokens
        known = min(computed, request.num_computed_tokens, request.num_tokens) // self.index.page_size
        is_kept = (self._saves_new or self._saves_lost) and not tracked.is_stale
        ended = tracked.ended() if self.index.learner is not None and not tracked.is_stale else None
        if is_kept and not tracked.loads and known > tracked.num_saved:
            later = None if self._saves_lost else ended  # it is saved with the next step: it is learned then
            blocks = tuple(tuple(group) for group in table)
            self._finished.leave(FinishedRequest(tracked, known, blocks, later))
            ended = ended if later is None else None
        learn(self.index, tracked, known, ended)

    def _give_up(self, tracked: Tracked) -> None:
        """Let go of prefetched pages: they are loaded from here on, or not wanted."""
        tracked.waiting_since = None
        if tracked.hold is not None:
            self.index.unlock(tracked.hold)
            tracked.hold = None

    # -- one step -----------------------------------------------------------------------------

    def _happened(self) -> None:
        """Something did that may bring orders or change figures."""
        self._is_told, self._quiet = False, None

    def quiet_step(self, computed: Iterable[tuple[str, int]]) -> Orders | None:
        """The orders of a step in which no request gets a block, or None if `step` must see it.

        computed: request ids with the tokens computed when the step ends. None when one of them has a page
        that is to be saved, or something has happened since `step`. Costs a look at each request.
        """
        if self._quiet is None or self.storage.is_asked:
            return None
        size, requests = self.index.page_size, self.requests
        for request_id, end in () if self._saves_lost else computed:
            tracked = requests.get(request_id)
            if tracked is None or end // size <= tracked.num_saved:
                continue
            if self._due(tracked, end) > tracked.num_saved:
                return None
        return self._quiet

    def step(self, scheduled: Sequence[StepRequest], table: Callable[[str], BlockTable]) -> Orders:
        """Everything the workers are to do with this step. table: a request's blocks, by its id."""
        self._is_told = False
        loads = self.loads.take()
        written = {block for load in loads for copy in load.copies for block in copy.device.tolist()}
        for one in scheduled:
            written.update(one.new_blocks)
        saves = self._save_finished(self._finished.taken(written))
        fences = self.saves.fences(written)
        self.figures.fences += len(fences)
        for one in scheduled:
            if (save := self._save(one, table)) is not None:
                saves.append(save)
        parts = (fences, tuple(saves), loads, *self.fetches.take(), self.storage.orders())
        self._quiet = NO_ORDERS[True, self._is_awaited]
        if not any(parts):
            return NO_ORDERS[bool(scheduled), self._is_awaited]
        return Orders(*parts, bool(scheduled), self._is_awaited)

    @property
    def _is_awaited(self) -> bool:
        """Whether a request may be waiting for what workers do."""
        return bool(self.fetches.in_flight or self.saves.in_flight or self.loads.in_flight)

    def _save(self, one: StepRequest, table: Callable[[str], BlockTable]) -> SaveOrder | None:
        tracked = self.requests.get(one.request_id)
        if tracked is None or not self.index.is_open or self._saves_lost:
            return None
        due = self._due(tracked, tracked.request.num_computed_tokens + one.num_tokens)
        if due <= tracked.num_saved:
            return None
        return self._planned(self._ticket(), tracked, table(one.request_id), due)

    def _due(self, tracked: Tracked, end: int) -> int:
        """Leading pages of a request to be on the host when a step has computed its tokens up to `end`."""
        known = 0 if tracked.is_stale else min(end, tracked.request.num_tokens)
        if not self._saves_new:
            known = min(known, tracked.local_tokens)
        return known // self.index.page_size

    def _save_finished(self, requests: Iterable[FinishedRequest]) -> list[SaveOrder]:
        """What ended requests left behind."""
        planned = []
        for one in requests:
            planned.append(self._planned(self._ticket(), one.tracked, one.table, one.num_pages))
            learn(self.index, one.tracked, one.num_pages, one.ended)
        return [SaveOrder(save.ticket, save.copies, save.rows, True) for save in planned if save is not None]

    def _planned(
        self, ticket: Ticket, tracked: Tracked, table: BlockTable, num_pages: int
    ) -> SaveOrder | None:
        save = self.saves.plan(tracked, table, num_pages, ticket)
        if save is None or not self.has_storage:
            return save
        job = self.saves.in_flight[ticket]
        job.is_stored = True
        return SaveOrder(ticket, save.copies, self.saves.rows(job))

    # -- what the workers say -------------------------------------------------------------------

    def apply(self, outcomes: Iterable[OrderOutcome]) -> None:
        """Take in what workers have done; each stage counts when the last of them has answered."""
        for outcome in outcomes:
            self._happened()
            whole = self.quorum.add(outcome)
            if whole is not None:
                self._ends[whole.stage](self, whole)

    def _written(self, outcome: OrderOutcome) -> None:
        job = self.saves.in_flight[outcome.ticket]
        self.saves.end_reading(job, outcome.ticket)
        if outcome.error is None:
            self.figures.saved_pages += len(job.pages[BACKBONE])
            self.index.arrived(job.pages)
            self._tell_entered(job.owner, job.start, job.pages[BACKBONE])
        else:
            self.figures.save_failed_pages += len(job.pages[BACKBONE])
            job.owner.num_saved = 0
            self.index.lose(job.key, job.start, job.pages)
        if not job.is_stored:
            self._end_save(outcome.ticket)

    def _stored(self, outcome: OrderOutcome) -> None:
        job = self.saves.in_flight[outcome.ticket]
        self.figures.stored_pages += outcome.num_pages
        self.figures.store_failed_pages += len(job.pages[BACKBONE]) - outcome.num_pages
        if outcome.hashes:
            node = job.lock.node
            self.index.tree.set_hashes(node, node.end - len(outcome.hashes), outcome.hashes)
        self._end_save(outcome.ticket)

    def _end_save(self, ticket: Ticket) -> None:
        self.index.unlock(self.saves.in_flight.pop(ticket).lock)

    def _loaded(self, outcome: OrderOutcome) -> None:
        job = self.loads.ended(outcome.ticket, outcome.error is None)
        if outcome.error is None:
            self.figures.loaded_pages += job.num_pages
        else:
            self.figures.load_failed += 1

    def _read(self, outcome: OrderOutcome) -> None:
        fetch = self.fetches.in_flight[outcome.ticket]
        owner = fetch.owner
        entered = self.fetches.arrived(outcome)
        if owner is not None:
            self._tell_entered(owner, fetch.start, entered)

    _ends: ClassVar[Mapping[OrderStage, Callable[[Any, OrderOutcome], None]]] = {
        OrderStage.WRITTEN: _written,
        OrderStage.STORED: _stored,
        OrderStage.LOADED: _loaded,
        OrderStage.FOUND: lambda self, outcome: self.fetches.found(outcome),
        OrderStage.READ: _read,
        OrderStage.ATTACHED: lambda self, outcome: self.storage.ended(outcome),
    }

    def _tell_entered(self, tracked: Tracked, start: int, pages: Pages) -> None:
        if self.plan.events is not None:
            self.plan.events.left(self.index.take_dropped())
            self.plan.events.entered(tracked, start, pages)

    def take_events(self) -> list[Any]:
        """What entered and left the host since the last call; none where nobody listens."""
        dropped = self.index.take_dropped() if self.index.dropped else ()
        if self.plan.events is None:
            return []
        self.plan.events.left(dropped)
        return self.plan.events.take()

    def take_figures(self) -> dict[str, float]:
        """What has changed since the last call, by name; empty if nothing has."""
        if self._is_told:
            return {}
        self._is_told = True
        fetched = {f"prefetch_{name}_pages": pages for name, pages in vars(self.fetches.figures).items()}
        return self._changes.until({**vars(self.figures), "no_host_page": self.saves.num_dropped, **fetched})

    # -- the whole ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all host pages. What transfers still use is served to nobody, and goes when they end.

        As after a change of weights: nothing of what requests have computed so far is saved any more.
        """
        self._happened()
        for tracked in self.requests.values():
            self._give_up(tracked)
            tracked.is_stale = tracked.request.num_computed_tokens > 0
        self.fetches.forget_all()
        self.index.lose_all()
        self._finished.forget_all()
        if not self.plan.keeps_storage:
            self.storage.start_anew()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and nothing is locked on any request's behalf."""
        trackers = (self.saves.in_flight, self.fetches.in_flight, self.loads.in_flight, self.quorum)
        return not any(len(tracker) for tracker in trackers) and not self.saves.reading

    def check(self) -> None:
        """Assert the index's invariants and that each page is in one place. O(tree)."""
        under_way = [fetch.host for fetch in self.fetches.in_flight.values() if fetch.host]
        self.index.check([sum(len(host[c]) for host in under_way) for c in range(len(self.plan.groups))])

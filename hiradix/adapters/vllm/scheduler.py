"""The scheduler role: what may be promised, and the orders that keep the promise.

    arrived(request)     storage is asked for what the host lacks
    lookup(request, n)   tokens the host can bring beyond vLLM's own n; nothing is pinned
    allocated(...)       what was promised is locked, and its load ordered
    step(...)            full blocks are saved; one step's orders
    apply(outcomes)      what every worker has done is booked
    finished(request)    the last full blocks are saved; nothing holds the request back

What is decided of pages is decided by `hiradix.cache`, as in every engine: here is when vLLM's calls have it
decide. One thread, vLLM's scheduler. Shares nothing with the workers but orders and outcomes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from hiradix.adapters.vllm.explained import HostTierExplainer
from hiradix.adapters.vllm.finished_requests import FinishedRequest, NextStepSaves, WriteBackSaves, learn
from hiradix.adapters.vllm.kv_hints import answers_of_hints
from hiradix.adapters.vllm.orders import Orders, Outcome, StorageSwitched
from hiradix.adapters.vllm.requests import EngineRequest, Tracked, track
from hiradix.adapters.vllm.scheduler_plan import (
    Asked,
    Changes,
    OfferedState,
    PrefetchCounters,
    SchedulerCounters,
    SchedulerPlan,
    StepRequest,
)
from hiradix.adapters.vllm.step_meter import StepMeter
from hiradix.adapters.vllm.stores import StorageTracker
from hiradix.cache.departed import Departed
from hiradix.cache.foreign_device import NO_STATES, BlockOwner, BlockTables, ForeignDevice, StateBlocks
from hiradix.cache.intents.planner import HostPlanner
from hiradix.cache.intents.table import Intents
from hiradix.cache.prefetch import Prefetcher
from hiradix.errors import BadNamespace, Misuse
from hiradix.explain import RecentExplanations
from hiradix.intents import Selector
from hiradix.intents.http import answers_of_request
from hiradix.policy.no_regret import GatedTransfer, NoRegret
from hiradix.transfer import JobKind
from hiradix.transfer.step_executor import StepExecutor
from hiradix.tree import BACKBONE, Node, Pages, Tier

logger = logging.getLogger(__name__)

WISHES = "hiradix"  # of a request's kv_transfer_params: its wishes, and in its answer what became of them
ARRIVAL_WAIT_S = 0.5  # longest a request asks again for pages that another one is just saving
AWAITED = (JobKind.WRITE, JobKind.LOAD, JobKind.QUERY, JobKind.READ)  # what a request may be waiting for
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
        self.requests: dict[str, Tracked] = {}
        self.executor = StepExecutor(plan.num_workers, plan.limits)
        self.no_regret = NoRegret(
            plan.no_regret,
            troubles=lambda: self.executor.storage_troubles,
            page_size=self.index.page_size,
        )
        self.device = ForeignDevice(
            self.index, self.executor, self.no_regret, plan.load_async, self._record_entered
        )
        self.storage = StorageTracker(
            self.executor, plan.num_workers, plan.clock, self._storage_leaves, self._storage_came
        )
        self.meter = StepMeter(self.no_regret, plan.clock, self.index.page_size, plan.num_overlapping)
        self._prefetcher: Prefetcher | None = None  # once the workers' pools are known
        self.explainer: HostTierExplainer | None = None  # then, too, where requests are explained
        self.explanations = RecentExplanations()  # of recent requests, for other threads
        planner = HostPlanner(
            self.index, plan.clock, self.executor, lambda: self._prefetcher, self.device.backup
        )
        self.intents = Intents(planner, plan.intents)
        self._saves_new = plan.writes.is_due(1)  # when pages are computed, not only when they are used again
        self._saves_lost = plan.writes.writes_on_evict  # and not before vLLM takes their blocks
        self._finished: NextStepSaves | WriteBackSaves = (
            WriteBackSaves() if self._saves_lost else NextStepSaves()
        )
        kinds = enumerate(self.index.tree.components)
        self._state_parts = [component for component, kind in kinds if not kind.per_page]
        self._num_hit_tokens = self._num_fences = self._num_not_text = 0
        self._changes = Changes()
        self._last_gauges: dict[str, float] = {}
        self._is_reported = False  # nothing has happened since `take_stats`
        self._quiet: Orders | None = None  # of the next step, if nothing happens before it

    def open(self, num_pages: Sequence[int], page_bytes: Sequence[int], has_storage: bool) -> None:
        """Before the first request: host pages per component that every worker has, and bytes of each."""
        self.index.open(num_pages)
        self.executor.open(page_bytes)
        self._prefetcher = Prefetcher(
            self.index.supply, self.executor, self.index.in_flight, self.plan.prefetch, self.plan.clock,
            self.no_regret, on_entered=self._fetched, num_adopted=lambda: float(self.executor.num_adopted),
        )  # fmt: skip
        if self.plan.explain_names and self.plan.loads:
            departed = Departed(self.index.tree, self.plan.clock, self.plan.explain_names)
            policy = self.plan.eviction_policy
            self.explainer = HostTierExplainer(
                self.index, self._prefetcher, departed, policy, self.explanations
            )
        self.storage.opened(self.plan.stored if has_storage else None)

    @property
    def prefetcher(self) -> Prefetcher:
        if self._prefetcher is None:
            raise Misuse("a prefetch before the workers' pools are known")
        return self._prefetcher

    @property
    def has_storage(self) -> bool:
        return self.executor.storage_attached

    # -- one request's life -------------------------------------------------------------------

    def arrived(self, request: EngineRequest) -> None:
        """A request entered vLLM's queue."""
        self._happened()
        try:
            tracked = track(request, self.index.page_size)
        except BadNamespace as error:
            if not self._num_not_text:
                logger.warning("request %s: nothing is cached of its like: %s", request.request_id, error)
            self._num_not_text += 1
            return
        if tracked is None:
            return
        self.requests[request.request_id] = tracked
        if (
            self.plan.loads
            and self.has_storage
            and self.index.is_open
            and not request.skip_reading_prefix_cache
        ):
            key = tracked.key(self._loadable_pages(request), self.index.page_size)
            if self.index.removals.cover(key):
                return
            self.prefetcher.start(request.request_id, key, self.index.tree.match(key).loadable_node)

    def lookup(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Tokens the host can bring beyond vLLM's own `local_tokens`; None: ask again with the next step.

        Changes nothing but what is remembered of the request: a lookup without a load pins nothing.
        """
        tracked = self.requests.get(request.request_id)
        if tracked is None or not self.index.is_open or request.skip_reading_prefix_cache:
            return 0
        if tracked.local_tokens != local_tokens:
            tracked.gated = 0, False  # it was of other pages
        tracked.local_tokens, tracked.is_promised = local_tokens, False
        if request.num_computed_tokens == 0:  # it begins, for the first time or again: nothing of it is old
            tracked.num_saved, tracked.is_stale, tracked.has_blocks = 0, False, False
        self._happened()
        limit = self._loadable_pages(request)
        if not self.plan.loads or limit * self.index.page_size <= local_tokens:
            return 0
        if not self.prefetcher.progress(request.request_id):
            return None
        found = self.index.find(tracked.key(limit, self.index.page_size))
        if found.is_arriving and self._may_wait(tracked):
            return None
        num_tokens = found.num_pages * self.index.page_size - local_tokens
        if not self._is_worth_loading(tracked, num_tokens // self.index.page_size):
            return 0
        tracked.is_promised = True
        return num_tokens

    def _loadable_pages(self, request: EngineRequest) -> int:
        """Whole pages before the last known token, which is computed to have something to sample from."""
        return (request.num_tokens - 1) // self.index.page_size

    def _is_worth_loading(self, tracked: Tracked, num_pages: int) -> bool:
        """The gate's decision, made once for as long as a request asks for the same. False of no pages."""
        if num_pages <= 0:
            tracked.gated = 0, False
            return False
        if tracked.gated[0] != num_pages:
            tracked.gated = num_pages, self.device.takes(num_pages)
        return tracked.gated[1]

    def _may_wait(self, tracked: Tracked) -> bool:
        now_s = self.plan.clock()
        if tracked.waiting_since is None:
            tracked.waiting_since = now_s
        return now_s - tracked.waiting_since < ARRIVAL_WAIT_S

    def allocated(self, request: EngineRequest, table: Callable[[], BlockTables], num_tokens: int) -> None:
        """vLLM has given a request its blocks, those of `num_tokens` for what `lookup` promised.

        It may do so steps after that lookup: then it counts these tokens as computed already, and what was
        promised may have gone.
        """
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return
        self._happened()
        asked = None if self.explainer is None else self.explainer.asked(tracked)
        self._give_up(tracked)
        if request.num_computed_tokens == 0:
            tracked.num_saved, tracked.is_stale = 0, False
        tracked.is_promised, tracked.gated, tracked.has_blocks = False, (0, False), True
        num_loaded = num_tokens if num_tokens and self._load(tracked, table(), num_tokens) else 0
        self._num_hit_tokens += num_loaded
        if self.explainer is not None and asked is not None:
            self.explainer.explain(tracked, num_loaded, asked)

    def _load(self, tracked: Tracked, table: BlockTables, num_tokens: int) -> bool:
        """Load `num_tokens` behind what vLLM has itself; False if they have gone, or are no whole pages."""
        size, end = self.index.page_size, tracked.local_tokens + num_tokens
        key = None if end % size or tracked.is_stale else tracked.key(end // size, size)
        blocks = self._blocks(table)
        start = tracked.local_tokens // size
        is_ordered = self.device.load(tracked, tracked.request.request_id, key, blocks, start)
        if is_ordered and key is not None:
            self.intents.count_use(self.index.tree.find(key))
        return is_ordered

    def _blocks(self, table: BlockTables) -> BlockTables:
        """The block table of each component, from those of all KV cache groups."""
        return [table[group] for group in self.plan.groups]

    def finished(self, request: EngineRequest, table: BlockTables) -> None:
        """A request has ended, however it did. Its blocks are vLLM's to free at once."""
        tracked = self.requests.pop(request.request_id, None)
        if not self.requests:
            self.meter.forget()
        if tracked is None:
            return
        self._happened()
        self._give_up(tracked)
        computed = tracked.local_tokens if tracked.is_promised else request.num_computed_tokens
        known = min(computed, request.num_computed_tokens, request.num_tokens) // self.index.page_size
        is_kept = self.plan.saves and (self._saves_new or self._saves_lost) and not tracked.is_stale
        ended = tracked.ended() if self.index.learner is not None and not tracked.is_stale else None
        if is_kept and not tracked.loads and known > tracked.num_saved:
            later = None if self._saves_lost else ended  # it is saved with the next step: it is learned then
            blocks = tuple(tuple(group) for group in table)
            self._finished.leave(FinishedRequest(tracked, known, blocks, later))
            ended = ended if later is None else None
        learn(self.index, tracked, known, ended)

    def take_wishes(self, request: Any) -> list[dict[str, Any]] | None:
        """Submit the wishes that a request brought in its `kv_transfer_params` and `kv_hints`, about its prompt,
        and return their answers; None if it brought none. Call when the request ends, before `finished`."""
        given = (getattr(request, "kv_transfer_params", None) or {}).get(WISHES)
        hints = getattr(request, "kv_hints", None)
        if given is None and hints is None:
            return None
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return [{"message": "nothing of this request is cached here", "field": WISHES}]
        # All its tokens: a key of none, which the whole pages of a short prompt are, would name its namespace.
        selector = Selector.prefix(tracked.key(tracked.ended().prompt_tokens, page_size=1))
        answers = answers_of_request([] if given is None else given, selector, self.intents.submit)
        return answers + answers_of_hints(hints, selector, self.intents.submit)

    def _give_up(self, tracked: Tracked) -> None:
        """Let go of prefetched pages: they are loaded from here on, or not wanted. What is still on its way
        enters the tree all the same."""
        tracked.waiting_since = None
        if self._prefetcher is not None:
            self._prefetcher.abort(tracked.request.request_id)
            self.index.drop_lost()  # which it may have held

    def _fetched(self, request_id: Hashable, first: int, node: Node) -> None:
        """Pages read for a request are on the host: from page `first` to the end of `node`."""
        tracked = self.requests.get(str(request_id))
        if tracked is not None:
            self._record_entered(tracked, first, self.index.tree.pages(node, Tier.HOST, first))

    # -- one step -----------------------------------------------------------------------------

    def _happened(self) -> None:
        """Something happened that may bring orders or change figures."""
        self._is_reported, self._quiet = False, None

    def quiet_step(self, computed: Iterable[tuple[str, int]]) -> Orders | None:
        """The orders of a step in which no request gets a block, or None if `step` must see it.

        computed: request ids with the tokens computed when the step ends. None when one of them has a page
        that is to be saved, something has happened since `step`, or a request that waits may have room now.
        Costs a look at each request.
        """
        if self._quiet is None or self.storage.is_asked:
            return None
        if (self._prefetcher is not None and self._prefetcher.room.is_due) or self.intents.is_due:
            return None
        size, requests = self.index.page_size, self.requests
        for request_id, end in () if self._saves_lost else computed:
            tracked = requests.get(request_id)
            if tracked is None or end // size <= tracked.num_saved:
                continue
            if self._due(tracked, end) > tracked.num_saved:
                return None
        if self.meter.is_open:
            self.meter.planned(0, False)
        return self._quiet

    def step(
        self,
        scheduled: Sequence[StepRequest],
        table: Callable[[str], BlockTables],
        filled: Iterable[int] = (),
    ) -> Orders:
        """Everything the workers are to do with this step. table: a request's blocks, by its id. filled: blocks
        that vLLM itself zeroes, or fills from others, before the forward."""
        self._is_reported = False
        if self._prefetcher is not None:
            self._prefetcher.room.next_round()
        self._book()
        self.apply_intents()
        written, num_tokens = self.device.start_loading(), 0
        is_loading = bool(written)
        written.update(filled)
        for one in scheduled:
            written.update(one.new_blocks)
            num_tokens += one.num_tokens
        self._measure(scheduled, num_tokens, is_loading)
        for left in self._finished.taken(written):
            key = left.tracked.key(left.num_pages, self.index.page_size)
            self.device.save(left.tracked, key, self._blocks(left.table), before_forward=True)
            learn(self.index, left.tracked, left.num_pages, left.ended)
        fences = self.device.fences(written)
        self._num_fences += len(fences)
        for one in scheduled:
            self._save(one, table, written)
        storage, jobs = self.storage.orders(), self.executor.take()
        is_awaited = self._is_awaited
        self._quiet = NO_ORDERS[True, is_awaited]
        if not (fences or storage or jobs):
            return NO_ORDERS[bool(scheduled), is_awaited]
        return Orders(fences, jobs, storage, bool(scheduled), is_awaited)

    def apply_intents(self) -> None:
        """Apply wishes. What requests have computed so far of what is forgotten is not saved any more."""
        removals, size = self.index.removals, self.index.page_size
        before = removals.number
        if self.index.is_open:
            self.intents.tick()
        if removals.number == before:
            return

        def covers(tracked: Tracked, num_pages: int) -> bool:
            return removals.cover_since(tracked.key(num_pages, size), before)

        for tracked in self.requests.values():
            if tracked.has_begun and covers(tracked, tracked.request.num_tokens // size):
                tracked.is_stale = True
        self._finished.forget(lambda left: covers(left.tracked, left.num_pages))

    def _measure(self, scheduled: Sequence[StepRequest], num_tokens: int, is_loading: bool) -> None:
        """Measure the cost of computing, by steps that wait for no load and compute mostly prompts."""
        if is_loading and not self.plan.load_async:
            self.meter.forget()
        else:
            self.meter.planned(num_tokens, self._computes_prompts(scheduled, num_tokens))

    def _computes_prompts(self, scheduled: Sequence[StepRequest], num_tokens: int) -> bool:
        """Whether there are two tokens and more for each request, without those a draft model has guessed."""
        enough = max(1, 2 * len(scheduled))
        if num_tokens < enough:
            return False
        for one in scheduled:
            tracked = self.requests.get(one.request_id)
            if tracked is not None:
                request = tracked.request
                known = max(0, request.num_tokens - request.num_computed_tokens)
                num_tokens -= max(0, one.num_tokens - known)
        return num_tokens >= enough

    @property
    def _is_awaited(self) -> bool:
        """Whether a request may be waiting for what workers do."""
        for kind in AWAITED:
            if self.index.in_flight.of_kind(kind):
                return True
        return False

    def _save(self, one: StepRequest, table: Callable[[str], BlockTables], written: set[int]) -> None:
        tracked = self.requests.get(one.request_id)
        if tracked is None or not self.index.is_open or self._saves_lost:
            return
        due = self._due(tracked, tracked.request.num_computed_tokens + one.num_tokens)
        if due > tracked.num_saved or (due and one.states):
            blocks = self._blocks(table(one.request_id))
            offered = one.states and self._still_there(one.states, blocks, written)
            for num_pages, states in self._states(tracked, offered, blocks, due):
                key = tracked.key(num_pages, self.index.page_size)
                self.device.save(tracked, key, blocks, states=states)

    def _still_there(
        self, offered: Sequence[OfferedState], blocks: BlockTables, written: set[int]
    ) -> list[OfferedState]:
        """Without those whose block the request has given back, and this step writes to: where steps overlap
        vLLM says of a state only when its tokens are known, and may have handed its block out by then."""
        size, found = self.index.page_size, []
        for one in offered:
            own, page = blocks[self.plan.groups.index(one.group)], one.num_tokens // size - 1
            if one.block not in written or (0 <= page < len(own) and own[page] == one.block):
                found.append(one)
        return found

    def _states(
        self, tracked: Tracked, offered: Sequence[OfferedState], blocks: BlockTables, due: int
    ) -> list[tuple[int, StateBlocks]]:
        """Ends to be saved of a request's pages, the last at `due`, and the blocks that hold the state there.

        A state is where vLLM says so for this step, and where its own prefix cache had it, which is the only
        block of a state before the request's own. Nothing else of such a group's table is the state of a
        block's end: a later one is still written to.
        """
        if not self._state_parts:
            return [(due, NO_STATES)]
        size = self.index.page_size
        found: dict[int, dict[int, int]] = {due: {}}
        hit = tracked.local_tokens // size
        if 0 < hit <= due and not tracked.num_saved:
            found[hit] = {c: blocks[c][hit - 1] for c in self._state_parts if len(blocks[c]) >= hit}
        for group, block, num_tokens in offered:
            if num_tokens % size == 0 and num_tokens <= due * size:
                found.setdefault(num_tokens // size, {})[self.plan.groups.index(group)] = block
        return sorted(found.items(), key=itemgetter(0))

    def _due(self, tracked: Tracked, end: int) -> int:
        """Leading pages of a request to be on the host when a step has computed its tokens up to `end`."""
        known = min(end, tracked.request.num_tokens) if self.plan.saves and not tracked.is_stale else 0
        if not self._saves_new:
            known = min(known, tracked.local_tokens)
        return known // self.index.page_size

    # -- what the workers say -------------------------------------------------------------------

    def apply(self, outcomes: Iterable[Outcome]) -> None:
        """Take in what workers have done; each ticket counts when the last of them has answered."""
        for outcome in outcomes:
            self._happened()
            if isinstance(outcome, StorageSwitched):
                self._book()  # what was said before is of the storage there was
                self.storage.answer(outcome)
            else:
                self.executor.answer(outcome)
        self._book()

    def _book(self) -> None:
        """Apply all results that have come, and keep what arrived for requests that wait."""
        has_come = False
        while results := self.executor.poll():
            has_come = True
            for result in results:
                self.index.in_flight.apply(result)
        if self._prefetcher is not None:
            self._prefetcher.room.balance()
        if not has_come:
            return
        self._happened()
        self.index.drop_lost()

    def _storage_leaves(self, asked: Asked) -> None:
        """The workers are about to attach other storage, or none: nobody waits for what there is any more."""
        self.prefetcher.stop_all()
        self.prefetcher.policy = asked.prefetch or self.prefetcher.policy

    def _storage_came(self) -> None:
        """Storage was attached: forget what was measured of fetches, and which pages are stored."""
        self.no_regret.attached()
        self.index.tree.forget_stored()

    def _record_entered(self, owner: BlockOwner, start: int, pages: Pages) -> None:
        """Host pages hold the owner's pages from page `start` on: an event, where somebody listens."""
        if self.plan.events is not None and isinstance(owner, Tracked):
            self.plan.events.record_removed(self.index.take_freed())
            self.plan.events.record_stored(owner, start, pages)

    def take_events(self) -> list[Any]:
        """The events of host pages since the last call; none where nobody listens."""
        freed = self.index.take_freed()
        if self.plan.events is None:
            return []
        self.plan.events.record_removed(freed)
        return self.plan.events.take()

    @property
    def figures(self) -> SchedulerCounters:
        """Counts since start."""
        pages = self.index.counters
        return SchedulerCounters(
            hit_tokens=self._num_hit_tokens,
            saved_pages=pages.written,
            save_failed_pages=pages.write_failed,
            no_host_page=pages.write_dropped,
            loaded_pages=pages.loaded,
            load_failed=pages.load_failed,
            load_too_slow_pages=pages.load_too_slow,
            stored_pages=pages.backed_up,
            store_failed_pages=pages.backup_failed,
            fences=self._num_fences,
            not_text=self._num_not_text,
        )

    @property
    def prefetch_figures(self) -> PrefetchCounters:
        """Counts since start."""
        return PrefetchCounters(
            asked=self.executor.num_asked,
            found=self.executor.num_found,
            read=self.index.counters.prefetched,
            late=self.index.counters.prefetched_late,
            refetched=self.index.counters.refetched,
            left_out=self.no_regret.num_refused[GatedTransfer.FETCH],
        )

    @property
    def gauges(self) -> dict[str, float]:
        """Host room of requests that wait, as of now: see `Prefetcher`."""
        p = self._prefetcher
        if p is None:
            return {}
        return {
            "waiting_reserved_pages": p.room.num_held,
            "waiting_reserved_pages_cap": p.caps[BACKBONE] if self.has_storage else 0,
            "requests_waiting_for_host_room": p.room.num_short,
        }

    def take_stats(self) -> dict[str, float]:
        """The growth of counters since the last call, and gauges that have changed, by name; empty if nothing
        has."""
        if self._is_reported:
            return {}
        self._is_reported = True
        missed = {f"prefetch_missed_{why}_pages": n for why, n in self.index.counters.unfulfilled.items()}
        computed = {} if self.explainer is None else self.explainer.figures
        fetched = {f"prefetch_{name}_pages": pages for name, pages in vars(self.prefetch_figures).items()}
        before, self._last_gauges = self._last_gauges, self.gauges
        changed = {name: value for name, value in self._last_gauges.items() if value != before.get(name, 0)}
        return {**self._changes.until({**vars(self.figures), **fetched, **missed, **computed}), **changed}

    # -- the whole ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all host pages. What transfers still use is served to nobody, and goes when they end.

        As after a change of weights: nothing of what requests have computed so far is saved any more.
        """
        self._happened()
        for tracked in self.requests.values():
            self._give_up(tracked)
            tracked.is_stale = tracked.has_begun
        if self._prefetcher is not None:
            self._prefetcher.disown()
        self.intents.reset(is_empty=False)
        self.index.lose_all()
        self._finished.forget_all()
        if not self.plan.keeps_storage:
            self.storage.start_anew()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and nothing is locked on any request's behalf."""
        return not len(self.index.in_flight) and self.executor.is_idle and not self.device.is_reading

    def check(self) -> None:
        """Assert the index's invariants and that each page is in one place. O(tree)."""
        self.index.check()
        self.intents.check()

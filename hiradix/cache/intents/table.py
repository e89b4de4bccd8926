"""All wishes of one cache: taken at once, applied in their order at the tick, kept until they are forgotten.

    submit -> accepted, or refused at once -> next tick: begun -> a step at each tick -> its end -> its receipt

What is decided follows from the calls, the tree, agreed results and the common clock, so ranks decide alike.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final

from hiradix.cache.intents.bringing import Copying, Persisting, Warming
from hiradix.cache.intents.extents import common_end
from hiradix.cache.intents.forgetting import Forgetting
from hiradix.cache.intents.job import IntentJob
from hiradix.cache.intents.leases import NEEDED, Lease, LeaseBook
from hiradix.cache.intents.locating import Locating
from hiradix.cache.intents.planner import TIERS_BY_NAME, Planner
from hiradix.cache.intents.removals import Removal
from hiradix.cache.intents.selection import nodes_of
from hiradix.cache.intents.sessions import Sessions
from hiradix.errors import Misuse
from hiradix.intents import (
    ANY_SESSION,
    COMMON,
    OPERATOR,
    BadIntent,
    Intent,
    IntentState,
    IntentStats,
    Receipt,
    Selector,
    SelectorKind,
    TenantUse,
    Verb,
)
from hiradix.intents.limits import IntentLimits
from hiradix.tree import BACKBONE, DEVICE, HOST, Node, RadixKey

MAX_WARMED: Final = 64  # wishes that have ended and whose pages' uses are counted
MOST_OF_SERIES: Final = 4  # leases of one session that do not continue each other
MAX_RECEIPT_TOKENS: Final = 1 << 22  # of prefixes that wishes which have ended named; one may have more


class Intents:
    """The wishes of one cache. Scheduler thread only.

    other_stores: the names of stores beside the cache's own, as of now. look: reads the planner's clock anew, on
    all ranks, where nothing else does; None: it goes by itself.
    """

    def __init__(
        self, planner: Planner, limits: IntentLimits | None = None,
        other_stores: Callable[[], tuple[str, ...]] = tuple, look: Callable[[], None] | None = None,
    ):  # fmt: skip
        self.limits = limits or IntentLimits()
        self.planner = planner
        self.book = LeaseBook(planner, self.limits)
        self.sessions = Sessions(planner.tree, self.limits.max_sessions)
        self._other_stores = other_stores
        self._look = look
        self._jobs: OrderedDict[int, IntentJob] = OrderedDict()  # open and ended, oldest first
        self._open: dict[int, IntentJob] = {}
        self._renewals: dict[Lease, Intent] = {}  # of the next tick, the last one of each
        self._last_id = self._num_holds = 0
        self._ended: dict[tuple[str, str], int] = {}
        self._forgotten: dict[str, int] = {}
        self._saved_tokens = 0
        self._warmed: deque[IntentJob] = deque(maxlen=MAX_WARMED)
        self._is_applying = False
        self._num_ended_tokens = 0  # of prefixes that wishes which have ended named

    # -- what callers do ----------------------------------------------------------------

    def submit(self, intent: Intent) -> Receipt:
        """Take a wish: refused at once where it cannot be carried out here, else applied with the next tick."""
        if self._look is not None:
            self._look()
        again = self._same_lease(intent)
        if again is not None:
            refusal = self._refusal(intent, is_new=False)
            if not refusal:
                self._renewals[again] = intent
                self._note_turn(again)
                return again.receipt()
        else:
            refusal = self._refusal(intent)
        self._last_id += 1
        if not refusal and intent.verb is Verb.HOLD:
            self._make_room_in_series(intent)
        job = self._make(self._last_id, intent)
        self._jobs[job.id] = job
        self._open[job.id] = job
        if refusal:
            job.refuse(refusal)
        if not job.is_open:
            self._close(job)
        return job.receipt()

    def cancel(self, intent_id: int, asked_by: str = OPERATOR) -> Receipt:
        """End a wish: a lease ends, what runs stops. BadIntent: it is not known, or another's."""
        job = self._jobs.get(intent_id)
        if job is None:
            raise BadIntent("id", f"no wish {intent_id} is known; those that ended are forgotten in time")
        if asked_by not in (OPERATOR, job.intent.asked_by):
            raise BadIntent("id", f"wish {intent_id} is another's")
        if job.is_open:
            job.end(IntentState.CANCELLED, "as asked")
            self._close(job)
        return job.receipt()

    def receipt(self, intent_id: int) -> Receipt | None:
        """The receipt of a wish as of now; None if it is not known any more."""
        job = self._jobs.get(intent_id)
        return None if job is None else job.receipt()

    def receipts(self, asked_by: str | None = None) -> list[Receipt]:
        """The receipts of all known wishes, or of those of one who asked, oldest first."""
        return [
            job.receipt()
            for job in self._jobs.values()
            if asked_by is None or job.intent.asked_by == asked_by
        ]

    def end_series(self, asked_by: str, series: str) -> int:
        """End the leases of one session, which goes on no more; how many. O(leases)."""
        ended = [lease for lease in self.book.leases.values() if _is_of_series(lease, asked_by, series)]
        for lease in ended:
            lease.end(IntentState.CANCELLED, "its session has ended")
            self._close(lease)
        return len(ended)

    def name_session(self, session: str, node: Node) -> None:
        """A session's prompt ends at `node`."""
        if session:
            self.sessions.note(session, node)

    # -- at each turn -------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether a tick has anything to do. O(wishes that have not ended)."""
        is_held = IntentState.HELD
        return bool(self._renewals) or any(
            job.state is not is_held or job.is_over for job in self._open.values()
        )

    def tick(self) -> None:
        """Apply new wishes in their order, and go a step on with the others. Next to nothing without any."""
        if self._is_applying or not (self._open or self._renewals):
            return
        if self._look is not None:
            self._look()
        self._is_applying = True
        try:
            self._tick()
        finally:
            self._is_applying = False

    def _tick(self) -> None:
        for job in list(self._open.values()):
            if not job.is_open:
                self._close(job)
            elif job.state is IntentState.ACCEPTED:
                self._begin(job)
            else:
                job.advance()
        renewals, self._renewals = self._renewals, {}
        for lease, intent in renewals.items():
            if lease.is_open:
                lease.renew(intent)
        for job in list(self._open.values()):
            if not job.is_open:
                self._close(job)

    def _begin(self, job: IntentJob) -> None:
        key, removal = job.intent.selector.key, None
        if key is not None and isinstance(job, (Lease, Warming, Persisting)):
            removal = self.planner.removals.covering(key)
        if removal is not None:
            job.end(IntentState.REFUSED, f"it is being forgotten by {removal.wish}")
        else:
            job.begin()

    def expire(self) -> None:
        """End leases whose time has come, or whose pages are spoilt: also where room is made between two ticks.
        O(leases)."""
        if not self._is_applying:
            for lease in list(self.book.leases.values()):
                if lease.is_held:
                    lease.advance()
                if not lease.is_open:
                    self._close(lease)

    def count_use(self, node: Node) -> None:
        """A request uses the path to `node`: what of that a wish has held or brought there is saved."""
        best, tokens = None, 0
        for job in (*self.book.leases.values(), *self._warmed):
            for end in job.nodes():
                common = common_end(self.planner.tree, end, node) * self.planner.tree.page_size
                if common > tokens:
                    best, tokens = job, common
        if best is not None:
            best.saved_tokens += tokens
            self._saved_tokens += tokens

    def give_way(self) -> bool:
        """End a lease on the device, as a request could not run else. False: there is none."""
        lease = self.book.give_way()
        if lease is None:
            return False
        lease.end(IntentState.CANCELLED, NEEDED)
        self._close(lease)
        return True

    def yieldable(self, component: int = BACKBONE) -> int:
        """Device pages that leases alone keep, and give if nothing else can go."""
        return self.book.yieldable(component) if self.book.leases else 0

    def reset(self, is_empty: bool = True) -> None:
        """The tree was emptied, or with `is_empty` False is about to be: leases have ended, and nothing is left
        to be forgotten of it."""
        for job in list(self._open.values()):
            if isinstance(job, Lease):
                if is_empty:
                    job.forget_locks()
                job.end(IntentState.CANCELLED, "the cache was reset")
            elif job.state is IntentState.ACCEPTED:
                continue  # it is applied to what comes next, and to storage
            elif isinstance(job, Forgetting):
                job.reset()
            else:
                job.end(IntentState.CANCELLED, "the cache was reset")
            if not job.is_open:
                self._close(job)
        self.sessions.clear()
        self._warmed.clear()
        self.planner.removals.clear()

    # -- what is refused at once ----------------------------------------------------------

    def _refusal(self, intent: Intent, is_new: bool = True) -> str:
        """The reason why a wish is not taken; "": it is."""
        tiers, planner = intent.tiers, self.planner
        if self._is_anothers(intent):
            return "not yours: a tenant names what is in his own namespaces"
        if intent.verb is Verb.HOLD:
            if intent.selector.kind not in (SelectorKind.PREFIX, SelectorKind.SESSION):
                return "a hold is of a prefix or of a session"
            if tiers[0] not in planner.tiers:
                return planner.refusal(tiers[0]) or f"this cache has no {tiers[0]} tier"
        if intent.verb is Verb.FORGET and not any(
            tier in planner.tiers or tier == "storage" for tier in tiers
        ):
            why = next(filter(None, map(planner.refusal, tiers)), "")
            return why or "tiers: none that this cache has"
        if intent.verb is Verb.BRING:
            if "host" not in planner.tiers:
                return "this cache has no host tier"
            if intent.asked_by != OPERATOR and intent.target not in (*TIERS_BY_NAME, "storage"):
                return "target: host or storage; other stores are the operator's"
            if intent.target not in (*TIERS_BY_NAME, "storage", *self._other_stores()):
                known = ", ".join(self._other_stores()) or "none"
                return f"target: no store {intent.target!r} is open; others than the cache's own: {known}"
        if intent.verb is Verb.LOCATE and "storage" not in tiers:
            return ""  # it is answered at once
        return self._crowd(intent) if is_new else ""

    def _crowd(self, intent: Intent) -> str:
        """The reason why a wish is one too many; "": it is not. Leases, which last, leave room for what ends by
        itself, such as forgets; and tenants for the operator."""
        limits, is_hold, outgrown = self.limits, intent.verb is Verb.HOLD, self._outgrown(intent)
        alike = [
            job.intent.asked_by
            for job in self._open.values()
            if isinstance(job, Lease) == is_hold and job not in outgrown
        ]
        own, what = alike.count(intent.asked_by), "leases" if is_hold else "wishes"
        if (own if intent.asked_by == OPERATOR else len(alike)) >= limits.max_open:
            return f"{limits.max_open} {what} have not ended"
        if intent.asked_by != OPERATOR and own >= limits.max_open_of_tenant:
            return f"{limits.max_open_of_tenant} {what} of {intent.asked_by!r} have not ended"
        return ""

    def _is_anothers(self, intent: Intent) -> bool:
        selector = intent.selector
        if intent.asked_by == OPERATOR:
            return False
        own = "" if intent.asked_by == COMMON else intent.asked_by
        if selector.kind is SelectorKind.EVERYTHING or selector.tenant != own:
            return True
        ends = self.sessions.ends(selector.name) if selector.kind is SelectorKind.SESSION else []
        return any(end.space.tenant != own for end in ends)

    def _same_lease(self, intent: Intent) -> Lease | None:
        """The open lease that a hold goes on with: of the same owner, tier, and prefix or session; in a series
        the longest that it continues."""
        if intent.verb is not Verb.HOLD:
            return None
        size = self.planner.tree.page_size
        if intent.series:
            leases = self._of_series(intent.asked_by, intent.series)
            continued = [lease for lease in leases if _continues(intent, self._next_of(lease), size)]
            return max(
                continued, key=lambda lease: len(self._next_of(lease).selector.key or ()), default=None
            )
        for lease in self.book.leases.values():
            held = lease.intent
            if held.asked_by == intent.asked_by and held.tiers == intent.tiers and lease.is_open:
                if _is_same(held.selector, intent.selector, size):
                    return lease
        return None

    def _next_of(self, lease: Lease) -> Intent:
        """The wish that a lease goes on with from the next tick."""
        return self._renewals.get(lease, lease.intent)

    def _of_series(self, asked_by: str, series: str) -> list[Lease]:
        """Open leases of a series, the one renewed longest ago first."""
        own = [
            one for one in self.book.leases.values() if _is_of_series(one, asked_by, series) and one.is_open
        ]
        return sorted(own, key=lambda lease: lease.renewed)

    def _outgrown(self, intent: Intent) -> list[Lease]:
        """The leases of its session that a further one takes the place of: the one renewed longest ago."""
        if intent.series in ("", ANY_SESSION):
            return []
        return self._of_series(intent.asked_by, intent.series)[: 1 - MOST_OF_SERIES]

    def _make_room_in_series(self, intent: Intent) -> None:
        for lease in self._outgrown(intent):
            lease.end(IntentState.CANCELLED, f"its session holds {MOST_OF_SERIES} others since")
            self._close(lease)

    def _note_turn(self, lease: Lease) -> None:
        self._num_holds += 1
        lease.renewed = self._num_holds

    def _make(self, number: int, intent: Intent) -> IntentJob:
        planner, limits, sessions = self.planner, self.limits, self.sessions
        if intent.verb is Verb.LOCATE:
            return Locating(number, intent, planner, limits, sessions)
        if intent.verb is Verb.FORGET:
            return Forgetting(number, intent, planner, limits, self.book, sessions, self._make_way)
        if intent.verb is Verb.HOLD:
            lease = Lease(number, intent, planner, limits, self.book, sessions)
            self.book.leases[number] = lease
            self._note_turn(lease)
            return lease
        if intent.target == "host":
            return Warming(number, intent, planner, limits, sessions)
        if intent.target == "storage":
            return Persisting(number, intent, planner, limits, sessions)
        return Copying(number, intent, planner, limits, sessions)

    def _make_way(self, forgetting: Forgetting, removal: Removal) -> None:
        """End what a forget goes before: leases of what it covers, and what would bring that back. What is on
        its way to storage goes on without that, whoever asked for it."""
        for job in list(self._open.values()):
            if job is forgetting or job.state is IntentState.ACCEPTED:
                continue
            if isinstance(job, Persisting):
                job.leave_out(removal)
            elif isinstance(job, (Lease, Warming)) and forgetting.may_end(job):
                if self._is_covered(job, removal):
                    job.end(IntentState.CANCELLED, f"forgotten by {removal.wish}")

    def _is_covered(self, job: IntentJob, removal: Removal) -> bool:
        key = job.intent.selector.key
        if key is not None and removal.covers(key):
            return True
        return any(removal.owns(node) is not None for node in list(job.nodes()))

    def _close(self, job: IntentJob) -> None:
        """A wish has ended: its receipt is kept for a while."""
        if self._open.pop(job.id, None) is None:
            return
        self.book.leases.pop(job.id, None)
        if isinstance(job, Warming):
            self._warmed.append(job)
        what = (job.intent.verb.value, job.state.value)
        self._ended[what] = self._ended.get(what, 0) + 1
        if job.intent.verb is Verb.FORGET:
            for tier, amount in job.by_tier.items():
                self._forgotten[tier] = self._forgotten.get(tier, 0) + amount.tokens
        self._num_ended_tokens += _num_tokens(job)
        while (num_ended := len(self._jobs) - len(self._open)) > self.limits.max_receipts or (
            num_ended > 1 and self._num_ended_tokens > MAX_RECEIPT_TOKENS
        ):
            oldest = next(number for number in self._jobs if number not in self._open)
            self._num_ended_tokens -= _num_tokens(self._jobs.pop(oldest))

    # -- figures ------------------------------------------------------------------------

    def tenants(self, only: str | None = None) -> list[TenantUse]:
        """The pages and bytes of each tenant in the tiers of the tree, those with the most bytes first.
        O(nodes); with `only` one tenant, O(his)."""
        planner, used = self.planner, dict[str, list[list[int]]]()
        kinds = len(planner.tree.components)
        nodes: Iterable[Node] = (
            planner.tree.nodes() if only is None else nodes_of(planner, Selector.tenant_of(only))
        )
        for node in nodes:
            counts = used.setdefault(node.space.tenant, [[0] * kinds, [0] * kinds])
            for tier in (DEVICE, HOST):
                for c, more in enumerate(planner.pages_of(node, tier)):
                    counts[tier][c] += more
        for lease in self.book.leases.values():
            if only in (None, lease.intent.asked_by):
                used.setdefault(lease.intent.asked_by, [[0] * kinds, [0] * kinds])
        found = []
        for tenant, (device, host) in used.items():
            leases = [lease for lease in self.book.leases.values() if lease.intent.asked_by == tenant]
            held, budget = {}, {}
            for name in planner.tiers:
                tier = TIERS_BY_NAME[name]
                held[name] = planner.amount(self.book.held(tier, tenant)).bytes
                budget[name] = planner.amount(self.book.caps(tier, tenant)).bytes
            saved = sum(job.saved_tokens for job in self._jobs.values() if job.intent.asked_by == tenant)
            own = TenantUse(
                tenant,
                planner.amount(device).bytes,
                planner.amount(host).bytes,
                held_bytes=held,
                budget_bytes=budget,
                num_leases=len(leases),
                saved_tokens=saved,
            )
            found.append(own)
        return sorted(found, key=lambda one: (-one.device_bytes - one.host_bytes, one.tenant))

    def stats(self) -> IntentStats:
        """A snapshot for metrics. O(held nodes)."""
        size, book, planner = self.planner.tree.page_size, self.book, self.planner
        tiers = [(name, tier) for name, tier in TIERS_BY_NAME.items() if name in planner.tiers]
        return IntentStats(
            len(self._open),
            sum(lease.is_held for lease in book.leases.values()),
            len(self.sessions),
            dict(self._ended),
            {name: book.held(tier)[BACKBONE] * size for name, tier in tiers},
            {name: book.caps(tier)[BACKBONE] * size for name, tier in tiers},
            dict(self._forgotten),
            self._saved_tokens,
        )

    def check(self) -> None:
        """Assert that leases keep to their budgets. O(held nodes)."""
        self.book.check()
        for job in self._jobs.values():
            if job.is_open and job.id not in self._open:
                raise Misuse(f"wish {job.id} is {job.state.value}, and nobody carries it out")


def _num_tokens(job: IntentJob) -> int:
    key = job.intent.selector.key
    return 0 if key is None else len(key)


def _is_of_series(lease: Lease, asked_by: str, series: str) -> bool:
    return (lease.intent.asked_by, lease.intent.series) == (asked_by, series)


def _continues(intent: Intent, before: Intent, page_size: int) -> bool:
    """Whether a hold of a series begins with all whole pages of another, and is like it else."""
    key, known = intent.selector.key, before.selector.key
    if key is None or known is None or (intent.tiers, intent.ttl_s) != (before.tiers, before.ttl_s):
        return False
    count = known.num_pages(page_size)
    if not count or key.num_pages(page_size) < count:
        return False
    return _has_same_pages(key[: count * page_size], known, page_size)


def _is_same(one: Selector, other: Selector, page_size: int) -> bool:
    """Whether two selectors name the same whole pages, or the same session."""
    if one.kind is not other.kind:
        return False
    if one.key is None or other.key is None:
        return (one.name, one.tenant) == (other.name, other.tenant)
    return _has_same_pages(one.key, other.key, page_size)


def _has_same_pages(one: RadixKey, other: RadixKey, page_size: int) -> bool:
    count = one.num_pages(page_size)
    if one.space != other.space or count != other.num_pages(page_size):
        return False
    end = count * page_size + one.space.lookahead
    same = bool((one.tokens[:end] == other.tokens[:end]).all())
    return same and one.extras_of(0, count) == other.extras_of(0, count)

"""Bring: what a wish names is in another tier too: on the host, in storage, or in another store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from hiradix.cache.in_flight import InFlightJob
from hiradix.cache.intents.arrival import Arrival
from hiradix.cache.intents.job import IntentJob
from hiradix.cache.intents.planner import Planner
from hiradix.cache.intents.removals import Removal
from hiradix.cache.intents.selection import ends_of, keys_of
from hiradix.cache.intents.sessions import Sessions
from hiradix.cache.pages import BACKBONE, Pages, PagesOf
from hiradix.intents import Intent, IntentState
from hiradix.intents.limits import IntentLimits
from hiradix.transfer import JobKind, Result, Ticket, TrailingPages
from hiradix.transfer.jobs import DeletePayload
from hiradix.tree import HOST, Lock, Node

MAX_PATHS: Final = 32  # of one wish that are on their way to storage at once
MAX_ORDERS: Final = 4  # of copies and backups for one path


class Warming(IntentJob):
    """Bring to the host: from storage, or down from the device."""

    def __init__(
        self, number: int, intent: Intent, planner: Planner, limits: IntentLimits, sessions: Sessions
    ):
        super().__init__(number, intent, planner, limits)
        self._sessions = sessions
        self._arrivals: list[Arrival] = []
        self._nodes: list[Node] = []

    def begin(self) -> None:
        self.state = IntentState.RUNNING
        keys, planner = keys_of(self._planner, self.intent.selector, self._sessions), self._planner
        self._arrivals = [Arrival(planner, (self.id, place), key, HOST) for place, key in enumerate(keys)]
        self.total = planner.backbone(sum(arrival.num_pages for arrival in self._arrivals))
        if not keys:
            self.end(IntentState.REFUSED, "storage is asked by a prefix's tokens: name one of whole pages")
        else:
            self.advance()

    def advance(self) -> None:
        for arrival in self._arrivals:
            arrival.advance(self._most_pages(arrival))
        self._nodes = [arrival.usable(self._most_pages(arrival)) for arrival in self._arrivals]
        self.done = self._planner.backbone(sum(node.end for node in self._nodes))
        is_ended = all(arrival.is_ended for arrival in self._arrivals)
        if not (is_ended or self.is_over):
            return
        if self.done.pages < self.total.pages:
            reasons = [arrival.reason for arrival in self._arrivals if arrival.reason]
            self.clipped = self.clipped or next(iter(reasons), "storage has no more of it")
        self._arrived(IntentState.DONE if is_ended else IntentState.EXPIRED)

    def _most_pages(self, arrival: Arrival) -> int:
        size, budget = self._planner.page_bytes[BACKBONE], self.intent.max_bytes
        if budget is None or not size or arrival.num_pages <= budget // size:
            return arrival.num_pages
        self.clipped = f"max_bytes is {budget}"
        return budget // size

    def _arrived(self, state: IntentState) -> None:
        """All that will come to the host has."""
        self.end(state)

    def nodes(self) -> Iterator[Node]:
        return iter(self._nodes)

    def let_go(self) -> None:
        for arrival in self._arrivals:
            arrival.stop()


class CopyBackup(InFlightJob):
    """Host pages of a path on their way to another store than the cache's own. lock: on the path, meanwhile."""

    __slots__ = ("lock", "wish")

    def __init__(self, wish: Copying, lock: Lock, pages: PagesOf):
        super().__init__(JobKind.STORE, reads=pages)
        self.wish = wish
        self.lock = lock

    def book(self, result: Result) -> None:
        self.wish.copied(self, result)


class Copying(Warming):
    """Bring to another store, by way of the host; with `is_move` the cache's own storage forgets what came
    there."""

    def __init__(
        self, number: int, intent: Intent, planner: Planner, limits: IntentLimits, sessions: Sessions
    ):
        super().__init__(number, intent, planner, limits, sessions)
        self._num_open = 0
        self._fault = ""
        self._end_state = IntentState.DONE

    def advance(self) -> None:
        if self._num_open:
            if self.is_over:
                self.end(IntentState.EXPIRED, "the other store has not taken it in time")
        else:
            super().advance()

    def _arrived(self, state: IntentState) -> None:
        self._end_state = state
        for node in self._nodes:
            if node.parent is not None:
                self._copy(node)
        self.done = self._planner.backbone(0)
        if not self._num_open:
            self.end(IntentState.REFUSED, self.clipped or "nothing of it is in the cache")

    def _copy(self, node: Node) -> None:
        """Put the whole path of `node`, with what a boundary there needs, into the other store."""
        tree, executor = self._planner.tree, self._planner.executor
        if executor is None:
            return
        lock = tree.lock(node, HOST)
        found: dict[int, Pages] = {}
        for component, kind in enumerate(tree.components):
            first = max(0, node.end - kind.reach)
            if kind.per_page:
                found[component] = tree.pages(node, HOST, first, component)
            else:
                record = node.residency(component, HOST).pages
                if record is not None:
                    found[component] = record
        others = [TrailingPages(own, component) for component, own in found.items() if component]
        ticket = executor.write_storage(
            tree.page_rows(node, 0), found[BACKBONE], others, store=self.intent.target
        )
        self._planner.in_flight.add(ticket, CopyBackup(self, lock, found))
        self._num_open += 1

    def copied(self, job: CopyBackup, result: Result) -> None:
        """The other store has answered."""
        planner, node = self._planner, job.lock.node
        self._num_open -= 1
        num_pages = len(job.reads[BACKBONE])
        if result.num_pages < job.num_pages:
            self._fault = result.error or "the other store did not take all of it"
            num_pages = min(num_pages, result.num_pages)
        elif self.intent.is_move and planner.has_storage and planner.executor is not None and self.is_open:
            rows = planner.tree.page_rows(node, 0)
            payload = DeletePayload(rows, num_pages, is_last=True)
            for n in planner.tree.path(node):
                n.stored = n.boundary_stored = False
            planner.in_flight.add(planner.executor.delete(payload), _Moved(self))
            self._num_open += 1
        planner.tree.unlock(job.lock)
        self.done += planner.backbone(num_pages)
        self._look()

    def moved(self, result: Result) -> None:
        """The cache's own storage has forgotten what came to the other one."""
        self._num_open -= 1
        self._fault = self._fault or (result.error or "")
        self._look()

    def _look(self) -> None:
        if not self._num_open:
            if self._fault:
                self.end(IntentState.FAILED, self._fault)
            else:
                self.end(self._end_state)


class _Moved(InFlightJob):
    """Names that storage is told to forget, as another store has the pages."""

    __slots__ = ("wish",)

    def __init__(self, wish: Copying):
        super().__init__(JobKind.DELETE)
        self.wish = wish

    def book(self, result: Result) -> None:
        self.wish.moved(result)


class _Path:
    """One path on its way to storage, down to the host first where that lacks it. num_pages: that storage lacked
    of it."""

    def __init__(self, planner: Planner, node: Node):
        self.node = node
        self._planner = planner
        self.num_pages = self.num_lacking
        self._waits: set[Ticket] = set()
        self._num_orders = 0
        self._is_settled = False  # what it waits for last are all backups under way

    @property
    def num_lacking(self) -> int:
        """Pages of it that storage is not said to have."""
        return sum(n.num_pages for n in self._planner.tree.path(self.node) if not n.stored)

    def advance(self) -> bool:
        """One step more; whether nothing more will come of it."""
        planner, in_flight = self._planner, self._planner.in_flight
        kinds = (in_flight.of_kind(JobKind.WRITE), in_flight.of_kind(JobKind.STORE))
        self._waits = {ticket for ticket in self._waits if any(ticket in kind for kind in kinds)}
        if self._waits:
            return False
        lacking = [n for n in planner.tree.path(self.node) if not n.stored]
        if not lacking and self._num_orders:
            if not self._is_settled:  # a copy's own backup may be under way, and may fail
                self._is_settled = True
                self._waits = set(in_flight.tickets(JobKind.STORE))
            return not self._waits
        if self._num_orders >= MAX_ORDERS or planner.backup is None:
            return True
        self._num_orders, self._is_settled = self._num_orders + 1, False
        if any(n.host.pages is None for n in lacking):
            planner.copy_down(self.node)
            self._waits = set(in_flight.tickets(JobKind.WRITE))
        else:
            planner.backup.store(self.node)
            self._waits = set(in_flight.tickets(JobKind.STORE))
        return not self._waits


class Persisting(IntentJob):
    """Bring to storage: what the host has, and what the device alone has by way of the host."""

    def __init__(
        self, number: int, intent: Intent, planner: Planner, limits: IntentLimits, sessions: Sessions
    ):
        super().__init__(number, intent, planner, limits)
        self._sessions = sessions
        self._waiting: deque[Node] = deque()  # ends of paths that were not looked at yet
        self._paths: list[_Path] = []
        self._num_lost = self._num_stored = 0

    def begin(self) -> None:
        self.state = IntentState.RUNNING
        if not self._planner.has_storage or self._planner.backup is None:
            self.end(IntentState.REFUSED, "no storage is attached")
            return
        self._waiting.extend(ends_of(self._planner, self.intent.selector, self._sessions))
        for removal in self._planner.removals.under_way:
            self.leave_out(removal)
        if not self.is_open:
            return
        lacking = {n for end in self._waiting for n in self._planner.tree.path(end) if not n.stored}
        self.total = self._planner.backbone(sum(n.num_pages for n in lacking))
        self.advance()

    def leave_out(self, removal: Removal) -> None:
        """Go on without what is being forgotten; end where nothing else is left and nothing was stored."""
        tree, forgotten = self._planner.tree, removal.nodes()
        ends = {path.node: tree.current(path.node) for path in self._paths}
        ends |= {end: tree.current(end) for end in self._waiting}
        left = [at for at in ends.values() if at is not None and at in forgotten]
        if not left:
            return
        self._paths = [path for path in self._paths if ends[path.node] not in forgotten]
        fronts = {forgotten[at].parent: None for at in left}  # of these a part may be somebody else's too
        self._waiting = deque(end for end in self._waiting if ends[end] not in forgotten)
        self._waiting.extend(front for front in fronts if front is not None and front.parent is not None)
        count = sum(n.num_pages for n in {n for at in left for n in tree.path(at) if n in forgotten})
        self._clip(f"{count} pages are forgotten by {removal.wish}")
        if not (self._waiting or self._paths or self._num_stored):
            self.end(IntentState.CANCELLED, f"forgotten by {removal.wish}")

    def advance(self) -> None:
        if not self._planner.has_storage:
            self.end(IntentState.FAILED, "storage was detached")
            return
        self._take_more()
        still: list[_Path] = []
        for path in self._paths:
            if path.advance():
                self._ended(path)
            else:
                still.append(path)
        self._paths = still
        self.done = self._planner.backbone(min(self._num_stored, self.total.pages))
        if not self._waiting and not self._paths:
            if self._num_lost:
                self._clip(f"{self._num_lost} pages could not be stored, or had left the cache")
            self.end(IntentState.DONE)
        elif self.is_over:
            self.end(IntentState.EXPIRED, "storage has not taken all of it in time")

    def _take_more(self) -> None:
        """Begin with further paths, as many as a tick and their number allow."""
        left, budget = self._limits.pages_per_tick, self.intent.max_bytes
        while self._waiting and len(self._paths) < MAX_PATHS and left > 0:
            if budget is not None and self.done.bytes >= budget:
                self._clip(f"max_bytes is {budget}")
                self._waiting.clear()
                return
            path = _Path(self._planner, self._waiting.popleft())
            self._paths.append(path)
            left -= path.num_pages

    def _clip(self, why: str) -> None:
        self.clipped = f"{self.clipped}; {why}" if self.clipped else why

    def _ended(self, path: _Path) -> None:
        is_here = self._planner.tree.current(path.node) is not None
        lost = path.num_lacking if is_here else path.num_pages
        self._num_lost += lost
        self._num_stored += max(0, path.num_pages - lost)

    def let_go(self) -> None:
        self._waiting.clear()
        self._paths.clear()

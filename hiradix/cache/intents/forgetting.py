"""Forget: what a wish covers leaves every tier it names, and nothing brings it back on the way.

    applied: nothing of it is matched, entered or fetched any more -> node by node, deepest first, as far as
    nothing locks it: out of the tree, and its names to storage -> what continues it there -> ended

What is in use is waited for, up to the deadline. What others' leases hold is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from hiradix.cache.in_flight import InFlightJob
from hiradix.cache.intents.job import IntentJob
from hiradix.cache.intents.leases import LeaseBook
from hiradix.cache.intents.planner import TIERS_BY_NAME, Planner
from hiradix.cache.intents.removals import Branch, Removal, branch_of
from hiradix.cache.intents.selection import keys_of
from hiradix.cache.intents.sessions import Sessions
from hiradix.explain import Reason
from hiradix.intents import OPERATOR, Amount, Intent, IntentState, SelectorKind
from hiradix.intents.limits import IntentLimits
from hiradix.policy.learning import learner_of
from hiradix.transfer import JobKind, Result
from hiradix.transfer.jobs import DeletePayload, FailReason
from hiradix.tree import HOST, Freed, Node, PageRows, RadixTree

MAX_DELETIONS: Final = 64  # of one wish that storage has not answered


class Deletion(InFlightJob):
    """Names that storage is told to forget."""

    __slots__ = ("wish",)

    def __init__(self, wish: Forgetting):
        super().__init__(JobKind.DELETE)
        self.wish = wish

    def book(self, result: Result) -> None:
        self.wish.deleted(result)


class Forgetting(IntentJob):
    """One forget. end_others(removal): ends what goes back for it, of those who may not hold on."""

    def __init__(
        self, number: int, intent: Intent, planner: Planner, limits: IntentLimits, book: LeaseBook,
        sessions: Sessions, make_way: Callable[[Forgetting, Removal], None],
    ):  # fmt: skip
        super().__init__(number, intent, planner, limits)
        self._book = book
        self._sessions = sessions
        self._make_way = make_way
        self._removal: Removal | None = None
        self._tiers = [TIERS_BY_NAME[name] for name in intent.tiers if name in planner.tiers]
        self._is_stored = "storage" in intent.tiers
        self._going_down: set[Node] = set()  # as of the last look
        # Nodes whose names storage is told, or was (`_told`), each with its first page then: they may be merged.
        self._named: dict[Node, int] = {}
        self._told: set[Node] = set()
        self._num_open = 0  # deletions that storage has not answered
        self._left: list[DeletePayload] = []  # of those that follow what is in the tree
        self._faults: list[str] = []
        self._learner = learner_of(planner.tree.order_factory)

    # -- steps --------------------------------------------------------------------------

    def begin(self) -> None:
        self.state = IntentState.RUNNING
        planner, selector = self._planner, self.intent.selector
        keys = keys_of(planner, selector, self._sessions)
        branches = [branch_of(planner.tree, key, self.intent.is_whole) for key in keys]
        self.clipped = "; ".join(filter(None, map(planner.refusal, self.intent.tiers)))
        if selector.kind is SelectorKind.SESSION and not branches:
            self.end(IntentState.REFUSED, "nothing is known of that session")
            return
        if selector.kind is SelectorKind.PREFIX and not branches and len(selector.key or ()):
            self.end(IntentState.DONE, "no page of it is whole")
            return
        self._removal = removal = planner.removals.begin(self.id, selector, branches)
        self._make_way(self, removal)
        if planner.prefetcher is not None:
            planner.prefetcher.forget(removal.covers)
        self.total = self._amount_of(self._covered())
        if self._is_stored:
            self._plan_storage(branches)
        self._forget_names(branches)
        self.advance()

    def _plan_storage(self, branches: list[Branch]) -> None:
        """Plan which pages storage is to forget, whether or not the tree has them."""
        planner, selector = self._planner, self.intent.selector
        if not planner.has_storage:
            self._is_stored = False
            return
        tree = planner.tree
        for branch in branches:
            num_pages = branch.key.num_pages(tree.page_size)
            rows = tree.rows_behind(branch.key, branch.key.space.seed, 0, num_pages)
            self._left.append(DeletePayload(rows, num_pages - branch.cut, continues=True))
            for node in tree.path(tree.find(branch.key)):
                node.stored = node.boundary_stored = False
                self._named[node] = node.start
        if selector.kind is SelectorKind.EVERYTHING:
            self._left.append(DeletePayload(_no_rows(tree), is_all=True))
        elif selector.kind is SelectorKind.TENANT:
            self._left.append(DeletePayload(_no_rows(tree), tenant=selector.name))
        elif not branches:
            self.clipped = "storage: of a namespace only what was in the tree has a name to be forgotten by"
        self._left.append(DeletePayload(_no_rows(tree), is_last=True))

    def _forget_names(self, branches: list[Branch]) -> None:
        """Have the policy forget the pages' names, and the table of sessions the session."""
        if self._learner is not None:
            for branch in branches:
                self._learner.forget_behind(branch.key, branch.cut)
        if self.intent.selector.kind is SelectorKind.SESSION:
            self._sessions.forget(self.intent.selector.name)

    def advance(self) -> None:
        if self._removal is None:
            return
        if self._has_dropped_all():
            while self._left and self._num_open < MAX_DELETIONS:
                self._order(self._left.pop(0))
                self._told.update(self._named)
            if not self._left and not self._num_open:
                self.end(*((IntentState.FAILED, self._faults[0]) if self._faults else (IntentState.DONE,)))
        if self.is_open and self.is_over:
            self.end(IntentState.EXPIRED, self.reason or "storage has not answered in time")

    def _has_dropped_all(self) -> bool:
        """Drop what can be in this tick; whether that was all but what others hold."""
        covered, left, in_use = self._covered(), self._limits.pages_per_tick, 0
        stay = self._held_by_others(covered)
        if stay:
            count = sum(node.num_pages for node in stay)
            self.clipped = f"{count} pages are held by others' leases, and stay"
        for node in reversed(covered):
            if node in stay:
                continue
            if left <= 0 or self._num_open >= MAX_DELETIONS:
                return False
            left -= node.num_pages
            if not self._drop(node):
                in_use += node.num_pages
        self.reason = f"in use by requests or copies: {in_use} pages" if in_use else ""
        return not in_use

    def _covered(self) -> list[Node]:
        """The nodes to forget that are still in one of the tiers, parents first. O(their number)."""
        found = [] if self._removal is None else self._removal.nodes()
        self._going_down = self._find_going_down() if found else set()
        return [node for node in found if self._is_due(node)]

    def _is_due(self, node: Node) -> bool:
        if node in self._going_down or any(node.resident(tier) for tier in self._tiers):
            return True
        return self._is_stored and self._has_untold(node)

    def _has_untold(self, node: Node) -> bool:
        """Whether storage is still to be told the names of `node`: for the first time, or again, as a request
        that ran had it stored since."""
        if node.start < self._named.get(node, node.end):
            return True
        return node in self._told and (node.stored or node.boundary_stored)

    def _find_going_down(self) -> set[Node]:
        """The nodes that running copies and backups bring to a tier that this wish empties, storage too."""
        planner, kinds = self._planner, [JobKind.WRITE] if self._is_stored or HOST in self._tiers else []
        if self._is_stored:
            kinds.append(JobKind.STORE)
        jobs = [job for kind in kinds for job in planner.in_flight.of_kind(kind).values()]
        ends = {end for job in jobs if (end := job.copied) is not None}
        return {node for end in ends for node in planner.tree.path(end)}

    def _held_by_others(self, covered: Iterable[Node]) -> set[Node]:
        """The nodes of `covered` that are held by leases which this wish may not end."""
        nodes = set(covered)
        leases = [lease for lease in self._book.leases.values() if lease.locks and not self.may_end(lease)]
        held = (
            node for lease in leases for lock in lease.locks for node in self._planner.tree.path(lock.node)
        )
        return nodes.intersection(held)

    def may_end(self, other: IntentJob) -> bool:
        """Whether this wish goes before `other`: the operator's before all, a tenant's before his own."""
        return self.intent.asked_by in (OPERATOR, other.intent.asked_by)

    def _drop(self, node: Node) -> bool:
        """Take a node out of the tiers, and tell storage its names. False: something uses it."""
        planner = self._planner
        payload = None
        if node in self._going_down:
            return False
        if self._is_stored and self._has_untold(node):
            payload = DeletePayload(planner.tree.page_rows(node, node.start), node.num_pages)
        for tier in self._tiers:
            if node.resident(tier):
                with planner.supply.leaving(Reason.FORGOTTEN):
                    self._count(planner.tree.drop_own(node, tier))
        if any(node.resident(tier) for tier in self._tiers):
            return False
        if node.parent is None and self._learner is not None:
            self._learner.forget_node(node)
        if payload is not None:
            self._named[node] = node.start
            self._told.add(node)
            node.stored = node.boundary_stored = False
            self._order(payload)
            if not self._left:  # what comes last was ordered already
                self._left.append(DeletePayload(_no_rows(planner.tree), is_last=True))
        return True

    def _count(self, freed: list[Freed]) -> None:
        names = {tier: name for name, tier in TIERS_BY_NAME.items()}
        for one in freed:
            pages = [0] * len(self._planner.tree.components)
            pages[one.component] = len(one.pages)
            amount = self._planner.amount(pages)
            name = names[one.tier]
            self.by_tier[name] = self.by_tier.get(name, Amount()) + amount
            self.done += amount
        self._planner.supply.release(freed)

    def _amount_of(self, nodes: Iterable[Node]) -> Amount:
        found = Amount()
        for node in nodes:
            for tier in self._tiers:
                found += self._planner.amount(self._planner.pages_of(node, tier))
        return found

    # -- storage ------------------------------------------------------------------------

    def _order(self, payload: DeletePayload) -> None:
        executor = self._planner.executor
        if executor is None or not executor.storage_attached:
            self._faults.append("storage was detached before it was told")
            return
        self._num_open += 1
        self._planner.in_flight.add(executor.delete(payload), Deletion(self))

    def deleted(self, result: Result) -> None:
        """Storage has answered."""
        self._num_open -= 1
        known = self.by_tier.get("storage", Amount())
        self.by_tier["storage"] = known + self._planner.backbone(result.num_pages)
        if result.reason is FailReason.UNLISTED:
            self.clipped = (
                "storage: this store cannot tell what else it has of it, by tenant or by what continues it"
            )
        elif result.error is not None:
            self._faults.append(f"storage: {result.error}")

    def let_go(self) -> None:
        if self._removal is not None:
            self._planner.removals.end(self._removal)
        self._removal = None
        self._going_down.clear()
        self._named.clear()
        self._told.clear()
        self._left.clear()

    def reset(self) -> None:
        """The tree was emptied: what it had of it is gone, and what it knew of names in storage."""
        self._removal = None
        if self.is_open:
            done = not (self._is_stored and (self._left or self._num_open))
            why = "" if done else "the cache was reset before storage was told of all"
            self.end(IntentState.DONE if done else IntentState.FAILED, why)


def _no_rows(tree: RadixTree) -> PageRows:
    return tree.page_rows(tree.root, 0)

"""Holds: leases of prefixes in a tier, the budgets they keep to, and how they give way.

    wished -> brought into the tier, as far as budgets go -> locked there: in force -> its end, a release,
    a wish that goes before it, or a request that could not run else

What several leases hold counts once for each tenant, and once in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hiradix.cache.intents.arrival import Arrival
from hiradix.cache.intents.job import IntentJob
from hiradix.cache.intents.planner import TIERS_BY_NAME, Planner
from hiradix.cache.intents.selection import keys_of
from hiradix.cache.intents.sessions import Sessions
from hiradix.cache.reserved_room import HeldPages, fit
from hiradix.errors import Misuse
from hiradix.intents import OPERATOR, Amount, Intent, IntentState
from hiradix.intents.limits import IntentLimits
from hiradix.tree import BACKBONE, DEVICE, HOST, Lock, Node, RadixKey, Tier

NEEDED: Final = "a request needed the room"
SPOILT: Final = "a copy of what it held failed"


class Lease(IntentJob):
    """One hold. locks: what it keeps, since it is in force. tier: where. renewed: its place among holds, by when
    they were asked for last."""

    def __init__(
        self, number: int, intent: Intent, planner: Planner, limits: IntentLimits, book: LeaseBook,
        sessions: Sessions,
    ):  # fmt: skip
        super().__init__(number, intent, planner, limits)
        self.tier = TIERS_BY_NAME[intent.tiers[0]]
        self.locks: list[Lock] = []
        self.renewed = 0
        self._book = book
        self._sessions = sessions
        self._arrivals: list[Arrival] = []

    @property
    def is_held(self) -> bool:
        return self.state is IntentState.HELD

    def begin(self) -> None:
        self.state = IntentState.RUNNING
        keys = keys_of(self._planner, self.intent.selector, self._sessions)
        self._arrivals = [
            Arrival(self._planner, (self.id, place), key, self.tier) for place, key in enumerate(keys)
        ]
        self.total = self._planner.backbone(sum(arrival.num_pages for arrival in self._arrivals))
        if not keys:
            self.end(IntentState.REFUSED, "nothing is known of that session, or no page of it is whole")
        else:
            self.advance()

    def advance(self) -> None:
        if self.is_held:
            if self.is_over:
                self.end(IntentState.EXPIRED)
            elif any(self._planner.is_spoilt(lock.node) for lock in self.locks):
                self.end(IntentState.FAILED, SPOILT)
            return
        for arrival in self._arrivals:
            arrival.advance(self._book.most_pages(self, arrival.key))
        if self.is_over or all(arrival.is_ended for arrival in self._arrivals):
            self._take_force()

    def _take_force(self) -> None:
        """Lock what has come, as far as budgets go, in place of what was held so far."""
        tree, self.clipped = self._planner.tree, ""
        most_pages = [self._book.most_pages(self, arrival.key) for arrival in self._arrivals]
        before, self.locks = self.locks, []
        wanted = sum(arrival.num_pages for arrival in self._arrivals)
        reasons = [arrival.reason for arrival in self._arrivals if arrival.reason]
        for arrival, most in zip(self._arrivals, most_pages, strict=True):
            most = min(most, self._book.most_pages(self, arrival.key)) if self.locks else most
            node = arrival.usable(most)
            if node.parent is not None:
                self.locks.append(tree.lock(node, self.tier))
                if not self._book.fits(self):
                    tree.unlock(self.locks.pop())
                    most = 0
            if most < arrival.num_pages:
                reasons.append(self._book.why_clipped(self, arrival.key))
            arrival.stop()
        for lock in before:
            tree.unlock(lock)
        self.done = self._book.amount_of(self)
        if not self.locks:
            self.end(IntentState.REFUSED, next(iter(reasons), "nothing of it is in the cache"))
            return
        if self.done.pages < wanted:
            self.clipped = next(iter(reasons), "the rest is nowhere in the cache")
        self.state, self.reason = IntentState.HELD, ""
        self.deadline_s = self._planner.clock() + min(self.intent.ttl_s, self._limits.max_ttl_s)
        if self.intent.ttl_s > self._limits.max_ttl_s:
            self.clipped = self.clipped or f"a lease is {self._limits.max_ttl_s:g} s at most"

    def renew(self, intent: Intent) -> None:
        """The same owner wishes the same again, or what continues it: from now on it is held so."""
        before, self.intent = self.intent, intent
        is_longer = self._num_pages(intent) != self._num_pages(before)
        if not (self.is_held or is_longer) and before.max_bytes == intent.max_bytes:
            return
        if self.is_held and not (self.clipped or is_longer) and self._book.fits(self):
            self.deadline_s = self._planner.clock() + min(intent.ttl_s, self._limits.max_ttl_s)
            return
        for arrival in self._arrivals:
            arrival.stop()
        self.deadline_s = self._planner.clock() + min(intent.wait_s, self._limits.max_wait_s)
        self.begin()  # what it holds stays held until there is more

    def _num_pages(self, intent: Intent) -> int:
        key = intent.selector.key
        return 0 if key is None else key.num_pages(self._planner.tree.page_size)

    def nodes(self) -> Iterator[Node]:
        return (lock.node for lock in self.locks)

    def let_go(self) -> None:
        for arrival in self._arrivals:
            arrival.stop()
        for lock in self.locks:
            self._planner.tree.unlock(lock)
        self.locks = []

    def forget_locks(self) -> None:
        """The tree was emptied: its locks are void."""
        self.locks = []


class LeaseBook:
    """All leases that have not ended, and what they may hold together."""

    def __init__(self, planner: Planner, limits: IntentLimits):
        self._planner = planner
        self._limits = limits
        self.leases: dict[int, Lease] = {}

    def _held(self, tier: Tier, tenant: str | None = None, but: Lease | None = None) -> HeldPages:
        """The pages that leases hold in a tier, of one tenant or of all. O(held nodes)."""
        held = HeldPages(self._planner.tree)
        for lease in self.leases.values():
            if lease.tier is tier and lease is not but and tenant in (None, lease.intent.asked_by):
                for lock in lease.locks:
                    held.add_lock(lock)
        return held

    def held(self, tier: Tier, tenant: str | None = None) -> list[int]:
        """Pages of each component that leases hold in a tier, of one tenant or of all. O(held nodes)."""
        return self._held(tier, tenant).pages

    def caps(self, tier: Tier, tenant: str | None = None) -> list[int]:
        """The most of that."""
        limits = self._limits
        share = limits.host_share if tier is HOST else limits.device_share
        if tenant not in (None, OPERATOR):
            share *= limits.tenant_share
        caps = [int(share * count) for count in self._planner.pool_pages(tier)]
        size = self._planner.page_bytes[BACKBONE]
        if tenant not in (None, OPERATOR) and limits.tenant_bytes is not None and size:
            caps[BACKBONE] = min(caps[BACKBONE], limits.tenant_bytes // size)
        return caps

    def most_pages(self, lease: Lease, key: RadixKey) -> int:
        """The number of leading pages of `key` that a lease may hold now."""
        planner, tier, tenant = self._planner, lease.tier, lease.intent.asked_by
        node, child, matched = planner.tree.follow(key)
        at = node if child is None else child
        most = key.num_pages(planner.tree.page_size)
        for held, caps in (
            (self._held(tier), self.caps(tier)),
            (self._held(tier, tenant), self.caps(tier, tenant)),
        ):
            there = min(held.end_on(at), node.end + matched)
            most = min(most, there + max(0, caps[BACKBONE] - held.pages[BACKBONE]))
        size, budget = planner.page_bytes[BACKBONE], lease.intent.max_bytes
        if budget is not None:
            most = min(most, budget // size if size else 0)
        return most

    def fits(self, lease: Lease) -> bool:
        """Whether all caps hold, with what `lease` holds, and its own budget."""
        tier, tenant = lease.tier, lease.intent.asked_by
        nothing = [0] * len(self._planner.tree.components)
        budget = lease.intent.max_bytes
        if budget is not None and self.amount_of(lease).bytes > budget:
            return False
        return fit(self.held(tier), nothing, self.caps(tier)) and fit(
            self.held(tier, tenant), nothing, self.caps(tier, tenant)
        )

    def why_clipped(self, lease: Lease, key: RadixKey) -> str:
        """The budget that keeps a lease from holding all of `key`, in words."""
        tier, tenant, name = lease.tier, lease.intent.asked_by, lease.intent.tiers[0]
        if lease.intent.max_bytes is not None and not self._planner.page_bytes[BACKBONE]:
            return "max_bytes: what a page takes is not known here"
        own, all_held = self.held(tier, tenant), self.held(tier)
        caps, all_caps = self.caps(tier, tenant), self.caps(tier)
        if all_caps[BACKBONE] - all_held[BACKBONE] <= caps[BACKBONE] - own[BACKBONE]:
            return f"all leases in {name} may hold {all_caps[BACKBONE]} pages, and hold {all_held[BACKBONE]}"
        return (
            f"{tenant or 'the operator'} may hold {caps[BACKBONE]} pages in {name}, and holds {own[BACKBONE]}"
        )

    def amount_of(self, lease: Lease) -> Amount:
        """The amount that one lease holds, whether or not others hold it too."""
        held = HeldPages(self._planner.tree)
        for lock in lease.locks:
            held.add_lock(lock)
        return self._planner.amount(held.pages)

    def give_way(self) -> Lease | None:
        """The lease on the device that ends for a request that could not run else: of a tenant that holds more
        than an equal share, if there is one, the youngest. None: there is none."""
        leases = [lease for lease in self.leases.values() if lease.tier is DEVICE and lease.locks]
        if not leases:
            return None
        owners = {lease.intent.asked_by for lease in leases}
        held = {owner: self.held(DEVICE, owner)[BACKBONE] for owner in owners}
        share = sum(held.values()) / len(owners)
        return max(leases, key=lambda lease: (held[lease.intent.asked_by] > share, lease.id))

    def yieldable(self, component: int) -> int:
        """Device pages of a component that leases alone keep from being evicted. O(held nodes)."""
        locks = [lock for lease in self.leases.values() if lease.tier is DEVICE for lock in lease.locks]
        if not locks:
            return 0
        tree, ours = self._planner.tree, dict[Node, int]()
        for lock in locks:
            if component == BACKBONE:
                at = tree.current(lock.node)
                if at is not None:
                    ours[at] = ours.get(at, 0) + 1
            else:
                for node in tree.path(lock.node, lock.floors[component]):
                    ours[node] = ours.get(node, 0) + 1
        if component != BACKBONE:
            entries = [(node.residency(component, DEVICE), count) for node, count in ours.items()]
            return sum(
                len(entry.pages) for entry, n in entries if entry.pages is not None and entry.lock_ref == n
            )
        return sum(node.num_pages for node in self._kept_by(ours))

    def _kept_by(self, ours: dict[Node, int]) -> Iterator[Node]:
        """Nodes on the device whose backbone nothing but these locks keep, by the node where they end."""
        waiting = sorted(
            {node for end in ours for node in self._planner.tree.path(end)}, key=lambda node: -node.end
        )
        counts = dict(ours)
        for node in waiting:
            if node.device.lock_ref == counts.get(node, 0):
                if node.device.pages is not None:
                    yield node
                parent = node.parent
                if parent is not None:
                    counts[parent] = counts.get(parent, 0) + 1

    def check(self) -> None:
        """Assert that every budget is kept, and that no lease is in force past its end by more than a tick.
        O(held nodes)."""
        nothing = [0] * len(self._planner.tree.components)
        for tier in (DEVICE, HOST):
            tenants = {lease.intent.asked_by for lease in self.leases.values()}
            for tenant in (None, *sorted(tenants)):
                held, caps = self.held(tier, tenant), self.caps(tier, tenant)
                if any(held) and not fit(held, nothing, caps):
                    raise Misuse(f"leases of {tenant!r} hold {held} pages in {tier.name}, of {caps}")

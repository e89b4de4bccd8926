"""HierarchicalCache: one prefix cache over device, host and storage, in pages and nodes.

    tick()        apply finished transfers; once per scheduler step, before anything else
    match(key)    deepest usable device and loadable boundaries
    load_back()   host -> device, all promised pages or none
    insert()      give a request's pages to the tree; write-through follows
    make_room()   evict until the device pool has pages to give
    prefetch      storage -> host while a request waits

With several ranks, the methods that apply or wait for transfers exchange a vector with the other ranks (see
`agreement`), so every rank must call them in the same order; after a lost rank they raise CacheError.

The scheduler thread is the only caller. This package is the only place that sees both the tree (what is
where) and the controller (what moves); each of its files holds one direction of movement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hiradix.cache.agreement import AHEAD, Agree, Agreement, CommonClock, least
from hiradix.cache.departed import Departed
from hiradix.cache.in_flight import InFlightJobs
from hiradix.cache.intents.planner import LocalPlanner
from hiradix.cache.intents.removals import Removals
from hiradix.cache.intents.table import Intents
from hiradix.cache.load_back import LoadBack
from hiradix.cache.misses import Misses
from hiradix.cache.pages import (
    BACKBONE,
    CacheCounters,
    CappedPages,
    Pages,
    PageSupply,
    Share,
    Sources,
    as_tuple,
)
from hiradix.cache.prefetch import Prefetcher
from hiradix.cache.write_through import WriteThrough
from hiradix.errors import CacheError, Misuse, StorageError
from hiradix.explain import Reason
from hiradix.intents.limits import IntentLimits
from hiradix.policy.hint_shares import HintShares
from hiradix.policy.learning import LearningPolicy, learner_of
from hiradix.policy.no_regret import NoRegret
from hiradix.policy.prefetch_policy import PrefetchPolicy
from hiradix.policy.uses import Finished
from hiradix.policy.write_policy import WritePolicy
from hiradix.storage import Stores
from hiradix.transfer import HiCacheController, JobKind, Ticket
from hiradix.tree import DEVICE, HOST, Lock, Match, Node, RadixKey, RadixTree, Tier

STORAGE_STOP_S: Final = 2.0  # how long a reset waits for storage jobs before it leaves them orphaned
CLOCK_STEP_S: Final = 1e-6  # what ranks agree on is no finer
COPY_WAIT_S: Final = 5.0  # longest the scheduler waits for device copies that free pages


@dataclass(frozen=True)
class HostTier:
    """The parts below the device tier; without them the cache is device-only."""

    pages: Sources  # host pages of each of the tree's components, or of its only one
    controller: HiCacheController
    write_policy: WritePolicy
    prefetch_policy: PrefetchPolicy
    no_regret: bool = True  # transfers predicted slower than computing again are not taken


class HierarchicalCache:
    """Keeps prefixes over device, host and storage. Owns the tree and the host pool; shares the device pools.

    device: the pages of each of the tree's components, or of its only one.
    agree: the elementwise minimum over all ranks; None when there is one rank only.
    """

    def __init__(
        self,
        tree: RadixTree,
        device: Sources,
        host: HostTier | None = None,
        clock: Callable[[], float] | None = None,
        agree: Agree | None = None,
        intents: IntentLimits | None = None,
    ):
        if clock is None:
            clock = host.controller.runtime.clock if host is not None else time.monotonic
        self.tree = tree
        self._clock = clock
        self.counters = CacheCounters()
        self.learner = learner_of(tree.order_factory)  # of an eviction policy that learns, else None
        self.supply = PageSupply(tree, device, _common_pages(host, agree), self.counters)
        self.in_flight = InFlightJobs(self.supply.free_all_host)
        self.controller = host.controller if host else None
        self.write_through: WriteThrough | None = None
        self._load_back: LoadBack | None = None
        self.prefetcher: Prefetcher | None = None
        self._ranks: Agreement | None = None
        self.no_regret = NoRegret(False)
        self._hints = HintShares()
        self.misses: Misses | None = None
        self._removals = Removals(tree)
        if host is not None:
            self._build_lower_tiers(host, agree)
        self.intents = self._make_intents(intents, agree)

    def _make_intents(self, limits: IntentLimits | None, agree: Agree | None) -> Intents:
        """Over the tiers there are. A method of its own: where they were just set to None, the compiled form
        takes them for None."""
        clock: Callable[[], float] = self._clock
        look: Callable[[], None] | None = None
        if agree is not None and self.controller is None:
            common = CommonClock(agree, clock)
            clock, look = common, common.look
        planner = LocalPlanner(
            self.supply, self.in_flight, self._removals, clock, self.controller, self.write_through,
            self._load_back, self.prefetcher,
        )  # fmt: skip
        return Intents(planner, limits, self._other_stores, look)

    def _build_lower_tiers(self, host: HostTier, agree: Agree | None) -> None:
        share: Share = lambda source: source  # noqa: E731
        if agree is not None:
            self._ranks = Agreement(agree, self.in_flight, self._state)
            share = self._ranks.share
        self._clock = share(self._clock)
        self.write_through = WriteThrough(self.supply, host.controller, self.in_flight, host.write_policy)
        self.no_regret = NoRegret(
            host.no_regret, share, lambda: host.controller.storage_troubles, self.tree.page_size
        )
        self._load_back = LoadBack(
            self.supply, host.controller, self.in_flight, self.make_room, share, self.no_regret
        )
        self.prefetcher = Prefetcher(
            self.supply, host.controller, self.in_flight, host.prefetch_policy, self._clock, self.no_regret,
            agree, num_adopted=share(lambda: float(host.controller.num_adopted)),
        )  # fmt: skip
        self._apply(True)

    def remember_departures(self, policy: str, num_names: int) -> None:
        """Explain misses from here on (see `misses`): remember what leaves, `num_names` pages of it at most.
        Before anything is in the tree. policy: the eviction policy's name."""
        departed = Departed(self.tree, self._clock, num_names)
        self.supply.remember(departed)
        self.misses = Misses(self.tree, departed, policy)

    @property
    def load_refusal(self) -> Reason | None:
        """The reason why the `load_back` that was asked for since the last `match` was not made; None if it
        was, or none was asked for."""
        return None if self._load_back is None else self._load_back.refusal

    # -- one request's life -------------------------------------------------------------

    def tick(self) -> None:
        """Apply finished transfers. Costs next to nothing when there are none."""
        if self.controller is not None:
            self._apply(True)
            if self.prefetcher is not None:
                self.prefetcher.room.next_round()
        self.intents.tick()

    def _apply(self, ok: bool) -> bool:
        """Apply the results that all ranks have. Returns whether all ranks are `ok`. With several ranks, one
        exchange."""
        if self.controller is None or self._load_back is None:
            raise Misuse("no host tier")
        results = self.controller.poll()
        if self._ranks is not None:
            results, ok = self._ranks.exchange(results, ok)
        for result in results:
            self.in_flight.apply(result)
        self._load_back.drop_failed()
        if self.prefetcher is not None and self.prefetcher.room.is_stale:
            self.prefetcher.room.balance()
        return ok

    def settle(self, ok: bool = True) -> bool:
        """Exchange and apply results until all that are common to the ranks are applied. Returns whether all
        ranks are `ok`."""
        if self.controller is None:
            return ok
        ok = self._apply(ok)
        while self._ranks is not None and self._ranks.has_more:
            self._apply(True)
        return ok

    def _state(self) -> tuple[int, ...]:
        """Counts that must be equal on all ranks; if they differ, the ranks have diverged. O(components)."""
        tree, supply = self.tree, self.supply
        counts = [
            count(tier, component)
            for count in (tree.resident_pages, tree.evictable_pages)
            for tier in Tier
            for component in range(len(tree.components))
        ]
        free = [pool.available for pool in (*supply.device_pools, *supply.host_pools)]
        prefetches = () if self.prefetcher is None else self.prefetcher.state()
        return *counts, *free, len(self.in_flight), *prefetches

    def match(self, key: RadixKey) -> Match:
        """The deepest boundaries of `key`: usable on the device as it is, and after a load back."""
        if self._load_back is not None:
            self._load_back.asked_for_nothing()
        return self._usable(self.tree.match(key))

    def _usable(self, match: Match) -> Match:
        """`match`, cut above what is being forgotten, and above any failed load."""
        if self._removals:
            match = self._removals.usable(match)
        return match if self._load_back is None else self._load_back.usable(match)

    def match_again(self, node: Node) -> Match:
        """The same for the path to `node`, which an earlier match returned: without pages evicted since."""
        return self._usable(self.tree.boundaries(node))

    def load_back(self, match: Match, quota_pages: int | None = None) -> int | None:
        """Bring `match.loadable_node` to the device: pages queued, or None if it cannot be."""
        if self._load_back is None or match.loadable_node is match.device_node:
            return 0
        return self._load_back.load(match.loadable_node, quota_pages)

    def start_loading(self) -> int:
        """Launch queued loads and writes; the gate slot the next forward waits on, -1 if nothing loads."""
        return -1 if self._load_back is None else self._load_back.start_loading()

    def insert(
        self,
        key: RadixKey,
        pages: Pages,
        at: Lock | None = None,
        others: Sequence[Pages] = (),
        ended: Finished | None = None,
    ) -> Lock:
        """Give `pages`, the last pages of `key`, to the device tier. Duplicates are freed.

        others: the same for each further component, each as far back as there are pages without a gap.
        at: the lock that the request holds on a prefix of `key`; the walk starts there. It stays the caller's.
        ended: with the request's last insert, the facts that a learning eviction policy gets.

        Returns a lock on the whole key, which is the caller's to give back. Where the path contains pages of a
        failed load, nothing is inserted: the lock covers what `at` covers, and `pages` stay the caller's.
        """
        if self.is_blocked(key):
            return self.tree.lock(at.node if at is not None else self.tree.root, DEVICE)
        lock = self.supply.give(key, (pages, *others), at)
        self.inserted(lock.node) if ended is None else self.finished(key, lock.node, ended)
        return lock

    def finished(self, key: RadixKey, node: Node, ended: Finished) -> None:
        """A request has ended that still locks `node`, the end of `key`. Call it once per request: copies to the
        host may wait until the policy has heard of its end."""
        if self.learner is not None:
            tenant = key.space.tenant
            self._hints.ended(tenant)
            if ended.hint is not None and not self._hints.hears(tenant, ended.hint):
                ended = ended.unhinted()
            self.learner.finished(self.tree, node, key, ended)
        if ended.session:
            self.intents.name_session(ended.session, node)
        self.inserted(node)

    def hint(self, key: RadixKey, hint: str) -> int:
        """A client says `hint` of what the cache has of `key`: its pages; 0 where no policy learns, or where it
        says so of too much."""
        if self.learner is None or not self._hints.hears(key.space.tenant, hint):
            return 0
        return self.learner.hint_prefix(self.tree, key, hint)

    def is_blocked(self, key: RadixKey) -> bool:
        """Whether `key` may not be inserted: it is being forgotten, or pages of a failed load on its path are
        still locked."""
        if self.is_forgetting(key):
            return True
        return self._load_back is not None and self._load_back.blocks(key)

    @property
    def num_forgotten(self) -> int:
        """The number of wishes to forget something that have been applied since start."""
        return self._removals.number

    def was_forgotten_since(self, key: RadixKey, number: int) -> bool:
        """Whether pages of `key` are being forgotten, or were, by a wish behind the first `number`."""
        return self._removals.cover_since(key, number)

    def is_forgetting(self, key: RadixKey) -> bool:
        """Whether pages of `key` are being forgotten."""
        return bool(self._removals) and self._removals.cover(key)

    def inserted(self, node: Node) -> None:
        """Write through what is due on the path of `node`, which was just inserted or used again."""
        if self.write_through is not None:
            self.write_through.on_insert(node)

    def count_use(self, node: Node, priority: int = 0) -> None:
        """Count one more request on the path to `node`; once per request. An insert counts new nodes itself."""
        self.tree.hit(node, priority)
        self.intents.count_use(node)
        if self.write_through is not None:
            self.write_through.storage_backup.offer_again(node)

    def evictable_pages(self, component: int = BACKBONE) -> int:
        """Device pages that no request holds: what leases keep gives way where nothing else can go."""
        return self.tree.evictable_pages(DEVICE, component) + self.intents.yieldable(component)

    def make_room(self, num_pages: int, component: int = BACKBONE) -> int:
        """Evict until the device pool has `num_pages` free, or nothing more can go. Returns pages freed."""
        short = num_pages - self.supply.device_pools[component].available
        if short <= 0:
            return 0
        return self.evict(short, component)

    def evict(self, num_pages: int, component: int = BACKBONE) -> int:
        """Evict `num_pages` from the device; under write-back they are copied to the host first. Returns how
        many were freed. Waits up to COPY_WAIT_S for copies in flight if what they lock is needed too.
        """
        dropped = self.supply.num_dropped
        before, target = dropped[component], dropped[component] + num_pages
        if self.intents.book.leases:
            self.intents.expire()
        if self._load_back is not None:
            self._load_back.drop_failed()
        self._write_back(target - dropped[component], component)
        self.supply.evict(DEVICE, target - dropped[component], component)
        if dropped[component] < target and self.wait_for_copies(COPY_WAIT_S):
            self.supply.evict(DEVICE, target - dropped[component], component)
        while self._can_give_way(target - dropped[component], component):
            self._write_back(target - dropped[component], component)
            self.supply.evict(DEVICE, target - dropped[component], component)
        return dropped[component] - before

    def _can_give_way(self, num_pages: int, component: int) -> bool:
        """Whether a lease has ended for room that is needed, and that leases can give."""
        return 0 < num_pages <= self.intents.yieldable(component) and self.intents.give_way()

    def _write_back(self, num_pages: int, component: int) -> int:
        """Under write-back, copy the coldest `num_pages` to the host and drop them here, as far as possible."""
        if (
            self.controller is None
            or self.write_through is None
            or not self.write_through.policy.writes_on_evict
        ):
            return 0
        freed, ended = 0, True
        while freed < num_pages and ended:
            victims, copies = self.write_through.write_back(num_pages - freed, component)
            if copies:
                ended = self._all_ended([copy.ticket for copy in copies])
                if not ended:
                    self.write_through.keep(copies)
                self.settle()
            if not (moved := self.supply.demote(victims, component)):
                break
            freed += moved
        return freed

    def _all_ended(self, copies: list[Ticket]) -> bool:
        """Wait for these copies. Returns whether the next `settle` applies all of them at once."""
        assert self.controller is not None
        ended = self.controller.wait(copies, COPY_WAIT_S)
        if self._ranks is None:
            return ended
        return bool(self._ranks.least(ended)[0]) and len(self.in_flight.of_kind(JobKind.WRITE)) <= AHEAD

    def wait_for_copies(self, timeout_s: float) -> bool:
        """Wait until running device copies are done and apply them. False if there were none.

        Loads that wait for `start_loading` go on waiting: the pass that reads them starts them.
        """
        if self.controller is None or self._load_back is None:
            return False
        tickets = self.in_flight.tickets(JobKind.WRITE) + self._load_back.running()
        if not tickets:
            return False
        self.controller.wait(tickets, timeout_s)
        self.settle()
        return True

    def _other_stores(self) -> tuple[str, ...]:
        """Stores that are open beside the cache's own."""
        return () if self.controller is None else self.controller.other_stores

    # -- lifecycle ----------------------------------------------------------------------

    def attach_storage(self, storage: Stores | None) -> None:
        """Start backing up to and fetching from `storage`, which the controller owns from now on.

        On all ranks or on none: a rank that could not open its storage calls this with None. Raises
        StorageError, with nothing changed, if any rank has none or cannot take it.
        """
        if self.controller is None:
            raise Misuse("storage needs a host tier")
        refusal = self.controller.attach_refusal
        if storage is None:
            refusal = "there is none to attach"
        if not self.settle(refusal is None):
            raise StorageError(f"storage is not attached: {refusal or 'another rank could not'}")
        assert storage is not None
        self.controller.attach(storage)
        self.no_regret.attached()
        self.tree.forget_stored()

    def detach_storage(self, timeout_s: float) -> None:
        """Stop using storage, on all ranks at once.

        Raises StorageError when a job of any rank does not end in time; may then be repeated.
        """
        if self.controller is None or self.prefetcher is None:
            raise Misuse("storage needs a host tier")
        self.prefetcher.stop_all()
        ended = self.controller.detach(timeout_s)
        if not self.settle(ended):
            raise StorageError(f"a storage job did not end within {timeout_s} s")
        self.tree.forget_stored()

    def reset(self, timeout_s: float = 30.0) -> None:
        """Empty device and host tiers. Storage keeps what it has. Nothing may be locked by a request.

        Raises CacheError, with nothing changed, if device copies do not end within the deadline. Storage
        jobs under way become orphans that give their host pages back when they end.
        """
        self.start_loading()
        self.wait_for_copies(timeout_s)
        if running := self.in_flight.tickets(JobKind.WRITE, JobKind.LOAD):
            raise CacheError(f"reset: {len(running)} device copies did not end within {timeout_s} s")
        if self.controller is not None and self.prefetcher is not None:
            self.prefetcher.stop_all()
            self.controller.reset(min(timeout_s, STORAGE_STOP_S))
            self.settle()
        self.in_flight.orphan_all()
        if self.supply.departed is not None:
            self.supply.departed.leaving_all(Reason.FLUSHED)
        for drop in self.tree.clear():
            if drop.tier is HOST:
                kept = self.in_flight.owned(drop.component)
                self.supply.free_host(np.setdiff1d(drop.pages, kept).astype(np.int32), drop.component)
            else:
                self.supply.device_pools[drop.component].free(drop.pages)
        for part in (self.write_through, self._load_back, self.prefetcher):
            if part is not None:
                part.clear()
        self.intents.reset()

    def drain(self, timeout_s: float) -> bool:
        """Wait for everything in flight and apply it; False if the deadline passed first."""
        self.settle()
        deadline = self._clock() + timeout_s
        while len(self.in_flight) and self.controller is not None:
            remaining_s = deadline - self._clock()
            if remaining_s < CLOCK_STEP_S:
                return False
            self.start_loading()
            self.controller.wait(self.in_flight.tickets(), min(remaining_s, COPY_WAIT_S))
            self.settle()
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Save what the eviction policy has learned, stop the workers and close storage."""
        if isinstance(policy := self.tree.order_factory, LearningPolicy):
            policy.close()
        if self.controller is not None:
            self.controller.close(timeout_s)

    # -- checks -------------------------------------------------------------------------

    def check(self) -> None:
        """Tree invariants, and each host page in exactly one place. O(tree); for tests and idle time."""
        self.tree.check()
        self.intents.check()
        if self.prefetcher is not None:
            self.prefetcher.room.check()
        for component, pool in enumerate(self.supply.host_pools):
            owned = self.in_flight.owned(component)
            resident = self.tree.all_pages(HOST, component)
            taken = np.concatenate([owned, resident])
            if len(np.unique(taken)) != len(taken):
                raise Misuse(f"component {component}: a host page is in two places")
            if len(taken) + pool.available != pool.num_pages:
                raise Misuse(
                    f"host pages of component {component}: {len(resident)} tree + {len(owned)} in flight + "
                    f"{pool.available} free != {pool.num_pages}"
                )


def _common_pages(host: HostTier | None, agree: Agree | None) -> Sources | None:
    """The host pools, each cut to what the rank with the smallest one has."""
    if host is None or agree is None:
        return host.pages if host is not None else None
    pools = as_tuple(host.pages)
    common = least(agree, *(pool.num_pages for pool in pools))
    return tuple(
        pool if count == pool.num_pages else CappedPages(pool, count)
        for pool, count in zip(pools, common, strict=True)
    )

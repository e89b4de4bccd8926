"""HierarchicalCache: one prefix cache over device, host and storage, in pages and nodes.

    tick()        apply finished transfers; once per scheduler step, before anything else
    match(key)    deepest usable device and loadable boundaries
    load_back()   host -> device, all promised pages or none
    insert()      give a request's pages to the tree; write-through follows
    make_room()   evict until the device pool has pages to give
    prefetch      storage -> host while a request waits

The scheduler thread is the only caller. This package is the only place that sees both the tree (what is
where) and the controller (what moves); each of its files holds one direction of movement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hiradix.cache.backup import Backup
from hiradix.cache.flights import Flights
from hiradix.cache.load_back import LoadBack
from hiradix.cache.pages import BACKBONE, Counters, Pages, PageSource, PageSupply
from hiradix.cache.prefetch import Prefetcher
from hiradix.errors import CacheError, StorageError
from hiradix.policy.prefetch import PrefetchPolicy
from hiradix.policy.write import WritePolicy
from hiradix.storage import GuardedStorage
from hiradix.transfer import JobKind, TransferController
from hiradix.tree import Lock, Match, Node, RadixKey, RadixTree, Tier

STORAGE_STOP_S = 2.0  # how long a reset waits for storage jobs before it leaves them orphaned
COPY_WAIT_S = 5.0  # longest the scheduler waits for device copies that free pages


@dataclass(frozen=True)
class HostTier:
    """What the cache needs below the device tier; without it the cache is device-only."""

    pages: PageSource
    controller: TransferController
    write_policy: WritePolicy
    prefetch_policy: PrefetchPolicy


class HierarchicalCache:
    """See the module's docstring. Owns the tree and the host pool; shares the device pools.

    device: the pages of each of the tree's components, or of its only one.
    """

    def __init__(
        self,
        tree: RadixTree,
        device: PageSource | Sequence[PageSource],
        host: HostTier | None = None,
        clock: Callable[[], float] | None = None,
    ):
        if clock is None:
            clock = host.controller.runtime.clock if host is not None else time.monotonic
        self.tree = tree
        self._clock = clock
        self.counters = Counters()
        self.supply = PageSupply(tree, device, host.pages if host else None, self.counters)
        self.flights = Flights(self.supply.free_host)
        self.controller = host.controller if host else None
        self.backup: Backup | None = None
        self._load_back: LoadBack | None = None
        self.prefetcher: Prefetcher | None = None
        if host is not None:
            self.backup = Backup(self.supply, host.controller, self.flights, host.write_policy)
            self._load_back = LoadBack(self.supply, host.controller, self.flights, self.make_room)
            self.prefetcher = Prefetcher(
                self.supply, host.controller, self.flights, host.prefetch_policy, clock
            )

    # -- one request's life -------------------------------------------------------------

    def tick(self) -> None:
        """Apply finished transfers. Costs next to nothing when there are none."""
        if self.controller is None:
            return
        for result in self.controller.poll():
            self.flights.apply(result)
        if self._load_back is not None:
            self._load_back.drop_failed()

    def match(self, key: RadixKey) -> Match:
        """Deepest boundaries of `key` usable on the device as it is, and after a load back."""
        match = self.tree.match(key)
        return match if self._load_back is None else self._load_back.usable(match)

    def load_back(self, match: Match, quota_pages: int | None = None) -> int | None:
        """Bring `match.loadable_node` to the device: pages queued, or None if it cannot be."""
        if self._load_back is None or match.loadable_node is match.device_node:
            return 0
        return self._load_back.load(match.loadable_node, quota_pages)

    def start_loading(self) -> int:
        """Launch queued loads; the gate slot the next forward waits on, -1 when nothing is loading."""
        return -1 if self._load_back is None else self._load_back.start_loading()

    def insert(
        self, key: RadixKey, pages: Pages, at: Lock | None = None, others: Sequence[Pages] = ()
    ) -> Lock:
        """Give `pages`, the last pages of `key`, to the device tier; what the tree has already is freed.

        others: likewise of each further component, each as far back as there are pages without a gap.
        at: the lock the request holds on a prefix of `key`; the walk continues there. The returned lock
        covers the whole key and is the caller's; `at` stays the caller's too. It covers only what `at`
        does, and `pages` stay the caller's too, where the way leads over pages of a failed load.
        """
        if self.is_blocked(key):
            return self.tree.lock(at.node if at is not None else self.tree.root, Tier.DEVICE)
        lock = self.supply.give(key, (pages, *others), at)
        self.inserted(lock.node)
        return lock

    def is_blocked(self, key: RadixKey) -> bool:
        """Whether nothing may be inserted at `key`: a failed load is still locked on its way."""
        return self._load_back is not None and self._load_back.blocks(key)

    def inserted(self, node: Node) -> None:
        """Copy down what is due on the path of `node`, which was just inserted or found, as policies say."""
        if self.backup is not None:
            self.backup.on_insert(node)

    def count_use(self, node: Node) -> None:
        """One more request runs on the path to `node`; once per request. Inserts count only what they add."""
        self.tree.hit(node)
        if self.backup is not None:
            self.backup.on_use(node)

    def make_room(self, num_pages: int) -> int:
        """Evict until the device pool has `num_pages` free, or nothing more can go. Returns pages freed."""
        short = num_pages - self.supply.device.available
        if short <= 0:
            return 0
        return self.evict(short)

    def evict(self, num_pages: int, component: int = BACKBONE) -> int:
        """Evict `num_pages` from the device, copying first under write-back. Returns pages freed.

        When everything evictable is gone and running copies still hold pages, waits for those.
        """
        freed = 0
        if component == BACKBONE:
            freed += 0 if self._load_back is None else self._load_back.drop_failed()
            freed += self._write_back(num_pages - freed)
        freed += self.supply.evict(Tier.DEVICE, num_pages - freed, component)
        if freed < num_pages and self.wait_for_copies(COPY_WAIT_S):
            freed += self.supply.evict(Tier.DEVICE, num_pages - freed, component)
        return freed

    def _write_back(self, num_pages: int) -> int:
        """Under write-back, move the coldest `num_pages` to the host, as far as that can be done."""
        if self.controller is None or self.backup is None or not self.backup.policy.writes_on_evict:
            return 0
        freed, ended = 0, True
        while freed < num_pages and ended:
            victims, copies = self.backup.write_back(num_pages - freed)
            ended = self.controller.wait([copy.ticket for copy in copies], COPY_WAIT_S)
            if not ended:
                self.backup.keep(copies)
            self.tick()
            here = [node for node in victims if self.tree.current(node) is not None]
            moved = sum(self.supply.release(self.tree.demote(node)) for node in here)
            if not moved:
                break
            freed += moved
        return freed

    def wait_for_copies(self, timeout_s: float) -> bool:
        """Wait until running device copies are done and apply them. False if there were none.

        Loads that wait for `start_loading` go on waiting: the pass that reads them starts them.
        """
        if self.controller is None or self._load_back is None:
            return False
        tickets = self.flights.tickets(JobKind.WRITE) + self._load_back.running()
        if not tickets:
            return False
        self.controller.wait(tickets, timeout_s)
        self.tick()
        return True

    # -- lifecycle ----------------------------------------------------------------------

    def attach_storage(self, storage: GuardedStorage) -> None:
        """Start backing up to and fetching from `storage`, which the controller owns from now on."""
        assert self.controller is not None, "storage needs a host tier"
        self.controller.attach(storage)
        self.tree.forget_stored()

    def detach_storage(self, timeout_s: float) -> None:
        """Stop using storage. Raises StorageError when a job does not end in time; may then be repeated."""
        assert self.controller is not None and self.prefetcher is not None, "storage needs a host tier"
        self.prefetcher.stop_all()
        ended = self.controller.detach(timeout_s)
        self.tick()
        if not ended:
            raise StorageError(f"a storage job did not end within {timeout_s} s")
        self.tree.forget_stored()

    def reset(self, timeout_s: float = 30.0) -> None:
        """Empty device and host tiers. Storage keeps what it has. Nothing may be locked by a request.

        Raises CacheError, with nothing changed, if device copies do not end within the deadline. Storage
        jobs under way become orphans that give their host pages back when they end.
        """
        self.start_loading()
        self.wait_for_copies(timeout_s)
        if running := self.flights.tickets(JobKind.WRITE, JobKind.LOAD):
            raise CacheError(f"reset: {len(running)} device copies did not end within {timeout_s} s")
        if self.controller is not None:
            self.controller.reset(min(timeout_s, STORAGE_STOP_S))
            self.tick()
        kept = self.flights.orphan_all()
        for drop in reversed(self.tree.clear()):
            if drop.tier is Tier.HOST:
                self.supply.free_host(np.setdiff1d(drop.pages, kept).astype(np.int32))
            else:
                self.supply.device_pools[drop.component].free(drop.pages)
        for part in (self.backup, self._load_back, self.prefetcher):
            if part is not None:
                part.clear()

    def drain(self, timeout_s: float) -> bool:
        """Wait for everything in flight and apply it; False if the deadline passed first."""
        deadline = self._clock() + timeout_s
        while len(self.flights) and self.controller is not None:
            left = deadline - self._clock()
            if left <= 0:
                return False
            self.start_loading()
            self.controller.wait(self.flights.tickets(), left)
            self.tick()
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the workers and close storage."""
        if self.controller is not None:
            self.controller.close(timeout_s)

    # -- checks -------------------------------------------------------------------------

    def check(self) -> None:
        """Tree invariants, and each host page in exactly one place. O(tree); for tests and idle time."""
        self.tree.check()
        if self.supply.host is None:
            return
        owned = self.flights.owned()
        resident = self.tree.all_pages(Tier.HOST)
        taken = np.concatenate([owned, resident])
        assert len(np.unique(taken)) == len(taken), "a host page is in two places"
        total, free = self.supply.host.num_pages, self.supply.host.available
        assert len(taken) + free == total, (
            f"host pages: {len(resident)} tree + {len(owned)} in flight + {free} free != {total}"
        )

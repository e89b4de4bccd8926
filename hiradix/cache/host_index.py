"""The host tier of an engine whose device pages are its own: a radix tree with that one tier, and page
states.

The tree is keyed by tokens, not by an engine's block hashes: those start from a seed of the process and
depend on a hash function the operator chooses, while page hashes computed from tokens name the same page in
every process and engine that shares a store. All workers use the same page numbers, so one index serves
them.

A page enters the tree when its copy is ordered, so that no other request copies it again. It is ARRIVING until
every worker has copied it, then READY; only ready pages are promised to requests. A page whose copy failed is
LOST until it can be dropped with everything below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hiradix.cache.in_flight import InFlightJobs
from hiradix.cache.intents.removals import Removals
from hiradix.cache.pages import NO_PAGES, CacheCounters, PagesOf, PageSupply
from hiradix.errors import Misuse
from hiradix.explain import Reason
from hiradix.memory import PageAllocator
from hiradix.policy.learning import LearningPolicy, learner_of
from hiradix.policy.uses import Finished
from hiradix.tree import (
    BACKBONE,
    Component,
    Lock,
    LruOrder,
    Node,
    OrderFactory,
    Pages,
    RadixKey,
    RadixTree,
    Tier,
)

READY, ARRIVING, LOST = 0, 1, 2


@dataclass(frozen=True)
class HostHit:
    """The result of a lookup: how many leading pages of a key can be loaded, and whether more are arriving."""

    num_pages: int
    is_arriving: bool


class HostPages(PageAllocator):
    """The page ids of a host pool, and the state of those in the tree: int8 [num_pages], READY, ARRIVING or
    LOST.

    records_freed: pages that are freed are kept for `take_freed`.
    """

    def __init__(self, num_pages: int, records_freed: bool = True) -> None:
        super().__init__(num_pages)
        self.state: npt.NDArray[np.int8] = np.zeros(num_pages, np.int8)
        self._records_freed = records_freed
        self._freed: list[Pages] = []

    def free(self, pages: npt.ArrayLike) -> None:
        """Take pages back, and reset their state."""
        given = np.asarray(pages)
        super().free(given)
        self.state[given] = READY
        if self._records_freed:
            self._freed.append(given)

    def take_freed(self) -> list[Pages]:
        """The pages freed since the last call."""
        freed, self._freed = self._freed, []
        return freed


class HostIndex:
    """An index by prefix of the pages that are on the host or arriving there. One thread.

    supply, in_flight: as in `HierarchicalCache`, without device pools. counters: in pages, since start.
    _lost: (key, first page, why) of each range of lost pages that is still in the tree.
    """

    def __init__(
        self, page_size: int, components: Sequence[Component], order: OrderFactory = LruOrder
    ) -> None:
        self.page_size = page_size
        self.tree = RadixTree(page_size, components, order=order)
        self.learner = learner_of(order)  # of an eviction policy that learns, else None
        self.counters = CacheCounters()
        self.supply = PageSupply(self.tree, (), None, self.counters)
        self.in_flight = InFlightJobs(self._free_all)
        self.removals = Removals(self.tree)
        self._pools: tuple[HostPages, ...] = ()
        self._lost: list[tuple[RadixKey, int, Reason]] = []

    def open(self, num_pages: Sequence[int]) -> None:
        """Set how many host pages per component the workers have. Once, before the first lookup."""
        if len(num_pages) != len(self.tree.components):
            raise Misuse(f"{num_pages} for {self.tree.components}")
        self._pools = tuple(
            HostPages(count, component == BACKBONE) for component, count in enumerate(num_pages)
        )
        self.supply = PageSupply(self.tree, (), self._pools, self.counters)

    def _free_all(self, pages: PagesOf) -> None:
        self.supply.free_all_host(pages)

    @property
    def is_open(self) -> bool:
        return bool(self._pools)

    @property
    def num_pages(self) -> int:
        """Host pages of the backbone."""
        return self._pools[BACKBONE].num_pages if self._pools else 0

    # -- lookups ----------------------------------------------------------------------------

    def find(self, key: RadixKey) -> HostHit:
        """The part of `key` that could be loaded now. Locks nothing.

        Counts up to the deepest boundary of which all pages are ready.
        """
        node = self.removals.usable(self.tree.match(key)).loadable_node
        usable, is_arriving = self._usable(node)
        while 0 < usable < node.end and len(self.tree.components) > 1:
            node = self.tree.match(key.head(usable, self.page_size)).loadable_node
            usable, _ = self._usable(node)
        return HostHit(usable, is_arriving)

    def _usable(self, node: Node) -> tuple[int, bool]:
        """Up to which page the path to a boundary is ready, and whether the next page is arriving."""
        usable, is_arriving = node.end, False
        for component in range(len(self.tree.components)):
            floor = self.tree.floor(node, component)
            pages = self.tree.pages(node, Tier.HOST, floor, component)
            states = self._pools[component].state[pages]
            wrong = np.flatnonzero(states)
            if len(wrong) and floor + int(wrong[0]) < usable:
                usable = floor + int(wrong[0])
                is_arriving = bool(states[wrong[0]] == ARRIVING)
        return usable, is_arriving

    def lock(self, key: RadixKey) -> Lock | None:
        """Lock all whole pages of `key` until `unlock`; None where the host does not have all of them."""
        node = self.tree.match(key).loadable_node
        if node.end != key.num_pages(self.page_size):
            return None
        return self.tree.lock(node, Tier.HOST)

    def lock_windows(self, lock: Lock, begin: int) -> list[Lock]:
        """`lock` and further locks on its path that together keep all window pages from page `begin` on; one
        lock alone keeps the last window. O(path)."""
        locks, at = [lock], lock
        while (first := max(at.floors[1:], default=0)) > begin:
            node = next(node for node in self.tree.path(at.node) if node.end <= first)
            at = self.tree.lock(node, Tier.HOST)
            locks.append(at)
        return locks

    def are_ready(self, component: int, pages: Pages) -> bool:
        """Whether these pages, which are in the tree, may be read: none is being copied or lost."""
        return not self._pools[component].state[pages].any()

    def is_ready(self, node: Node) -> bool:
        """Whether all pages on the path of `node` may be read. O(path)."""
        return all(self.has_ready(at) for at in self.tree.path(node))

    def has_lost_on(self, node: Node) -> bool:
        """Whether any of the path of `node` is lost, and goes when nothing locks it."""
        return bool(self._lost) and any(self._is_lost(at) for at in self.tree.path(node))

    def has_ready(self, node: Node) -> bool:
        """Whether the pages of `node` alone may be read."""
        on_host = zip(_on_host(node, len(self._pools)), self._pools, strict=True)
        return all(pages is None or not pool.state[pages].any() for pages, pool in on_host)

    def unlock(self, lock: Lock) -> None:
        self.tree.unlock(lock)
        self.drop_lost()

    def loadable(self, lock: Lock, component: int, start: int) -> tuple[int, Pages]:
        """(first page, host pages) of a component that `lock` keeps, from page `start` on at the earliest.

        Of a recurrent state, the key's last page and the one record at its end, wherever `start` is.
        """
        if not self.tree.components[component].per_page:
            return lock.node.end - 1, self.tree.pages(lock.node, Tier.HOST, lock.node.start, component)
        first = max(start, self.tree.floor(lock.node, component))
        return first, self.tree.pages(lock.node, Tier.HOST, first, component)

    def resident_end(self, key: RadixKey) -> Node:
        """The deepest node on `key` that has backbone pages on the host, ready or not."""
        return self.ends(key)[1]

    def ends(self, key: RadixKey) -> tuple[Node, Node]:
        """The deepest boundary on `key`, and `resident_end`.

        A boundary: the host, with what is arriving, has all that a load up to there needs.
        """
        boundary = self.tree.match(key).loadable_node  # splits where the key leaves the tree
        return boundary, boundary if len(self.tree.components) == 1 else self.tree.find(key)

    def touch(self, node: Node) -> None:
        """Count a use of the path to `node` although nothing was loaded or saved."""
        self.unlock(self.tree.lock(node, Tier.HOST))

    def used(self, key: RadixKey, ended: Finished) -> None:
        """Tell a learning eviction policy that a request has ended which used the resident part of `key`."""
        if self.learner is None:
            return
        lock = self.tree.lock(self.resident_end(key), Tier.HOST)
        self.learner.finished(self.tree, lock.node, key, ended)
        self.unlock(lock)

    # -- entering ---------------------------------------------------------------------------

    def alloc(self, num_pages: int, component: int = BACKBONE) -> Pages:
        """Up to `num_pages` host pages, evicting the coldest; fewer where the rest is locked."""
        pages = self.supply.alloc_host(min(num_pages, self.supply.host_room(component)), component)
        return NO_PAGES if pages is None else pages

    def insert(self, key: RadixKey, pages: Sequence[Pages]) -> tuple[Lock, PagesOf]:
        """Give `pages`, which end where `key` ends, to the tree as ARRIVING. Duplicates are freed.

        Returns a lock on all of `key`, which is the caller's, and the pages per component that the tree took.
        """
        done = self.tree.insert(key, Tier.HOST, pages)
        taken = {}
        for component, (given, refused) in enumerate(zip(pages, done.duplicates, strict=True)):
            self.supply.free_host(refused, component)
            kept = given[~np.isin(given, refused)] if len(refused) else given
            self._pools[component].state[kept] = ARRIVING
            taken[component] = kept
        return done.lock, taken

    def arrived(self, taken: PagesOf) -> None:
        """Every worker has these pages: arriving ones become ready. Lost ones stay lost."""
        for component, pages in taken.items():
            state = self._pools[component].state
            state[pages[state[pages] == ARRIVING]] = READY

    def lose(self, key: RadixKey, start: int, taken: PagesOf) -> None:
        """The copy of these pages, which begin at page `start` of `key`, failed somewhere."""
        for component, pages in taken.items():
            self._pools[component].state[pages] = LOST
        self._lost.append((key, start, Reason.DAMAGED))
        self.drop_lost()

    def drop_lost(self) -> None:
        """Drop lost pages and what is below them, where nothing locks them."""
        if not self._lost:
            return
        waiting, self._lost = self._lost, []
        for key, start, why in waiting:
            with self.supply.leaving(why):
                is_gone = self._drop(key, start)
            if not is_gone:
                self._lost.append((key, start, why))

    def _drop(self, key: RadixKey, start: int) -> bool:
        deepest = self.resident_end(key)
        if deepest.end <= start:
            return True
        self.tree.cut(deepest, start)
        path = list(self.tree.path(deepest, start))
        if not any(self._is_lost(node) for node in path):
            return True
        if path[-1].host.lock_ref:  # a lock on anything below it counts here
            return False
        self.supply.release(self.tree.drop(path[-1]))
        return True

    def _is_lost(self, node: Node) -> bool:
        return any(
            pages is not None and bool((pool.state[pages] == LOST).any())
            for pages, pool in zip(_on_host(node, len(self._pools)), self._pools, strict=True)
        )

    # -- leaving ----------------------------------------------------------------------------

    def lose_path(self, lock: Lock) -> None:
        """A load of the pages that `lock` keeps has failed: mark the whole path lost."""
        for node in self.tree.path(lock.node):
            for pages, pool in zip(_on_host(node, len(self._pools)), self._pools, strict=True):
                if pages is not None:
                    pool.state[pages] = LOST
        self._lost.append((self.tree.path_key(lock.node), 0, Reason.DAMAGED))

    def lose_all(self) -> None:
        """Mark everything lost: what nothing locks is dropped at once, the rest when it is unlocked."""
        for component, pool in enumerate(self._pools):
            pool.state[self.tree.all_pages(Tier.HOST, component)] = LOST
        self._lost += [
            (self.tree.path_key(top), 0, Reason.FLUSHED) for top in self.tree.root.children.values()
        ]
        self.drop_lost()

    def take_freed(self) -> list[Pages]:
        """Backbone pages freed since the last call, evicted ones included."""
        return self._pools[BACKBONE].take_freed() if self._pools else []

    def close(self) -> None:
        """Have a learning eviction policy save what it has learned, if it has a file for that."""
        factory = self.tree.order_factory
        if isinstance(factory, LearningPolicy):
            factory.close()

    def check(self) -> None:
        """Assert that each page is free, in the tree, or one of a transfer's own. O(tree)."""
        self.tree.check()
        self.supply.check_conservation(0, self.in_flight.num_owned)
        for component, pool in enumerate(self._pools):
            on_host = self.tree.all_pages(Tier.HOST, component)
            outside = np.setdiff1d(np.flatnonzero(pool.state), on_host)
            if len(outside):
                raise Misuse(f"pages {outside} of component {component} wait outside the tree")


def _on_host(node: Node, num_components: int) -> list[Pages | None]:
    """A node's host pages of each component."""
    return [node.residency(component, Tier.HOST).pages for component in range(num_components)]

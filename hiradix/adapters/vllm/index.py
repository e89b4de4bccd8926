"""What the host has: a radix tree whose only tier in use is the host, and the workers' page numbers.

The tree is keyed by tokens, not by vLLM's block hashes: those start from a seed of the process and depend on
a hash function the operator chooses, while page hashes computed from tokens name the same page in every
process and engine that shares a store. All workers use the same page numbers, so one index serves them.

A page enters the tree when its copy is ordered, so that no second request copies it again, and is ARRIVING
until every worker has it: nobody is promised it before that. A page whose copy failed is LOST until it can be
dropped with all that is below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hiradix.errors import Misuse
from hiradix.memory import PageAllocator
from hiradix.policy.learning import LearningPolicy, learner_of
from hiradix.policy.uses import Finished
from hiradix.tree import (
    BACKBONE,
    Component,
    Freed,
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
    """What of a key the host has: leading pages that can be loaded, and whether more are arriving."""

    num_pages: int
    is_arriving: bool


class HostIndex:
    """Knows which pages are on the host, by prefix. One thread. Component c of the tree is KV cache group
    `groups[c]`."""

    def __init__(
        self, page_size: int, components: Sequence[Component], order: OrderFactory = LruOrder
    ) -> None:
        self.page_size = page_size
        self.tree = RadixTree(page_size, components, order=order)
        self.learner = learner_of(order)  # of an eviction policy that learns, else None
        self._pools: list[PageAllocator] = []
        self._state: list[npt.NDArray[np.int8]] = []
        self._lost: list[tuple[RadixKey, int]] = []
        self.dropped: list[Pages] = []  # the backbone's pages that left since `take_dropped`

    def open(self, num_pages: Sequence[int]) -> None:
        """The workers have so many host pages per component. Once, before the first lookup."""
        if len(num_pages) != len(self.tree.components):
            raise Misuse(f"{num_pages} for {self.tree.components}")
        self._pools = [PageAllocator(count) for count in num_pages]
        self._state = [np.zeros(count, np.int8) for count in num_pages]

    @property
    def is_open(self) -> bool:
        return bool(self._pools)

    @property
    def num_pages(self) -> int:
        """Host pages of the backbone."""
        return self._pools[BACKBONE].num_pages if self._pools else 0

    # -- lookups ----------------------------------------------------------------------------

    def find(self, key: RadixKey) -> HostHit:
        """What of `key` could be loaded now. Leaves nothing pinned."""
        node = self.tree.match(key).loadable_node
        usable, is_arriving = node.end, False
        for component in range(len(self.tree.components)):
            floor = self.tree.floor(node, component)
            pages = self.tree.pages(node, Tier.HOST, floor, component)
            states = self._state[component][pages]
            wrong = np.flatnonzero(states)
            if len(wrong) and floor + int(wrong[0]) < usable:
                usable = floor + int(wrong[0])
                is_arriving = bool(states[wrong[0]] == ARRIVING)
        if usable < node.end and len(self.tree.components) > 1:
            usable = 0  # a boundary further up may lack what its windows need
        return HostHit(usable, is_arriving)

    def lock(self, key: RadixKey) -> Lock | None:
        """Keep all whole pages of `key` until `unlock`; None where the host has not got them all."""
        node = self.tree.match(key).loadable_node
        if node.end != key.num_pages(self.page_size):
            return None
        return self.tree.lock(node, Tier.HOST)

    def are_ready(self, component: int, pages: Pages) -> bool:
        """Whether these pages, which are in the tree, may be read: none is being copied or lost."""
        return not self._state[component][pages].any()

    def unlock(self, lock: Lock) -> None:
        self.tree.unlock(lock)
        if self._lost:
            self.drop_lost()

    def loadable(self, lock: Lock, component: int, start: int) -> tuple[int, Pages]:
        """Where the pages begin that `lock` keeps of a component, not before `start`, and which they are."""
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
        """What is on the way to `node` has been used, though nothing was loaded or saved."""
        self.unlock(self.tree.lock(node, Tier.HOST))

    def used(self, key: RadixKey, ended: Finished) -> None:
        """A request that has ended used as much of `key` as is here: the policy may learn from it."""
        if self.learner is None:
            return
        lock = self.tree.lock(self.resident_end(key), Tier.HOST)
        self.learner.finished(self.tree, lock.node, key, ended)
        self.unlock(lock)

    # -- entering ---------------------------------------------------------------------------

    def alloc(self, num_pages: int, component: int = BACKBONE) -> Pages:
        """Up to `num_pages` host pages, evicting what is coldest; fewer where all others are in use."""
        if not self._pools:
            return np.empty(0, np.int32)
        pool = self._pools[component]
        short = num_pages - pool.available
        if short > 0:
            self._release(self.tree.evict(component, Tier.HOST, short))
        pages = pool.alloc(min(num_pages, pool.available))
        assert pages is not None
        return pages

    def insert(self, key: RadixKey, pages: Sequence[Pages], state: int) -> tuple[Lock, tuple[Pages, ...]]:
        """Give `pages`, which end where `key` does, to the tree. The lock on all of `key` is the caller's.

        Second: the pages of each component that the tree took. What it has already is freed.
        """
        done = self.tree.insert(key, Tier.HOST, pages)
        taken = []
        for component, (given, refused) in enumerate(zip(pages, done.duplicates, strict=True)):
            self._pools[component].free(refused)
            kept = given[~np.isin(given, refused)] if len(refused) else given
            self._state[component][kept] = state
            taken.append(kept)
        return done.lock, tuple(taken)

    def free(self, pages: Pages, component: int = BACKBONE) -> None:
        """Give back pages that never entered the tree."""
        self._pools[component].free(pages)

    def arrived(self, taken: Sequence[Pages]) -> None:
        """Every worker has these pages. What was lost meanwhile stays so."""
        for component, pages in enumerate(taken):
            state = self._state[component]
            state[pages[state[pages] == ARRIVING]] = READY

    def lose(self, key: RadixKey, start: int, taken: Sequence[Pages]) -> None:
        """The copy of these pages, which begin at page `start` of `key`, failed somewhere."""
        for component, pages in enumerate(taken):
            self._state[component][pages] = LOST
        self._lost.append((key, start))
        self.drop_lost()

    def drop_lost(self) -> None:
        """Drop lost pages and what is below them, where nothing locks them."""
        waiting, self._lost = self._lost, []
        for key, start in waiting:
            if not self._drop(key, start):
                self._lost.append((key, start))

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
        self._release(self.tree.drop(path[-1]))
        return True

    def _is_lost(self, node: Node) -> bool:
        entries = (node.residency(component, Tier.HOST).pages for component in range(len(self._state)))
        return any(
            pages is not None and bool((state[pages] == LOST).any())
            for pages, state in zip(entries, self._state, strict=True)
        )

    # -- leaving ----------------------------------------------------------------------------

    def lose_path(self, lock: Lock) -> None:
        """A load of what `lock` keeps failed: none of it is promised again."""
        for node in self.tree.path(lock.node):
            for component, state in enumerate(self._state):
                pages = node.residency(component, Tier.HOST).pages
                if pages is not None:
                    state[pages] = LOST
        self._lost.append((self.tree.path_key(lock.node), 0))

    def lose_all(self) -> None:
        """Forget everything: at once what nothing locks, the rest when it is unlocked."""
        for component, state in enumerate(self._state):
            state[self.tree.all_pages(Tier.HOST, component)] = LOST
        self._lost += [(self.tree.path_key(top), 0) for top in self.tree.root.children.values()]
        self.drop_lost()

    def take_dropped(self) -> list[Pages]:
        """The backbone's pages that left the tree since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def _release(self, freed: Iterable[Freed]) -> None:
        for drop in freed:
            if drop.tier is not Tier.HOST:
                raise Misuse(f"{drop} is not of the host")
            component, pages = drop.component, drop.pages
            self._state[component][pages] = READY
            self._pools[component].free(pages)
            if component == BACKBONE:
                self.dropped.append(pages)

    def close(self) -> None:
        """The engine ends: what the policy has learned is kept, where it was told to keep it."""
        factory = self.tree.order_factory
        if isinstance(factory, LearningPolicy):
            factory.close()

    def check(self, in_flight: Sequence[int]) -> None:
        """Assert that each page is free, in the tree, or one of `in_flight` (counts per component)."""
        self.tree.check()
        for component, pool in enumerate(self._pools):
            resident = self.tree.resident_pages(Tier.HOST, component)
            if pool.available + resident + in_flight[component] != pool.num_pages:
                raise Misuse(
                    f"component {component}: {pool.available} free + {resident} tree + "
                    f"{in_flight[component]} in flight != {pool.num_pages}"
                )
            on_host = self.tree.all_pages(Tier.HOST, component)
            outside = np.setdiff1d(np.flatnonzero(self._state[component]), on_host)
            if len(outside):
                raise Misuse(f"pages {outside} of component {component} wait outside the tree")

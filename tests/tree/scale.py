"""One big tree: built, then a million random operations in both tiers, then every invariant.

    python -m tests.tree.scale [nodes] [operations]      a million of each by default; prints time and memory

Which node follows which is drawn once; the tokens of a node are its number's, so a page's data can name the
path it belongs to, and each match is compared with what the pages hold.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from hiradix.tree import Component, Lock, Node, RadixKey, RadixTree, Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST
REACH = 2
NODE_PAGES = 2
COMPONENTS = (Component("full"), Component("window", reach=REACH))
MAX_LOCKS = 1000
DEMOTED_AT_ONCE = 64
OPERATIONS = {
    "look": 30,
    "turn": 25,
    "unlock": 15,
    "evict": 12,
    "write back": 6,
    "back up": 6,
    "load back": 6,
}

Pages = npt.NDArray[np.int32]


class Pool:
    """Page ids as a stack, and what each page holds: the token it is the data of, -1 while it is free."""

    def __init__(self, num_pages: int):
        self._stack = np.arange(num_pages, dtype=np.int32)
        self.num_free = self.num_pages = num_pages
        self.data = np.full(num_pages, -1, np.int64)

    def alloc(self, tokens: npt.NDArray[np.int64]) -> Pages:
        assert len(tokens) <= self.num_free, f"{len(tokens)} of {self.num_free} pages"
        self.num_free -= len(tokens)
        pages = self._stack[self.num_free : self.num_free + len(tokens)].copy()
        self.data[pages] = tokens
        return pages

    def free(self, pages: Pages) -> None:
        assert (self.data[pages] >= 0).all(), "a page was freed twice"
        self.data[pages] = -1
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)


class Forest:
    """Which node follows which: most fan out by eight, every third continues the one before it."""

    def __init__(self, rng: random.Random, num_nodes: int):
        self.num_nodes = num_nodes
        self._parents = [0] + [i - 1 if rng.random() < 0.3 else i // 8 for i in range(1, num_nodes)]

    def tokens(self, number: int) -> npt.NDArray[np.int64]:
        """The path to node `number`. Node 0 is the root and has no tokens."""
        path = []
        while number:
            path.append(number)
            number = self._parents[number]
        first = np.array(path[::-1], np.int64) * NODE_PAGES
        return (first[:, None] + np.arange(NODE_PAGES)).reshape(-1)


class BigTree:
    """A tree of full attention and a window with pools of its own, and one method per operation."""

    def __init__(self, num_nodes: int, num_operations: int):
        self.rng = random.Random(1)
        self.num_built = num_nodes
        self.forest = Forest(self.rng, num_nodes + 1 + num_operations)
        self.tree = RadixTree(1, COMPONENTS)
        self.pools = {(c, tier): Pool(num_nodes * (3 - c) // 2 + 4096) for c in (0, 1) for tier in Tier}
        self.locks: list[Lock] = []

    def build(self) -> None:
        """Insert every node below its parent; what is cold moves to the host as the device fills up."""
        for number in range(1, self.num_built + 1):
            self._turn(self.forest.tokens(number))

    def operate(self, name: str) -> None:
        getattr(self, f"_{name.replace(' ', '_')}")(self._some_path())

    # -- operations ---------------------------------------------------------------------

    def _some_path(self) -> npt.NDArray[np.int64]:
        if self.num_built + 1 < self.forest.num_nodes and self.rng.random() < 0.2:
            self.num_built += 1
            return self.forest.tokens(self.num_built)
        return self.forest.tokens(self.rng.randrange(1, self.num_built + 1))

    def _match(self, tokens: npt.NDArray[np.int64]) -> Any:
        match = self.tree.match(RadixKey(tokens))
        node = match.device_node
        for c, first in ((0, 0), (1, max(0, node.end - REACH))):
            held = self.pools[c, DEVICE].data[self.tree.pages(node, DEVICE, first, c)]
            assert (held == tokens[first : node.end]).all(), f"component {c} of {tokens} holds {held}"
        return match

    def _look(self, tokens: npt.NDArray[np.int64]) -> None:
        node = self._match(tokens).device_node
        self.tree.hit(node)
        if len(self.locks) < MAX_LOCKS:
            self.locks.append(self.tree.lock(node, DEVICE))

    def _turn(self, tokens: npt.NDArray[np.int64]) -> None:
        match = self._match(tokens)
        held = self.tree.lock(match.device_node, DEVICE)
        first = (held.node.end, max(0, len(tokens) - REACH))
        pages = [self._alloc(c, DEVICE, tokens[first[c] :]) for c in (0, 1)]
        done = self.tree.insert(RadixKey(tokens), DEVICE, pages, held)
        for c, refused in enumerate(done.duplicates):
            self.pools[c, DEVICE].free(refused)
        self.tree.unlock(held)
        self.tree.unlock(done.lock)

    def _unlock(self, _: npt.NDArray[np.int64]) -> None:
        if self.locks:
            at = self.rng.randrange(len(self.locks))
            self.locks[at], self.locks[-1] = self.locks[-1], self.locks[at]
            self.tree.unlock(self.locks.pop())

    def _evict(self, _: npt.NDArray[np.int64]) -> None:
        c, tier = self.rng.randrange(2), Tier(self.rng.randrange(2))
        self._release(self.tree.evict(c, tier, self.rng.randint(1, 8)))

    def _write_back(self, _: npt.NDArray[np.int64]) -> None:
        self._move_down(self.rng.randint(1, 4))

    def _back_up(self, tokens: npt.NDArray[np.int64]) -> None:
        self._copy(self._match(tokens).device_node, DEVICE, HOST)

    def _load_back(self, tokens: npt.NDArray[np.int64]) -> None:
        node = self._match(tokens).loadable_node
        self._copy(node, HOST, DEVICE)
        assert self._match(tokens).device_node is node

    # -- parts --------------------------------------------------------------------------

    def _copy(self, node: Node, source: Tier, target: Tier) -> None:
        locks = [self.tree.lock(node, tier) for tier in Tier]
        for s in self.tree.missing(node, source, target):
            pages = self._alloc(s.component, target, self.pools[s.component, source].data[s.pages])
            self.pools[s.component, target].free(self.tree.adopt(s.node, s.component, target, pages))
        for lock in locks:
            self.tree.unlock(lock)

    def _move_down(self, num_pages: int) -> None:
        for node in self.tree.coldest(0, DEVICE, num_pages):
            if not node.resident(HOST):
                self._copy(node, DEVICE, HOST)
            self._release(self.tree.demote(node))

    def _alloc(self, c: int, tier: Tier, tokens: npt.NDArray[np.int64]) -> Pages:
        pool = self.pools[c, tier]
        if pool.num_free < len(tokens):
            if c == 0 and tier is DEVICE:
                self._move_down(DEMOTED_AT_ONCE)
            self._release(self.tree.evict(c, tier, max(0, len(tokens) - pool.num_free)))
        return pool.alloc(tokens)

    def _release(self, freed: Any) -> None:
        for drop in freed:
            self.pools[drop.component, drop.tier].free(drop.pages)

    # -- checks -------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant with exact lock counts; each page in one place, holding what its path says."""
        self.tree.check(self.locks)
        for (c, tier), pool in self.pools.items():
            resident = self.tree.all_pages(tier, c)
            assert len(resident) + pool.num_free == pool.num_pages, "a page leaked"
            assert len(np.unique(resident)) == len(resident) == (pool.data >= 0).sum()
        for node in self.tree.nodes():
            for (c, tier), pool in self.pools.items():
                if node.resident(tier, c):
                    assert (pool.data[node.residency(c, tier).pages] == node.tokens).all(), f"{node}"

    def drain(self) -> None:
        """Give everything back: nothing stays pinned, and the tree empties."""
        while self.locks:
            self.tree.unlock(self.locks.pop())
        for tier in Tier:
            assert self.tree.protected_pages(tier) == 0, "something stayed pinned"
            self._release(self.tree.evict(0, tier, sys.maxsize))
        assert not self.tree.root.children
        assert all(pool.num_free == pool.num_pages for pool in self.pools.values())


def run(num_nodes: int, num_operations: int) -> list[str]:
    """The whole life of one tree. Lines to print."""
    big, clock, lines = BigTree(num_nodes, num_operations), time.perf_counter, []
    began = clock()
    big.build()
    took = clock() - began
    lines.append(
        f"{num_nodes:,} inserts in {took:.1f} s, {took / num_nodes * 1e6:.0f} us each: {_shown(big)}"
    )
    names = big.rng.choices(list(OPERATIONS), list(OPERATIONS.values()), k=num_operations)
    began = clock()
    for name in names:
        big.operate(name)
    took = clock() - began
    drawn = ", ".join(f"{name} {count:,}" for name, count in sorted(Counter(names).items()))
    lines.append(
        f"{num_operations:,} operations in {took:.1f} s, {took / num_operations * 1e6:.0f} us each ({drawn})"
    )
    lines.append(_shown(big))
    began = clock()
    big.check()
    lines.append(f"every invariant holds, each page is in one place: {clock() - began:.1f} s")
    lines.append(f"peak memory {_peak_mb():,.0f} MB")
    big.drain()
    return lines


def _peak_mb() -> float:
    """Of this process alone: `ru_maxrss` starts with what the parent had when it forked."""
    with open("/proc/self/status") as status:
        peak = next(line for line in status if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


def _shown(big: BigTree) -> str:
    nodes = sum(1 for _ in big.tree.nodes())
    pages = {t: big.tree.resident_pages(t) for t in Tier}
    return f"{nodes:,} nodes, {pages[DEVICE]:,} pages on the device, {pages[HOST]:,} on the host"


def main() -> None:
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    operations = int(sys.argv[2]) if len(sys.argv) > 2 else nodes
    print("\n".join(run(nodes, operations)))


if __name__ == "__main__":
    main()

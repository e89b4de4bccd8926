"""Policies as models of blocks, for comparison: the offline optimum, ARC, S3-FIFO, SIEVE.

They decide block by block over a flat cache; only leaves of the prefix tree may leave, and a request's own
blocks stay while it is served. Not the product's code: what the product is compared with.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hiradix.apps.traces.trace import Trace

Hits = npt.NDArray[np.int64]  # tokens per request
NEVER = 1 << 60
_SMALL_SHARE = 0.1  # of S3-FIFO's small queue


def belady(trace: Trace, capacity: int) -> Hits:
    """The most any policy can serve that may refuse what is new: whoever is next used last goes first."""
    hits = np.zeros(len(trace.calls), np.int64)
    resident: dict[int, int] = {}  # block: its next use
    heap: list[tuple[int, int, int]] = []
    for number, (call, following) in enumerate(zip(trace.calls, _next_uses(trace))):
        names = call.blocks.tolist()
        found = _leading(names, resident)
        hits[number] = found * trace.block_tokens
        for depth, (name, later) in enumerate(zip(names, following)):
            resident[name] = later
            heapq.heappush(heap, (-later, -depth, name))
        while len(resident) > capacity:
            later, _, name = heapq.heappop(heap)
            if resident.get(name) == -later:
                del resident[name]
    return hits


def _next_uses(trace: Trace) -> list[list[int]]:
    last: dict[int, int] = {}
    found = []
    for number in range(len(trace.calls) - 1, -1, -1):
        names = trace.calls[number].blocks.tolist()
        found.append([last.get(name, NEVER) for name in names])
        for name in names:
            last[name] = number
    return found[::-1]


def _leading(names: list[int], resident: dict[int, int]) -> int:
    for i, name in enumerate(names):
        if name not in resident:
            return i
    return len(names)


@dataclass
class _Flat:
    """A cache of blocks by name; a model says in which queue a block waits and which one leaves.

    where: by resident block, its queue. parent: by block, the one before it in its prompt (-1: none).
    children: by block, how many resident ones follow it: only a block without any may leave. pinned: the
    blocks of the request that is served.
    """

    trace: Trace
    capacity: int
    where: dict[int, int] = field(default_factory=dict)
    children: dict[int, int] = field(default_factory=dict)
    parent: dict[int, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Makes the queues."""

    def play(self) -> Hits:
        hits = np.zeros(len(self.trace.calls), np.int64)
        for number, call in enumerate(self.trace.calls):
            names = call.blocks.tolist()
            self.pinned = set(names)
            found = _leading(names, self.where)
            hits[number] = found * self.trace.block_tokens
            for name in reversed(names[:found]):
                self.hit(name)
            self._enter([-1, *names], found)
        return hits

    def _enter(self, path: list[int], found: int) -> None:
        """Let in what follows `found`, as much as there can be room for; the deepest is the coldest."""
        wanted = len(path) - 1 - found
        while len(self.where) + wanted > self.capacity and self.evict():
            pass
        last = found + min(wanted, self.capacity - len(self.where))
        for i in range(last, found, -1):
            above, name = path[i - 1], path[i]
            self.parent[name] = above
            self.children[above] = self.children.get(above, 0) + 1
            self.add(name)

    def is_stuck(self, name: int) -> bool:
        """Whether a block may not leave now."""
        return name in self.pinned or self.children.get(name, 0) > 0

    def leave(self, name: int) -> None:
        del self.where[name]
        self.children[self.parent[name]] -= 1

    def hit(self, name: int) -> None:
        """A resident block was asked for."""
        raise NotImplementedError

    def add(self, name: int) -> None:
        """A block becomes resident; there is room."""
        raise NotImplementedError

    def evict(self) -> bool:
        """Have one block leave; False if none may."""
        raise NotImplementedError


class _Arc(_Flat):
    """Two lists and two ghost lists; the target of the first moves with ghost hits."""

    def __post_init__(self) -> None:
        self.lists: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]
        self.ghosts: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]
        self.target = 0.0

    def hit(self, name: int) -> None:
        del self.lists[self.where[name]][name]
        self.lists[1][name] = None
        self.where[name] = 1

    def add(self, name: int) -> None:
        first, second = self.ghosts
        at = 0
        if name in first:
            self.target = min(self.capacity, self.target + max(1.0, len(second) / len(first)))
            at = 1
        elif name in second:
            self.target = max(0.0, self.target - max(1.0, len(first) / len(second)))
            at = 1
        for ghosts in self.ghosts:
            ghosts.pop(name, None)
        self.lists[at][name] = None
        self.where[name] = at

    def evict(self) -> bool:
        order = (0, 1) if len(self.lists[0]) > self.target else (1, 0)
        for at in order:
            name = next((name for name in self.lists[at] if not self.is_stuck(name)), None)
            if name is None:
                continue
            del self.lists[at][name]
            self.leave(name)
            self.ghosts[at][name] = None
            while self.ghosts[0] and len(self.lists[0]) + len(self.ghosts[0]) > self.capacity:
                self.ghosts[0].popitem(last=False)
            while self.ghosts[1] and len(self.ghosts[0]) + len(self.ghosts[1]) > self.capacity:
                self.ghosts[1].popitem(last=False)
            return True
        return False


class _Fifo(_Flat):
    """S3-FIFO: a small queue on probation, a main queue that goes round, a ghost queue."""

    small_share = _SMALL_SHARE
    most = 3

    def __post_init__(self) -> None:
        self.queues: list[deque[int]] = [deque(), deque()]
        self.counts = [0, 0]
        self.uses: dict[int, int] = {}
        self.ghosts: OrderedDict[int, None] = OrderedDict()

    def hit(self, name: int) -> None:
        self.uses[name] = min(self.most, self.uses[name] + 1)

    def add(self, name: int) -> None:
        self._put(name, int(self.small_share == 0 or name in self.ghosts))
        self.ghosts.pop(name, None)
        self.uses[name] = 0

    def _put(self, name: int, at: int) -> None:
        self.queues[at].append(name)
        self.counts[at] += 1
        self.where[name] = at

    def evict(self) -> bool:
        for _ in range(8 * self.capacity):
            at = 0 if self.counts[0] > self.small_share * self.capacity or not self.counts[1] else 1
            if not self.queues[at]:
                return False
            name = self.queues[at].popleft()
            self.counts[at] -= 1
            if self.uses[name] or self.is_stuck(name):
                self.uses[name] = 0 if at == 0 or self.most == 1 else max(self.uses[name] - 1, 0)
                self._put(name, at if name in self.pinned else 1)
                continue
            self.leave(name)
            del self.uses[name]
            if at == 0:
                self.ghosts[name] = None
                if len(self.ghosts) > self.capacity:
                    self.ghosts.popitem(last=False)
            return True
        return False


class _Sieve(_Fifo):
    """One queue and one bit: what was used since the hand came by gets another round."""

    small_share = 0.0
    most = 1


MODELS: dict[str, Callable[[Trace, int], Hits]] = {
    "belady": belady,
    "arc": lambda trace, capacity: _Arc(trace, capacity).play(),
    "s3fifo": lambda trace, capacity: _Fifo(trace, capacity).play(),
    "sieve": lambda trace, capacity: _Sieve(trace, capacity).play(),
}

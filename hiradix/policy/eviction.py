"""Eviction orders by name. Each says how cold an entry is; leaves always go before their ancestors.

| name | evicted first |
|---|---|
| lru | least recently unlocked |
| mru | most recently unlocked |
| fifo, filo | oldest, youngest node |
| lfu | fewest hits, then lru |
| priority | lowest priority, then lru |
| slru | fewer than `protected_threshold` (2) hits, then lru |
| tlru | ends of conversations that can be recomputed within the budget, then lru |

A key is computed when its entry is unlocked, and stays until it is locked again. Keys are made of counts and
sequence numbers, so ranks that see the same calls evict the same pages. `register_eviction_policy` adds others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hiradix.errors import ConfigError
from hiradix.policy.ghd import GhdPolicy, check_config
from hiradix.policy.learning import LearningPolicy, SharedLog
from hiradix.policy.leaves import exposed_parent, is_blocked
from hiradix.policy.uses import SecondUse, UseLog
from hiradix.tree import FULL, EvictionOrder, LruOrder, Node, OrderContext, OrderFactory, Tier
from hiradix.tree.node import Residency

_FLAG = "--radix-eviction-policy-config"


class Use(NamedTuple):
    """An entry's last use: the number of the push that ended it, and the depth it reached, in pages."""

    push: int
    deepest: int


KeyOf = Callable[[Node, Use], int]  # small is cold; equal keys go least recently used first, -push reverses


class _Place:
    """An entry's place in a heap. Void if its entry's rank is another; outside, it waits for `expose`."""

    __slots__ = ("key", "push", "depth", "entry", "in_heap")

    def __init__(self, key: int, push: int, depth: int, entry: Residency):
        self.key = key
        self.push = push
        self.depth = depth  # between the halves of a split, which share the rest
        self.entry = entry
        self.in_heap = True

    def __lt__(self, other: _Place) -> bool:
        if self.key != other.key:
            return self.key < other.key
        if self.push != other.push:
            return self.push < other.push
        return self.depth < other.depth


class HeapOrder:
    """Coldest key first, O(log n) per change. Entries whose node is no leaf wait outside the heap."""

    def __init__(self, context: OrderContext, key_of: KeyOf):
        self.num_pages = 0
        self._context = context
        self._key_of = key_of
        self._pushes = 0
        self._live: dict[int, Residency] = {}
        self._heap: list[_Place] = []

    def __iter__(self) -> Iterator[Residency]:
        return iter(list(self._live.values()))

    def push(self, entries: Iterable[Residency]) -> None:
        entries = list(entries)
        deepest = max((entry.node.end for entry in entries if entry.node is not None), default=0)
        for entry in entries:
            assert entry.node is not None and entry.pages is not None
            self._pushes += 1
            self._add(entry, self._key_of(entry.node, Use(self._pushes, deepest)), self._pushes)
            self.num_pages += len(entry.pages)

    def _add(self, entry: Residency, key: int, push: int) -> None:
        assert entry.node is not None
        start = entry.node.start
        depth = -start if self._context.backbone else start
        entry.rank = place = _Place(key, push, depth, entry)
        self._live[id(entry)] = entry
        heapq.heappush(self._heap, place)
        if len(self._heap) > 2 * len(self._live) + 64:  # mostly void: O(1) amortised
            self._heap = [p for p in self._heap if p.entry.rank is p]
            heapq.heapify(self._heap)

    def remove(self, entries: Iterable[Residency]) -> None:
        for entry in entries:
            assert entry.pages is not None
            entry.rank = None
            del self._live[id(entry)]
            self.num_pages -= len(entry.pages)

    def touched(self, entries: Iterable[Residency]) -> None:
        entries = list(entries)
        self.remove(entries)
        self.push(entries)

    def dropped(self, entry: Residency) -> None:
        self.remove((entry,))

    def coldest(self) -> Residency | None:
        heap = self._heap
        while heap:
            place = heap[0]
            entry: Residency = place.entry
            if entry.rank is place and not is_blocked(self._context, entry):
                return entry
            place.in_heap = False
            heapq.heappop(heap)
        return None

    def victims(self, num_pages: int) -> list[Residency]:
        """Pops as evictions would, exposing parents as they would, and puts everything back."""
        heap, popped = self._heap, []
        gone: dict[int, int] = {}
        while heap and num_pages > 0:
            place = heapq.heappop(heap)
            entry: Residency = place.entry
            if entry.rank is not place or is_blocked(self._context, entry, gone):
                place.in_heap = False
                continue
            assert entry.node is not None and entry.pages is not None
            popped.append(place)
            num_pages -= len(entry.pages)
            above = exposed_parent(self._context, entry.node, gone)
            if above is not None:
                self.expose(above)
        for place in popped:
            heapq.heappush(heap, place)
        return [place.entry for place in popped]

    def split(self, entry: Residency, upper: Residency) -> None:
        place = entry.rank
        for half in (entry, upper):
            self._add(half, place.key, place.push)

    def expose(self, entry: Residency) -> None:
        place = entry.rank
        if place is not None and not place.in_heap:
            place.in_heap = True
            heapq.heappush(self._heap, place)


# -- keys -------------------------------------------------------------------------------

_SIMPLE: dict[str, KeyOf] = {
    "mru": lambda node, use: -use.push,
    "fifo": lambda node, use: node.created,
    "filo": lambda node, use: -node.created,
    "lfu": lambda node, use: node.hit_count,
    "priority": lambda node, use: node.priority,
}


def _slru(config: Mapping[str, Any], context: OrderContext) -> KeyOf:
    """Probation, then protected: a node's second hit protects it from a flood of prompts seen once."""
    threshold = _count("slru", config, "protected_threshold", 2)
    return lambda node, use: int(node.hit_count >= threshold)


def _tlru(config: Mapping[str, Any], context: OrderContext) -> KeyOf:
    """Evict first the nodes that cost little to lose: the next turn of the conversation, of about
    `next_prompt_estimate` tokens, would recompute at most `threshold` tokens without this node and all below
    it."""
    threshold = _count("tlru", config, "threshold", 1024)
    estimate = _count("tlru", config, "next_prompt_estimate", 256)
    if threshold <= estimate:
        raise ConfigError(f"{_FLAG}: tlru threshold {threshold} must be > next_prompt_estimate {estimate}")
    slack = (threshold - estimate) // context.page_size
    return lambda node, use: int(use.deepest - node.start > slack)


_CONFIGURED: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], OrderContext], KeyOf]]] = {
    "slru": (("protected_threshold",), _slru),
    "tlru": (("threshold", "next_prompt_estimate"), _tlru),
}


def _count(name: str, config: Mapping[str, Any], field: str, default: int) -> int:
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{_FLAG}: {name} {field} must be a whole number >= 0, got {value!r}")
    return value


def _reject_unknown(name: str, config: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if unknown := sorted(set(config) - set(known)):
        raise ConfigError(f"{_FLAG}: {name} does not know {', '.join(map(str, unknown))}")


# -- policies with a memory -------------------------------------------------------------


class _GhostHeapOrder(HeapOrder):
    """A heap that leaves ghosts."""

    def __init__(self, context: OrderContext, log: UseLog):
        super().__init__(context, lambda node, use: node.note.class_id if node.note is not None else 0)
        self._log = log

    def push(self, entries: Iterable[Residency]) -> None:
        super().push(entries)
        self._log.grow(self.num_pages)

    def dropped(self, entry: Residency) -> None:
        super().dropped(entry)
        if self._context.backbone:
            self._log.left(entry)


class TwoQueuePolicy(SharedLog[UseLog]):
    """`2q`: what has been used once goes first, what has come back, also from a ghost, later; each lru."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config, SecondUse)

    def __call__(self, context: OrderContext) -> EvictionOrder:
        return _GhostHeapOrder(context, self.log_of(context))


class _PerTier:
    """One policy on the device, another on the host; at most one of them learns."""

    def __init__(self, device: OrderFactory, host: OrderFactory):
        self._of = (device, host)

    def __call__(self, context: OrderContext) -> EvictionOrder:
        return self._of[context.tier](context)


class _LearningPerTier(_PerTier):
    """The same, where one does."""

    def __init__(self, device: OrderFactory, host: OrderFactory, learning: LearningPolicy):
        super().__init__(device, host)
        self._learning = learning

    @property
    def learner(self) -> UseLog:
        return self._learning.learner

    def close(self) -> None:
        self._learning.close()


def _per_tier(name: str, config: Mapping[str, Any]) -> OrderFactory:
    names = name.split(",")
    if len(names) != 2:
        raise ConfigError(
            f"--radix-eviction-policy {name!r}: give one policy, or one for device and host: a,b"
        )
    num_learning = sum(part in _LEARNING for part in names)
    if num_learning == 2 or (config and not num_learning):
        raise ConfigError(f"--radix-eviction-policy {name!r}: of two policies one at most may learn, and it "
                          f"alone may have a {_FLAG}")  # fmt: skip
    first, second = names
    if first in _LEARNING:
        learning = _learning(first, config)
        return _LearningPerTier(learning, make_order(second), learning)
    if second in _LEARNING:
        learning = _learning(second, config)
        return _LearningPerTier(make_order(first), learning, learning)
    return _PerTier(make_order(first), make_order(second))


_LEARNING: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], LearningPolicy]]] = {
    "2q": (("page_tokens",), TwoQueuePolicy),
    "ghd": (("page_tokens", "tables"), GhdPolicy),
}


def _learning(name: str, config: Mapping[str, Any]) -> LearningPolicy:
    fields, make = _LEARNING[name]
    _reject_unknown(name, config, fields)
    check_config(name, config)
    return make(config)


# -- registry ---------------------------------------------------------------------------

_REGISTERED: dict[str, Callable[[Mapping[str, Any]], OrderFactory]] = {}


def register_eviction_policy(name: str, make: Callable[[Mapping[str, Any]], OrderFactory]) -> None:
    """Add a policy: `make(config)` gives what builds one order per component and tier.

    >>> longest = lambda node, use: -node.num_pages
    >>> register_eviction_policy("longest-first", lambda config: lambda context: HeapOrder(context, longest))
    >>> "longest-first" in eviction_policies()
    True
    """
    if name in eviction_policies():
        raise ConfigError(f"eviction policy {name!r} exists already")
    _REGISTERED[name] = make


def eviction_policies() -> list[str]:
    """All names `make_order` knows."""
    return ["lru", *_SIMPLE, *_CONFIGURED, *_LEARNING, *_REGISTERED]


def learning_policies() -> list[str]:
    """The names of the policies that learn; all of them take `page_tokens`, the tokens that a page stands
    for."""
    return list(_LEARNING)


def make_order(name: str, config: Mapping[str, Any] | None = None) -> OrderFactory:
    """The factory with which `RadixTree(order=...)` builds the named policy's orders. ConfigError names a bad
    value.

    >>> make_order("slru", {"protected_threshold": 3})(OrderContext(FULL, Tier.HOST, 64, True)).num_pages
    0
    >>> make_order("slru", {"threshold": 3})
    Traceback (most recent call last):
    hiradix.errors.ConfigError: --radix-eviction-policy-config: slru does not know threshold
    """
    config = dict(config or {})
    if "," in name:
        return _per_tier(name, config)
    if name in _REGISTERED:
        return _REGISTERED[name](config)
    if name not in eviction_policies():
        raise ConfigError(f"--radix-eviction-policy {name!r} is not one of {', '.join(eviction_policies())}")
    if name in _LEARNING:
        return _learning(name, config)
    fields, configured = _CONFIGURED.get(name, ((), None))
    _reject_unknown(name, config, fields)
    if name == "lru":
        return LruOrder
    if configured is None:
        return lambda context: HeapOrder(context, _SIMPLE[name])
    configured(config, OrderContext(FULL, Tier.DEVICE, 1, True))  # names a bad value now

    def make(context: OrderContext) -> EvictionOrder:
        return HeapOrder(context, configured(config, context))

    return make

"""Eviction orders by name. Each says how cold an entry is; the tree keeps leaves before their ancestors.

| name | leaves first |
|---|---|
| lru | least recently unlocked |
| mru | most recently unlocked |
| fifo, filo | oldest, youngest node |
| lfu | fewest hits, then lru |
| priority | lowest priority, then lru |
| slru | fewer than `protected_threshold` hits (2), then lru |
| tlru | ends of conversations that can be recomputed within `threshold` tokens, then lru |

`register_eviction_policy` adds others. Keys are made of counts and sequence numbers only, so every rank
that sees the same calls evicts the same pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hiradix.errors import ConfigError
from hiradix.tree import EvictionOrder, LruOrder, Node, OrderContext, OrderFactory, Tier
from hiradix.tree.node import Residency

Key = tuple[int, ...]
KeyOf = Callable[[Node, int], Key]  # (node, number of this push) -> cold is small


class _Place:
    """An entry's place in a heap. Void when its entry's rank is another; parked: waits for `expose`."""

    __slots__ = ("key", "depth", "entry", "in_heap")

    def __init__(self, key: Key, entry: Residency):
        assert entry.node is not None
        self.key = key
        self.depth = entry.node.start  # between the halves of a split, which share the rest of the key
        self.entry = entry
        self.in_heap = True

    def __lt__(self, other: _Place) -> bool:
        return (self.key, self.depth) < (other.key, other.depth)


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
        for entry in entries:
            assert entry.node is not None and entry.pages is not None
            self._pushes += 1
            place = _Place((*self._key_of(entry.node, self._pushes), self._pushes), entry)
            self._add(entry, place)
            self.num_pages += len(entry.pages)

    def _add(self, entry: Residency, place: _Place) -> None:
        entry.rank = place
        self._live[id(entry)] = entry
        heapq.heappush(self._heap, place)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [p for p in self._heap if p.entry.rank is p]
            heapq.heapify(self._heap)

    def remove(self, entries: Iterable[Residency]) -> None:
        for entry in entries:
            assert entry.pages is not None
            entry.rank = None
            del self._live[id(entry)]
            self.num_pages -= len(entry.pages)

    def coldest(self) -> Residency | None:
        heap = self._heap
        while heap:
            place = heap[0]
            entry: Residency = place.entry
            if entry.rank is place and not self._is_blocked(entry, {}):
                return entry
            place.in_heap = False
            heapq.heappop(heap)
        return None

    def victims(self, num_pages: int) -> list[Residency]:
        """Pops as `coldest` would, exposing parents as evictions would, and puts everything back."""
        found: list[Residency] = []
        taken: set[int] = set()
        gone: dict[int, int] = {}  # per parent, children that would have left
        heap = [p for p in self._live_places() if p.in_heap]
        heapq.heapify(heap)
        while heap and num_pages > 0:
            entry = heapq.heappop(heap).entry
            if id(entry) in taken or self._is_blocked(entry, gone):
                continue
            assert entry.node is not None and entry.pages is not None
            taken.add(id(entry))
            found.append(entry)
            num_pages -= len(entry.pages)
            parent = entry.node.parent
            if not self._context.backbone or parent is None or parent.parent is None:
                continue
            gone[id(parent)] = gone.get(id(parent), 0) + 1
            above = parent.residency(0, self._context.tier)
            if above.rank is not None and not self._is_blocked(above, gone):
                heapq.heappush(heap, above.rank)
        return found

    def _live_places(self) -> Iterator[_Place]:
        return (entry.rank for entry in self._live.values())

    def _is_blocked(self, entry: Residency, gone: Mapping[int, int]) -> bool:
        """Whether something in the tree depends on the entry; `gone` counts children as if they had left."""
        node = entry.node
        if not self._context.backbone or node is None:
            return False
        left = gone.get(id(node), 0)
        if self._context.tier == Tier.DEVICE:
            return node.num_device_children > left
        return node.device.pages is None and len(node.children) > left

    def split(self, entry: Residency, upper: Residency) -> None:
        key = entry.rank.key
        self._add(entry, _Place(key, entry))
        self._add(upper, _Place(key, upper))

    def expose(self, entry: Residency) -> None:
        place = entry.rank
        if place is not None and not place.in_heap:
            place.in_heap = True
            heapq.heappush(self._heap, place)


# -- keys -------------------------------------------------------------------------------


def _by_name(name: str, config: Mapping[str, Any]) -> Callable[[OrderContext], KeyOf]:
    simple: dict[str, KeyOf] = {
        "mru": lambda node, push: (-push,),
        "fifo": lambda node, push: (node.created,),
        "filo": lambda node, push: (-node.created,),
        "lfu": lambda node, push: (node.hit_count, push),
        "priority": lambda node, push: (node.priority, push),
    }
    if name in simple:
        _reject_unknown(name, config, ())
        return lambda context: simple[name]
    if name == "slru":
        _reject_unknown(name, config, ("protected_threshold",))
        threshold = _count(name, config, "protected_threshold", 2)
        return lambda context: lambda node, push: (int(node.hit_count >= threshold), push)
    raise ConfigError(f"--radix-eviction-policy {name!r} is not one of {', '.join(eviction_policies())}")


def _tlru(config: Mapping[str, Any]) -> Callable[[OrderContext], KeyOf]:
    """Pages so near the end of their conversation that recomputing them stays within the budget go first."""
    _reject_unknown("tlru", config, ("threshold", "next_prompt_estimate"))
    threshold = _count("tlru", config, "threshold", 1024)
    estimate = _count("tlru", config, "next_prompt_estimate", 256)
    if threshold <= estimate:
        raise ConfigError(
            f"--radix-eviction-policy-config: tlru threshold {threshold} must be > "
            f"next_prompt_estimate {estimate}"
        )

    def keys(context: OrderContext) -> KeyOf:
        slack = (threshold - estimate) // context.page_size

        def key_of(node: Node, push: int) -> Key:
            return (int(_conversation_end(node) - node.start > slack), push)

        return key_of

    return keys


def _conversation_end(node: Node) -> int:
    return node.end


def _count(name: str, config: Mapping[str, Any], field: str, default: int) -> int:
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"--radix-eviction-policy-config: {name} {field} must be a whole number >= 0, got {value!r}"
        )
    return value


def _reject_unknown(name: str, config: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if unknown := sorted(set(config) - set(known)):
        raise ConfigError(f"--radix-eviction-policy-config: {name} does not know {', '.join(unknown)}")


# -- registry ---------------------------------------------------------------------------

_REGISTERED: dict[str, Callable[[Mapping[str, Any]], OrderFactory]] = {}


def register_eviction_policy(name: str, make: Callable[[Mapping[str, Any]], OrderFactory]) -> None:
    """Add a policy: `make(config)` gives what builds one order per component and tier."""
    if name in eviction_policies():
        raise ConfigError(f"eviction policy {name!r} exists already")
    _REGISTERED[name] = make


def eviction_policies() -> list[str]:
    """All names `make_order` knows."""
    return ["lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "tlru", *_REGISTERED]


def make_order(name: str, config: Mapping[str, Any] | None = None) -> OrderFactory:
    """The factory of the named policy's orders, for `RadixTree(order=...)`. ConfigError names a bad value."""
    config = dict(config or {})
    if name in _REGISTERED:
        return _REGISTERED[name](config)
    if name == "lru":
        _reject_unknown(name, config, ())
        return LruOrder
    keys = _tlru(config) if name == "tlru" else _by_name(name, config)

    def make(context: OrderContext) -> EvictionOrder:
        return HeapOrder(context, keys(context))

    return make

"""A cache to play traces on: the real tree, cache and controller over pools without memory.

A block of the trace is one page, named by one token: the tree, its orders and the cache run as in production,
only nothing is copied. Transfers end at once, in the order the controller gives them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hiradix.cache import HierarchicalCache, HostTier
from hiradix.memory import PageAllocator
from hiradix.policy.eviction import learning_policies, make_order
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.storage import Batch, GuardedStorage, Page, PageFingerprint, StorageBackend, Stores, Traits
from hiradix.transfer import HiCacheController, Runtime, StepDriver
from hiradix.tree import RadixKey, RadixTree

_PAGE = bytearray(1)


@dataclass(frozen=True)
class Tiers:
    """Capacities in tokens; 0: there is none. write_policy: of the host tier."""

    device: int
    host: int = 0
    storage: int = 0
    write_policy: str = "write_through"


@dataclass
class _Shape:
    num_layers: int = 1


@dataclass
class _DevicePool:
    shape: _Shape = field(default_factory=_Shape)
    device: str = "cpu"

    def register_layer_transfer_counter(self, counter: Any, /) -> None:
        pass


@dataclass
class _HostPool:
    page_bytes: int = 1

    def page_views(self, page: int, /) -> list[memoryview]:
        return [memoryview(_PAGE)]


class _NoCopy:
    def copy_pages(self, *pages: Any) -> None:
        pass


def _pools() -> tuple[Any, Any]:
    """A device pool and a host pool that hold nothing: what moves are names."""
    return _DevicePool(), _HostPool()


class KeyStore(StorageBackend):
    """Storage that keeps names only: `capacity` of them, least recently used first out."""

    traits = Traits(verifies=True, namespaced=True, direct=True)

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.written = 0
        self._names: dict[str, None] = {}

    def exists(self, batch: Batch) -> int:
        for i, key in enumerate(batch):
            if key not in self._names:
                return i
        return len(batch)

    def get(self, batch: Batch, into: Sequence[Page]) -> list[bool]:
        found = [key in self._names for key in batch]
        for key, hit in reversed(list(zip(batch, found))):  # a prefix's head is used later than its tail
            if hit:
                del self._names[key]
                self._names[key] = None
        return found

    def put(self, batch: Batch, pages: Sequence[Page]) -> list[bool]:
        for key in reversed(batch):
            if key not in self._names:
                self.written += 1
                self._names[key] = None
        while len(self._names) > self.capacity:
            del self._names[next(iter(self._names))]
        return [True] * len(batch)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._names.pop(key, None)

    def clear(self) -> None:
        self._names.clear()

    def close(self) -> None:
        pass


class SimulatedCache:
    """One cache of given tiers under one policy. `tick` lets every transfer end."""

    def __init__(self, policy: str, tiers: Tiers, block_tokens: int, config: Mapping[str, Any] | None = None):
        settings = dict(config or {})
        if any(name in learning_policies() for name in policy.split(",")):
            settings.setdefault("page_tokens", block_tokens)
        self.tree = RadixTree(1, order=make_order(policy, settings))
        self.device = PageAllocator(max(tiers.device // block_tokens, 1))
        self.store: KeyStore | None = None
        self._driver: StepDriver | None = None
        self.cache = HierarchicalCache(self.tree, self.device, self._host(tiers, block_tokens))

    def _host(self, tiers: Tiers, block_tokens: int) -> HostTier | None:
        if not tiers.host:
            return None
        self._driver = StepDriver()
        storage = None
        if tiers.storage:
            self.store = KeyStore(tiers.storage // block_tokens)
            guard = GuardedStorage(self.store, PageFingerprint("replay"), clock=self._driver.now)
            storage = Stores([guard])
        transport: Any = _NoCopy()
        controller = HiCacheController(
            *_pools(),
            transport=transport,
            storage=storage,
            runtime=Runtime(driver=self._driver, clock=self._driver.now),
        )
        limits = PrefetchLimits(1, threshold_tokens=1)
        write_policy = WritePolicy.from_name(tiers.write_policy)
        pages = PageAllocator(max(tiers.host // block_tokens, 1))
        return HostTier(pages, controller, write_policy, PrefetchPolicy("wait_complete", limits))

    def fetch(self, key: RadixKey, handle: Hashable) -> int:
        """Bring what storage has of a prompt, whose turn it is, to the host; blocks that came. None of them is
        held: they are for the load that comes next."""
        prefetcher = self.cache.prefetcher
        if self.store is None or prefetcher is None:
            return 0
        if prefetcher.start(handle, key, self.cache.match(key).loadable_node):
            self.settle()
        prefetcher.stop(handle)
        num_loaded = prefetcher.pop_loaded_pages(handle)
        prefetcher.abort(handle)
        return num_loaded

    def drop_tail(self, key: RadixKey, num_pages: int) -> int:
        """Let device pages at the end of a prompt's path go that nothing else uses, until so many went."""
        node, dropped = self.tree.match(key).device_node, 0
        while dropped < num_pages and node.num_device_children == 0:
            parent = node.parent
            freed = self.tree.drop_device(node)
            if parent is None or not freed:
                break
            dropped += self.cache.supply.release(freed)
            node = parent
        return dropped

    def settle(self) -> None:
        """Run every transfer under way to its end."""
        if self._driver is None:
            return
        while len(self.cache.in_flight):
            self._driver.run()
            self.cache.tick()

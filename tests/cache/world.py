"""A whole cache in one thread: real tree, pools, copies, controller; simulated time, engine, storage.

Each page's bytes are stamped with what it must hold (namespace and all tokens up to its end), and every
read of a prefix compares them, so a wrong page anywhere is seen where it is used: "miss or exact".
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch

from hiradix.cache import HierarchicalCache, HostTier
from hiradix.intents.limits import IntentLimits
from hiradix.memory import DevicePool, HostPool, KVShape, make_transport
from hiradix.policy.eviction import make_order
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.storage import StorageBackend, Traits
from hiradix.transfer import HiCacheController, Runtime, StepDriver
from hiradix.tree import Lock, RadixKey, RadixTree, Tier
from hiradix.tree.hashing import hash_pages
from tests.transfer.doubles import PoisonedPages, guarded, loads_came

PAGE_SIZE = 2
LAYERS = 2


class SimulatedStorage(StorageBackend):
    """Keeps pages in a dict; fails, forgets, lies and cuts short as `faults` tells, but never swaps bytes.

    `faults` 0..1 is the chance that a call goes wrong.
    """

    traits = Traits(verifies=True, namespaced=True, direct=True)

    def __init__(self, rng: random.Random):
        self.pages: dict[str, bytes] = {}
        self.rng = rng
        self.faults = 0.0
        self.closed = False

    def _fault(self) -> bool:
        return self.rng.random() < self.faults

    def exists(self, keys):
        if self._fault():
            raise OSError("injected: exists")
        if self._fault():
            return len(keys) + 5  # a backend that lies
        for i, key in enumerate(keys):
            if key not in self.pages:
                return i
        return len(keys)

    def get(self, keys, into):
        if self._fault():
            raise OSError("injected: get")
        answer = []
        for key, views in zip(keys, into, strict=True):
            data = self.pages.get(key)
            if data is None or self._fault():
                views[0][:4] = b"junk"  # a failed get may leave anything behind
                answer.append(False)
                continue
            at = 0
            for view in views:
                flat = view.cast("B") if view.format != "B" or view.ndim != 1 else view
                flat[:] = data[at : at + len(flat)]
                at += len(flat)
            answer.append(True)
        return answer[: self.rng.randint(0, len(answer))] if self._fault() else answer

    def put(self, keys, pages):
        if self._fault():
            raise OSError("injected: put")
        answer = []
        for key, views in zip(keys, pages, strict=True):
            if self._fault():
                answer.append(False)
                continue
            self.pages[key] = b"".join(bytes(view) for view in views)
            answer.append(True)
        return answer

    def delete(self, keys):
        for key in keys:
            self.pages.pop(key, None)

    def clear(self):
        self.pages.clear()

    def close(self):
        self.closed = True


class FaultyTransport:
    """Copies pages, except when it raises before or after having copied some."""

    def __init__(self, inner, rng: random.Random):
        self.inner = inner
        self.rng = rng
        self.faults = 0.0

    def copy_pages(self, src, dst, src_pages, dst_pages, layers=None):
        if self.rng.random() < self.faults:
            half = len(src_pages) // 2
            self.inner.copy_pages(src, dst, src_pages[:half], dst_pages[:half], layers)
            raise RuntimeError("injected: copy")
        self.inner.copy_pages(src, dst, src_pages, dst_pages, layers)


@dataclass(frozen=True)
class Setup:
    """One configuration of the world."""

    device_pages: int = 12
    host_pages: int = 16
    write_policy: str = "write_through"
    prefetch_policy: str = "timeout"
    order: str = "lru"
    layout: str = "page_first"
    threshold_tokens: int = PAGE_SIZE
    intents: IntentLimits = IntentLimits()


@dataclass(eq=False)
class Admitted:
    """A request of the next pass: its lock on what it found, and its own pages for the rest."""

    key: RadixKey
    lock: Lock
    pages: np.ndarray


@dataclass(eq=False)
class Running:
    """A request that runs: its key, its lock, and how many pages it had to compute."""

    key: RadixKey
    lock: Lock
    num_computed: int


class World:
    """See the module's docstring."""

    def __init__(self, setup: Setup, seed: int):
        self.setup = setup
        self.rng = random.Random(seed)
        self.driver = StepDriver(seed)
        shape = KVShape(LAYERS, 1, 4, 4, torch.float32)
        self.device_pool = DevicePool(shape, setup.device_pages, PAGE_SIZE)
        self.host_pool = HostPool(shape, setup.host_pages, PAGE_SIZE, layout=setup.layout)
        self.storage = SimulatedStorage(random.Random(seed + 1))
        self.stores = guarded(self.storage, self.driver.now)
        self.transport = FaultyTransport(make_transport("kernel", "cpu"), random.Random(seed + 2))
        runtime = Runtime(driver=self.driver, clock=self.driver.now)
        self.controller = HiCacheController(
            self.device_pool, self.host_pool, transport=self.transport, runtime=runtime
        )
        junk = torch.full((2, LAYERS, PAGE_SIZE, 1, 4), float("nan"))
        self.device = PoisonedPages(setup.device_pages, lambda page: self.write_page(page, junk), 1)
        self.host = PoisonedPages(setup.host_pages, self.poison_host_page)
        limits = PrefetchLimits(PAGE_SIZE, threshold_tokens=setup.threshold_tokens, timeout_base_s=0.05)
        host_tier = HostTier(
            self.host,
            self.controller,
            WritePolicy.from_name(setup.write_policy),
            PrefetchPolicy.from_name(setup.prefetch_policy, limits),
        )
        tree = RadixTree(PAGE_SIZE, order=make_order(setup.order))
        self.cache = HierarchicalCache(
            tree, self.device, host_tier, clock=self.driver.now, intents=setup.intents
        )
        self.running: list[Running] = []
        self.known: set[RadixKey] = set()
        self.gates: tuple[int, ...] = ()  # loads that the next pass waits for, as the engine keeps them
        self.num_reads = 0

    # -- stamps -------------------------------------------------------------------------

    def stamp(self, key: RadixKey, page: int) -> torch.Tensor:
        """[2, L, page_size, H, D]: what page number `page` of `key` must hold."""
        text = repr((key.extra_key, key.cache_salt, key.tokens[: (page + 1) * PAGE_SIZE].tolist()))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        base = float(int.from_bytes(digest[:3], "big"))
        return base + torch.arange(2 * LAYERS * PAGE_SIZE * 4, dtype=torch.float32).view(
            2, LAYERS, PAGE_SIZE, 1, 4
        )

    def write_page(self, page: int, data: torch.Tensor) -> None:
        rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        for layer in range(LAYERS):
            self.device_pool.k_buffer[layer][rows] = data[0, layer]
            self.device_pool.v_buffer[layer][rows] = data[1, layer]

    def poison_host_page(self, page: int) -> None:
        for view in self.host_pool.page_views(page):
            view.cast("B")[:] = b"\xff" * view.nbytes

    def read_prefix(self, key: RadixKey, pages: np.ndarray) -> None:
        """Check that device `pages` hold the first pages of `key`, to the bit."""
        for i, page in enumerate(pages.tolist()):
            rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            want = self.stamp(key, i)
            for layer in range(LAYERS):
                assert torch.equal(self.device_pool.k_buffer[layer][rows], want[0, layer]), (
                    "K",
                    layer,
                    i,
                    page,
                )
                assert torch.equal(self.device_pool.v_buffer[layer][rows], want[1, layer]), (
                    "V",
                    layer,
                    i,
                    page,
                )
            self.num_reads += 1

    # -- the engine's moves ---------------------------------------------------------------

    def run_request(self, key: RadixKey, *, load: bool = True) -> Running | None:
        """One request, admitted and computed in a pass of its own; None when that cannot be. Holds a lock."""
        self.cache.tick()
        admitted = self.admit(key, load=load)
        done = self.run_pass([] if admitted is None else [admitted])
        return done[0] if done else None

    def admit(self, key: RadixKey, *, load: bool = True) -> Admitted | None:
        """Match, load back, lock and allocate; None when the device has no room."""
        cache, tree = self.cache, self.cache.tree
        match = cache.match(key)
        if load:
            cache.load_back(match)
            match = cache.match(key)
        lock = tree.lock(match.device_node, Tier.DEVICE)
        need = len(key) // PAGE_SIZE - lock.node.end
        cache.make_room(need)
        pages = self.device.alloc(need)
        if pages is None:
            tree.unlock(lock)
            return None
        return Admitted(key, lock, pages)

    def run_pass(self, batch: list[Admitted]) -> list[Running]:
        """Start the loads, wait for them as the engine does, compute the batch and insert it."""
        slot = self.cache.start_loading()
        self.gates = () if slot < 0 else (*self.gates, slot)
        if not batch:
            return []
        if not loads_came(self.controller.layer_done_counter, self.gates):
            self.undo(batch)
            return []
        self.gates = ()
        for one in batch:
            self.read_prefix(one.key, self.cache.tree.pages(one.lock.node, Tier.DEVICE))
        return [self._compute(one) for one in batch]

    def undo(self, batch: list[Admitted]) -> None:
        """Give back what admitted requests hold, the last one first."""
        for one in reversed(batch):
            self.device.free(one.pages)
            self.cache.tree.unlock(one.lock)

    def _compute(self, one: Admitted) -> Running:
        tree, start = self.cache.tree, one.lock.node.end
        for i, page in enumerate(one.pages.tolist()):
            self.write_page(page, self.stamp(one.key, start + i))
        self.cache.count_use(one.lock.node)
        lock = self.cache.insert(one.key, one.pages, at=one.lock)
        assert lock.node.end == start + len(one.pages), "blocked by a failed load after a pass that ran"
        tree.unlock(one.lock)
        self.read_prefix(one.key, tree.pages(lock.node, Tier.DEVICE))
        self.known.add(one.key)
        return Running(one.key, lock, len(one.pages))

    def release(self, running: Running) -> None:
        self.cache.tree.unlock(running.lock)

    # -- checks ---------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant, and each device page in exactly one place."""
        self.cache.check()
        self.check_conservation(0)
        resident = self.cache.tree.all_pages(Tier.DEVICE)
        assert len(np.unique(resident)) == len(resident), "a device page is in two nodes"
        total = len(resident) + self.device.available
        assert total == self.setup.device_pages, (len(resident), self.device.available)

    def check_conservation(self, num_held: int) -> None:
        """What an engine asserts after every step."""
        self.cache.supply.check_conservation(num_held, self.cache.in_flight.num_owned)

    def check_storage(self) -> None:
        """Every stored page holds, to the bit, what its name says. Uses pages of empty pools."""
        wanted = {}
        for key in self.known:
            rows = self.cache.tree.rows(key, self.cache.tree.root, 0, len(key) // PAGE_SIZE)
            wanted.update({h.hex(): (key, i) for i, h in enumerate(hash_pages(rows))})
        assert set(self.storage.pages) <= set(wanted), "a page is stored under a name no prefix has"
        for name, stored in self.storage.pages.items():
            key, page = wanted[name]
            self.write_page(1, self.stamp(key, page))
            self.transport.inner.copy_pages(self.device_pool, self.host_pool, np.array([1]), np.array([0]))
            assert stored == b"".join(bytes(v) for v in self.host_pool.page_views(0)), (key, page)

    def settle(self) -> None:
        """Faults stop; everything in flight ends, but what waits for room that others have."""
        self.storage.faults = self.transport.faults = 0.0
        self.driver.held.clear()
        assert self.cache.drain(1000.0), self.cache.in_flight.tickets()
        for _ in range(3):
            self.driver.run()
            self.cache.tick()
        assert len(self.cache.in_flight) == 0 and self.controller.is_idle
        assert self.cache.prefetcher is not None
        assert len(self.cache.prefetcher) == self.cache.prefetcher.room.num_short

    def assert_drained(self) -> None:
        """Nothing held: after dropping the tree, every page is free again (promise 6). All requests end."""
        self.settle()
        self.cache.prefetcher.stop_all()
        self.check()
        tree = self.cache.tree
        for tier in Tier:
            assert tree.protected_pages(tier) == 0, (
                f"{tier.name}: {tree.protected_pages(tier)} pages locked at idle"
            )
        self.cache.reset()
        self.check()
        self.check_storage()
        assert self.device.available == self.setup.device_pages
        assert self.host.available == self.setup.host_pages

"""A cache of several components in one thread: real tree, allocators, controller, and pages with names.

A page of a simulated pool is a number per layer: the name of the prefix it belongs to. Whoever frees a page
overwrites it. Every match is read back, full, window and state, in both tiers: each page must hold the name
of the prefix that ends with it, or it should not have been matched.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from hiradix.cache import HierarchicalCache, HostTier
from hiradix.cache.agreement import Agree
from hiradix.memory import PageAllocator
from hiradix.policy.eviction import make_order
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.transfer import HiCacheController, JobKind, PoolPair, Runtime, StepDriver
from hiradix.tree import Component, DeadLeaf, Granularity, Lock, Node, RadixKey, RadixTree, Tier
from tests.transfer.doubles import Pool, Transport, loads_came
from tests.tree.world import POLICY_CONFIG, Draw, components_of

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAYERS = {"full": (1, 3), "window": (0, 2), "state": (4,)}  # which of the model's layers each kind has
MAX_PAGES = 7
GONE = -7


@dataclass(frozen=True)
class Setup:
    """One configuration. window: see `components_of`."""

    page_size: int = 1
    window: str = "above"
    has_state: bool = False
    order: str = "lru"
    write_policy: str = "write_through"
    dead_leaf: str = "unusable"
    long_path: int = 16
    device_pages: tuple[int, int, int] = (20, 14, 5)
    host_pages: tuple[int, int, int] = (24, 14, 6)

    def components(self) -> tuple[Component, ...]:
        return components_of(self.page_size, self.window, self.has_state)


class Source(PageAllocator):
    """Overwrites what is freed, so that whoever still reads it is found out."""

    def __init__(self, pool: Pool, num_pages: int, first_page: int):
        super().__init__(num_pages, first_page)
        self.pool = pool

    def free(self, pages):
        super().free(pages)
        self.pool.data[pages] = GONE


class WindowSource(Source):
    """Window pages of the device: a model finds them beside full pages only."""

    def __init__(self, pool: Pool, num_pages: int, num_full_pages: int):
        super().__init__(pool, num_pages, 1)
        self.window_of = np.zeros(num_full_pages + 1, np.int32)
        self.full_of = np.zeros(num_pages + 1, np.int32)

    def pair(self, full, window):
        before = self.full_of[window]
        self.window_of[before] = 0
        assert not self.window_of[full].any(), f"full pages {full} have window pages already"
        self.window_of[full], self.full_of[window] = window, full

    def free(self, pages):
        super().free(pages)
        self.window_of[self.full_of[pages]] = 0
        self.full_of[pages] = 0


@dataclass(eq=False)
class Admitted:
    """A request of the next pass: its lock on what it found, and its own pages, per component."""

    key: RadixKey
    lock: Lock
    pages: list[np.ndarray]


@dataclass(eq=False)
class Running:
    key: RadixKey
    lock: Lock


class ComponentWorld:
    """See the module's docstring."""

    def __init__(self, setup: Setup, seed: int, agree: Agree | None = None):
        self.setup, self.size = setup, setup.page_size
        self.driver = StepDriver(seed)
        self.components = setup.components()
        order = make_order(setup.order, POLICY_CONFIG.get(setup.order))
        granularity, rule = Granularity(setup.long_path), DeadLeaf(setup.dead_leaf)
        self.tree = RadixTree(
            self.size, self.components, order=order, granularity=granularity, dead_leaf=rule
        )
        both = dict(zip(LAYERS, zip(setup.device_pages, setup.host_pages, strict=True), strict=True))
        counts = [both[c.name] for c in self.components]
        num_layers = [len(LAYERS[c.name]) for c in self.components]
        self.pools = [
            (Pool(device + 1, layers), Pool(host, layers))
            for (device, host), layers in zip(counts, num_layers, strict=True)
        ]
        self.num_pages = counts
        self.device = [self._device_source(c) for c in range(len(self.components))]
        self.host = [Source(self.pools[c][HOST], counts[c][HOST], 0) for c in range(len(self.components))]
        self.rng = random.Random(seed)
        self.faults = 0.0
        self.transport = Transport()
        self.transport.before = self._maybe_fail
        self.controller = self._make_controller()
        limits = PrefetchLimits(self.size, threshold_tokens=1)
        tier = HostTier(
            tuple(self.host),
            self.controller,
            WritePolicy.from_name(setup.write_policy),
            PrefetchPolicy.from_name("best_effort", limits),
        )
        self.cache = HierarchicalCache(self.tree, tuple(self.device), tier, agree=agree)
        self.names: dict[tuple, int] = {}
        self.running: list[Running] = []
        self.known: list[RadixKey] = []
        self.gates: tuple[int, ...] = ()
        self.num_hits = self.num_computed = 0

    def _device_source(self, c: int) -> Source:
        pool, num_pages = self.pools[c][DEVICE], self.num_pages[c][DEVICE]
        if self.components[c].name == "window":
            return WindowSource(pool, num_pages, self.num_pages[0][DEVICE])
        return Source(pool, num_pages, 1)

    def _make_controller(self) -> HiCacheController:
        present = [layer for c in self.components for layer in LAYERS[c.name]]
        number = {layer: i for i, layer in enumerate(sorted(present))}
        pairs = [
            PoolPair(*pools, self.transport, [number[layer] for layer in LAYERS[c.name]])
            for c, pools in zip(self.components, self.pools, strict=True)
        ]
        return HiCacheController.over(pairs, self._runtime())

    def _runtime(self) -> Runtime:
        return Runtime(driver=self.driver, clock=self.driver.now)

    def _maybe_fail(self, src, dst, sources, targets, layers) -> None:
        if self.rng.random() < self.faults:
            half = len(sources) // 2
            dst.data[targets[:half]] = src.data[sources[:half]]
            raise RuntimeError("injected: copy")

    # -- names --------------------------------------------------------------------------

    def key(self, draw: Draw, start: RadixKey | None = None, limit: int = MAX_PAGES) -> RadixKey:
        """A key over few different pages, often one of before; or a longer one that starts with `start`."""
        if start is None and self.known and draw(2):
            return self.known[draw(len(self.known))]
        num_old = 0 if start is None else len(start) // self.size
        pages = np.zeros((1 + draw(max(1, limit - num_old)), self.size), np.int64)
        for i in range(len(pages)):
            pages[i, (i * 7) % self.size] = draw(2)
        old = np.empty(0, np.int64) if start is None else start.tokens[: num_old * self.size]
        extra = ("tenant" if draw(4) == 0 else None) if start is None else start.extra_key
        return RadixKey(np.concatenate([old, pages.ravel()]), extra)

    def names_of(self, key: RadixKey) -> list[int]:
        """Names of the key's pages: equal iff the pages and everything before them are."""
        name: object = key.extra_key
        found = []
        for page in range(len(key) // self.size):
            row = key.tokens[page * self.size : (page + 1) * self.size].tobytes()
            name = self.names.setdefault((name, row), len(self.names) + 1)
            found.append(name)
        return found

    def stamp(self, c: int, page: int, name: int) -> None:
        self.pools[c][DEVICE].data[page] = name * 10 + c

    # -- reading back ---------------------------------------------------------------------

    def read_device(self, key: RadixKey, node: Node) -> None:
        """A boundary at `node` has all it needs on the device, through the map where there is one."""
        names = self.names_of(key)
        full = self.tree.pages(node, DEVICE)
        self._compare(0, DEVICE, full, names[: node.end])
        for c in range(1, len(self.components)):
            kind = self.components[c]
            if not kind.per_page:
                if node.end:
                    self._compare(c, DEVICE, node.residency(c, DEVICE).pages, names[node.end - 1 : node.end])
                continue
            start = max(0, node.end - kind.reach)
            source = self.device[c]
            assert isinstance(source, WindowSource)
            self._compare(c, DEVICE, source.window_of[full[start:]], names[start : node.end])

    def read_loadable(self, key: RadixKey, node: Node) -> None:
        """A boundary at `node` has all it needs in one of the tiers; the host's counts while loads run."""
        names, is_loading = self.names_of(key), bool(self.cache.in_flight.tickets(JobKind.LOAD))
        for c, kind in enumerate(self.components):
            floor = self.tree.floor(node, c) if kind.per_page else node.start
            for n in self.tree.path(node, floor):
                held = [t for t in Tier if n.resident(t, c)]
                assert held, f"component {c} of {n} is nowhere"
                for tier in held[-1:] if is_loading else held:
                    own = names[n.start : n.end] if kind.per_page else names[n.end - 1 : n.end]
                    self._compare(c, tier, n.residency(c, tier).pages, own)

    def _compare(self, c: int, tier: Tier, pages: np.ndarray, names: list[int]) -> None:
        data = self.pools[c][tier].data[pages]
        want = np.array(names, np.int64)[:, None] * 10 + c
        kind = self.components[c].name
        assert (data == want).all(), f"{kind} pages {pages} in {tier.name}: {data} != {want}"

    # -- the engine's moves ---------------------------------------------------------------

    def admit(self, key: RadixKey, load: bool = True) -> Admitted | None:
        """Match, load back, lock and allocate; None when the device has no room."""
        cache = self.cache
        match = cache.match(key)
        self.read_loadable(key, match.loadable_node)
        if load and cache.load_back(match) is not None:
            assert cache.match(key).device_node.end >= match.loadable_node.end, "loaded, and not usable"
        return self.take(key, self.tree.lock(cache.match(key).device_node, DEVICE))

    def take(self, key: RadixKey, lock: Lock) -> Admitted | None:
        """Pages of every component for what `key` has behind `lock`, given back if there are none."""
        need = len(key) // self.size - lock.node.end
        pages: list[np.ndarray] = []
        for c, kind in enumerate(self.components):
            count = need if kind.per_page else min(need, 1)
            self.cache.make_room(count, c)
            own = self.device[c].alloc(count)
            if own is None:
                for other, given in enumerate(pages):
                    self.device[other].free(given)
                self.tree.unlock(lock)
                return None
            pages.append(own)
        return Admitted(key, lock, pages)

    def undo(self, batch: list[Admitted]) -> None:
        for one in reversed(batch):
            for c, pages in enumerate(one.pages):
                self.device[c].free(pages)
            self.tree.unlock(one.lock)

    def run_pass(self, batch: list[Admitted], draw: Draw) -> list[Running]:
        """Start the loads, wait for them layer by layer, compute the batch and insert it."""
        slot = self.cache.start_loading()
        self.gates = () if slot < 0 else (*self.gates, slot)
        if not batch:
            return []
        if not self.loads_came():
            self.undo(batch)
            return []
        self.gates = ()
        for one in batch:
            self.read_device(one.key, one.lock.node)
            self.num_hits += one.lock.node.end
        return [self.compute(one, draw) for one in batch]

    def loads_came(self) -> bool:
        """Wait for what the pass reads; False if it cannot run."""
        return loads_came(self.controller.layer_done_counter, self.gates)

    def compute(self, one: Admitted, draw: Draw) -> Running:
        """Fill the request's pages, give up part of the window behind the last `reach` pages, insert."""
        start, names, pages = one.lock.node.end, self.names_of(one.key), list(one.pages)
        end = start + len(pages[0])
        self.num_computed += len(pages[0])
        for c, kind in enumerate(self.components):
            for i, page in enumerate(pages[c].tolist()):
                self.stamp(c, page, names[start + i] if kind.per_page else names[end - 1])
            if kind.name == "window":
                gap = min(draw(3), max(0, len(pages[c]) - kind.reach))
                source = self.device[c]
                source.pair(pages[0], pages[c])
                source.free(pages[c][:gap])
                pages[c] = pages[c][gap:]
        self.cache.count_use(one.lock.node)
        lock = self.cache.insert(one.key, pages[0], at=one.lock, others=pages[1:])
        assert lock.node.end == end, "blocked by a failed load after a pass that ran"
        self.tree.unlock(one.lock)
        self.read_device(one.key, lock.node)
        self.known = [*self.known[-5:], one.key]
        return Running(one.key, lock)

    # -- checks ---------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant, each page in one place per component and tier, and the map in step."""
        self.cache.check()
        for c in range(len(self.components)):
            resident = self.tree.all_pages(DEVICE, c)
            assert len(np.unique(resident)) == len(resident), f"component {c}: a page is in two nodes"
            total, free = self.num_pages[c][DEVICE], self.device[c].available
            assert len(resident) + free == total, f"{c}: {len(resident)} tree + {free} free != {total}"
            source = self.device[c]
            if isinstance(source, WindowSource):
                self._check_map(source, c)

    def _check_map(self, source: WindowSource, c: int) -> None:
        wanted = np.zeros_like(source.window_of)
        for node in self.tree.nodes():
            beside = node.residency(c, DEVICE).pages
            if beside is not None:
                wanted[node.device.pages] = beside
        assert np.array_equal(wanted, source.window_of), f"map {source.window_of}, tree {wanted}"

    def settle(self) -> None:
        self.faults = 0.0
        for _ in range(4):  # a step may give room to one who waited for it
            assert self.cache.drain(1000.0), self.cache.in_flight.tickets()
            self.driver.run()
            self.cache.tick()
        assert len(self.cache.in_flight) == 0 and self.controller.is_idle

    def assert_drained(self) -> None:
        """Nothing held; after a reset every page of every pool is free again. All requests end."""
        self.settle()
        assert self.cache.prefetcher is not None
        self.cache.prefetcher.stop_all()
        self.check()
        for tier in Tier:
            for c in range(len(self.components)):
                assert self.tree.protected_pages(tier, c) == 0, (tier, c)
        self.cache.reset()
        self.check()
        for c, (device, host) in enumerate(self.num_pages):
            assert (self.device[c].available, self.host[c].available) == (device, host)

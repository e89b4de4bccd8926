"""Simulated ranks: each has its own cache, speed, clock, pool sizes, page order, storage and faults.

All play the same story, as engines of one tensor parallel group do: the story's random numbers are
replicated, everything else is drawn from a rank's own. At every collective call the ranks must be in the
same state.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hiradix.cache import HierarchicalCache, HostTier, least
from hiradix.errors import CacheError
from hiradix.policy.eviction import learning_policies, make_order
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.uses import HINTS, Finished
from hiradix.policy.write_policy import WritePolicy
from hiradix.transfer import (
    FOUR_WORKERS,
    TWO_WORKERS,
    HiCacheController,
    JobKind,
    Runtime,
    StepDriver,
    TransferLimits,
)
from hiradix.tree import EvictionOrder, Lock, RadixKey, RadixTree, Tier
from tests.ranks.lockstep import Lockstep
from tests.transfer.doubles import NORMAL, NUM_LAYERS, MemoryStorage, Pool, Transport, guarded, loads_came

PAGE_SIZE = 1
PAGE_TOKENS = 512  # of a page, to policies that learn: each has a ghost
POISON = -7
MAX_WAITS = 1000  # between two collective calls: who waits for what is there waits for ever


@dataclass(frozen=True)
class Setup:
    """One configuration of the ranks. Host pools have `host_pages` or a few more, by rank."""

    num_ranks: int = 2
    device_pages: int = 12
    host_pages: int = 16
    write_policy: str = "write_through"
    prefetch_policy: str = "timeout"
    replicated: bool = False  # all ranks have the same pages (MLA), one stores for all
    order: str = "lru"


class ScatteredPages:
    """A page allocator that hands out ids in an order of its own. `on_free(page)` is called for each."""

    def __init__(self, num_pages: int, rng: random.Random, on_free: Callable[[int], None]):
        self.num_pages = num_pages
        self._free = list(range(num_pages))
        self._rng = rng
        self._on_free = on_free

    @property
    def available(self) -> int:
        return len(self._free)

    def alloc(self, num_pages: int) -> np.ndarray | None:
        if num_pages > len(self._free):
            return None
        self._rng.shuffle(self._free)
        taken = [self._free.pop() for _ in range(num_pages)]
        return np.array(taken, np.int32)

    def free(self, pages: Any) -> None:
        for page in pages.tolist():
            assert page not in self._free, f"double free of {page}"
            self._free.append(page)
            self._on_free(page)


class RankDriver(StepDriver):
    """Counts how often its rank waits without a collective call in between."""

    num_waits = 0

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        self.num_waits += 1
        assert self.num_waits < MAX_WAITS, "a rank waits again and again, and makes no collective call"
        return super().wait_for(predicate, timeout_s)


@dataclass(eq=False)
class Admitted:
    key: RadixKey
    lock: Lock
    pages: np.ndarray


class Rank:
    """One rank: its cache and what surrounds it. Methods named do_* are the story's moves."""

    def __init__(self, number: int, seed: int, setup: Setup, agree: Any, store: dict[str, bytes] | None):
        self.number, self.setup = number, setup
        self.story = random.Random(seed)
        self.own = own = random.Random(seed * 1009 + number + 1)
        self.agree = agree
        self.driver = RankDriver(own.getrandbits(30), max_step_s=own.choice([0.001, 0.01, 0.05]))
        self.speed = own.choice([1, 2, 6])
        self.page_s = random.Random(seed).choice([0.002, 0.02, 0.2])  # what computing a page takes
        offset = own.uniform(0, 1000)

        def own_clock() -> float:
            return self.driver.now() + offset

        self.clock = own_clock
        host_pages = setup.host_pages + own.randint(0, 5)
        self.device_pool, self.host_pool = Pool(setup.device_pages), Pool(host_pages)
        self.faults = 0.0
        self.transport = Transport()
        self.transport.before = self._copy_fault
        self.store = store
        self.storage = self._new_storage()
        workers = own.choice([FOUR_WORKERS, TWO_WORKERS])
        limits = TransferLimits(queued_jobs=4, batch_pages=3, copy_pages=3, gate_timeout_s=0.4)
        self.controller = HiCacheController(
            self.device_pool, self.host_pool, transport=self.transport,
            runtime=Runtime(driver=self.driver, clock=self.clock, limits=limits, workers=workers),
        )  # fmt: skip
        self.controller.backs_up = number == 0 or not setup.replicated
        self.device = ScatteredPages(setup.device_pages, own, lambda page: _poison(self.device_pool, page))
        self.host = ScatteredPages(host_pages, own, lambda page: _poison(self.host_pool, page))
        self.cache = self._make_cache()
        self.locks: list[Lock] = []
        self.handles: dict[int, RadixKey] = {}
        self.next_handle = 0
        self.gates: tuple[int, ...] = ()
        self.said: list[Any] = []
        self.num_read = 0

    def _make_cache(self) -> HierarchicalCache:
        limits = PrefetchLimits(PAGE_SIZE, threshold_tokens=1, timeout_base_s=0.05)
        tier = HostTier(
            self.host, self.controller,
            WritePolicy.from_name(self.setup.write_policy),
            PrefetchPolicy.from_name(self.setup.prefetch_policy, limits),
        )  # fmt: skip
        learns = not {*self.setup.order.split(",")}.isdisjoint(learning_policies())
        order = make_order(self.setup.order, {"page_tokens": PAGE_TOKENS} if learns else None)
        return HierarchicalCache(RadixTree(PAGE_SIZE, order=order), self.device, tier, self.clock, self.agree)

    # -- what differs -----------------------------------------------------------------------

    def _new_storage(self) -> MemoryStorage:
        storage = MemoryStorage()
        storage.before = self._storage_fault
        if self.store is not None:
            storage.pages = self.store
        return storage

    def _faulty(self) -> bool:
        return self.own.random() < self.faults

    def _copy_fault(self, *args: Any) -> None:
        if self._faulty():
            raise RuntimeError("copy")

    def _storage_fault(self, call: str, keys: Sequence[str]) -> Any:
        if not self._faulty():
            return NORMAL
        if self.own.random() < 0.4:
            raise OSError(call)
        n = len(keys)
        if call == "exists":
            return self.own.choice([0, -1, n + 1, None, self.own.randint(0, n)])
        return self.own.choice([None, [False] * n, [True] * (n + 1), [False]])

    def _drift(self) -> None:
        """The rank's own weather: some worker steps; faults and hangs that come and go."""
        own, share = self.own, 1 / self.setup.num_ranks
        for _ in range(own.randint(0, 3 * self.speed)):
            self.driver.step()
        if own.random() < 0.1:
            self.faults = own.choice([0.05, 0.4]) if own.random() < share else 0.0
        if own.random() < (0.2 if self.driver.held else 0.04 * share):
            names = sorted({w.name for w in self.controller._job_table.workers.values()})
            self.driver.held = set() if self.driver.held else {own.choice(names)}
        if own.random() < 0.005 * share and self.store is None:
            self.storage.pages.clear()

    def _take_a_while(self) -> None:
        """Ranks do not read their clocks at the same moment."""
        self.driver._now_s += self.own.uniform(0, 0.03)

    # -- stamps -----------------------------------------------------------------------------

    def stamp(self, key: RadixKey, page: int) -> Any:
        """What page number `page` of `key` holds on this rank: one number per layer."""
        space = repr((key.extra_key, key.cache_salt)).encode()
        name = zlib.crc32(np.asarray(key.tokens[: page + 1], np.int64).tobytes(), zlib.crc32(space))
        return (name * 16 + (0 if self.setup.replicated else self.number)) * 8 + np.arange(NUM_LAYERS)

    def read(self, key: RadixKey, pages: np.ndarray) -> None:
        for at, page in enumerate(pages.tolist()):
            assert (self.device_pool.data[page] == self.stamp(key, at)).all(), (self.number, key, at)
            self.num_read += 1

    # -- the story --------------------------------------------------------------------------

    def live(self, num_moves: int) -> None:
        names, weights = list(MOVES), list(MOVES.values())
        if self.story.random() < 0.8:
            self.do_attach()
        for _ in range(num_moves):
            self._drift()
            getattr(self, f"do_{self.story.choices(names, weights)[0]}")()
        self.end()

    def key(self) -> RadixKey:
        tokens = [self.story.choice([0, 0, 1]) + 2 * at for at in range(self.story.randint(1, 9))]
        return RadixKey(tokens, self.story.choice([None, None, None, "tenant"]))

    def do_tick(self) -> None:
        self.cache.tick()

    def do_request(self) -> None:
        """Requests of one scheduler step: match, load back, admit; one pass; insert."""
        self.cache.tick()
        batch = [self._admit(self.key()) for _ in range(self.story.randint(1, 2))]
        admitted = [one for one in batch if one is not None]
        slot = self.cache.start_loading()
        if slot < 0:
            self.gates = ()
        elif slot not in self.gates:
            self.gates += (slot,)
        if not admitted:
            return
        if self._pass_failed():
            for one in reversed(admitted):
                self.device.free(one.pages)
                self.cache.tree.unlock(one.lock)
            return
        waited, self.gates = bool(self.gates), ()
        for one in admitted:
            self.read(one.key, self.cache.tree.pages(one.lock.node, Tier.DEVICE))
        num_pages = sum(len(one.pages) for one in admitted)
        if not waited:
            self.cache.no_regret.computed(num_pages, num_pages * self.page_s * self.own.uniform(0.7, 1.3))
        for one in admitted:
            self._compute(one)

    def _admit(self, key: RadixKey) -> Admitted | None:
        cache = self.cache
        match = cache.match(key)
        self.said.append(("load", cache.load_back(match)))
        match = cache.match(key)
        lock = cache.tree.lock(match.device_node, Tier.DEVICE)
        need = len(key) - lock.node.end
        cache.make_room(need)
        pages = self.device.alloc(need)
        if pages is None:
            cache.tree.unlock(lock)
            return None
        return Admitted(key, lock, pages)

    def _pass_failed(self) -> bool:
        """Wait for the loads as a forward pass does; True on every rank if they failed on one."""
        gate = self.controller.layer_done_counter
        ok = loads_came(gate, self.gates)
        usable = [int(gate.error(slot) is None) for slot in self.gates[:8]]
        agreed, *usable_everywhere = least(self.agree, int(ok), *usable)
        if not agreed:
            kept = zip(self.gates, usable_everywhere, strict=True)
            self.gates = tuple(slot for slot, usable_slot in kept if usable_slot)
        self.said.append(("pass", agreed))
        return not agreed

    def _compute(self, one: Admitted) -> None:
        start, tree = one.lock.node.end, self.cache.tree
        for at, page in enumerate(one.pages.tolist()):
            self.device_pool.data[page] = self.stamp(one.key, start + at)
        self.cache.count_use(one.lock.node)
        lock = self.cache.insert(one.key, one.pages, at=one.lock, ended=self._ended(one.key))
        tree.unlock(one.lock)
        self.read(one.key, tree.pages(lock.node, Tier.DEVICE))
        self.locks.append(lock)

    def _ended(self, key: RadixKey) -> Finished | None:
        """What a policy that learns is told of a request; now and then also a client's hint."""
        learner = self.cache.learner
        if learner is None:
            return None
        if self.story.random() < 0.2:
            learner.hint_prefix(self.cache.tree, self.key(), self.story.choice(HINTS))
        return Finished(len(key) * PAGE_TOKENS, self.story.choice([1, 50, 900]))

    def do_finish(self) -> None:
        if self.locks:
            self.cache.tree.unlock(self.locks.pop(self.story.randrange(len(self.locks))))

    def do_prefetch(self) -> None:
        self.cache.tick()
        key, handle = self.key(), self.next_handle
        self.next_handle += 1
        self._take_a_while()
        assert self.cache.prefetcher is not None
        self.cache.prefetcher.start(handle, key, self.cache.match(key).loadable_node)
        self.handles[handle] = key

    def do_progress(self) -> None:
        self.cache.tick()
        self._take_a_while()
        assert self.cache.prefetcher is not None
        for handle in list(self.handles):
            go_on = self.cache.prefetcher.progress(handle)
            self.said.append(("go on", handle, go_on))
            if go_on:
                self.said.append(self.cache.prefetcher.pop_loaded_pages(handle))
                if self.story.random() < 0.7:  # it runs
                    del self.handles[handle]
                    self.cache.prefetcher.abort(handle)

    def do_reorder(self) -> None:
        handles = self.story.sample(list(self.handles), self.story.randint(0, len(self.handles)))
        assert self.cache.prefetcher is not None
        self.cache.prefetcher.in_order(handles)

    def do_abort(self) -> None:
        if self.handles:
            handle = self.story.choice(list(self.handles))
            del self.handles[handle]
            assert self.cache.prefetcher is not None
            self.cache.prefetcher.abort(handle)

    def do_evict(self) -> None:
        self.said.append(("evicted", self.cache.evict(self.story.randint(1, 4))))

    def do_attach(self) -> None:
        """A rank's backend may refuse to open: then no rank has storage."""
        refuses = self.own.random() < 0.3 / self.setup.num_ranks
        stores = None if refuses else guarded(self.storage, self.clock)
        self._try("attach", lambda: self.cache.attach_storage(stores))

    def do_detach(self) -> None:
        self._try("detach", lambda: self.cache.detach_storage(0.5))

    def do_reset(self) -> None:
        while self.locks:
            self.cache.tree.unlock(self.locks.pop())
        self.handles.clear()
        self._try("reset", lambda: self.cache.reset(0.5))

    def do_drain(self) -> None:
        self.said.append(("drained", self.cache.drain(0.3)))

    def _try(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except CacheError:
            self.said.append((what, "refused"))
        else:
            self.said.append((what, "done"))

    def end(self) -> None:
        """The weather clears: everything ends and every page comes back."""
        self.faults = 0.0
        self.driver.held = set()
        while self.locks:
            self.cache.tree.unlock(self.locks.pop())
        assert self.cache.prefetcher is not None
        for handle in list(self.handles):
            self.cache.prefetcher.abort(handle)
        assert self.cache.drain(1000.0)
        for _ in range(3):  # pages of failed loads that locked each other leave one after the other
            self.cache.tick()
        assert len(self.cache.prefetcher) == 0 and self.controller.is_idle
        self.cache.check()
        assert all(self.cache.tree.protected_pages(tier) == 0 for tier in Tier)
        self.cache.reset()
        assert (self.device.available, self.host.available) == (self.device.num_pages, self.host.num_pages)

    # -- what must be the same --------------------------------------------------------------

    def dump(self) -> list[Any]:
        """The tree's shape, residency, locks and eviction order, what is in flight, and all decisions."""
        cache, tree = self.cache, self.cache.tree
        nodes = [
            (
                n.start, n.end, n.row, n.created, n.hit_count, n.stored,
                n.device.lock_ref, -1 if n.device.pages is None else len(n.device.pages),
                n.host.lock_ref, -1 if n.host.pages is None else len(n.host.pages),
            )
            for n in tree.nodes()
        ]  # fmt: skip
        orders = [standing(tree._residencies.orders[0][tier]) for tier in Tier]
        flights = [list(cache.in_flight.of_kind(kind)) for kind in JobKind]
        assert cache.prefetcher is not None and cache.supply.host is not None
        prefetches: list[Any] = [
            (p.phase, p.asked_pages, p.loaded_pages, p.stopped, p.end_page, p.found_nothing, len(p.tickets))
            for p in cache.prefetcher._running
        ]
        waiting = [(p.handle, p.phase, p.lock is None, p.wants_hold) for p in cache.prefetcher._waiting]
        reserved = cache.prefetcher.room
        prefetches = [prefetches, waiting, reserved.reserved_pages(), reserved.num_short]
        room = (self.device.available, cache.supply.host.available)
        gate = cache.no_regret
        return [nodes, orders, flights, prefetches, room, cache.counters, self.said, self.gates,
                (self.controller.storage_attached, gate.num_refused, gate.num_probes)]  # fmt: skip


MOVES = {
    "tick": 40, "request": 34, "finish": 22, "prefetch": 12, "progress": 12, "reorder": 2, "abort": 3,
    "evict": 5, "attach": 6, "detach": 2, "reset": 2, "drain": 4,
}  # fmt: skip


def standing(order: EvictionOrder) -> tuple[Any, ...]:
    """Who is in an order, and who leaves it one after the other."""
    leaving = [(e.node.created, e.node.end) for e in order.victims(1 << 30)]  # type: ignore[union-attr]
    return order.num_pages, sorted((e.node.created, e.node.end) for e in order), leaving  # type: ignore[union-attr]


def _poison(pool: Pool, page: int) -> None:
    pool.data[page] = POISON


class Ranks:
    """All ranks of one seed, and the comparison at every collective call."""

    def __init__(self, seed: int, setup: Any):
        self.lockstep = Lockstep(setup.num_ranks, seed, self._compare)
        self.ranks: list[Any] = []
        self._make = self._makers(seed, setup)

    def _makers(self, seed: int, setup: Any) -> list[Callable[[], Any]]:
        """What builds each rank, on a thread of its own."""
        store: dict[str, bytes] | None = {} if setup.replicated else None
        return [
            lambda number=number: Rank(number, seed, setup, self.agree_of(number), store)
            for number in range(setup.num_ranks)
        ]

    def agree_of(self, number: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda vector: self.lockstep.agree(number, vector)

    def play(self, num_moves: int) -> Ranks:
        def life(make: Callable[[], Any]) -> Callable[[], None]:
            def body() -> None:
                rank = make()  # building a cache makes collective calls too
                self.ranks.append(rank)
                rank.live(num_moves)

            return body

        self.lockstep.run([life(make) for make in self._make])
        return self

    @property
    def num_rank_ticks(self) -> int:
        return self.lockstep.num_calls * len(self._make)

    def _compare(self) -> None:
        """Time passes for all while they wait for each other; their states are the same."""
        if len(self.ranks) < len(self._make):
            return
        now_s = max(rank.driver.now() for rank in self.ranks)
        first, *others = (rank.dump() for rank in self.ranks)
        for rank in self.ranks:
            rank.driver._now_s, rank.driver.num_waits = now_s, 0
            rank.said.clear()
        for rank, other in zip(self.ranks[1:], others, strict=True):
            for part, one, two in zip(PARTS, first, other, strict=True):
                assert one == two, f"{part}: rank {self.ranks[0].number} {one}, rank {rank.number} {two}"


PARTS = ("nodes", "orders", "flights", "prefetches", "room", "counters", "decisions", "gates", "others")

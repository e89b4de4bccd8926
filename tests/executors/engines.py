"""Two engines over the one planner, which differ in what carries its orders out, and what both can be told.

`LocalEngine`: the hierarchical cache over worker threads of this process, as the reference engine has it.
`VllmEngine`: vLLM's roles, whose orders travel with steps to worker processes, over the small vLLM of their
tests.

Both compute the same numbers for a position (see `FakeRequest.number`), check each number before they read
it, and give their pages the same bytes and names, so that either may find in storage what the other has put
there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from hiradix.adapters.vllm.requests import Tracked, track
from hiradix.cache import CacheCounters, HierarchicalCache, HostTier
from hiradix.cache.host_index import READY
from hiradix.errors import CacheError, StorageError
from hiradix.memory import DevicePool, HostPool, KVShape
from hiradix.policy.eviction import make_order
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.write_policy import WritePolicy
from hiradix.transfer import HiCacheController, Runtime, StepDriver, TransferLimits
from hiradix.tree import DEVICE, HOST, Lock, RadixKey, RadixTree
from tests.transfer.doubles import PoisonedPages, loads_came
from tests.vllm_roles.mini_vllm import (
    DIM,
    HEADS,
    LAYERS,
    FakeRequest,
    FakeStorage,
    FaultyTransport,
    MiniVLLM,
    S,
    World,
)

HostPage = tuple[RadixKey, int, bytes]
"""A page of a prefix on the host: the prefix, the page's number in it, and what it holds."""


class Engine(Protocol):
    """What a life does to an engine, and what its oracle looks at. labels: of storage, by weights."""

    waiting: list[FakeRequest]
    running: list[FakeRequest]
    done: list[FakeRequest]
    hit_tokens: int
    weights: int
    labels: dict[str, int]

    def add(self, request: FakeRequest) -> None: ...

    def abort(self, request: FakeRequest) -> None: ...

    def step(self) -> object: ...

    def work(self, num_steps: int) -> None:
        """Background workers go on by so much."""

    def hold(self, worker: str) -> None:
        """That worker makes no progress until this is said again."""

    def fail_a_copy(self) -> None: ...

    def fault(self, mode: str) -> None:
        """What storage does wrong from now on; "" for nothing."""

    def attach(self) -> None: ...

    def detach(self) -> None: ...

    def new_weights(self) -> None:
        """Nothing of before may be found."""

    def check(self) -> None: ...

    def on_host(self) -> Iterator[HostPage]:
        """All that a match may promise from the host."""

    def drain(self) -> None:
        """Faults end, and all that is under way; then everything is in its place."""

    def counts(self) -> dict[str, int]: ...


def of_tree(tree: RadixTree, pool: HostPool, is_ready: Any) -> Iterator[HostPage]:
    """The host pages of a tree for which `is_ready`."""
    for node in tree.nodes():
        if node.host.pages is None:
            continue
        key = tree.path_key(node)
        for at, page in enumerate(node.host.pages.tolist(), node.start):
            if is_ready(page):
                yield key, at, b"".join(bytes(view) for view in pool.page_views(page))


class VllmEngine(MiniVLLM):
    """The roles in the small vLLM."""

    def __init__(self, world: World, store: dict[str, bytes], rng: random.Random) -> None:
        self.labels = {"": 0}
        self._rng = rng
        super().__init__(world, [store])
        for rank in self.ranks:
            whole = rank.role.switch.open_storage

            def opened(name: str, keys: Any, label: str, whole: Any = whole) -> Any:
                self.labels.setdefault(label, self.weights)
                return whole(name, keys, label)

            rank.role.switch.open_storage = opened

    def work(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.ranks[0].driver.step()
        self.ranks[0].follow()

    def hold(self, worker: str) -> None:
        self.ranks[0].driver.held ^= {worker}

    def fail_a_copy(self) -> None:
        self.ranks[0].transports[0].fails = 1

    def fault(self, mode: str) -> None:
        self.ranks[0].storage.fault = mode

    def attach(self) -> None:
        self.role.storage.ask("fake", {})

    def detach(self) -> None:
        self.role.storage.ask(None, {})

    def new_weights(self) -> None:
        self.update_weights(preempts=self.world.prefix_cache or self._rng.random() < 0.5)

    def check(self) -> None:
        self.role.check()

    def on_host(self) -> Iterator[HostPage]:
        pool, (pages,) = self.ranks[0].role._controller._copies._pairs[0].host, self.index._pools
        return of_tree(self.index.tree, pool, lambda page: pages.state[page] == READY)

    def drain(self) -> None:
        rank = self.ranks[0]
        rank.driver.held.clear()
        rank.storage.fault, rank.transports[0].fails = "", 0
        super().drain()

    def counts(self) -> dict[str, int]:
        return _counts(self.index.counters, self.hit_tokens)


class Served:
    """A request as the local engine runs it: the lock on what the tree has of it, and pages of its own
    behind."""

    def __init__(self, request: FakeRequest, tracked: Tracked, lock: Lock, pages: Any) -> None:
        self.request = request
        self.tracked = tracked
        self.lock = lock
        self.pages = pages


class LocalEngine:
    """One pass per step: admit, load back, wait for the layers, compute, give the tree what is new."""

    def __init__(self, world: World, store: dict[str, bytes], rng: random.Random) -> None:
        self.world = world
        self.labels = {"": 0}
        self.driver = StepDriver(world.seed)
        shape = KVShape(LAYERS, HEADS, DIM, DIM, torch.float64)
        self._device_pool = DevicePool(shape, world.num_blocks, S)
        self._host_pool = HostPool(shape, world.host_pages, S)
        self._cells = [
            (
                self._device_pool.k_buffer[n].numpy().reshape(-1),
                self._device_pool.v_buffer[n].numpy().reshape(-1),
            )
            for n in range(LAYERS)
        ]
        self._transport = FaultyTransport()
        self._controller = HiCacheController(
            self._device_pool,
            self._host_pool,
            transport=self._transport,
            runtime=Runtime(self.driver, self.driver.now, TransferLimits(batch_pages=world.batch_pages)),
        )
        self._device = PoisonedPages(world.num_blocks, self._poison, 1)
        limits = PrefetchLimits(S, threshold_tokens=S, timeout_base_s=0.05)
        self.cache = HierarchicalCache(
            RadixTree(S, order=make_order(world.policy)),
            self._device,
            HostTier(
                PoisonedPages(world.host_pages, self._poison_host),
                self._controller,
                WritePolicy.from_name(world.write_policy),
                PrefetchPolicy.from_name(world.prefetch_policy, limits),
                no_regret=world.no_regret,
            ),
        )
        self.waiting: list[FakeRequest] = []
        self.done: list[FakeRequest] = []
        self.hit_tokens = self.weights = 0
        self._tracked: dict[FakeRequest, Tracked] = {}
        self._served: list[Served] = []
        self._gates: tuple[int, ...] = ()
        self._store, self._label, self.storage = store, "", FakeStorage(store)
        self.attach()

    @property
    def running(self) -> list[FakeRequest]:
        return [one.request for one in self._served]

    @property
    def _prefetcher(self) -> Any:
        assert self.cache.prefetcher is not None
        return self.cache.prefetcher

    # -- pages ----------------------------------------------------------------------------

    def _rows(self, page: int) -> slice:
        return slice(page * S, (page + 1) * S)

    def _poison(self, page: int) -> None:
        for k, v in self._cells:
            k[self._rows(page)] = v[self._rows(page)] = -0.5

    def _poison_host(self, page: int) -> None:
        for view in self._host_pool.page_views(page):
            view.cast("B")[:] = b"\xff" * view.nbytes

    def _table(self, one: Served) -> list[int]:
        return [*self.cache.tree.pages(one.lock.node, DEVICE).tolist(), *one.pages.tolist()]

    def _read(self, one: Served, end: int) -> None:
        """Look at every number up to position `end`."""
        table = self._table(one)
        for position in range(end):
            row, number = table[position // S] * S + position % S, one.request.number(position)
            for layer, (k, v) in enumerate(self._cells):
                wrong = one.request.request_id, position, k[row], v[row]
                assert k[row] == number + layer == -v[row], f"read of what is not theirs: {wrong}"

    def _write(self, one: Served, start: int, end: int) -> None:
        table = self._table(one)
        for position in range(start, end):
            row, number = table[position // S] * S + position % S, one.request.number(position)
            for layer, (k, v) in enumerate(self._cells):
                k[row], v[row] = number + layer, -(number + layer)

    # -- requests -------------------------------------------------------------------------

    def add(self, request: FakeRequest) -> None:
        request.num_prompt = request.num_tokens
        self.waiting.append(request)
        tracked = track(request, S)
        assert tracked is not None
        self._tracked[request] = tracked
        self._ask(request)

    def _ask(self, request: FakeRequest) -> None:
        """Storage, for what it has of a request."""
        key = self._tracked[request].key((request.num_tokens - 1) // S, S)
        self._prefetcher.start(request.request_id, key, self.cache.match(key).loadable_node)

    def abort(self, request: FakeRequest) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
            self._prefetcher.abort(request.request_id)
            self._end(request)
        for one in [one for one in self._served if one.request is request]:
            self._finish(one)

    def step(self) -> None:
        self.cache.tick()
        admitted = self._admit_all()
        slot = self.cache.start_loading()
        self._gates = () if slot < 0 else (*self._gates, slot)
        if not admitted and not self._served:
            return
        if not loads_came(self._controller.layer_done_counter, self._gates):
            for one in reversed(admitted):
                self._give_back(one)
                self.waiting.insert(0, one.request)
            return
        self._gates = ()
        for one in [*self._served]:
            self._decode(one)
        for one in admitted:
            self._prefill(one)

    def _admit_all(self) -> list[Served]:
        admitted: list[Served] = []
        for request in [*self.waiting]:
            if len(self._served) + len(admitted) >= self.world.max_running:
                break
            if not self._prefetcher.progress(request.request_id):
                continue
            one = self._admit(request)
            if one is None:
                break
            self._prefetcher.abort(request.request_id)
            self.waiting.remove(request)
            admitted.append(one)
        return admitted

    def _admit(self, request: FakeRequest) -> Served | None:
        cache, tracked = self.cache, self._tracked[request]
        key = tracked.key((request.num_tokens - 1) // S, S)
        cache.load_back(cache.match(key))
        lock = cache.tree.lock(cache.match(key).device_node, DEVICE)
        last = max(request.num_tokens, request.num_prompt + request.max_tokens)
        need = -(-last // S) - lock.node.end
        cache.make_room(need)
        pages = self._device.alloc(need)
        if pages is None:
            cache.tree.unlock(lock)
            return None
        return Served(request, tracked, lock, pages)

    def _give_back(self, one: Served) -> None:
        self._device.free(one.pages)
        self.cache.tree.unlock(one.lock)

    def _prefill(self, one: Served) -> None:
        request, start = one.request, one.lock.node.end * S
        request.weights = self.weights
        self._read(one, start)
        self.hit_tokens += start
        self._write(one, start, request.num_tokens)
        self.cache.count_use(one.lock.node)
        self._served.append(one)
        self._insert(one, request.num_tokens // S)
        self._answer(one)

    def _decode(self, one: Served) -> None:
        last = one.request.num_tokens - 1
        self._read(one, last)
        self._write(one, last, last + 1)
        self._answer(one)

    def _answer(self, one: Served) -> None:
        request = one.request
        request.all_token_ids.append(request.number(request.num_tokens - 1) % 3)
        if request.num_tokens >= request.num_prompt + request.max_tokens:
            self._finish(one)

    def _insert(self, one: Served, num_pages: int) -> None:
        """Give the tree a request's first pages; where a failed load is in the way they stay its own."""
        count = num_pages - one.lock.node.end
        if count <= 0:
            return
        before, key = one.lock, one.tracked.key(num_pages, S)
        one.lock = self.cache.insert(key, one.pages[:count], at=before)
        if one.lock.node.end == num_pages:
            one.pages = one.pages[count:]
        self.cache.tree.unlock(before)

    def _finish(self, one: Served) -> None:
        self._served.remove(one)
        self._insert(one, (one.request.num_tokens - 1) // S)
        self._give_back(one)
        self._end(one.request)

    def _end(self, request: FakeRequest) -> None:
        del self._tracked[request]
        self.done.append(request)

    # -- what happens to it ---------------------------------------------------------------

    def work(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    def hold(self, worker: str) -> None:
        self.driver.held ^= {worker}

    def fail_a_copy(self) -> None:
        self._transport.fails = 1

    def fault(self, mode: str) -> None:
        self.storage.fault = mode

    def attach(self) -> None:
        storage = FakeStorage(self._store, 1, self._label)
        try:
            self.cache.attach_storage(storage)  # type: ignore[arg-type]
        except StorageError:
            return
        self.storage = storage

    def detach(self) -> None:
        try:
            self.cache.detach_storage(0.5)
        except StorageError:
            return

    def new_weights(self) -> None:
        while self._served:
            one = self._served.pop()
            self._give_back(one)
            self.waiting.insert(0, one.request)
        for request in self.waiting:
            self._prefetcher.abort(request.request_id)
        had_storage = self._controller.storage_attached
        try:
            if had_storage:
                self.cache.detach_storage(1.0)
            elif self._controller.attach_refusal is not None:
                return  # a detach goes on
            self.cache.reset(1.0)
        except CacheError:  # copies, or storage, hang: nothing has changed
            self.attach()
            return
        self._gates = ()
        self.weights += 1
        self._label = f"{self.world.seed}-{self.weights}-"
        self.labels[self._label] = self.weights
        if had_storage:
            self.attach()

    def check(self) -> None:
        self.cache.check()
        held = sum(len(one.pages) for one in self._served)
        self.cache.supply.check_conservation(held, self.cache.in_flight.num_owned)

    def on_host(self) -> Iterator[HostPage]:
        return of_tree(self.cache.tree, self._host_pool, lambda page: True)

    def drain(self) -> None:
        self.driver.held.clear()
        self.storage.fault, self._transport.fails = "", 0
        for _ in range(500):
            if not (self.waiting or self._served):
                break
            self.driver.step()
            self.step()
        assert not self.waiting and not self._served, f"{len(self.waiting)} wait"
        assert self.cache.drain(1000.0), self.cache.in_flight.tickets()
        self.check()
        tree: RadixTree = self.cache.tree
        for tier in (DEVICE, HOST):
            assert tree.protected_pages(tier) == 0, f"{tier.name}: something is locked"
        assert not self._tracked and not len(self._prefetcher)

    def counts(self) -> dict[str, int]:
        return _counts(self.cache.counters, self.hit_tokens)


def _counts(pages: CacheCounters, hit_tokens: int) -> dict[str, int]:
    names = ("written", "loaded", "load_failed", "backed_up", "prefetched")
    return {"hit_tokens": hit_tokens, **{name: getattr(pages, name) for name in names}}

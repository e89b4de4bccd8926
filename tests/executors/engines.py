"""Two engines over the one planner, which differ in what carries its orders out, and what both can be told.

`LocalEngine`: the hierarchical cache over worker threads of this process, as the reference engine has it.
`VllmEngine`: vLLM's roles, whose orders travel with steps to worker processes, over the small vLLM of their
tests.

Both compute the same numbers for a position (see `FakeRequest.number`), check each number before they read
it, and give their pages the same bytes and names, so that either may find in storage what the other has put
there. Both do so for all kinds of attention: full, with sliding windows beside it, with recurrent states.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from hiradix.adapters.vllm.requests import Tracked, track
from hiradix.cache import CacheCounters, HierarchicalCache, HostTier
from hiradix.cache.host_index import READY
from hiradix.cache.pages import NO_PAGES, Pages
from hiradix.errors import CacheError, StorageError
from hiradix.memory import HostPool
from hiradix.policy.eviction import make_order
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.policy.uses import Finished
from hiradix.policy.write_policy import WritePolicy
from hiradix.transfer import HiCacheController, PoolPair, Runtime, StepDriver, TransferLimits
from hiradix.tree import DEVICE, FULL, HOST, Component, DeadLeaf, Lock, RadixKey, RadixTree
from tests.executors.device_memory import StateMemory, TokenMemory
from tests.transfer.doubles import PoisonedPages, loads_came
from tests.vllm_roles.mini_vllm import (
    LAYERS,
    FakeRequest,
    FakeStorage,
    FaultyTransport,
    MiniVLLM,
    S,
    World,
)

HostPage = tuple[RadixKey, int, int, bytes]
"""A page of a prefix on the host: the prefix, the page's number in it, its component, and what it holds. A
record of states stands at the page that it follows."""


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


def of_tree(tree: RadixTree, hosts: Sequence[HostPool], is_ready: Any) -> Iterator[HostPage]:
    """The host pages of a tree for which `is_ready(component, page)`."""
    for node in tree.nodes():
        key = tree.path_key(node)
        for component, host in enumerate(hosts):
            pages = node.residency(component, HOST).pages
            if pages is None:
                continue
            for at, page in enumerate(pages.tolist(), node.end - len(pages)):
                if is_ready(component, page):
                    yield key, at, component, b"".join(bytes(view) for view in host.page_views(page))


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
        self._rng.choice(self.ranks[0].transports).fails = 1

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
        hosts = [pair.host for pair in self.ranks[0].role._controller._copies._pairs]
        pools = self.index._pools
        return of_tree(self.index.tree, hosts, lambda c, page: pools[c].state[page] == READY)

    def drain(self) -> None:
        rank = self.ranks[0]
        rank.driver.held.clear()
        rank.storage.fault = ""
        for transport in rank.transports:
            transport.fails = 0
        super().drain()

    def counts(self) -> dict[str, int]:
        return _counts(self.index.counters, self.hit_tokens)


class Served:
    """A request as the local engine runs it: the lock on what the tree has of it, and pages of its own
    behind, for each component of attention."""

    def __init__(self, request: FakeRequest, tracked: Tracked, lock: Lock, pages: list[Pages]) -> None:
        self.request = request
        self.tracked = tracked
        self.lock = lock
        self.pages = pages


class LocalEngine:
    """One pass per step: admit, load back, wait for the layers, compute, give the tree what is new."""

    def __init__(self, world: World, store: dict[str, bytes], rng: random.Random) -> None:
        self.world, self._rng = world, rng
        self.labels = {"": 0}
        self.driver = StepDriver(world.seed)
        num_kinds = 1 + (world.window > 0) + world.states
        own = replace(world, num_blocks=world.num_blocks // num_kinds)  # where vLLM has one pool for all
        self._tokens = [TokenMemory(own, 0, None)]
        kinds = [FULL]
        if world.window:
            self._tokens.append(TokenMemory(own, 1, world.window - 1))
            kinds.append(Component("window", -(-(world.window - 1) // S)))
        first = len(kinds)
        self._states = {c: StateMemory(own, c) for c in range(first, first + world.states)}
        kinds += [Component(f"state{n}", 1, per_page=False) for n in range(world.states)]
        memories = [*self._tokens, *self._states.values()]
        self._hosts = [memory.host for memory in memories]
        self._transports = [FaultyTransport() for _ in memories]
        self._controller = HiCacheController.over(
            [
                PoolPair(memory.device, memory.host, transport, range(c * LAYERS, (c + 1) * LAYERS))
                for c, (memory, transport) in enumerate(zip(memories, self._transports, strict=True))
            ],
            Runtime(self.driver, self.driver.now, TransferLimits(batch_pages=world.batch_pages)),
        )
        self._device = [PoisonedPages(own.num_blocks, memory.poison, 1) for memory in memories]
        limits = PrefetchLimits(S, threshold_tokens=S, timeout_base_s=0.05)
        dead_leaf = DeadLeaf.UNUSABLE if len(kinds) > 1 else DeadLeaf.KEEP
        self.cache = HierarchicalCache(
            RadixTree(S, tuple(kinds), order=make_order(world.policy), dead_leaf=dead_leaf),
            self._device,
            HostTier(
                [PoisonedPages(world.host_pages, self._poison_host(host)) for host in self._hosts],
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
        self._store, self._label, self.storage = store, "", FakeStorage(store, len(kinds))
        self.attach()

    @property
    def running(self) -> list[FakeRequest]:
        return [one.request for one in self._served]

    @property
    def _prefetcher(self) -> Any:
        assert self.cache.prefetcher is not None
        return self.cache.prefetcher

    # -- pages ----------------------------------------------------------------------------

    def _poison_host(self, host: HostPool) -> Callable[[int], None]:
        def poison(page: int) -> None:
            for view in host.page_views(page):
                view.cast("B")[:] = b"\xff" * view.nbytes

        return poison

    def _table(self, one: Served, component: int, start: int) -> dict[int, int]:
        """In which device page each page of the request's tokens lies, from page `start` on."""
        node = one.lock.node
        held = self.cache.tree.pages(node, DEVICE, min(start, node.end), component)
        return dict(enumerate([*held.tolist(), *one.pages[component].tolist()], node.end - len(held)))

    def _read(self, one: Served, end: int) -> None:
        """Look at every number that the token at position `end` looks at."""
        for component, memory in enumerate(self._tokens):
            begin = 0 if memory.behind is None else max(0, end - memory.behind)
            table = self._table(one, component, begin // S)
            for position in range(begin, end):
                whose = one.request.request_id, component, position
                memory.check(table[position // S], position % S, one.request.number(position), whose)

    def _read_states(self, one: Served) -> None:
        """Look at the records that the request goes on from."""
        node = one.lock.node
        for component, memory in self._states.items() if node.end else ():
            (slot,) = node.residency(component, DEVICE).pages.tolist()
            memory.check(slot, one.request.number(node.end * S - 1), one.request.request_id)

    def _write(self, one: Served, start: int, end: int) -> None:
        for component, memory in enumerate(self._tokens):
            table = self._table(one, component, one.lock.node.end)
            for position in range(start, end):
                memory.write(table[position // S], position % S, one.request.number(position))

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
        pages: list[Pages] = []
        for component in range(len(self._tokens)):
            cache.make_room(need, component)
            own = self._device[component].alloc(need)
            if own is None:
                self._give_back(Served(request, tracked, lock, pages))
                return None
            pages.append(own)
        return Served(request, tracked, lock, pages)

    def _give_back(self, one: Served) -> None:
        for pool, own in zip(self._device, one.pages, strict=False):  # as many as it has got
            pool.free(own)
        self.cache.tree.unlock(one.lock)

    def _prefill(self, one: Served) -> None:
        request, start = one.request, one.lock.node.end * S
        request.weights = self.weights
        self._read(one, start)
        self._read_states(one)
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

    def _insert(self, one: Served, num_pages: int, ended: Finished | None = None) -> None:
        """Give the tree a request's first pages; where a failed load is in the way they stay its own. ended: of
        its last insert."""
        count = num_pages - one.lock.node.end
        before, key = one.lock, one.tracked.key(num_pages, S)
        if count <= 0:
            if ended is not None:
                self.cache.finished(key, before.node, ended)
            return
        first, *windows = [own[:count] for own in one.pages]
        records = [self._record(component, one, num_pages) for component in self._states]
        one.lock = self.cache.insert(key, first, at=before, others=(*windows, *records), ended=ended)
        if one.lock.node.end == num_pages:
            one.pages = [own[count:] for own in one.pages]
        else:
            for component, record in zip(self._states, records, strict=True):
                self._device[component].free(record)
        self.cache.tree.unlock(before)

    def _record(self, component: int, one: Served, num_pages: int) -> Pages:
        """A slot with the state behind a request's first pages, or none where none can be had."""
        self.cache.make_room(1, component)
        slots = self._device[component].alloc(1)
        if slots is None:
            return NO_PAGES
        self._states[component].write(int(slots[0]), one.request.number(num_pages * S - 1))
        return slots

    def _finish(self, one: Served) -> None:
        self._served.remove(one)
        request = one.request
        ended = Finished(request.num_prompt, request.num_tokens - request.num_prompt)
        self._insert(one, (request.num_tokens - 1) // S, ended)
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
        self._rng.choice(self._transports).fails = 1

    def fault(self, mode: str) -> None:
        self.storage.fault = mode

    def attach(self) -> None:
        storage = FakeStorage(self._store, len(self._hosts), self._label)
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
        held = sum(len(one.pages[0]) for one in self._served)
        self.cache.supply.check_conservation(held, self.cache.in_flight.num_owned)

    def on_host(self) -> Iterator[HostPage]:
        return of_tree(self.cache.tree, self._hosts, lambda component, page: True)

    def drain(self) -> None:
        self.driver.held.clear()
        self.storage.fault = ""
        for transport in self._transports:
            transport.fails = 0
        for _ in range(500):
            if not (self.waiting or self._served):
                break
            self.driver.step()
            self.step()
        assert not self.waiting and not self._served, f"{len(self.waiting)} wait"
        assert self.cache.drain(1000.0), self.cache.in_flight.tickets()
        self.check()
        tree: RadixTree = self.cache.tree
        for component, pool in enumerate(self._device):
            for tier in (DEVICE, HOST):
                assert tree.protected_pages(tier, component) == 0, f"{tier.name} {component}: locked"
            resident = tree.resident_pages(DEVICE, component)
            assert pool.available + resident == pool.num_pages, f"component {component} has lost pages"
        assert not self._tracked and not len(self._prefetcher)

    def counts(self) -> dict[str, int]:
        return _counts(self.cache.counters, self.hit_tokens)


def _counts(pages: CacheCounters, hit_tokens: int) -> dict[str, int]:
    names = ("written", "loaded", "load_failed", "backed_up", "prefetched")
    return {"hit_tokens": hit_tokens, **{name: getattr(pages, name) for name in names}}

"""The hierarchical cache driven at random: faults, aborts, attach and detach, every policy; miss or exact."""

from __future__ import annotations

import os
import random

import pytest

from hiradix.errors import CacheError
from hiradix.tree import RadixKey
from tests.cache.world import PAGE_SIZE, Setup, World
from tests.seeds import is_enough, seeded, seeds

NUM_SEEDS = int(os.environ.get("HIRADIX_CACHE_SEEDS", "20"))
NUM_STEPS = 150
NAMESPACES = (None, "tenant-a")
SETUPS = (
    Setup(),
    Setup(write_policy="write_back", device_pages=8, host_pages=9),
    Setup(write_policy="write_through_selective", prefetch_policy="best_effort"),
    Setup(host_pages=6, prefetch_policy="wait_complete"),
    Setup(device_pages=8, host_pages=40, layout="layer_first"),
    Setup(order="lfu", host_pages=24),
    Setup(order="slru", write_policy="write_back", host_pages=10),
)


class Player:
    """One random run: moves and their weights; the seed decides everything."""

    def __init__(self, setup: Setup, seed: int):
        self.world = World(setup, seed)
        self.rng = random.Random(seed ^ 0x5EED)
        self.handles: dict[int, RadixKey] = {}
        self.next_handle = 0
        if self.rng.random() < 0.7:
            self.attach()
        self.moves = {
            self.queued_request: 12,
            self.request: 20,
            self.batch: 14,
            self.finish: 22,
            self.step_workers: 30,
            self.tick: 15,
            self.prefetch: 14,
            self.reorder: 2,
            self.progress: 14,
            self.abort: 5,
            self.evict: 6,
            self.attach: 4,
            self.detach: 2,
            self.hold: 3,
            self.resume: 6,
            self.faults: 3,
            self.forget_storage: 1,
            self.reset: 4,
        }

    def key(self) -> RadixKey:
        num_pages = self.rng.randint(1, 6)
        tokens: list[int] = []
        for _ in range(num_pages):
            token = self.rng.randint(0, 1)
            tokens += [token, token + 10]
        return RadixKey(tokens, self.rng.choice(NAMESPACES))

    def request(self) -> None:
        running = self.world.run_request(self.key(), load=self.rng.random() < 0.8)
        if running is not None:
            self.world.running.append(running)

    def batch(self) -> None:
        """Several requests in one plan; now and then the plan is given up after its loads have begun."""
        world = self.world
        world.cache.tick()
        found = [world.admit(self.key()) for _ in range(self.rng.randint(1, 3))]
        admitted = [one for one in found if one is not None]
        if self.rng.random() < 0.2:
            world.undo(admitted)
            admitted = []
        world.running += world.run_pass(admitted)

    def finish(self) -> None:
        if self.world.running:
            self.world.release(self.world.running.pop(self.rng.randrange(len(self.world.running))))

    def step_workers(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.world.driver.step()

    def tick(self) -> None:
        self.world.cache.tick()

    def prefetch(self) -> None:
        key, cache = self.key(), self.world.cache
        cache.tick()
        handle = self.next_handle
        self.next_handle += 1
        if cache.prefetcher.start(handle, key, cache.match(key).loadable_node):
            self.handles[handle] = key

    def queued_request(self) -> None:
        """A whole request: prefetch while it waits, then run."""
        world, key, handle = self.world, self.key(), -1
        world.cache.tick()
        world.cache.prefetcher.start(handle, key, world.cache.match(key).loadable_node)
        for _ in range(self.rng.randint(0, 12)):
            world.driver.step()
            world.cache.tick()
            if world.cache.prefetcher.progress(handle):
                break
        world.cache.prefetcher.abort(handle)
        running = world.run_request(key)
        if running is not None:
            world.release(running)

    def progress(self) -> None:
        for handle in list(self.handles):
            if self.world.cache.prefetcher.progress(handle):
                key = self.handles[handle]
                assert self.world.cache.prefetcher.pop_loaded_pages(handle) <= len(key) // PAGE_SIZE
                if self.rng.random() < 0.7:  # it runs
                    del self.handles[handle]
                    self.world.cache.prefetcher.abort(handle)

    def reorder(self) -> None:
        """Those who wait will run in another order, as far as it is told."""
        handles = self.rng.sample(list(self.handles), self.rng.randint(0, len(self.handles)))
        self.world.cache.prefetcher.in_order(handles)

    def abort(self) -> None:
        if self.handles:
            handle = self.rng.choice(list(self.handles))
            del self.handles[handle]
            self.world.cache.prefetcher.abort(handle)

    def evict(self) -> None:
        self.world.cache.evict(self.rng.randint(1, 4))

    def attach(self) -> None:
        if not self.world.controller.storage_attached and not self.world.driver.held:
            try:
                self.world.cache.attach_storage(self.world.stores)
            except CacheError:
                assert self.world.controller.stats().detaching

    def detach(self) -> None:
        try:
            self.world.cache.detach_storage(5.0)
        except CacheError:
            assert self.world.driver.held

    def hold(self) -> None:
        names = sorted(w for w in self.world.driver._workers)
        if names and len(self.world.driver.held) < 1:
            name = self.rng.choice(names)
            if name not in ("load",):
                self.world.driver.held.add(name)

    def resume(self) -> None:
        self.world.driver.held.clear()

    def faults(self) -> None:
        self.world.storage.faults = self.rng.choice([0.0, 0.05, 0.3])
        self.world.transport.faults = self.rng.choice([0.0, 0.0, 0.2])

    def forget_storage(self) -> None:
        self.world.storage.pages.clear()

    def reset(self) -> None:
        self.world.driver.held.clear()
        while self.world.running:
            self.finish()
        self.handles.clear()
        self.world.cache.reset()

    def play(self) -> World:
        names = list(self.moves)
        weights = list(self.moves.values())
        for _ in range(NUM_STEPS):
            self.rng.choices(names, weights)[0]()
            self.world.check()
        while self.world.running:
            self.finish()
        for handle in list(self.handles):
            self.world.cache.prefetcher.abort(handle)
        self.world.assert_drained()
        return self.world


@seeded
@pytest.mark.parametrize("index", range(len(SETUPS)))
def test_random_life_keeps_every_promise(index: int) -> None:
    loaded = fetched = backed_up = 0
    for seed in seeds(NUM_SEEDS):
        try:
            world = Player(SETUPS[index], seed).play()
        except Exception as error:
            raise AssertionError(f"setup {index}, seed {seed}: {error!r}") from error
        loaded += world.cache.counters.loaded
        fetched += world.cache.counters.prefetched
        backed_up += world.cache.counters.backed_up
    assert is_enough(loaded > 0 and fetched > 0 and backed_up > 0), (loaded, fetched, backed_up)

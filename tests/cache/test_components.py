"""The cache with windows and state records, driven at random: miss or exact in every component and tier."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.policy.eviction import eviction_policies
from hiradix.tree import RadixKey
from tests.cache.component_world import DEVICE, HOST, Admitted, ComponentWorld, Draw, Setup
from tests.seeds import is_enough, seeded, seeds

NUM_RUNS = int(os.environ.get("HIRADIX_COMPONENT_RUNS", "240"))
NUM_MOVES = 80
NUM_CHUNKS = 8
VALUES = {
    "page_size": [1, 16, 64],
    "window": ["none", "below", "equal", "above"],
    "has_state": [False, True],
    "order": ["lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "tlru"],
    "write_policy": ["write_through", "write_through_selective", "write_back"],
    "dead_leaf": ["keep", "bare", "unusable"],
    "long_path": [0, 16],
}
CONFIGS = [
    Setup(*values) for values in itertools.product(*VALUES.values()) if values[1] != "none" or values[2]
]
random.Random(3).shuffle(CONFIGS)


class Player:
    """One life: moves and their weights."""

    def __init__(self, setup: Setup, seed: int):
        self.world = ComponentWorld(setup, seed)

    def request(self, draw: Draw) -> None:
        world = self.world
        world.cache.tick()
        admitted = world.admit(world.key(draw), load=draw(5) > 0)
        world.running += world.run_pass([] if admitted is None else [admitted], draw)

    def batch(self, draw: Draw) -> None:
        """Several requests of one plan; now and then it is given up after its loads have begun."""
        world = self.world
        world.cache.tick()
        found = [world.admit(world.key(draw)) for _ in range(1 + draw(3))]
        admitted: list[Admitted] = [one for one in found if one is not None]
        if draw(5) == 0:
            world.undo(admitted)
            admitted = []
        world.running += world.run_pass(admitted, draw)

    def extend(self, draw: Draw) -> None:
        """A running request goes on from its lock; out of room, it ends."""
        world = self.world
        if not world.running:
            return
        running = world.running.pop(draw(len(world.running)))
        one = world.take(world.key(draw, running.key, MAX_LENGTH), running.lock)
        world.running += world.run_pass([] if one is None else [one], draw)

    def finish(self, draw: Draw) -> None:
        if self.world.running:
            self.world.tree.unlock(self.world.running.pop(draw(len(self.world.running))).lock)

    def step(self, draw: Draw) -> None:
        for _ in range(1 + draw(6)):
            self.world.driver.step()

    def tick(self, draw: Draw) -> None:
        self.world.cache.tick()

    def evict(self, draw: Draw) -> None:
        self.world.cache.evict(1 + draw(6), draw(len(self.world.components)))

    def fault(self, draw: Draw) -> None:
        self.world.faults = (0.0, 0.0, 0.15, 0.5)[draw(4)]

    def look(self, draw: Draw) -> None:
        world = self.world
        key = world.key(draw)
        match = world.cache.match(key)
        world.read_loadable(key, match.loadable_node)

    def reset(self, draw: Draw) -> None:
        while self.world.running:
            self.finish(draw)
        self.world.faults = 0.0
        self.world.cache.reset()

    MOVES = {
        request: 24, batch: 10, extend: 8, finish: 22, step: 26, tick: 12, evict: 20, fault: 3, look: 8,
        reset: 1,
    }  # fmt: skip

    def play(self, draw: Draw, num_moves: int, check_every: int = 1) -> ComponentWorld:
        moves = [move for move, weight in self.MOVES.items() for _ in range(weight)]
        for number in range(num_moves):
            moves[draw(len(moves))](self, draw)
            if number % check_every == 0:
                self.world.check()
        while self.world.running:
            self.finish(draw)
        self.world.assert_drained()
        return self.world


MAX_LENGTH = 10


def lives(player: type[Player], chunk: int) -> Iterator[ComponentWorld]:
    """Play one chunk's seeds; the world that each leaves."""
    for seed in seeds(len(range(chunk, NUM_RUNS, NUM_CHUNKS)), chunk, NUM_CHUNKS):
        setup = CONFIGS[seed % len(CONFIGS)]
        try:
            world = player(setup, seed).play(random.Random(seed).randrange, NUM_MOVES, 4)
        except BaseException as error:
            error.add_note(f"seed {seed}, {setup}")
            raise
        yield world


def shrinking_lives(player: type[Player]) -> Callable[[], None]:
    """A test that plays lives which hypothesis draws, and makes one that fails small."""

    @settings(max_examples=8, deadline=None)
    @given(st.sampled_from(CONFIGS), st.data())
    def life(setup: Setup, data: st.DataObject) -> None:
        player(setup, 1).play(lambda n: data.draw(st.integers(0, n - 1)), 25)

    return life


@seeded
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_lives_are_exact_in_every_component_and_tier(chunk: int) -> None:
    hits = computed = loaded = written = 0
    for world in lives(Player, chunk):
        hits, computed = hits + world.num_hits, computed + world.num_computed
        loaded, written = loaded + world.cache.counters.loaded, written + world.cache.counters.written
    assert is_enough(min(hits, computed, loaded, written) > 20), (hits, computed, loaded, written)


test_lives_that_shrink = shrinking_lives(Player)


def test_each_value_is_drawn_often() -> None:
    assert set(VALUES["order"]) <= set(eviction_policies())
    for name, values in VALUES.items():
        drawn = Counter(getattr(CONFIGS[seed % len(CONFIGS)], name) for seed in range(240))
        assert all(drawn[value] >= 20 for value in values), drawn


# -- one thing at a time ------------------------------------------------------------------


def roomy(**changes: object) -> ComponentWorld:
    sizes = {"device_pages": (60, 60, 20), "host_pages": (60, 60, 20)}
    return ComponentWorld(Setup(**{**sizes, **changes}), 1)  # type: ignore[arg-type]


def serve(world: ComponentWorld, tokens: list[int]) -> int:
    """Run one request to its end and settle; the pages it had to compute."""
    world.cache.tick()
    admitted = world.admit(RadixKey(tokens))
    assert admitted is not None
    count = len(admitted.pages[0])
    (running,) = world.run_pass([admitted], lambda n: 0)
    world.tree.unlock(running.lock)
    world.settle()
    world.check()
    return count


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_left_the_device_comes_back_with_all_its_components(has_state: bool, policy: str) -> None:
    world = roomy(has_state=has_state, write_policy=policy)
    assert serve(world, list(range(12))) == 12
    world.cache.evict(100)
    assert world.tree.resident_pages(DEVICE) == 0
    assert serve(world, list(range(12))) == 0
    world.assert_drained()


def test_only_the_window_a_boundary_needs_goes_down_and_comes_back() -> None:
    world = roomy()
    serve(world, list(range(12)))
    assert (world.tree.resident_pages(HOST), world.tree.resident_pages(HOST, 1)) == (12, 3)
    world.cache.evict(100)
    serve(world, list(range(12)))
    assert (world.tree.resident_pages(DEVICE), world.tree.resident_pages(DEVICE, 1)) == (12, 3)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_window_that_left_alone_comes_back_alone(policy: str) -> None:
    world = roomy(write_policy=policy)
    serve(world, list(range(12)))
    world.cache.evict(100, 1)
    assert (world.tree.resident_pages(DEVICE), world.tree.resident_pages(DEVICE, 1)) == (12, 0)
    match = world.cache.match(RadixKey(list(range(12))))
    assert (match.device_node.end, match.loadable_node.end) == (0, 12)
    loaded = world.cache.counters.loaded
    assert serve(world, list(range(12))) == 0
    assert world.cache.counters.loaded == loaded, "no full page was copied"


def test_load_back_is_all_or_nothing_over_all_components() -> None:
    world = roomy(device_pages=(60, 6, 20))
    serve(world, [0, 1, 2, 3, 4])
    world.cache.evict(100)
    match = world.cache.match(RadixKey([0, 1, 2, 3, 4]))
    blocker = world.device[1].alloc(4)
    assert match.loadable_node.end == 5
    assert world.cache.load_back(match) is None, "two window pages free, three needed"
    assert world.tree.resident_pages(DEVICE) == 0 and world.device[0].available == 60
    world.device[1].free(blocker)
    assert world.cache.load_back(match) == 5 + 3
    world.cache.start_loading()
    world.settle()
    world.assert_drained()


def test_a_copy_that_fails_in_the_window_leaves_nothing_behind() -> None:
    world = roomy()
    serve(world, list(range(8)))
    world.cache.evict(100)
    window = world.pools[1][DEVICE]

    def fail(src, dst, *_):
        if dst is window:
            raise RuntimeError("injected")

    world.transport.before = fail
    admitted = world.admit(RadixKey(list(range(8))))
    assert admitted is not None and admitted.lock.node.end == 8
    assert world.run_pass([admitted], lambda n: 0) == []
    world.settle()
    world.check()
    assert world.tree.resident_pages(DEVICE) == world.tree.resident_pages(DEVICE, 1) == 0
    world.transport.before = lambda *_: None
    world.run_pass([], lambda n: 0)
    assert serve(world, list(range(8))) == 0

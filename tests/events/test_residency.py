"""Replaying the event stream always gives exactly what is in which tier, whatever the tree and cache do."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable

import pytest

from hiradix.events import KVEvents, Naming
from hiradix.tree import RadixKey, RadixTree, hash_pages
from tests.cache import test_components as components
from tests.cache import test_hierarchical_cache as whole
from tests.cache import world as cache_world
from tests.events.model import Router, Viewer, key_names
from tests.seeds import is_enough, seeded, seeds
from tests.tree.test_fuzz import config_of
from tests.tree.world import World

NUM_RUNS = int(os.environ.get("HIRADIX_EVENT_RUNS", "64"))
NUM_CHUNKS = 4


class Readers:
    """Both readers of one tree's events; events are taken now and then, as an engine's steps do."""

    def __init__(self, tree: RadixTree, rng: random.Random):
        self.tree, self.rng = tree, rng
        self.events = KVEvents(tree, Naming(is_dynamo=True))
        self.router, self.viewer = Router(tree.page_size), Viewer()
        self.kinds: Counter[str] = Counter()

    def read(self) -> None:
        events = self.events.take()
        for event in events:
            medium = getattr(event, "medium", "")
            self.kinds[f"{type(event).__name__} {medium}"] += 1
        self.router.read(events)
        self.viewer.read([e for e in events if getattr(e, "medium", "") != "EXTERNAL"])

    def look(self) -> None:
        if self.rng.random() < 0.4:
            self.read()
            self.check()

    def check(self) -> None:
        self.router.check(self.tree, True)
        self.viewer.check(self.tree, True)


@seeded
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_the_tree_driven_at_random(chunk: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in seeds(len(range(chunk, NUM_RUNS, NUM_CHUNKS)), chunk, NUM_CHUNKS):
        rng = random.Random(seed)
        world = World(config_of(seed))
        readers = Readers(world.tree, rng)
        moves, weights = list(World.MOVES), list(World.MOVES.values())
        try:
            for _ in range(100):
                getattr(world, rng.choices(moves, weights)[0])(rng.randrange)
                readers.look()
            world.drain()
            readers.read()
            readers.check()
        except Exception as error:
            error.add_note(f"seed {seed}, {world.config}")
            raise
        kinds += readers.kinds
    wanted = {f"Block{what} {where}" for what in ("Stored", "Removed") for where in ("GPU", "CPU_PINNED")}
    assert is_enough(wanted <= {*kinds}), kinds


@seeded
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_caches_of_several_components(chunk: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in seeds(len(range(chunk, NUM_RUNS, NUM_CHUNKS)), chunk, NUM_CHUNKS):
        rng = random.Random(seed)
        player = components.Player(components.CONFIGS[seed % len(components.CONFIGS)], seed)
        readers = Readers(player.world.tree, rng)
        moves = [move for move, weight in player.MOVES.items() for _ in range(weight)]
        for _ in range(80):
            rng.choice(moves)(player, rng.randrange)
            readers.look()
        while player.world.running:
            player.finish(rng.randrange)
        player.world.assert_drained()
        readers.read()
        readers.check()
        kinds += readers.kinds
    assert is_enough(kinds["BlockStored CPU_PINNED"] > 0 and kinds["AllBlocksCleared "] > 0), kinds


@seeded
@pytest.mark.parametrize("index", range(len(whole.SETUPS)))
def test_whole_caches_with_storage_and_faults(index: int) -> None:
    """Of storage, which fails, lies and forgets here, nothing is said that was never there."""
    kinds: Counter[str] = Counter()
    for seed in seeds(NUM_RUNS // 8):
        player = whole.Player(whole.SETUPS[index], seed)
        readers = Readers(player.world.cache.tree, random.Random(seed))
        ever: set[str] = set()
        check = player.world.check

        def look(player=player, readers=readers, ever=ever, check=check) -> None:
            check()
            readers.look()
            ever.update(player.world.storage.pages)
            assert readers.router.media.get("EXTERNAL", set()) <= names_in(player.world, ever)

        player.world.check = look
        player.play()
        readers.read()
        readers.check()
        kinds += readers.kinds
    assert is_enough(kinds["BlockStored EXTERNAL"] > 0 and kinds["BlockStored GPU"] > 0), kinds


def test_storage_that_works_is_told_exactly() -> None:
    world = cache_world.World(cache_world.Setup(), seed=5)
    readers = Readers(world.cache.tree, random.Random(5))
    world.cache.attach_storage(world.stores)
    for number in range(24):
        tokens = [number % 3, 10 + number % 2, number % 5, 20, number % 2, 30]
        running = world.run_request(RadixKey(tokens, ("tenant", None)[number % 2]))
        assert running is not None
        world.release(running)
        world.settle()
        readers.read()
        readers.check()
        assert readers.router.media["EXTERNAL"] == names_in(world, world.storage.pages)
    assert len(world.storage.pages) > 10
    world.cache.reset()
    readers.read()
    assert readers.router.media == {} and readers.viewer.medium_of == {}


def names_in(world: cache_world.World, stored: Iterable[str]) -> set[int]:
    """What blocks are called whose storage keys are `stored`."""
    tree, found = world.cache.tree, {}
    for key in world.known:
        rows = tree.rows(key, tree.root, 0, key.num_pages(tree.page_size))
        found.update(
            zip((d.hex() for d in hash_pages(rows)), key_names(key, tree.page_size, True), strict=True)
        )
    return {found[key] for key in stored}

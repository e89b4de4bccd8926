"""Many seeded lives of a tree beside the page map; every policy, page size, window and component set.

`HIRADIX_TREE_RUNS=50000` for the long version. A run checks everything every few moves; one that fails is
played again with a check after each, so that the report names the move.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter

import pytest

from hiradix.policy.eviction import eviction_policies
from tests.seeds import seeded, seeds
from tests.tree.world import Config, World

NUM_RUNS = int(os.environ.get("HIRADIX_TREE_RUNS", "600"))
NUM_MOVES = 100
NUM_CHUNKS = 20
SHIPPED = set(eviction_policies())  # before any test registers its own
VALUES = {
    "policy": ["lru", "lfu", "fifo", "mru", "filo", "priority", "slru", "tlru", "2q", "ghd"],
    "page_size": [1, 16, 64],
    "window": ["none", "below", "equal", "above"],
    "has_state": [False, True],
    "is_bigram": [False, True],
    "long_path": [0, 2, 16],
    "waste": [1, 4],
    "dead_leaf": ["keep", "bare", "unusable"],
}
CONFIGS = [Config(*values) for values in itertools.product(*VALUES.values())]
random.Random(7).shuffle(CONFIGS)


def config_of(seed: int) -> Config:
    return CONFIGS[seed % len(CONFIGS)]


def live(seed: int, check_every: int) -> None:
    """One run: random moves, then everything given back."""
    rng = random.Random(seed)
    world = World(config_of(seed))
    moves, weights = list(World.MOVES), list(World.MOVES.values())
    done: list[str] = []
    try:
        for number in range(NUM_MOVES):
            done.append(rng.choices(moves, weights)[0])
            getattr(world, done[-1])(rng.randrange)
            if number % check_every == 0:
                world.check()
        world.check()
        world.drain()
    except Exception as error:
        error.add_note(f"seed {seed}, {world.config}, move {len(done)}: ... {', '.join(done[-4:])}")
        raise


@seeded
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_lives_agree_with_the_page_map(chunk: int, record_property) -> None:
    lives = seeds(len(range(chunk, NUM_RUNS, NUM_CHUNKS)), chunk, NUM_CHUNKS)
    for seed in lives:
        try:
            live(seed, check_every=5)
        except AssertionError:
            live(seed, check_every=1)
            raise
    drawn = Counter(f"{name} {getattr(config_of(seed), name)}" for name in VALUES for seed in lives)
    record_property("tree_runs", len(lives))
    record_property("tree_moves", len(lives) * NUM_MOVES)
    record_property("tree_drawn", dict(drawn))


def test_each_value_is_drawn_often() -> None:
    assert set(VALUES["policy"]) == SHIPPED, "a policy is not drawn, or known no more"
    for name, values in VALUES.items():
        drawn = Counter(getattr(config_of(seed), name) for seed in range(1000))
        assert all(drawn[value] >= 20 for value in values), drawn

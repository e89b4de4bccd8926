"""The controller under seeded faults, hangs, cancels, attaches, detaches and resets, in one thread."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hiradix.transfer import FOUR_WORKERS, TWO_WORKERS
from tests.seeds import is_enough, seeded, seeds
from tests.transfer.world import MOVES, World

WORKERS = (FOUR_WORKERS, TWO_WORKERS)


def play(seed: int, num_moves: int) -> World:
    """One seed's life of the world, up to its end."""
    world = World(seed, WORKERS[seed % 2], is_late=seed % 4 >= 2)
    names, weights = list(MOVES), list(MOVES.values())
    for at in range(num_moves):
        if at % 50 == 0:
            world.fault_rate = world.random.choice([0.0, 0.05, 0.4])
        getattr(world, f"do_{world.random.choices(names, weights)[0]}")()
        world.check()
    if seed % 3:
        world.drain()
    world.close()
    return world


@seeded
@pytest.mark.parametrize("block", range(8))
def test_every_ticket_gets_one_result_and_no_page_is_touched_after_it(block: int) -> None:
    num_results = 0
    for seed in seeds(25, block * 25):
        try:
            num_results += play(seed, 150).num_results
        except BaseException:
            print(f"replay with play({seed}, 150)")
            raise
    assert is_enough(num_results > 500)


def test_a_seed_replays() -> None:
    def story(seed: int) -> Any:
        world = play(seed, 200)
        return world.num_results, world.driver.now(), world.last_ran, world.transport.num_calls

    assert story(11) == story(11)
    assert story(11) != story(13)


class Shrinkable(RuleBasedStateMachine):
    """The same moves chosen by hypothesis, so that a failure comes small."""

    @initialize(
        seed=st.integers(0, 1 << 16),
        workers=st.sampled_from(WORKERS),
        is_late=st.booleans(),
        faults=st.sampled_from([0.0, 0.3]),
    )
    def begin(self, seed: int, workers: Any, is_late: bool, faults: float) -> None:
        self.world = World(seed, workers, is_late)
        self.world.fault_rate = faults

    @rule(moves=st.lists(st.sampled_from(sorted(MOVES)), min_size=1, max_size=8))
    def move(self, moves: list[str]) -> None:
        for name in moves:
            getattr(self.world, f"do_{name}")()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


Shrinkable.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestShrinkable = Shrinkable.TestCase

"""The same moves under hypothesis, which shrinks what it finds. Everything is checked after every move."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.tree.test_fuzz import VALUES
from tests.tree.world import Config, World

configs = st.builds(Config, *(st.sampled_from(values) for values in VALUES.values()))


class TreeMachine(RuleBasedStateMachine):
    """One rule per kind of move; numbers within a move come from hypothesis too."""

    world: World | None = None

    @initialize(config=configs)
    def begin(self, config: Config) -> None:
        self.world = World(config)

    @rule(data=st.data(), move=st.sampled_from([m for m, n in World.MOVES.items() for _ in range(n)]))
    def move(self, data: st.DataObject, move: str) -> None:
        getattr(self.world, move)(lambda n: data.draw(st.integers(0, n - 1)))

    @invariant()
    def sound(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.drain()


TreeMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("HIRADIX_TREE_EXAMPLES", "40")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTreeMachine = TreeMachine.TestCase

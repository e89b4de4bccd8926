"""Whole lives of the cache under the policies that learn: every promise of the simulation holds."""

from __future__ import annotations

import pytest

from tests.seeds import seeded, seeds
from tests.simulation import world
from tests.simulation.run import play


@seeded
@pytest.mark.parametrize("policy", ["ghd", "2q"])
@pytest.mark.parametrize("seed", seeds(6))
def test_no_promise_depends_on_the_policy(policy: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "eviction_policies", lambda: [policy])
    life = play(seed, 400)
    assert life.setup.order == policy and life.num_moves >= 400

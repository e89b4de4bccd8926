"""Single promises of the cache that its random lives do not ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiradix.cache import HierarchicalCache
from hiradix.errors import Misuse
from hiradix.memory import PageAllocator
from hiradix.policy.eviction import make_order
from hiradix.policy.uses import Finished
from hiradix.tree import HOST, RadixKey, RadixTree
from tests.cache.component_world import ComponentWorld, Setup
from tests.cache.test_component_storage import TOKENS, loadable, on_the_way, restarted, serve_key
from tests.cache.test_lost_hits import key, serve
from tests.cache.world import Setup as PlainSetup
from tests.cache.world import World


def device_alone(policy: str, config: dict[str, Any]) -> HierarchicalCache:
    return HierarchicalCache(RadixTree(4, order=make_order(policy, config)), PageAllocator(16, 1))


def test_a_policy_that_learns_hears_of_each_request_that_ended() -> None:
    cache = device_alone("ghd", {})
    prompt = RadixKey(range(8))
    lock = cache.insert(prompt, cache.supply.device_pools[0].alloc(2))
    cache.finished(prompt, lock.node, Finished(8, 3))
    assert cache.learner is not None and cache.learner.clock == 11


def test_what_a_policy_has_learned_is_saved_at_the_end(tmp_path: Path) -> None:
    cache = device_alone("ghd", {"tables": str(tmp_path / "learned")})
    cache.close()
    assert [path.stat().st_size > 0 for path in tmp_path.iterdir()] == [True]


def test_each_host_pool_is_cut_to_the_smallest_of_any_rank() -> None:
    def first_then_own(vector: np.ndarray) -> np.ndarray:
        asked.append(vector)
        return np.minimum(vector, 9) if len(asked) == 1 else vector

    asked: list[np.ndarray] = []
    world = ComponentWorld(Setup(host_pages=(24, 8, 6)), 1, agree=first_then_own)
    assert [pool.num_pages for pool in world.cache.supply.host_pools] == [9, 8]
    assert [pool.available for pool in world.cache.supply.host_pools] == [9, 8]


def test_device_pages_for_a_path_that_has_its_own_are_refused() -> None:
    world = World(PlainSetup(), 1)
    serve(world, key(4))
    node = world.cache.match(key(4)).device_node
    with pytest.raises(Misuse, match="for what is resident"):
        world.cache.supply.take_path(node, world.device.alloc(1))


@pytest.mark.parametrize(("host_pages", "written"), [(5, 5), (8, 8), (9, 8)])
def test_of_a_prompt_longer_than_the_host_its_beginning_is_written(host_pages: int, written: int) -> None:
    world = World(PlainSetup(device_pages=12, host_pages=host_pages), 1)
    serve(world, key(8))
    assert world.cache.tree.resident_pages(HOST) == written
    assert world.cache.counters.written == written and world.cache.counters.write_dropped == 8 - written
    world.assert_drained()


def test_boundaries_on_the_way_are_named_from_where_the_tree_ends() -> None:
    """Also those behind the first, whose names go on from the one before."""
    world = restarted(5, 9, 12)
    serve_key(world, TOKENS[:1])
    on_the_way(world, step=4)
    world.settle()
    assert world.gets == [(0, 4), (1, 3)] * 2 + [(0, 3), (1, 3)] and loadable(world) == 12
    assert serve_key(world, TOKENS) == 0

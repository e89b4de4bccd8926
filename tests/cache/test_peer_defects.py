"""Defects measured in SGLang's caches (rows h.. and s.. of a survey), each shown absent in the whole cache.

`tests/tree/test_regressions.py` has their tree half, `tests/memory/test_allocator.py` the allocators' (h9b,
h13, h18), `tests/prefix_cache/test_peer_defects.py` the engines' side (h19, s2) and `test_swa.py` s1 and s3.
"""

from __future__ import annotations

import pytest

from hiradix.tree import Tier
from tests.cache.test_lost_hits import fetch, key, serve
from tests.cache.world import Setup, World
from tests.tree.steps import num_steps


def test_h1_a_node_split_while_it_is_copied_reaches_storage_whole() -> None:
    world = World(Setup(device_pages=24, host_pages=40), 1)
    world.cache.attach_storage(world.stores)
    first, second = key(10, tail=1, shared=5), key(8, tail=2, shared=5)
    running = [world.run_request(first)]
    assert len(world.cache.in_flight) == 1, "the copy is under way"
    running.append(world.run_request(second))  # splits what is being copied
    for one in running:
        assert one is not None
        world.release(one)
    world.settle()
    assert len(world.storage.pages) == 10 + 3
    world.cache.reset()
    assert fetch(world, first) == 10, "no hole at the front of the chain"
    world.assert_drained()


def test_h2_write_back_with_a_full_host_evicts_all_the_same() -> None:
    world = World(Setup(write_policy="write_back", device_pages=8, host_pages=2), 1)
    serve(world, key(3))
    assert world.cache.evict(3) == 3
    written = world.cache.counters.written
    assert written <= 2 and world.cache.counters.write_dropped == 3 - written
    assert world.cache.match(key(3)).loadable_node.end == written
    serve(world, key(8, tail=1))
    assert world.cache.evict(8) == 8
    world.assert_drained()


@pytest.mark.parametrize("num_pages", [1, 4])
def test_h11_a_host_hit_of_any_length_is_loaded(num_pages: int) -> None:
    world = World(Setup(), 1)
    serve(world, key(num_pages))
    world.cache.evict(num_pages)
    match = world.cache.match(key(num_pages))
    assert (match.device_node.end, match.loadable_node.end) == (0, num_pages)
    assert world.cache.load_back(match) == num_pages
    assert world.cache.match(key(num_pages)).device_node.end == num_pages
    world.assert_drained()


def test_h12_writing_back_costs_what_it_evicts() -> None:
    def cost(num_leaves: int) -> float:
        world = World(Setup(write_policy="write_back", device_pages=num_leaves, host_pages=num_leaves), 1)
        for i in range(num_leaves):
            serve(world, key(1, tail=i + 1))
        steps = num_steps(lambda: world.cache.evict(num_leaves))
        assert world.cache.counters.written == num_leaves
        return steps / num_leaves

    assert cost(240) < 1.5 * cost(40)


def test_h14_host_pages_below_an_uncopied_parent_leave_with_it() -> None:
    stored = World(Setup(), 1)
    stored.cache.attach_storage(stored.stores)
    serve(stored, key(4))
    world = World(Setup(write_policy="write_through_selective"), 1)
    world.storage.pages.update(stored.storage.pages)
    world.cache.attach_storage(world.stores)
    serve(world, key(2))
    assert fetch(world, key(4)) == 4 and world.cache.tree.resident_pages(Tier.HOST) == 2
    world.settle()
    assert world.cache.evict(2) == 2
    assert world.cache.tree.resident_pages(Tier.HOST) == 0 and world.host.available == world.setup.host_pages
    world.cache.reset()
    world.settle()

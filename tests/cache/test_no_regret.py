"""The gate in the cache: slow tiers are left alone, and the request is answered all the same."""

from __future__ import annotations

from hiradix.policy.no_regret import GatedTransfer, NoRegret
from tests.cache.test_lost_hits import fetch, key, serve, stored_world
from tests.cache.world import Setup, World


def slow(world: World, move: GatedTransfer) -> NoRegret:
    gate = world.cache.no_regret
    gate.computed(1000, 1.0)
    gate.moved(move, 1, 10.0)
    return gate


def test_a_host_hit_that_is_slower_than_computing_is_computed() -> None:
    world = World(Setup(device_pages=12, host_pages=20), 1)
    serve(world, key(4))
    world.cache.evict(12)
    gate = slow(world, GatedTransfer.LOAD)
    assert serve(world, key(4)) == 4
    assert world.cache.counters.load_too_slow == 4 == gate.num_refused[GatedTransfer.LOAD]
    assert world.cache.match(key(4)).device_node.end == 4
    gate.enabled = False
    world.cache.evict(12)
    assert serve(world, key(4)) == 0
    world.assert_drained()


def test_a_storage_hit_that_is_slower_than_computing_is_not_read() -> None:
    world = stored_world(4)
    slow(world, GatedTransfer.FETCH)
    assert fetch(world, key(4)) == 0
    assert world.cache.counters.unfulfilled == {"slower_than_compute": 4}
    assert world.host.available == world.setup.host_pages
    world.assert_drained()


def test_loads_and_fetches_are_measured() -> None:
    world = stored_world(4)
    assert fetch(world, key(4)) == 4
    serve(world, key(4))
    rates = world.cache.no_regret.rates()
    assert rates["load"] > 0 and rates["fetch"] > 0, rates
    world.assert_drained()

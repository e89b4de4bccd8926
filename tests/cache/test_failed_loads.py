"""Pages that a failed load promised: nobody may find them, however the tree is cut around them."""

from __future__ import annotations

from hiradix.tree import Tier
from tests.cache.test_lost_hits import key, serve
from tests.cache.world import Setup, World


def failed_load(num_pages: int, split_at: int) -> tuple[World, object]:
    """A world in which a load of `key(num_pages)` failed while somebody locked its first `split_at` pages."""
    world = World(Setup(device_pages=20, host_pages=20), 1)
    cache, tree = world.cache, world.cache.tree
    serve(world, key(num_pages))
    cache.evict(20)
    assert cache.load_back(cache.match(key(num_pages))) == num_pages
    held = tree.lock(cache.match(key(split_at)).device_node, Tier.DEVICE)
    world.transport.faults = 1.0
    cache.start_loading()
    world.driver.run()
    world.transport.faults = 0.0
    cache.tick()
    assert cache.counters.load_failed == num_pages
    return world, held


def test_a_failed_load_is_known_though_its_end_was_split_off_and_evicted() -> None:
    world, held = failed_load(6, split_at=4)
    cache, tree = world.cache, world.cache.tree
    tree.match(key(2))  # cuts what is left of the load in two
    tree.unlock(held)
    cache.supply.evict(Tier.HOST, 20)
    cache.supply.evict(Tier.DEVICE, 1)
    cache.tick()
    assert cache.match(key(6)).device_node is tree.root, "pages of a failed load can be matched"
    world.assert_drained()


def test_a_failed_load_frees_its_pages_once_its_reader_is_gone() -> None:
    world, held = failed_load(6, split_at=4)
    cache, tree = world.cache, world.cache.tree
    assert world.device.available == 16, "the four pages that are locked"
    tree.unlock(held)
    cache.evict(20)
    assert world.device.available == 20 and tree.protected_pages(Tier.DEVICE) == 0
    assert cache.match(key(6)).loadable_node.end == 6
    world.assert_drained()

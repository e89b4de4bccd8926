"""Pages that a failed load promised: nobody may find them, however the tree is cut around them."""

from __future__ import annotations

import pytest

from hiradix.transfer import LoadFailed
from hiradix.tree import Lock, Tier
from tests.cache.test_lost_hits import key, serve
from tests.cache.world import LAYERS, Setup, World


def failed_load(num_pages: int, split_at: int) -> tuple[World, Lock]:
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


def test_an_insert_over_a_failed_load_keeps_the_lock_its_request_has() -> None:
    """The request goes on with the lock it gets and gives the other back: what it reads must not be freed."""
    world, held = failed_load(6, split_at=4)
    cache, tree = world.cache, world.cache.tree
    pages = world.device.alloc(2)
    lock = cache.insert(key(6), pages, at=held)
    assert lock.node is held.node
    tree.unlock(held)
    cache.evict(20)
    assert world.device.available == 14, "four pages are read, and two are still the request's own"
    world.device.free(pages)
    tree.unlock(lock)
    cache.tick()
    assert world.device.available == 20
    world.assert_drained()


def test_a_reader_waits_for_every_load_it_may_read_from() -> None:
    """A load that fails only after a newer one was started is not hidden by the newer one's success."""
    world = World(Setup(device_pages=8, host_pages=20), 1)
    first, second, third = key(2, tail=1), key(2, tail=2), key(2, tail=3)
    for one in (first, second, third):
        serve(world, one)
    world.cache.evict(8)
    copy, failing = world.transport.copy_pages, [True]

    def fail_sometimes(*args: object) -> None:
        if failing[0]:
            raise RuntimeError("copy")
        copy(*args)

    world.transport.copy_pages = fail_sometimes
    assert world.cache.load_back(world.cache.match(first))
    slot = world.cache.start_loading()
    world.driver.run()
    assert world.cache.load_back(world.cache.match(second))
    assert world.cache.start_loading() == slot, "the failed one is what readers are told to wait for"
    world.cache.tick()
    assert world.cache.match(second).device_node.end == 2, "under way"
    assert world.cache.load_back(world.cache.match(third))
    newest = world.cache.start_loading()
    assert newest > slot + 1
    gate = world.controller.layer_done_counter
    while gate.error(slot + 1) is None:
        world.driver.step()
    failing[0] = False
    gate.set_consumer(newest)
    with pytest.raises(LoadFailed):
        for layer in range(LAYERS):
            gate.wait_until(layer)
    world.assert_drained()


@pytest.mark.parametrize("ends", [(2, 4, 6), (2, 6), (4, 6)])
def test_failed_loads_of_one_path_leave_together(ends: tuple[int, ...]) -> None:
    """An engine that finds no room counts on it: nothing is under way that could give some later."""
    world = World(Setup(device_pages=20, host_pages=20), 1)
    cache = world.cache
    serve(world, key(6))
    cache.evict(20)
    for end in ends:
        assert cache.load_back(cache.match(key(end)))
    world.transport.faults = 1.0
    cache.start_loading()
    world.driver.run()
    world.transport.faults = 0.0
    cache.tick()
    assert cache.counters.load_failed == 6
    assert world.device.available == 20 and cache.tree.protected_pages(Tier.DEVICE) == 0
    world.assert_drained()

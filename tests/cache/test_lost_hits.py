"""Ways in which hits were, or could be, lost without a word (known-bugs rows 28 to 31)."""

from __future__ import annotations

import numpy as np

from hiradix.cache.storage_backup import OFFER_AGAIN_USES
from hiradix.tree import Lock, RadixKey, Tier
from tests.cache.world import PAGE_SIZE, Setup, World


def key(num_pages: int, *, tail: int = 0, shared: int = 0) -> RadixKey:
    """`num_pages` pages; the first `shared` are the same for every `tail`."""
    return RadixKey([n if n < shared * PAGE_SIZE else n + 1000 * tail for n in range(num_pages * PAGE_SIZE)])


def serve(world: World, wanted: RadixKey) -> int:
    """Run one request to its end and settle; the pages it had to compute."""
    running = world.run_request(wanted)
    assert running is not None
    world.release(running)
    world.settle()
    return running.num_computed


def fetch(world: World, wanted: RadixKey, handle: object = "f") -> int:
    """Prefetch `wanted` to the end; the pages loadable afterwards."""
    world.cache.prefetcher.start(handle, wanted, world.cache.match(wanted).loadable_node)
    world.driver.run()
    while not world.cache.prefetcher.progress(handle):
        world.cache.tick()
        world.driver.run()
    return world.cache.match(wanted).loadable_node.end


def test_write_back_copies_exactly_what_it_evicts() -> None:
    world = World(Setup(write_policy="write_back", device_pages=8, host_pages=20), 1)
    first, second = key(3, tail=1), key(3, tail=2)
    serve(world, first)
    serve(world, second)
    assert world.cache.evict(3) == 3
    assert world.cache.counters.written == 3
    assert world.cache.match(first).loadable_node.end == 3
    assert world.cache.match(second).device_node.end == 3
    assert world.cache.evict(3) == 3
    assert [world.cache.match(k).loadable_node.end for k in (first, second)] == [3, 3]
    world.assert_drained()


def test_an_eviction_that_copies_nothing_waits_for_nothing() -> None:
    """What came from the host is there still: no results to look for, and with ranks no exchange."""
    world = World(Setup(write_policy="write_back", device_pages=12, host_pages=20), 1)
    serve(world, key(4))
    assert world.cache.evict(4) == 4
    serve(world, key(4))
    assert world.cache.counters.loaded == 4
    ticket = world.controller.write([], [])
    world.driver.run()
    assert world.cache.evict(4) == 4 and world.cache.counters.written == 4
    assert [result.ticket for result in world.controller.poll()] == [ticket], "nobody looked for it"
    world.assert_drained()


def test_an_eviction_waits_for_the_copies_that_hold_what_is_to_go() -> None:
    """Else a request that needs the room would be put off for what is there in a moment."""
    world = World(Setup(device_pages=8, host_pages=20), 1)
    running = world.run_request(key(8))
    assert running is not None
    world.release(running)
    assert world.cache.tree.evictable_pages(Tier.DEVICE) == 0, "all of it is being copied"
    assert world.cache.evict(6) >= 6 and world.cache.counters.written == 8
    world.assert_drained()


def test_what_is_written_back_leaf_first_is_stored_whole() -> None:
    """A leaf goes down before what is above it, and cannot be stored then: nobody could reach it."""
    world = World(Setup(write_policy="write_back", device_pages=12, host_pages=20), 1)
    world.cache.attach_storage(world.stores)
    serve(world, key(2, shared=2))
    serve(world, key(4, shared=2, tail=1))
    assert world.cache.evict(2) == 2 and world.cache.evict(2) == 2
    world.settle()
    assert len(world.storage.pages) == 4
    world.cache.reset()
    assert fetch(world, key(4, shared=2, tail=1)) == 4
    world.assert_drained()


def test_write_back_saves_what_a_load_back_evicts() -> None:
    world = World(Setup(write_policy="write_back", device_pages=6, host_pages=20), 1)
    first, second = key(5, tail=1), key(5, tail=2)
    serve(world, first)
    serve(world, second)  # evicts the first, saved on the host
    assert serve(world, first) == 0  # loaded back in place of the second
    assert world.cache.match(second).loadable_node.end == 5
    world.assert_drained()


def test_writing_back_is_no_use_of_what_is_above() -> None:
    world = World(Setup(write_policy="write_back", device_pages=12, host_pages=20), 1)
    first, second = key(4, tail=1), key(3, tail=2)
    serve(world, first[: 2 * PAGE_SIZE])
    serve(world, first)
    serve(world, second)
    assert world.cache.evict(2) == 2 and world.cache.match(first).device_node.end == 2
    assert world.cache.evict(2) == 2 and world.cache.match(first).device_node.end == 0, "it was used first"
    assert world.cache.match(second).device_node.end == 3
    world.assert_drained()


def test_a_write_back_that_does_not_end_keeps_what_it_copies() -> None:
    world = World(Setup(write_policy="write_back", device_pages=8, host_pages=20), 1)
    prompt = key(3, tail=1)
    serve(world, prompt)
    world.driver.held.add("write")
    assert world.cache.evict(3) == 0, "the copies read these pages"
    assert world.cache.tree.protected_pages(Tier.DEVICE) == 3
    world.driver.held.clear()
    assert world.cache.drain(1.0) and world.cache.tree.protected_pages(Tier.DEVICE) == 0
    assert world.cache.evict(3) == 3 and world.cache.match(prompt).loadable_node.end == 3
    world.assert_drained()


def test_a_backup_never_evicts_the_host_copy_of_its_own_prefix() -> None:
    world = World(Setup(device_pages=12, host_pages=6), 1)
    serve(world, key(4))
    serve(world, key(8))  # no room for four more pages on the host beside the first four
    world.cache.evict(12)
    assert world.cache.match(key(8)).loadable_node.end >= 4
    world.assert_drained()


def test_a_page_whose_copy_failed_is_copied_with_the_next_insert_below_it() -> None:
    world = World(Setup(device_pages=12, host_pages=20), 1)
    running = world.run_request(key(2))
    assert running is not None
    world.transport.faults = 1.0
    world.driver.step()
    world.transport.faults = 0.0
    below = world.run_request(key(4))
    assert below is not None
    world.driver.run()
    world.cache.tick()
    assert world.cache.counters.write_failed == 2
    serve(world, key(6))
    world.release(running)
    world.release(below)
    world.settle()
    world.cache.evict(12)
    assert world.cache.match(key(6)).loadable_node.end == 6
    world.assert_drained()


def attached(**setup: object) -> World:
    world = World(Setup(**setup), 1)  # type: ignore[arg-type]
    world.cache.attach_storage(world.stores)
    return world


def test_a_page_whose_store_failed_is_stored_by_the_next_use() -> None:
    world = attached()
    world.storage.faults = 1.0
    running = world.run_request(key(3))
    world.driver.run()
    world.cache.tick()
    world.driver.run()
    world.cache.tick()
    assert running is not None and world.cache.counters.backup_failed == 3
    world.release(running)
    world.storage.faults = 0.0
    serve(world, key(3))
    assert len(world.storage.pages) == 3


def test_a_gap_in_a_stored_chain_is_filled() -> None:
    world = attached(device_pages=20, host_pages=20)
    world.storage.faults = 1.0
    first = world.run_request(key(3))
    world.driver.run()
    world.cache.tick()
    world.driver.held.add("store")
    second = world.run_request(key(6))
    world.driver.run()
    world.cache.tick()
    assert first is not None and second is not None
    world.driver.held.clear()
    while not world.cache.counters.backup_failed:
        world.driver.step()
        world.cache.tick()
    world.storage.faults = 0.0
    world.driver.run()
    world.cache.tick()
    world.release(first)
    world.release(second)
    serve(world, key(8))
    assert len(world.storage.pages) == 8


def test_what_storage_forgot_is_offered_again_while_it_is_used() -> None:
    world = attached()
    serve(world, key(3))
    world.storage.pages.clear()
    for _ in range(OFFER_AGAIN_USES + 1):
        serve(world, key(3))
    assert len(world.storage.pages) == 3


def test_pages_from_before_an_attach_are_stored_by_their_next_use() -> None:
    world = World(Setup(), 1)
    serve(world, key(3))
    world.cache.attach_storage(world.stores)
    serve(world, key(3))
    assert len(world.storage.pages) == 3


def stored_world(num_pages: int, **setup: object) -> World:
    """A world whose device and host are empty, and whose storage has `key(num_pages)`."""
    usual = {"device_pages": 40, "host_pages": 4 * num_pages, "prefetch_policy": "wait_complete"}
    world = attached(**{**usual, **setup})
    serve(world, key(num_pages))
    world.cache.reset()
    assert len(world.storage.pages) == num_pages
    return world


def test_a_request_does_not_wait_for_a_prefetch_that_was_aborted() -> None:
    world = stored_world(4)
    prefetcher = world.cache.prefetcher
    assert prefetcher.start("gone", key(4), world.cache.tree.root)
    world.driver.step()  # the query has begun
    prefetcher.abort("gone")
    assert fetch(world, key(4), "again") == 4
    world.assert_drained()


def test_one_who_joined_asks_for_itself_when_the_other_was_not_worth_reading() -> None:
    world = stored_world(6, threshold_tokens=4 * PAGE_SIZE)
    other = key(6, tail=1, shared=2)  # two pages in common: less than the threshold
    assert world.cache.prefetcher.start("first", other, world.cache.tree.root)
    assert fetch(world, key(6), "second") == 6
    world.cache.prefetcher.abort("first")
    world.assert_drained()


def test_a_prefetch_longer_than_the_host_brings_what_fits() -> None:
    """Row 31: any configuration accepted at the start can read from storage."""
    world = stored_world(20)
    small = World(Setup(host_pages=7), 2)
    small.storage.pages, small.known = world.storage.pages, world.known
    small.cache.attach_storage(small.stores)
    assert fetch(small, key(20)) == 7
    small.assert_drained()


def test_pages_that_came_before_a_stop_are_kept_though_later_reads_never_ran() -> None:
    world = stored_world(150, device_pages=160)
    prefetcher = world.cache.prefetcher
    prefetcher.start("r", key(150), world.cache.tree.root)
    while not sum(p.unread_pages for p in prefetcher._running):
        world.driver.step()
        world.cache.tick()
    assert world.driver.step()  # the first batch is being read, the second is queued
    prefetcher.stop("r")
    world.settle()
    assert world.cache.match(key(150)).loadable_node.end == 128
    world.assert_drained()


def test_a_reset_leaves_a_hanging_store_its_pages_until_it_ends() -> None:
    """Row 9: pages that a worker may still read are not free."""
    world = attached()
    running = world.run_request(key(2))
    world.driver.held.add("store")
    world.driver.run()
    world.cache.tick()
    assert running is not None
    world.release(running)
    world.driver.held.clear()
    world.driver.step()  # it has begun
    world.driver.held.add("store")
    world.cache.reset(0.01)
    world.check()
    assert len(world.cache.in_flight) == 1 and world.host.available == world.setup.host_pages - 2
    world.settle()
    assert world.host.available == world.setup.host_pages
    world.assert_drained()


def loading(world: World) -> Lock:
    """Three pages that were evicted are about to be loaded; the lock of who waits for them."""
    serve(world, key(3))
    world.cache.evict(12)
    assert world.cache.load_back(world.cache.match(key(3))) == 3
    return world.cache.tree.lock(world.cache.match(key(3)).device_node, Tier.DEVICE)


def test_no_insert_lands_on_the_pages_of_a_failed_load() -> None:
    """Row 22: the prefix that a failed load promised is not what the next owner gets."""
    world = World(Setup(device_pages=12, host_pages=20), 1)
    cache, tree, held = world.cache, world.cache.tree, loading(world)
    world.transport.faults = 1.0
    cache.start_loading()
    world.driver.run()
    world.transport.faults = 0.0
    cache.tick()
    assert cache.match(key(3)).loadable_node is tree.root
    pages = world.device.alloc(3)
    for i, page in enumerate(pages.tolist()):
        world.write_page(page, world.stamp(key(3), i))
    lock = cache.insert(key(3), pages)
    world.read_prefix(key(3), tree.pages(lock.node, Tier.DEVICE))
    kept = pages[lock.node.end :]
    world.device.free(kept)
    tree.unlock(lock)
    tree.unlock(held)
    cache.tick()
    assert cache.match(key(3)).device_node is tree.root and cache.match(key(3)).loadable_node.end == 3
    world.assert_drained()


def test_the_gate_tells_of_a_load_that_failed_before_it_was_asked() -> None:
    """A request admitted with a load, then a wait for copies in the same plan: the pass must not run."""
    world = World(Setup(device_pages=12, host_pages=20), 1)
    cache, tree, held = world.cache, world.cache.tree, loading(world)
    world.transport.faults = 1.0
    slot = cache.start_loading()
    world.driver.run()
    cache.tick()
    world.transport.faults = 0.0
    assert world.controller.layer_done_counter.error(slot) is not None
    assert cache.start_loading() == slot, "its reader still holds it"
    tree.unlock(held)
    assert cache.start_loading() == -1
    world.assert_drained()


def test_making_room_starts_no_load_of_the_plan_under_way() -> None:
    world = World(Setup(device_pages=8, host_pages=20), 1)
    cache, tree, held = world.cache, world.cache.tree, loading(world)
    busy = cache.insert(key(5, tail=1), world.device.alloc(5))
    cache.evict(4)
    assert len(cache._load_back._queued) == 1
    assert cache.start_loading() >= 0, "the pass of this plan waits for it"
    world.driver.run()
    cache.tick()
    tree.unlock(held)
    tree.unlock(busy)
    world.cache.tree.check()
    assert np.all(tree.pages(cache.match(key(3)).device_node, Tier.DEVICE) > 0)


def test_one_long_path_that_does_not_fit_the_host_is_no_deep_recursion() -> None:
    world = World(Setup(device_pages=1300, host_pages=2, write_policy="write_back"), 1)
    cache = world.cache
    lock = None
    for n in range(1, 1200):
        pages = world.device.alloc(1)
        new = cache.insert(key(n), pages, at=lock)
        if lock is not None:
            cache.tree.unlock(lock)
        lock = new
    cache.write_through.policy = type(cache.write_through.policy).from_name("write_through")
    cache.tree.unlock(cache.insert(key(1200), world.device.alloc(1), at=lock))
    cache.tree.unlock(lock)
    world.settle()
    assert world.cache.tree.resident_pages(Tier.HOST) == 2
    world.assert_drained()


def test_host_pages_of_a_load_stay_until_it_is_done() -> None:
    """Row 5: nothing may take the source of a copy that has not ended."""
    world = World(Setup(device_pages=12, host_pages=4), 1)
    serve(world, key(4))
    world.cache.evict(12)
    supply = world.cache.supply
    assert supply.host_room() == 4
    assert world.cache.load_back(world.cache.match(key(4))) == 4
    assert supply.host_room() == 0 and supply.alloc_host(1) is None
    world.cache.start_loading()
    world.driver.run()
    world.cache.tick()
    assert supply.host_room() == 4
    world.assert_drained()


def reading(world: World, num_pages: int) -> None:
    """Prefetch `key(num_pages)` as "r" and go on until its reads are submitted."""
    prefetcher = world.cache.prefetcher
    assert prefetcher.start("r", key(num_pages), world.cache.tree.root)
    while not sum(p.unread_pages for p in prefetcher._running):
        world.driver.step()
        world.cache.tick()


def test_pages_behind_one_that_did_not_come_are_not_used() -> None:
    """Row 6: a prefetch is worth its leading pages, whatever a later read brings."""
    world = stored_world(150, device_pages=160)
    names = list(world.storage.pages)  # in the order of storing, which is that of the chain
    reading(world, 150)
    del world.storage.pages[names[5]]
    world.settle()
    world.check()
    assert world.cache.match(key(150)).loadable_node.end == 5
    world.assert_drained()


def test_what_a_prefetch_brought_stays_until_its_request_runs() -> None:
    world = stored_world(150, device_pages=160, host_pages=300)
    reading(world, 150)
    while not world.cache.counters.prefetched:
        world.driver.step()
        world.cache.tick()
    assert world.cache.counters.prefetched == 128
    assert world.cache.supply.host_room() == 150, "half of the host is the prefetch's"
    world.settle()
    assert world.cache.prefetcher.progress("r") and world.cache.supply.host_room() == 150
    world.cache.prefetcher.abort("r")
    assert world.cache.supply.host_room() == 300
    world.assert_drained()


def test_the_gate_tells_of_a_failed_load_though_a_later_one_went_well() -> None:
    world = World(Setup(device_pages=12, host_pages=20), 1)
    cache, tree = world.cache, world.cache.tree
    for tail in (1, 2):
        serve(world, key(3, tail=tail))
    cache.evict(12)
    cache.load_back(cache.match(key(3, tail=1)))
    held = tree.lock(cache.match(key(3, tail=1)).device_node, Tier.DEVICE)
    world.transport.faults = 1.0
    failed = cache.start_loading()
    world.driver.run()
    world.transport.faults = 0.0
    cache.tick()
    cache.load_back(cache.match(key(3, tail=2)))
    assert cache.start_loading() == failed
    tree.unlock(held)
    assert cache.start_loading() > failed, "nobody reads the failed one any more"
    world.driver.run()
    cache.tick()
    assert cache.start_loading() == -1
    world.assert_drained()


def test_a_prompt_longer_than_the_host_is_copied_as_far_as_it_fits() -> None:
    """Row 31: a host smaller than one prompt still serves the front of it."""
    for policy in ("write_through", "write_back"):
        world = World(Setup(device_pages=12, host_pages=4, write_policy=policy), 1)
        serve(world, key(8))
        world.cache.evict(12)
        assert world.cache.match(key(8)).loadable_node.end == 4, policy
        assert serve(world, key(8)) == 4
        world.assert_drained()


def test_what_is_longer_than_the_host_with_its_prefix_is_copied_as_far_as_it_fits() -> None:
    world = World(Setup(device_pages=12, host_pages=6), 1)
    serve(world, key(2))
    serve(world, key(8))
    world.cache.evict(12)
    assert world.cache.match(key(8)).loadable_node.end == 6
    world.assert_drained()


def test_a_node_that_was_split_before_its_copy_ended_is_stored_whole() -> None:
    world = attached(device_pages=20, host_pages=20)
    first = world.run_request(key(6))
    second = world.run_request(key(5, tail=1, shared=3))  # cuts what is still being copied
    assert first is not None and second is not None
    world.release(first)
    world.release(second)
    world.settle()
    assert len(world.storage.pages) == 6 + 2
    world.assert_drained()

"""A prefetch ends with the last request that waits for it, and holds nothing before it is known to hit."""

from __future__ import annotations

from hiradix.transfer import FailReason, JobKind
from tests.cache.test_lost_hits import key, reading, stored_world


def test_reads_stop_when_the_last_who_joined_is_gone() -> None:
    world = stored_world(150, device_pages=160)
    prefetcher = world.cache.prefetcher
    reading(world, 150)
    assert prefetcher.start("joined", key(150), world.cache.tree.root)
    prefetcher.abort("r")
    assert world.controller.pending(JobKind.READ) == 2, "somebody waits for them"
    prefetcher.abort("joined")
    world.settle()
    failures = world.controller.stats().kinds[JobKind.READ].failures
    assert failures.get(FailReason.CANCELLED) == 2, failures
    world.assert_drained()


def test_one_who_joined_does_not_keep_up_a_prefetch_once_aborted() -> None:
    world = stored_world(4)
    prefetcher = world.cache.prefetcher
    assert prefetcher.start("first", key(4), world.cache.tree.root)
    assert prefetcher.start("joined", key(4), world.cache.tree.root)
    prefetcher.abort("joined")
    assert len(prefetcher) == 1, "the joined one has ended"
    prefetcher.abort("first")
    world.settle()
    assert world.controller.stats().kinds[JobKind.QUERY].failures == {FailReason.CANCELLED: 1}
    world.assert_drained()


def test_a_query_holds_no_host_page() -> None:
    """Row 35: pages are taken when the length of the hit is known."""
    world = stored_world(4)
    assert world.cache.prefetcher.start("r", key(4), world.cache.tree.root)
    assert world.host.available == world.setup.host_pages
    world.settle()
    world.assert_drained()


def test_all_results_are_applied_in_one_tick() -> None:
    """Row 35: what has ended is not kept waiting behind what came before it."""
    world = stored_world(4, device_pages=160)
    for n in range(5):
        running = world.run_request(key(2, tail=n + 1))
        assert running is not None
        world.release(running)
    assert len(world.cache.flights) >= 5
    while world.controller.stats().kinds[JobKind.WRITE].num_results < 6:
        world.driver.step()
    world.cache.tick()
    assert world.controller.pending(JobKind.WRITE) == 0
    world.assert_drained()

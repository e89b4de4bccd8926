"""A prefetch ends with the last request that waits for it, and holds nothing before it is known to hit."""

from __future__ import annotations

from typing import Any

import pytest

from hiradix.transfer import FailReason, JobKind
from hiradix.tree.hashing import hash_pages
from tests.cache.test_lost_hits import fetch, key, reading, serve, stored_world
from tests.cache.world import PAGE_SIZE, Setup, World


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


@pytest.mark.parametrize(("gone", "stays"), [("r", "joined"), ("joined", "r")])
def test_of_two_who_wait_for_the_same_pages_one_may_go(gone: str, stays: str) -> None:
    world = stored_world(150, device_pages=160)
    prefetcher = world.cache.prefetcher
    reading(world, 150)
    assert prefetcher.start("joined", key(150), world.cache.tree.root)
    prefetcher.abort(gone)
    world.settle()
    assert prefetcher.progress(stays) and prefetcher.pop_loaded_span(stays) == (0, 150)
    kinds = world.controller.stats().kinds
    assert not kinds[JobKind.READ].failures and kinds[JobKind.READ].num_results == 2, "nothing is read twice"
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
    assert len(world.cache.in_flight) >= 5
    while world.controller.stats().kinds[JobKind.WRITE].num_results < 6:
        world.driver.step()
    world.cache.tick()
    assert world.controller.pending(JobKind.WRITE) == 0
    world.assert_drained()


def fail(keys: Any) -> int:
    """A lookup whose guard is at fault: of a store's faults it says no more than that nothing is there."""
    raise OSError("injected")


def test_a_query_that_nobody_waits_for_any_more_is_no_fault_of_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = stored_world(4)
    prefetcher, unfulfilled = world.cache.prefetcher, world.cache.counters.unfulfilled
    assert prefetcher.start("gone", key(4), world.cache.tree.root)
    prefetcher.abort("gone")
    world.settle()
    assert world.controller.stats().kinds[JobKind.QUERY].failures == {FailReason.CANCELLED: 1}
    assert "storage_transfer" not in unfulfilled, unfulfilled
    monkeypatch.setattr(world.stores.parts[0], "exists", fail)
    assert prefetcher.start("r", key(4), world.cache.tree.root)
    world.driver.run()
    world.cache.tick()
    assert unfulfilled["storage_transfer"] == 4 and prefetcher.progress("r")
    world.assert_drained()


def test_names_that_a_query_made_of_what_is_there_are_kept() -> None:
    """Of a prefix from before the attach nobody knew them: the next query need not reach back for them."""
    world = World(Setup(host_pages=40), 1)
    serve(world, key(3))
    anchor = world.cache.match(key(3)).loadable_node
    assert world.cache.tree.hashes(anchor) is None
    world.cache.attach_storage(world.stores)
    assert world.cache.prefetcher.start("r", key(6), anchor)
    world.driver.run()
    world.cache.tick()
    wanted = hash_pages(world.cache.tree.rows(key(6), world.cache.tree.root, 0, 6))
    assert world.cache.tree.hashes(anchor) == wanted[:3]
    world.cache.prefetcher.abort("r")
    world.assert_drained()


def test_names_of_what_a_fetch_brought_are_kept() -> None:
    """Whatever is stored or looked for below it begins there."""
    world = stored_world(4)
    assert fetch(world, key(4)) == 4
    tree, node = world.cache.tree, world.cache.match(key(4)).loadable_node
    assert tree.hashes(node) == hash_pages(tree.rows(key(4), tree.root, 0, 4))
    world.assert_drained()


def test_one_who_joined_has_what_came_behind_where_it_began() -> None:
    world = stored_world(6)
    assert fetch(world, key(2)) == 2
    prefetcher = world.cache.prefetcher
    node = world.cache.match(key(6)).loadable_node
    assert prefetcher.start("first", key(6), node) and prefetcher.start("joined", key(6), node)
    world.settle()
    assert prefetcher.progress("first") and prefetcher.progress("joined")
    assert prefetcher.pop_loaded_span("first") == prefetcher.pop_loaded_span("joined") == (2, 4)
    assert prefetcher.pop_loaded_span("joined") == (0, 0), "reading resets it"
    world.assert_drained()


def test_a_prefetch_that_the_host_has_no_page_for_ends_when_its_request_could_run() -> None:
    """Others than those who wait have all pages, as those that a slow store is given: nobody waits for them."""
    world = stored_world(4)
    prefetcher, unfulfilled = world.cache.prefetcher, world.cache.counters.unfulfilled
    assert prefetcher.start("r", key(4), world.cache.tree.root)
    taken = world.cache.supply.alloc_host(world.setup.host_pages)
    world.driver.run()
    world.cache.tick()
    assert len(prefetcher) == 1 and prefetcher.room.num_short == 1 and not prefetcher.is_done("r")
    assert prefetcher.progress("r") and len(prefetcher) == 0
    assert unfulfilled == {"host_capacity": 4} and prefetcher.pop_loaded_span("r") == (0, 0)
    world.cache.supply.free_host(taken)
    world.assert_drained()


def test_who_could_run_takes_as_many_host_pages_as_there_are() -> None:
    """It does not wait for the others, which may be being written; nor does one that joined it."""
    world = stored_world(4)
    prefetcher, unfulfilled = world.cache.prefetcher, world.cache.counters.unfulfilled
    assert prefetcher.start("r", key(4), world.cache.tree.root)
    assert prefetcher.start("joined", key(4), world.cache.tree.root)
    taken = world.cache.supply.alloc_host(world.setup.host_pages - 3)
    world.driver.run()
    world.cache.tick()
    assert prefetcher.room.num_short == 1 and prefetcher.fetching_pages("r") == 4
    assert not prefetcher.progress("joined") and unfulfilled == {"host_capacity": 1}
    world.driver.run()
    world.cache.tick()
    assert prefetcher.progress("r") and prefetcher.pop_loaded_span("r") == (0, 3)
    prefetcher.abort("r")
    world.cache.supply.free_host(taken)
    world.settle()
    assert prefetcher.progress("joined"), "what did not come is asked for again"
    assert prefetcher.pop_loaded_span("joined") == (0, 4)
    world.assert_drained()


def test_who_finds_no_host_page_is_served_when_there_are_some() -> None:
    """Its turn has not come yet."""
    world = stored_world(4)
    prefetcher = world.cache.prefetcher
    assert prefetcher.start("r", key(4), world.cache.tree.root)
    taken = world.cache.supply.alloc_host(world.setup.host_pages)
    world.driver.run()
    world.cache.tick()
    assert prefetcher.room.num_short == 1 and not prefetcher.is_done("r")
    world.cache.supply.free_host(taken)
    world.settle()
    assert prefetcher.progress("r") and prefetcher.pop_loaded_span("r") == (0, 4)
    world.assert_drained()


def test_pages_that_storage_failed_to_bring_are_counted_and_those_that_were_gone_are_none_of_them() -> None:
    for num_gone in (0, 1):
        world = stored_world(4)
        reading(world, 4)
        if num_gone:
            del world.storage.pages[list(world.storage.pages)[2]]
        else:
            world.storage.faults = 1.0
        world.driver.run()
        world.cache.tick()
        assert world.cache.prefetcher.progress("r")
        assert world.cache.counters.unfulfilled == ({} if num_gone else {"storage_transfer": 4})
        assert world.cache.prefetcher.pop_loaded_span("r") == (0, 2 if num_gone else 0)
        world.assert_drained()


def test_prompts_that_share_no_page_do_not_wait_for_each_other() -> None:
    world = stored_world(4)
    serve(world, key(4, tail=1))
    world.cache.reset()
    prefetcher, root = world.cache.prefetcher, world.cache.tree.root
    assert prefetcher.start("one", key(4), root) and prefetcher.start("other", key(4, tail=1), root)
    assert world.controller.pending(JobKind.QUERY) == 2, "each is asked for"
    world.settle()
    for handle in ("one", "other"):
        assert prefetcher.progress(handle) and prefetcher.pop_loaded_span(handle) == (0, 4)
    world.assert_drained()


def test_what_is_held_counts_until_its_request_runs() -> None:
    """Two may not have more of the host together than its share; who comes second is served by itself."""
    world = stored_world(4, host_pages=8)
    prefetcher, counters = world.cache.prefetcher, world.cache.counters
    serve(world, key(4, tail=1))
    world.cache.reset()
    root = world.cache.tree.root
    assert prefetcher.start("r", key(4), root) and prefetcher.start("other", key(4, tail=1), root)
    world.driver.run()
    world.cache.tick()
    assert (prefetcher.room.reserved_pages(), prefetcher.room.num_short) == ([4], 1)
    world.settle()
    assert prefetcher.progress("r") and not prefetcher.progress("other")
    assert prefetcher.fetching_pages("r") == 0 and prefetcher.fetching_pages("other") == 4
    prefetcher.abort("r")
    assert prefetcher.room.reserved_pages() == [0]
    world.settle()
    assert prefetcher.progress("other") and prefetcher.pop_loaded_span("other") == (0, 4)
    assert counters.unfulfilled == {} and prefetcher.room.reserved_pages() == [4]
    world.assert_drained()


def test_a_hit_below_the_threshold_is_counted_and_not_read() -> None:
    world = stored_world(2, threshold_tokens=3 * PAGE_SIZE)
    assert fetch(world, key(6)) == 0
    assert world.cache.counters.unfulfilled == {"below_threshold": 2}
    assert not world.controller.stats().kinds[JobKind.READ].num_results
    world.assert_drained()


def test_a_reset_forgets_every_prefetch() -> None:
    world = stored_world(4)
    prefetcher, root = world.cache.prefetcher, world.cache.tree.root
    assert prefetcher.start("came", key(4), root)
    world.settle()
    assert fetch(world, key(4), "ended") == 4 and prefetcher.start("r", key(8, tail=1), root)
    world.cache.reset()
    assert len(prefetcher) == 0 and prefetcher.room.reserved_pages() == [0]
    for handle in ("came", "ended", "r"):
        assert prefetcher.progress(handle) and prefetcher.pop_loaded_pages(handle) == 0, handle
    world.settle()
    world.assert_drained()


def test_a_reset_forgets_a_prefetch_whose_read_hangs() -> None:
    """Nobody waits for it, it takes no share of the host, and what it brings after all is of no use."""
    world = stored_world(4)
    prefetcher = world.cache.prefetcher
    reading(world, 4)
    assert world.driver.step()  # it has begun
    world.driver.held.add("fetch")
    world.cache.reset(0.01)
    assert len(world.cache.in_flight) == 1 and world.host.available == world.setup.host_pages - 4
    assert prefetcher.progress("r") and (len(prefetcher), prefetcher.room.reserved_pages()) == (0, [0])
    world.check()
    world.settle()
    assert world.cache.match(key(4)).loadable_node.end == 0 and prefetcher.pop_loaded_span("r") == (0, 0)
    assert world.host.available == world.setup.host_pages
    assert fetch(world, key(4), "again") == 4
    world.assert_drained()


def test_what_storage_said_it_has_not_is_not_asked_for_again_by_who_joined() -> None:
    world = stored_world(4)
    prefetcher, root, wanted = world.cache.prefetcher, world.cache.tree.root, key(4, tail=1)
    before = world.controller.stats().kinds[JobKind.QUERY].num_results
    assert prefetcher.start("first", wanted, root) and prefetcher.start("joined", wanted, root)
    world.settle()
    assert prefetcher.progress("first") and prefetcher.progress("joined")
    assert world.controller.stats().kinds[JobKind.QUERY].num_results == before + 1
    world.assert_drained()


def test_one_who_joined_asks_for_itself_where_storage_did_not_answer() -> None:
    world = stored_world(4)
    prefetcher, root = world.cache.prefetcher, world.cache.tree.root
    assert prefetcher.start("first", key(4), root) and prefetcher.start("joined", key(4), root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.stores.parts[0], "exists", fail)
        world.driver.run()
    world.cache.tick()
    assert prefetcher.progress("first") and len(prefetcher) == 1
    world.settle()
    assert prefetcher.progress("joined") and prefetcher.pop_loaded_span("joined") == (0, 4)
    world.assert_drained()


def test_who_asks_again_lets_go_of_what_it_asked_for_before() -> None:
    """A request that was put back asks for another prefix: nobody waits for the first any more."""
    world = stored_world(4)
    prefetcher, root = world.cache.prefetcher, world.cache.tree.root
    assert prefetcher.start("r", key(4, tail=1), root) and prefetcher.start("r", key(4), root)
    world.settle()
    assert world.controller.stats().kinds[JobKind.QUERY].failures == {FailReason.CANCELLED: 1}
    assert prefetcher.progress("r") and prefetcher.pop_loaded_span("r") == (0, 4)
    world.assert_drained()


def test_reads_that_nobody_waits_for_any_more_are_no_fault_of_storage() -> None:
    for ends in ("abort", "detach", "reset"):
        world = stored_world(150, device_pages=160)
        reading(world, 150)
        if ends == "abort":
            world.cache.prefetcher.abort("r")
        elif ends == "detach":
            world.cache.detach_storage(100.0)
        else:
            world.cache.reset()
        world.settle()
        assert world.cache.counters.unfulfilled == {"dropped": 150}, ends
        world.assert_drained()


def test_pages_that_come_too_late_are_missed_for_that_reason_alone() -> None:
    world = stored_world(150, device_pages=160, prefetch_policy="timeout")
    reading(world, 150)
    world.driver.advance(100.0)
    assert world.cache.prefetcher.progress("r")
    world.settle()
    assert world.cache.counters.unfulfilled == {"deadline": 150}
    world.assert_drained()


def test_what_lies_behind_pages_that_storage_failed_to_bring_is_missed_too() -> None:
    world = stored_world(150, device_pages=160)
    reading(world, 150)
    world.storage.faults = 1.0
    while not world.controller.stats().kinds[JobKind.READ].failures:
        world.driver.step()
    world.storage.faults = 0.0
    world.settle()
    assert world.cache.prefetcher.progress("r") and world.cache.prefetcher.pop_loaded_span("r") == (0, 0)
    assert world.cache.counters.unfulfilled == {"storage_transfer": 150}
    world.assert_drained()


@pytest.mark.parametrize("num_failing", [1, 2])
def test_of_many_who_joined_one_asks_again_for_all(num_failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each would read the same pages, and no limit of what is in flight would hold."""
    world = stored_world(4)
    prefetcher, root, names = world.cache.prefetcher, world.cache.tree.root, [f"r{n}" for n in range(9)]
    part, failing = world.stores.parts[0], ["once"] * num_failing
    exists = part.exists
    monkeypatch.setattr(part, "exists", lambda keys: fail(failing.pop()) if failing else exists(keys))
    for name in names:
        assert prefetcher.start(name, key(4), root)
    world.settle()
    assert all(prefetcher.progress(name) for name in names)
    brought = 4 if num_failing == 1 else 0
    assert {prefetcher.pop_loaded_span(name)[1] for name in names[1:]} == {brought}
    kinds = world.controller.stats().kinds
    assert kinds[JobKind.QUERY].num_results == 2, "what failed twice is not asked for a third time"
    assert kinds[JobKind.READ].num_pages == brought
    world.assert_drained()

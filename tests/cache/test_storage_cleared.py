"""Storage is cleared while jobs of it are under way: what these bring is not taken for stored."""

from __future__ import annotations

from hiradix.transfer import JobKind
from hiradix.tree import RadixKey
from tests.cache.component_storage import StoredWorld
from tests.cache.test_component_storage import TOKENS, restarted, roomy, serve_key, stored
from tests.cache.test_lost_hits import key, serve, stored_world
from tests.cache.world import World


def cleared(world: World | StoredWorld) -> None:
    """What `AttachedStorage.cleared` does once the store has forgotten all pages."""
    if isinstance(world, World):
        world.storage.clear()
    else:
        world.depot.clear()
    world.cache.tree.forget_stored()


def until_answered(world: World | StoredWorld, kind: JobKind) -> None:
    """Work until a job of that kind has ended; nobody has looked at its result yet."""
    done = world.controller.stats().kinds[kind].num_results
    while world.controller.stats().kinds[kind].num_results == done:
        if not world.driver.step():
            world.cache.tick()


def test_pages_of_a_read_that_a_clear_overtook_are_offered_again() -> None:
    world = stored_world(4)
    assert world.cache.prefetcher.start("r", key(4), world.cache.tree.root)
    until_answered(world, JobKind.READ)
    cleared(world)
    world.settle()
    assert world.cache.match(key(4)).loadable_node.end == 4
    assert serve(world, key(4)) == 0 and len(world.storage.pages) == 4
    world.assert_drained()


def test_a_boundary_of_a_read_that_a_clear_overtook_is_offered_again() -> None:
    world = restarted(12)
    world.set_policy("wait_complete")
    world.prefetch(RadixKey(TOKENS))
    until_answered(world, JobKind.READ)
    cleared(world)
    world.settle()
    world.check_hints()
    assert serve_key(world, TOKENS) == 0
    full, window = stored(world, TOKENS)
    assert full == TOKENS and window == [9, 10, 11]
    world.assert_drained()


def test_a_boundary_that_was_put_before_a_clear_is_offered_again() -> None:
    world = roomy()
    admitted = world.admit(RadixKey(TOKENS))
    world.hashes(RadixKey(TOKENS))
    assert admitted is not None
    (running,) = world.run_pass([admitted], lambda n: 0)
    world.tree.unlock(running.lock)
    while not world.depot.puts or world.depot.puts[-1][0] == 0:
        if not world.driver.step():
            world.cache.tick()
    cleared(world)
    world.settle()
    world.check_hints()
    assert serve_key(world, TOKENS) == 0
    assert stored(world, TOKENS)[1] == [9, 10, 11]
    world.assert_drained()

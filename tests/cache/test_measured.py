"""What the cache says of its transfers to those who decide by it: pages, seconds, and of what was asked."""

from __future__ import annotations

from hiradix.policy.no_regret import NoRegret
from hiradix.transfer import JobKind
from hiradix.tree import RadixKey
from tests.cache.component_storage import StoredWorld
from tests.cache.component_world import Setup
from tests.cache.test_component_storage import TOKENS, fetched, loadable, restarted, serve_key
from tests.cache.test_lost_hits import fetch, key, serve, stored_world


def test_a_load_is_so_many_pages_in_the_time_that_it_worked() -> None:
    world = stored_world(4)
    assert fetch(world, key(4)) == 4
    serve(world, key(4))
    loads = world.cache.controller.stats().kinds[JobKind.LOAD]
    assert world.cache.no_regret.rates()["load"] * loads.busy_s == 4


def gated(*ends: int) -> tuple[StoredWorld, NoRegret]:
    """A world of windows that has served `TOKENS` up to each of `ends` and forgot it, with a gate."""
    world, gate = restarted(*ends), NoRegret()
    world.cache.no_regret = world.cache.prefetcher.reads.no_regret = gate
    return world, gate


def test_a_read_of_a_boundary_is_its_pages_of_full_attention_in_the_time_that_it_worked() -> None:
    world, gate = gated(12)
    assert fetched(world, TOKENS) == 12
    reads = world.cache.controller.stats().kinds[JobKind.READ]
    assert gate.rates()["fetch"] * reads.busy_s == 12


def test_a_read_of_boundaries_that_brought_nothing_is_no_measure_of_reads() -> None:
    world, gate = gated(12)
    world.depot.damaged.add((1, world.hashes(RadixKey(TOKENS))[-1]))
    world.prefetch(RadixKey(TOKENS))
    world.settle()
    assert loadable(world) == 0 and gate.rates()["fetch"] == 0


def test_reads_of_boundaries_that_brought_all_leave_the_next_one_as_it_is() -> None:
    """Else each would count as one that brought nothing, and some of the next be left out."""
    world = StoredWorld(Setup(device_pages=(90, 90, 20), host_pages=(90, 90, 20)), 1)
    prompts = [[100 * number + token for token in range(8)] for number in range(6)]
    for prompt in prompts:
        serve_key(world, prompt)
    world.restart()
    gate = world.cache.prefetcher.reads.no_regret = NoRegret()
    assert [fetched(world, prompt) for prompt in prompts] == [8] * 6
    assert gate.rates()["fetch"] > 0

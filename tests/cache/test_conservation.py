"""The check of every step sees a page that is lost, and one that two have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hiradix.tree import RadixKey, Tier
from tests.cache.world import Setup, World

KEYS = [RadixKey(range(100 * i, 100 * i + 4)) for i in range(4)]


def busy() -> World:
    """A world with data in both tiers, none of it locked."""
    world = World(Setup(), seed=3)
    for key in KEYS:
        running = world.run_request(key)
        if running is not None:
            world.release(running)
    world.settle()
    world.check_conservation(0)
    return world


def lose_a_device_page(world: World) -> None:
    world.cache.make_room(1)
    assert world.device.alloc(1) is not None


def lose_what_was_evicted(world: World) -> None:
    assert world.cache.tree.evict(0, Tier.DEVICE, 1)


def free_what_the_tree_has(world: World) -> None:
    world.device.free(world.cache.tree.all_pages(Tier.DEVICE)[:1])


def lose_a_host_page(world: World) -> None:
    assert world.host.alloc(1) is not None


def free_what_the_host_tier_has(world: World) -> None:
    world.host.free(world.cache.tree.all_pages(Tier.HOST)[:1])


@pytest.mark.parametrize(
    "fault",
    [lose_a_device_page, lose_what_was_evicted, free_what_the_tree_has, lose_a_host_page,
     free_what_the_host_tier_has],
)  # fmt: skip
def test_one_page_out_of_place_is_seen(fault: Callable[[World], None]) -> None:
    world = busy()
    fault(world)
    with pytest.raises(AssertionError, match="pages of component 0: .* free"):
        world.check_conservation(0)


def test_what_requests_hold_and_what_is_in_flight_counts() -> None:
    world = busy()
    world.cache.make_room(2)
    pages = world.device.alloc(2)
    world.check_conservation(2)
    with pytest.raises(AssertionError, match="DEVICE pages of component 0"):
        world.check_conservation(1)
    world.device.free(pages)
    world.check_conservation(0)


def test_a_copy_under_way_owns_its_host_pages() -> None:
    world = World(Setup(), seed=4)
    seen = 0
    for key in KEYS:
        running = world.run_request(key)
        if running is not None:
            world.release(running)
        world.check_conservation(0)
        seen = max(seen, world.cache.in_flight.num_owned[0])
        assert world.cache.in_flight.num_owned[0] == len(world.cache.in_flight.owned())
    assert seen > 0, "no copy was under way at any time"
    world.settle()
    assert world.cache.in_flight.num_owned[0] == 0

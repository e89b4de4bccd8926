"""What did not get where it should is counted, page by page, and is nobody's afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hiradix.transfer import JobKind
from hiradix.tree import Node, Tier
from tests.cache.test_lost_hits import attached, key, serve
from tests.cache.world import Setup, World

Put = Callable[[list[str], list[Any]], list[bool]]


def takes_two(put: Put, keys: list[str], pages: list[Any]) -> list[bool]:
    return (put(keys[:2], pages[:2]) + [False] * len(keys))[: len(keys)]


def test_pages_that_storage_took_before_it_failed_are_no_failures() -> None:
    world = attached(device_pages=20, host_pages=20)
    whole = world.storage.put

    world.storage.put = lambda keys, pages: takes_two(whole, keys, pages)  # type: ignore[method-assign]
    serve(world, key(5))
    counters = world.cache.counters
    assert (counters.backed_up, counters.backup_failed, len(world.storage.pages)) == (2, 3, 2)
    world.storage.put = whole  # type: ignore[method-assign]
    serve(world, key(5))
    assert len(world.storage.pages) == 5 and counters.backup_failed == 3
    world.assert_drained()


def test_without_storage_nothing_is_offered_to_it_and_nothing_fails() -> None:
    world = World(Setup(device_pages=20, host_pages=20), 1)
    serve(world, key(5))
    serve(world, key(7))
    assert world.controller.stats().kinds[JobKind.STORE].num_results == 0
    assert (world.cache.counters.written, world.cache.counters.backup_failed) == (7, 0)
    world.assert_drained()


def test_a_load_that_finds_the_device_full_is_counted_and_holds_nothing() -> None:
    world = World(Setup(device_pages=8, host_pages=20), 1)
    serve(world, key(6))
    world.cache.evict(8)
    running = world.run_request(key(4, tail=1))
    assert running is not None
    match, tree = world.cache.match(key(6)), world.cache.tree
    before = tree.protected_pages(Tier.HOST), tree.protected_pages(Tier.DEVICE)
    assert match.loadable_node.end == 6 and world.cache.load_back(match) is None
    assert world.cache.counters.load_refused == 6
    assert (tree.protected_pages(Tier.HOST), tree.protected_pages(Tier.DEVICE)) == before
    world.release(running)
    world.assert_drained()


def test_a_load_of_exactly_the_quota_is_taken() -> None:
    world = World(Setup(device_pages=8, host_pages=20), 1)
    serve(world, key(6))
    world.cache.evict(8)
    match = world.cache.match(key(6))
    assert world.cache.load_back(match, 5) is None and world.cache.counters.load_refused == 6
    assert world.cache.load_back(match, 6) == 6
    world.cache.start_loading()
    world.settle()
    assert world.cache.counters.loaded == 6
    world.assert_drained()


def test_what_another_request_has_loaded_since_is_not_loaded_again() -> None:
    world = World(Setup(device_pages=8, host_pages=20), 1)
    serve(world, key(6))
    world.cache.evict(8)
    match = world.cache.match(key(6))
    assert world.cache.load_back(match) == 6 and world.cache.load_back(match) == 0
    assert len(world.cache.in_flight) == 1
    world.cache.start_loading()
    world.settle()
    assert (world.cache.counters.loaded, world.cache.counters.load_refused) == (6, 0)
    world.assert_drained()


def test_a_host_too_full_to_help_gives_up_nothing() -> None:
    """All pages or none: what could not make enough room may stay."""
    world = World(Setup(device_pages=20, host_pages=8), 1)
    serve(world, key(3))
    world.cache.evict(20)
    serve(world, key(3, tail=1))
    world.cache.evict(20)
    supply, tree = world.cache.supply, world.cache.tree
    lock = tree.lock(world.cache.match(key(3)).loadable_node, Tier.HOST)
    assert supply.host_room() == 5 and supply.alloc_host(6) is None
    assert tree.resident_pages(Tier.HOST) == 6 and world.cache.counters.evicted_host == 0
    pages = supply.alloc_host(5)
    assert pages is not None and len(np.unique(pages)) == 5 and world.cache.counters.evicted_host == 3
    supply.free_host(pages)
    tree.unlock(lock)
    world.assert_drained()


def test_what_is_missed_for_one_reason_adds_up() -> None:
    counters = World(Setup(), 1).cache.counters
    for num_pages in (3, 0, 4):
        counters.miss("deadline", num_pages)
    counters.miss("dropped", 0)
    assert counters.unfulfilled == {"deadline": 7}


class Told:
    """A watch that notes what it is told that storage has."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def backed_up(self, node: Node, start: int, end: int) -> None:
        self.spans.append((start, end))

    def stored(self, node: Node, tier: int) -> None: ...
    def removed(self, node: Node, tier: int) -> None: ...
    def cleared(self) -> None: ...
    def storage_changed(self) -> None: ...


def test_only_what_storage_took_is_told() -> None:
    world, told = attached(device_pages=20, host_pages=20), Told()
    world.cache.tree.watch = told
    whole = world.storage.put
    world.storage.put = lambda keys, pages: [False] * len(keys)  # type: ignore[method-assign]
    serve(world, key(5))
    assert told.spans == []
    world.storage.put = lambda keys, pages: takes_two(whole, keys, pages)  # type: ignore[method-assign]
    serve(world, key(5))
    assert told.spans == [(0, 2)]
    world.storage.put = whole  # type: ignore[method-assign]
    serve(world, key(5))
    assert told.spans == [(0, 2), (0, 5)]

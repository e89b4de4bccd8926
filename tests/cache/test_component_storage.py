"""Storage of windows and state records: miss or exact, and nothing left out that could be had."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from hiradix.cache.agreement import Agree
from hiradix.cache.boundaries import MAX_STEPS, MAX_TRIES, pages_of_a_step
from hiradix.errors import StorageError
from hiradix.policy.no_regret import GatedTransfer, NoRegret
from hiradix.policy.prefetch_policy import PrefetchLimits, PrefetchPolicy
from hiradix.transfer import JobKind
from hiradix.tree import FULL, Component, RadixKey, Tier
from tests.cache.component_storage import Part, Storage, StoredPlayer, StoredWorld
from tests.cache.component_world import DEVICE, HOST, Setup
from tests.cache.test_components import CONFIGS, NUM_CHUNKS, NUM_MOVES, lives, serve, shrinking_lives
from tests.seeds import is_enough, seeded


@seeded
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_lives_are_exact_and_bring_what_can_be_had(chunk: int) -> None:
    hits = ends = beside = prefetched = 0
    for world in lives(StoredPlayer, chunk):
        assert isinstance(world, StoredWorld)
        hits, ends = hits + world.num_hits, ends + world.num_ends
        prefetched, beside = prefetched + world.cache.counters.prefetched, beside + world.num_beside
    assert is_enough(min(hits, ends, prefetched) > 20 and beside > 0), (hits, ends, prefetched, beside)


@pytest.mark.parametrize("seed", [14333252, 1374])
def test_lives_that_were_found(seed: int) -> None:
    """A window that is read beside a page that storage has lost and only the device has; and one with which
    a boundary behind it, that tiers have the rest of, is one again."""
    setup = CONFIGS[seed % len(CONFIGS)]
    assert StoredPlayer(setup, seed).play(random.Random(seed).randrange, NUM_MOVES).num_hits > 0


test_lives_that_shrink = shrinking_lives(StoredPlayer)


# -- one thing at a time ------------------------------------------------------------------


TOKENS = list(range(12))


def roomy(agree: Agree | None = None, **changes: object) -> StoredWorld:
    sizes = {"device_pages": (60, 60, 20), "host_pages": (60, 60, 20)}
    world = StoredWorld(Setup(**{**sizes, **changes}), 1, agree)  # type: ignore[arg-type]
    world.cache.no_regret = world.cache.prefetcher.reads.no_regret = NoRegret(False)  # type: ignore[union-attr]
    return world


def restarted(*ends: int, **changes: object) -> StoredWorld:
    """A world that has served `TOKENS` up to each of `ends`, and begins anew with what storage has of it."""
    world = roomy(**changes)
    for end in ends:
        serve_key(world, TOKENS[:end])
    world.restart()
    return world


def serve_key(world: StoredWorld, tokens: list[int]) -> int:
    world.hashes(RadixKey(tokens))
    return serve(world, tokens)


def stored(world: StoredWorld, tokens: list[int]) -> list[list[int]]:
    """Which pages of a prompt each component has in storage."""
    names = world.hashes(RadixKey(tokens))
    return [[page for page, name in enumerate(names) if name in shelf] for shelf in world.depot.pages]


def fetched(world: StoredWorld, tokens: list[int]) -> int:
    """Prefetch a prompt in peace; where its loadable part ends."""
    world.fetch_in_peace(RadixKey(tokens))
    world.check()
    return world.cache.match(RadixKey(tokens)).loadable_node.end


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_was_served_comes_back_after_a_restart(has_state: bool, policy: str) -> None:
    world = roomy(has_state=has_state, write_policy=policy)
    assert serve_key(world, TOKENS) == 12
    world.cache.evict(100)
    world.settle()
    full, window, *state = stored(world, TOKENS)
    assert full == TOKENS and window[-3:] == [9, 10, 11] and [own[-1] for own in state] == [11] * has_state
    assert policy == "write_back" or len(window) == 3, "only what the boundary needs"
    world.restart()
    world.puts.clear()
    assert fetched(world, TOKENS) == 12
    assert serve_key(world, TOKENS) == 0
    assert world.cache.counters.prefetched == 12
    if policy == "write_through":
        assert world.puts == [], "storage has it: it came from there"
    world.assert_drained()


def test_a_later_boundary_stores_what_the_earlier_one_has_not() -> None:
    world = roomy()
    serve_key(world, TOKENS)
    puts = len(world.puts)
    serve_key(world, [*TOKENS, 12])
    assert world.puts[puts:] == [(0, 1), (1, 1)]
    assert stored(world, [*TOKENS, 12])[1] == [9, 10, 11, 12]
    world.restart()
    assert fetched(world, [*TOKENS, 12]) == 13


def test_a_boundary_beside_another_prompt_is_stored_from_where_its_window_begins() -> None:
    world = roomy()
    serve_key(world, TOKENS)
    parted = [*TOKENS[:7], 50]
    serve_key(world, parted)
    assert stored(world, parted)[1] == [5, 6, 7]
    world.restart()
    assert fetched(world, parted) == 8


def test_hits_end_at_the_last_boundary_when_the_prompt_parts_in_between() -> None:
    world = restarted(6, 12)
    assert fetched(world, [*TOKENS[:9], 77, 78]) == 6
    world.restart()
    assert fetched(world, TOKENS) == 12


def test_what_is_read_begins_where_the_tree_ends() -> None:
    """A window that reaches back over what the tree has is read from there on only."""
    world = restarted(12)
    assert fetched(world, TOKENS[:11]) == 0
    serve_key(world, TOKENS[:11])
    world.depot.lose_page(1, world.hashes(RadixKey(TOKENS))[9])
    assert fetched(world, TOKENS) == 12
    assert serve_key(world, TOKENS) == 0


def without_windows(world: StoredWorld, end: int, *tiers: Tier) -> None:
    """`TOKENS[:end]` are on the host, without a window or record anywhere; `tiers`: their pages in those."""
    assert fetched(world, TOKENS[:end]) == end
    if DEVICE in tiers:
        serve_key(world, TOKENS[:end])
    supply = world.cache.supply
    for component in range(1, len(world.components)):
        for tier in Tier:
            supply.evict(tier, 100, component)
    if HOST not in tiers:
        supply.evict(HOST, 100)
    world.gets.clear()
    assert world.cache.match(RadixKey(TOKENS)).loadable_node.end == 0
    node = world.tree.find(RadixKey(TOKENS[:end]))
    assert [t for t in Tier if node.resident(t)] == list(tiers) and node.end == end


class Ears:
    """Hears what reads tell the gate, which goes on saying what they may."""

    def __init__(self, world: StoredWorld):
        assert world.cache.prefetcher is not None
        self._reads: Any = world.cache.prefetcher.reads
        self._gate: NoRegret = self._reads.no_regret
        self._reads.no_regret = self
        self.takes, self.predicted_s = self._gate.takes, self._gate.predicted_s
        self.asks, self.answered, self.ended = self._gate.asks, self._gate.answered, self._gate.ended
        self.heard: list[tuple[GatedTransfer, int]] = []

    def fetched(self, asked: int, num_pages: int, seconds: float) -> None:
        self.heard.append((GatedTransfer.FETCH, num_pages))

    def leave(self) -> None:
        """The gate hears for itself again."""
        self._reads.no_regret = self._gate


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("tiers", [[HOST], [DEVICE, HOST]])
def test_a_window_that_was_lost_comes_back_beside_the_pages_that_are_there(
    has_state: bool, tiers: list[Tier]
) -> None:
    world = restarted(12, has_state=has_state, dead_leaf="keep")
    without_windows(world, 12, *tiers)
    names = world.hashes(RadixKey(TOKENS))
    world.depot.lose_page(0, names[5])
    host, ears = world.host[0].available, Ears(world)
    assert fetched(world, TOKENS) == 12
    assert world.gets == [(1, 3), (2, 1)][: 1 + has_state], "none of full attention, asked for or read"
    assert world.host[0].available == host and not ears.heard, "nothing is learned of what twelve pages cost"
    assert serve_key(world, TOKENS) == 0
    world.assert_drained()


@pytest.mark.parametrize("has_state", [False, True])
def test_a_window_is_read_with_the_pages_it_must_lie_beside(has_state: bool) -> None:
    """Which only the device has: on the host nothing lies beside nothing."""
    world = restarted(12, has_state=has_state, dead_leaf="keep")
    without_windows(world, 12, DEVICE)
    assert fetched(world, TOKENS) == 12
    assert world.gets == [(0, 3), (1, 3), (2, 1)][: 2 + has_state]
    assert serve_key(world, TOKENS) == 0
    world.assert_drained()


def test_of_pages_that_only_the_device_has_no_more_is_read_than_the_window_lies_beside() -> None:
    world = restarted(10, 12, dead_leaf="keep")
    without_windows(world, 12, DEVICE)
    assert fetched(world, [*TOKENS[:10], 77]) == 10
    assert world.gets == [(0, 3), (1, 3)]
    world.assert_drained()


def test_what_is_kept_beside_a_window_that_is_read_takes_room() -> None:
    """A long prefix that lacks its window is read with few pages, and keeps many."""
    world = restarted(12, dead_leaf="keep", host_pages=(24, 14, 6))
    other = list(range(500, 505))
    serve_key(world, other)
    world.restart()
    without_windows(world, 12, DEVICE, HOST)
    prefetcher = world.cache.prefetcher
    assert prefetcher is not None
    limits = PrefetchLimits(world.size, threshold_tokens=1, capacity_share=0.5)
    prefetcher.policy = PrefetchPolicy.from_name("wait_complete", limits)
    first = world.prefetch(RadixKey(other))
    world.settle()
    second = world.prefetch(RadixKey(TOKENS))
    world.settle()
    world.check()
    assert prefetcher.progress(first) and not prefetcher.progress(second)
    assert prefetcher.room.reserved_pages()[0] == 5 and prefetcher.room.num_short == 1
    prefetcher.abort(first)
    world.cache.tick()
    world.settle()
    assert prefetcher.progress(second) and prefetcher.room.reserved_pages()[0] == 12
    world.check()


def test_beside_a_record_one_page_is_read() -> None:
    world = restarted(12, window="none", has_state=True, dead_leaf="keep")
    without_windows(world, 12, DEVICE)
    assert fetched(world, TOKENS) == 12
    assert world.gets == [(0, 1), (1, 1)]
    world.assert_drained()


def test_what_left_the_host_while_storage_was_asked_is_asked_for_too() -> None:
    world = restarted(12, dead_leaf="keep")
    without_windows(world, 12, HOST)
    world.set_policy("wait_complete")
    handle = world.prefetch(RadixKey(TOKENS))
    world.cache.supply.evict(HOST, 100)
    world.settle()
    assert loadable(world) == 12 and world.gets[-2:] == [(0, 12), (1, 3)]
    assert world.cache.prefetcher is not None and world.cache.prefetcher.progress(handle)
    world.assert_drained()


def test_a_boundary_above_the_end_of_what_is_there_needs_its_own_window() -> None:
    """What goes on from it has parted from the path that the host has."""
    world = restarted(8, 12)
    assert fetched(world, TOKENS) == 12
    world.gets.clear()
    assert fetched(world, [*TOKENS[:8], 77, 78]) == 8
    assert world.gets == [(1, 3)]
    world.assert_drained()


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize(("lost", "read"), [((), 0), ((8, 11), 1), ((9,), 3), ((10,), 2)])
def test_of_a_window_what_is_there_before_its_first_gap_is_not_read(
    lost: tuple[int, ...], read: int, tier: Tier
) -> None:
    world = restarted(11, 12, dead_leaf="keep")
    assert fetched(world, TOKENS[:11]) == 11
    world.gets.clear()
    assert fetched(world, TOKENS) == 12
    assert world.gets == [(0, 1), (1, 1)]
    if tier is DEVICE:
        serve_key(world, TOKENS)
        world.cache.supply.evict(HOST, 100, 1)
    for page in range(8, 12):
        world.tree.cut(world.tree.find(RadixKey(TOKENS)), page)
    for page in lost:
        node = world.tree.find(RadixKey(TOKENS[: page + 1]))
        world.cache.supply.release(world.tree.drop_other(node, 1, tier))
    world.gets.clear()
    assert fetched(world, TOKENS) == 12
    assert world.gets == [(1, read)][: len(lost)]
    world.assert_drained()


def test_what_the_tiers_have_takes_no_room_of_what_is_asked_for() -> None:
    """And does not make any: eight of twelve pages are there, and two are free."""
    world = restarted(8, 10, 12, dead_leaf="keep")
    without_windows(world, 8, HOST)
    blocked = world.host[0].alloc(50)
    world.fetch_in_peace(RadixKey(TOKENS))
    assert loadable(world) == 10
    assert world.gets == [(0, 2), (1, 3)]
    world.host[0].free(blocked)
    world.assert_drained()


@pytest.mark.parametrize("kind", [JobKind.QUERY, JobKind.READ])
def test_what_somebody_else_computes_meanwhile_does_not_count_as_fetched(kind: JobKind) -> None:
    world = restarted(12)
    world.set_policy("wait_complete")
    handle = world.prefetch(RadixKey(TOKENS))
    while not world.cache.in_flight.tickets(kind):
        world.driver.step()
        world.cache.tick()
    world.driver.held.add("fetch")
    admitted = world.admit(RadixKey(TOKENS[:7]))
    assert admitted is not None
    (running,) = world.run_pass([admitted], lambda n: 0)
    world.tree.unlock(running.lock)
    while world.driver.step():
        world.cache.tick()
    world.driver.held.clear()
    world.settle()
    prefetcher = world.cache.prefetcher
    assert loadable(world) == 12 and prefetcher is not None and prefetcher.progress(handle)
    assert prefetcher.pop_loaded_span(handle) == (7, 5)
    world.assert_drained()


def test_what_storage_was_not_asked_for_is_not_taken_for_stored() -> None:
    world = restarted(8, 12, dead_leaf="keep")
    without_windows(world, 8, HOST)
    world.tree.forget_stored()
    world.depot.lose_page(0, world.hashes(RadixKey(TOKENS))[5])
    assert fetched(world, TOKENS) == 12 and world.gets == [(0, 4), (1, 3)]
    assert stored(world, TOKENS)[0] == [*TOKENS[:5], *TOKENS[6:]]
    serve_key(world, TOKENS)
    assert stored(world, TOKENS)[0] == TOKENS
    world.assert_drained()


def test_a_boundary_fetched_onto_one_that_is_not_stored_is_stored_whole() -> None:
    """Its window reaches back over pages that storage was not asked for."""
    world = restarted(12)
    world.depot.on_put = lambda part, keys: [False] * len(keys) if part.component else None
    serve_key(world, TOKENS[:10])
    world.depot.on_put = lambda part, keys: None
    world.depot.lose_page(1, world.hashes(RadixKey(TOKENS))[9])
    assert fetched(world, TOKENS) == 12
    assert not world.cache.match(RadixKey(TOKENS)).loadable_node.boundary_stored
    serve_key(world, TOKENS)
    world.restart()
    assert fetched(world, TOKENS) == 12


def test_a_boundary_whose_window_was_not_taken_is_none_and_is_offered_again() -> None:
    world = roomy()
    refuse = True

    def take(part: Part, keys: Sequence[str]) -> list[bool] | None:
        return [True, False, False][: len(keys)] if part.component and refuse else None

    world.depot.on_put = take
    serve_key(world, TOKENS)
    node = world.cache.match(RadixKey(TOKENS)).device_node
    assert node.stored and not node.boundary_stored
    assert stored(world, TOKENS) == [TOKENS, [9]]
    refuse = False
    serve_key(world, TOKENS)
    assert stored(world, TOKENS)[1] == [9, 10, 11] and node.boundary_stored
    world.assert_drained()


def test_a_boundary_that_is_being_stored_is_not_stored_twice() -> None:
    world = roomy()
    world.driver.held.add("store")
    for _ in range(3):
        admitted = world.admit(RadixKey(TOKENS))
        assert admitted is not None
        world.hashes(RadixKey(TOKENS))
        (running,) = world.run_pass([admitted], lambda n: 0)
        world.tree.unlock(running.lock)
        world.driver.run()
        world.cache.tick()
    assert len(world.cache.in_flight.tickets(JobKind.STORE)) == 2, "the backbone's and the boundary's"
    world.driver.held.clear()
    world.settle()
    assert sorted(world.puts) == [(0, 12), (1, 3)]
    world.assert_drained()


def test_a_reset_forgets_a_boundary_whose_store_hangs() -> None:
    world = roomy()
    admitted = world.admit(RadixKey(TOKENS))
    assert (
        admitted is not None and world.cache.write_through is not None and world.cache.controller is not None
    )
    world.hashes(RadixKey(TOKENS))
    (running,) = world.run_pass([admitted], lambda n: 0)
    world.tree.unlock(running.lock)
    storage_backup, stats = world.cache.write_through.storage_backup, world.cache.controller.stats
    stores = partial(world.cache.in_flight.tickets, JobKind.STORE)
    while not storage_backup._ending or len(stores()) > 1 or JobKind.STORE not in stats().running_s:
        world.driver.step()
        world.cache.tick()
    world.driver.held.add("store")
    world.cache.reset()
    assert not storage_backup._ending, "nodes of the old tree are kept"
    world.driver.held.clear()
    world.settle()
    world.assert_drained()


def test_pages_that_several_hanging_stores_read_are_given_back_once_after_a_reset() -> None:
    """Windows of boundaries close to each other overlap. With several ranks, results behind one that hangs
    wait for it, so that a reset leaves all of them."""
    world = roomy(agree=lambda own: own)
    stores = partial(world.cache.in_flight.tickets, JobKind.STORE)
    assert world.cache.controller is not None
    stats = world.cache.controller.stats
    for end in (10, 11, 12):
        admitted = world.admit(RadixKey(TOKENS[:end]))
        assert admitted is not None
        world.hashes(RadixKey(TOKENS[:end]))
        (running,) = world.run_pass([admitted], lambda n: 0)
        world.tree.unlock(running.lock)
        for _ in range(200):
            world.driver.step()
            world.cache.tick()
            if JobKind.STORE in stats().running_s:
                world.driver.held.add("store")
    read = [flight.reads.get(1, ()) for flight in world.cache.in_flight.of_kind(JobKind.STORE).values()]
    assert len({page for pages in read for page in pages}) < sum(map(len, read)), "no two of them overlap"
    num_stores = len(stores())
    world.cache.reset()
    assert len(stores()) == num_stores > 1, "none waits for the one that hangs"
    world.cache.check()
    world.driver.held.clear()
    world.settle()
    world.assert_drained()


def test_a_split_leaves_the_boundary_with_the_end() -> None:
    world = roomy()
    serve_key(world, TOKENS)
    node = world.cache.match(RadixKey(TOKENS)).device_node
    world.cache.match(RadixKey(TOKENS[:5]))
    upper = world.tree.find(RadixKey(TOKENS[:5]))
    assert node.boundary_stored and upper.end == 5 and upper.stored and not upper.boundary_stored
    world.cache.detach_storage(1.0)
    assert not node.stored and not node.boundary_stored


@pytest.mark.parametrize("start", [0, 4])
def test_a_boundary_of_which_a_page_is_gone_by_now_is_given_up_for_an_earlier_one(start: int) -> None:
    world = restarted(4, 8, 12)
    if start:
        serve_key(world, TOKENS[:start])
    names = world.hashes(RadixKey(TOKENS))

    def lose_late(part: Part, keys: Sequence[str]) -> None:
        world.depot.pages[1].pop(names[10], None)

    world.depot.on_get = lose_late
    key = RadixKey(TOKENS)
    world.set_policy("wait_complete")
    handle = world.prefetch(key)
    world.settle()
    assert world.cache.match(key).loadable_node.end == 8
    prefetcher = world.cache.prefetcher
    assert prefetcher is not None and prefetcher.progress(handle)
    assert prefetcher.pop_loaded_span(handle) == (start, 8 - start)
    world.assert_drained()


def test_a_boundary_of_which_a_page_is_damaged_is_given_up_for_an_earlier_one() -> None:
    """Storage goes on saying that it has the page."""
    world = restarted(4, 8, 12)
    world.depot.damaged.add((1, world.hashes(RadixKey(TOKENS))[10]))
    world.prefetch(RadixKey(TOKENS))
    world.settle()
    assert world.cache.match(RadixKey(TOKENS)).loadable_node.end == 8
    world.assert_drained()


def test_a_host_too_small_for_the_prompt_gets_what_it_has_room_for() -> None:
    world = restarted(4, 8, 12)
    blocked = world.host[0].alloc(51)
    world.fetch_in_peace(RadixKey(TOKENS))
    assert world.cache.match(RadixKey(TOKENS)).loadable_node.end == 8, "nine pages are free"
    world.host[0].free(blocked)
    world.assert_drained()


def test_a_boundary_that_keeps_vanishing_is_not_asked_for_for_ever() -> None:
    world = restarted(*range(1, 13))
    gets = []

    def lose_all(part: Part, keys: Sequence[str]) -> None:
        gets.append(part.component)
        part.shelf.pop(keys[-1], None)

    world.depot.on_get = lose_all
    world.prefetch(RadixKey(TOKENS))
    world.settle()
    assert gets == [0] * MAX_TRIES
    world.assert_drained()


def test_a_boundary_is_measured_and_judged_by_the_prompt_it_brings() -> None:
    world = restarted(12)
    gate, ears = world.cache.no_regret, Ears(world)
    assert fetched(world, TOKENS) == 12
    assert ears.heard == [(GatedTransfer.FETCH, 12)], "the window's pages are no further tokens"
    ears.leave()
    world.restart()
    gate.enabled = True
    gate.computed(1000, 100.0)
    gate.moved(GatedTransfer.FETCH, 1, 10.0)
    gets = len(world.gets)
    assert fetched(world, TOKENS) == 0 and len(world.gets) == gets
    assert world.cache.counters.unfulfilled == {"slower_than_compute": 12}
    world.assert_drained()


# -- boundaries on the way ----------------------------------------------------------------


WHOLE = [(0, 12), (1, 3)]


def on_the_way(world: StoredWorld, policy: str = "best_effort", step: int = 4) -> int:
    """Begin to prefetch `TOKENS`, with a boundary every so many pages."""
    world.set_policy(policy)
    world.set_step(step)
    world.gets.clear()
    return world.prefetch(RadixKey(TOKENS))


def loadable(world: StoredWorld) -> int:
    return world.cache.match(RadixKey(TOKENS)).loadable_node.end


def num_reads(world: StoredWorld) -> int:
    assert world.cache.controller is not None
    return world.cache.controller.stats().kinds[JobKind.READ].num_results


@pytest.mark.parametrize("has_state", [False, True])
def test_a_request_that_is_let_go_has_the_boundaries_that_came(has_state: bool) -> None:
    world = restarted(4, 8, 12, has_state=has_state)
    seen = set()
    for steps in range(60):
        handle = on_the_way(world)
        for _ in range(steps):
            world.driver.step()
            world.cache.tick()
        end, prefetcher = loadable(world), world.cache.prefetcher
        assert prefetcher is not None and prefetcher.progress(handle)
        assert prefetcher.pop_loaded_span(handle) == (0, end)
        seen.add(end)
        world.settle()
        world.check()
        after = loadable(world)
        assert serve_key(world, TOKENS) == 12 - after
        if end == 12:
            break
        world.restart()
    assert seen == {0, 4, 8, 12}
    assert world.gets == [(0, 4), (1, 3), (2, 1)][: 2 + has_state] * 3
    world.assert_drained()


def test_boundaries_on_the_way_are_where_storage_has_them() -> None:
    world = restarted(2, 7, 12)
    on_the_way(world)
    world.settle()
    assert world.gets == [(0, 2), (1, 2), (0, 5), (1, 3), (0, 5), (1, 3)] and loadable(world) == 12


def test_a_stretch_without_a_boundary_has_none_on_the_way() -> None:
    world = restarted(4, 12)
    num_before = num_reads(world)
    on_the_way(world)
    world.settle()
    assert world.gets == [(0, 4), (1, 3), (0, 8), (1, 3)] and loadable(world) == 12
    assert num_reads(world) == num_before + 2  # none of no pages, which a boundary found twice would ask for


def test_a_boundary_on_the_way_has_its_whole_window_in_storage() -> None:
    """Also the part behind which another one might have ended."""
    world = restarted(5, 12)
    for name in world.hashes(RadixKey(TOKENS))[2:4]:
        world.depot.lose_page(1, name)
    on_the_way(world)
    world.settle()
    assert world.gets == WHOLE and loadable(world) == 12


def test_let_go_while_boundaries_on_the_way_are_looked_for_it_reads_nothing() -> None:
    world = restarted(4, 8, 12)
    handle = on_the_way(world)
    while len(world.cache.in_flight.tickets(JobKind.QUERY)) != 2:
        world.driver.step()
        world.cache.tick()
    assert world.cache.prefetcher is not None and world.cache.prefetcher.progress(handle)
    world.settle()
    assert not world.gets and world.cache.counters.unfulfilled == {"dropped": 12}
    world.assert_drained()


def test_there_is_no_boundary_on_the_way_right_before_the_end() -> None:
    world = restarted(5, 10, 12)
    on_the_way(world, step=5)
    world.settle()
    assert world.gets == [(0, 5), (1, 3), (0, 7), (1, 3)] and loadable(world) == 12


def test_what_is_there_is_no_step_on_the_way() -> None:
    world = restarted(4, 8, 12, dead_leaf="keep")
    without_windows(world, 8, HOST)
    on_the_way(world)
    world.settle()
    assert world.gets == [(0, 4), (1, 3)] and loadable(world) == 12


def test_a_long_prompt_has_no_more_boundaries_on_the_way_than_a_prefetch_may_read() -> None:
    tokens = list(range(6 * MAX_STEPS))
    world = roomy()
    for end in range(3, len(tokens) + 1, 3):
        serve_key(world, tokens[:end])
    world.restart()
    world.set_policy("best_effort")
    world.set_step(1)
    world.gets.clear()
    world.prefetch(RadixKey(tokens))
    world.settle()
    assert world.gets == [(0, 6), (1, 3)] * MAX_STEPS
    assert world.cache.match(RadixKey(tokens)).loadable_node.end == len(tokens)
    world.assert_drained()


def test_who_waits_for_all_of_it_pays_for_no_boundary_on_the_way() -> None:
    world = restarted(4, 8, 12)
    on_the_way(world, "wait_complete")
    world.settle()
    assert world.gets == WHOLE and loadable(world) == 12


@pytest.mark.parametrize(("page_s", "is_whole"), [(0.01, True), (0.2, False)])
def test_time_that_surely_suffices_pays_for_no_boundary_on_the_way(page_s: float, is_whole: bool) -> None:
    """Twelve pages may take a second and a little."""
    world = restarted(4, 8, 12)
    gate = world.cache.no_regret
    gate.moved(GatedTransfer.FETCH, 10, 10 * page_s)
    on_the_way(world, "timeout")
    world.settle()
    assert (world.gets == WHOLE) is is_whole and loadable(world) == 12


def test_a_host_without_room_for_windows_on_the_way_gets_the_last_one() -> None:
    world = restarted(4, 8, 12)
    blocked = world.host[1].alloc(56)
    on_the_way(world)
    world.settle()
    assert world.gets == WHOLE and loadable(world) == 12
    world.host[1].free(blocked)
    world.assert_drained()


@pytest.mark.parametrize(("page", "before"), [(3, 0), (7, 4)])
def test_a_boundary_on_the_way_that_does_not_come_costs_no_later_one(page: int, before: int) -> None:
    world = restarted(4, 8, 12)
    world.depot.damaged.add((1, world.hashes(RadixKey(TOKENS))[page]))
    on_the_way(world)
    world.settle()
    assert loadable(world) == 12 and world.gets[-2:] == [(0, 12 - before), (1, 3)]
    world.assert_drained()


@pytest.mark.parametrize(("component", "page", "want"), [(0, 6, 4), (1, 10, 8), (0, 2, 0)])
def test_a_gap_leaves_the_boundaries_before_it(component: int, page: int, want: int) -> None:
    world = restarted(4, 8, 12)
    world.depot.damaged.add((component, world.hashes(RadixKey(TOKENS))[page]))
    handle = on_the_way(world)
    world.settle()
    assert loadable(world) == want
    prefetcher = world.cache.prefetcher
    assert prefetcher is not None and prefetcher.progress(handle)
    assert prefetcher.pop_loaded_span(handle) == (0, want)
    world.assert_drained()


def test_behind_a_gap_nothing_more_is_read() -> None:
    world = restarted(4, 8, 12)
    world.depot.damaged.add((0, world.hashes(RadixKey(TOKENS))[2]))
    on_the_way(world)
    for _ in range(30):
        world.driver.step()
        world.cache.tick()
    assert world.gets == [(0, 4)]
    world.assert_drained()


def test_storage_that_fails_on_the_way_counts_what_did_not_come() -> None:
    world = restarted(4, 8, 12)

    def fail(part: Part, keys: Sequence[str]) -> None:
        if len(world.gets) > 2:
            raise OSError("injected: storage")

    world.depot.on_get = fail
    on_the_way(world)
    world.settle()
    assert loadable(world) == 4 and world.cache.counters.unfulfilled == {"storage_transfer": 8}
    world.assert_drained()


def test_boundaries_that_nobody_waits_for_any_more_are_no_fault_of_storage() -> None:
    world = restarted(4, 8, 12)
    handle = on_the_way(world)
    while not world.cache.in_flight.tickets(JobKind.READ):
        world.driver.step()
        world.cache.tick()
    assert world.cache.prefetcher is not None
    world.cache.prefetcher.abort(handle)
    world.settle()
    assert not world.gets and world.cache.counters.unfulfilled == {"dropped": 12}
    world.assert_drained()


def test_how_far_apart_boundaries_on_the_way_are() -> None:
    """At most an eighth of the backbone's bytes is read for them."""
    window, state = Component("window", 4), Component("state", 1, per_page=False)
    assert pages_of_a_step([FULL, window], [100, 500], 16) == 160
    assert pages_of_a_step([FULL, window, state], [100, 500, 101], 16) == 169
    assert pages_of_a_step([FULL, window], [1000, 5], 16) == 16


@pytest.mark.parametrize("component", [0, 1])
def test_without_room_for_all_of_it_nothing_is_read(component: int) -> None:
    world = restarted(12)
    blocked = world.host[component].alloc(58 if component else 50)
    gets = len(world.gets)
    world.prefetch(RadixKey(TOKENS))
    world.settle()
    assert world.cache.match(RadixKey(TOKENS)).loadable_node.end == 0
    assert len(world.gets) == gets and world.tree.resident_pages(HOST) == 0
    world.host[component].free(blocked)
    assert fetched(world, TOKENS) == 12
    world.assert_drained()


@pytest.mark.parametrize("steps", range(9))
def test_stopped_at_any_step_it_leaves_nothing_behind(steps: int) -> None:
    world = restarted(12, has_state=True)
    handle = world.prefetch(RadixKey(TOKENS))
    for _ in range(steps):
        world.driver.step()
        world.cache.tick()
    prefetcher = world.cache.prefetcher
    assert prefetcher is not None
    prefetcher.abort(handle)
    world.settle()
    world.check()
    assert world.cache.match(RadixKey(TOKENS)).loadable_node.end in (0, 12)
    world.assert_drained()


@pytest.mark.parametrize("steps", range(9))
def test_detached_at_any_step_it_leaves_nothing_behind(steps: int) -> None:
    world = restarted(12, has_state=True)
    world.prefetch(RadixKey(TOKENS))
    for _ in range(steps):
        world.driver.step()
        world.cache.tick()
    world.cache.detach_storage(100.0)
    world.check()
    assert not world.cache.in_flight.tickets(JobKind.QUERY, JobKind.READ)
    world.attach()
    assert fetched(world, TOKENS) == 12
    world.assert_drained()


def test_storage_of_full_attention_alone_is_refused() -> None:
    world = roomy()
    world.cache.detach_storage(1.0)
    with pytest.raises(StorageError, match="1 components of 2"):
        world.cache.attach_storage(Storage([Part(world.depot, 0, world._check_put)]))  # type: ignore[arg-type]
    world.attach()

"""Host room of requests that wait: who has it, who lets go, and that nobody waits for it for ever."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from hiradix.cache.prefetch import MAX_QUERIES
from hiradix.cache.reserved_room import MAX_ROOMS
from hiradix.policy.prefetch_policy import PREFETCH_POLICIES
from hiradix.policy.write_policy import WritePolicy
from hiradix.tree import HOST, Lock, RadixKey, Tier
from tests.cache.test_host_only import HOST_PAGES, PAGE_SIZE, Planner
from tests.cache.test_lost_hits import key as stamped
from tests.cache.test_lost_hits import serve, stored_world

ROOM = HOST_PAGES // 2


def prompt(number: int, num_pages: int, shared: int = 0, salt: str | None = None) -> RadixKey:
    """A prompt that has its first `shared` pages in common with others that have as many."""
    head = list(range(9000, 9000 + shared * PAGE_SIZE))
    first = 100 * number
    tail = range(first, first + (num_pages - shared) * PAGE_SIZE)
    return RadixKey([*head, *tail], cache_salt=salt)


class Waiting(Planner):
    """A planner whose prompts are all in storage, on a clock that is set."""

    def __init__(self, prompts: dict[Hashable, RadixKey], policy: str = "wait_complete") -> None:
        super().__init__(policy)
        self.now_s = 0.0
        self.prefetcher._clock = lambda: self.now_s
        self.prompts = prompts
        for one in prompts.values():
            self.store(one)
        self.book.num_read = 0

    def arrive(self, *names: Hashable) -> None:
        for name in names or self.prompts:
            one = self.prompts[name]
            self.prefetcher.start(name, one, self.tree.match(one).loadable_node)

    def check(self) -> None:
        super().check()
        self.prefetcher.room.check()
        assert self.prefetcher.room.reserved_pages()[0] <= ROOM

    def held(self) -> list[Hashable]:
        """Those for whom everything is on the host, and is kept there."""
        self.supply.evict(HOST, HOST_PAGES)
        return [
            name
            for name, one in self.prompts.items()
            if self.tree.match(one).loadable_node.end == one.num_pages(PAGE_SIZE)
        ]

    def settle(self) -> None:
        self.step()
        self.run()
        self.step()
        self.run()

    def gone(self) -> None:
        """All end; nothing is left of them."""
        for name in self.prompts:
            self.prefetcher.abort(name)
        self.settle()
        assert self.prefetcher.room.reserved_pages() == [0] and len(self.prefetcher) == 0
        assert self.tree.protected_pages(HOST) == 0


def five(num_pages: int = 8) -> dict[Hashable, RadixKey]:
    return {name: prompt(number, num_pages) for number, name in enumerate("abcde", 1)}


def test_as_many_are_fetched_ahead_as_there_is_room_in_order_of_arrival() -> None:
    planner = Waiting(five())
    planner.arrive()
    planner.settle()
    assert planner.held() == ["a", "b"] and planner.prefetcher.room.num_short == 3
    for name in "abcde":
        assert planner.prefetcher.progress(name) and name in planner.held()
        planner.prefetcher.abort(name)
        planner.settle()
    assert planner.book.num_read == 5 * 8, "each page once"
    planner.gone()


def test_they_are_fetched_in_the_order_in_which_they_will_run() -> None:
    planner = Waiting(five())
    planner.arrive()
    planner.prefetcher.in_order(["d", "nobody", "c"])
    planner.settle()
    assert planner.held() == ["c", "d"]
    planner.gone()


def test_without_that_the_order_is_that_in_which_the_engine_asks() -> None:
    planner = Waiting(five())
    planner.arrive()
    for name in "ecd":
        assert not planner.prefetcher.progress(name)
    planner.settle()
    assert planner.held() == ["c", "e"]
    planner.gone()


def test_the_last_lets_go_for_one_that_will_run_before_it_and_is_fetched_again() -> None:
    planner = Waiting(five())
    planner.arrive("a", "b")
    planner.settle()
    planner.arrive("c")
    planner.settle()
    assert planner.held() == ["a", "b"], "nothing is dropped for what runs later"
    planner.prefetcher.in_order(["c", "a", "b"])
    planner.settle()
    assert planner.held() == ["a", "c"] and not planner.prefetcher.progress("b")
    planner.prefetcher.abort("c")
    planner.settle()
    assert planner.held() == ["a", "b"] and planner.supply.counters.refetched == 8
    assert planner.prefetcher.progress("b") and planner.prefetcher.pop_loaded_span("b") == (0, 8)
    planner.gone()


def test_room_that_a_nearer_one_may_need_is_kept_while_storage_is_asked_for_it() -> None:
    planner = Waiting(five())
    planner.arrive("a")
    planner.settle()
    planner.arrive("b")
    [(ticket, asked)] = planner.book.orders.items()
    planner.arrive("c")
    del planner.book.orders[ticket]  # the answer for b is late
    planner.settle()
    assert planner.book.num_read == 8, "nothing is read for c"
    planner.book.orders[ticket] = asked
    planner.settle()
    assert planner.held() == ["a", "b"] and planner.book.num_read == 2 * 8
    planner.gone()


def test_what_was_let_go_of_and_is_still_there_is_not_fetched_again() -> None:
    planner = Waiting(five())
    planner.arrive("a", "b", "c")
    planner.settle()
    planner.prefetcher.in_order(["c", "a", "b"])
    planner.settle()
    planner.prefetcher.abort("c")
    planner.settle()
    assert planner.book.num_read == 3 * 8 and planner.supply.counters.refetched == 0
    planner.gone()


def test_a_prefix_of_many_is_fetched_and_counted_once() -> None:
    planner = Waiting({number: prompt(number, 9, shared=7) for number in range(1, 7)})
    planner.arrive()
    planner.settle()
    assert len(planner.held()) == 6 and planner.prefetcher.room.reserved_pages() == [7 + 6 * 2]
    assert planner.book.num_read == 7 + 6 * 2
    planner.gone()


def test_what_the_host_has_for_one_that_waits_is_held_too() -> None:
    planner = Waiting(five())
    planner.arrive("a")
    planner.settle()
    planner.prefetcher.abort("a")
    planner.arrive("a", "b")
    planner.settle()
    assert planner.held() == ["a", "b"] and planner.book.num_read == 2 * 8
    planner.gone()


def test_what_the_host_had_and_lost_before_it_was_held_is_fetched() -> None:
    planner = Waiting(five())
    planner.arrive("c")
    planner.settle()
    planner.prefetcher.abort("c")
    planner.arrive("a", "b", "c")
    planner.settle()
    assert planner.held() == ["a", "b"], "the room is theirs"
    planner.prefetcher.abort("a")
    planner.settle()
    assert planner.held() == ["b", "c"] and planner.prefetcher.progress("c")
    planner.gone()


def test_what_the_host_lost_of_one_that_has_no_room_is_fetched_when_it_is_asked_for() -> None:
    planner = Waiting(five())
    planner.arrive("c")
    planner.settle()
    planner.prefetcher.abort("c")
    planner.arrive("a", "b", "c")
    planner.settle()
    assert planner.held() == ["a", "b"] and not planner.prefetcher.progress("c")
    planner.settle()
    assert planner.held() == ["a", "c"] and planner.prefetcher.progress("c")
    planner.gone()


def test_one_that_exceeds_the_room_has_it_all_once_it_is_next() -> None:
    planner = Waiting({"a": prompt(1, 8), "big": prompt(2, ROOM + 5), "b": prompt(3, 8)})
    planner.arrive()
    planner.settle()
    assert planner.held() == ["a"]
    planner.prefetcher.abort("a")
    planner.settle()
    assert planner.prefetcher.progress("big") and planner.prefetcher.room.reserved_pages() == [ROOM]
    assert planner.prefetcher.pop_loaded_span("big") == (0, ROOM + 5)
    assert not planner.prefetcher.progress("b")
    planner.prefetcher.abort("big")
    planner.settle()
    assert planner.prefetcher.progress("b") and "b" in planner.held()
    planner.gone()


def test_a_tenant_gets_no_more_than_its_share_while_others_wait() -> None:
    prompts: dict[Hashable, RadixKey] = {n: prompt(n, 4, salt="flood") for n in range(1, 10)}
    planner = Waiting(prompts | {"other": prompt(1, 8, salt="other")})
    planner.arrive()
    planner.settle()
    held = planner.held()
    assert "other" in held and held[:2] == [1, 2], held
    assert planner.prefetcher.room.reserved_pages() == [4 * 3 + 8], "what the others leave may be used"
    planner.gone()


def test_what_a_tenant_has_beyond_its_share_stays_until_its_turn() -> None:
    prompts: dict[Hashable, RadixKey] = {n: prompt(n, 4, salt="flood") for n in range(1, 8)}
    planner = Waiting(prompts | {"other": prompt(1, 8, salt="other")})
    planner.arrive(*range(1, 8))
    planner.settle()
    assert planner.held() == [1, 2, 3, 4, 5]
    planner.arrive("other")
    planner.settle()
    assert planner.held() == [1, 2, 3, 4, 5]
    for name in (1, 2):
        planner.prefetcher.abort(name)
        planner.settle()
    assert planner.held() == [3, 4, 5, "other"], "the flood gets no more before the other has what it wants"
    planner.gone()


@pytest.mark.parametrize("policy", PREFETCH_POLICIES)
def test_nobody_waits_for_room_for_ever(policy: str) -> None:
    """Those who have it may not be able to run. The bound is that of what is fetched before it and for it."""
    planner = Waiting(five(), policy)
    planner.arrive()
    planner.settle()
    limit_s = planner.prefetcher.policy.room_wait_s(8, 8)
    planner.now_s = 0.5
    assert planner.prefetcher.progress("e") == (policy == "best_effort")
    planner.now_s += limit_s + 2 * 8
    assert planner.prefetcher.progress("e") and planner.prefetcher.progress("e")
    assert planner.prefetcher.pop_loaded_span("e") == (0, 0)
    planner.gone()


def test_the_wait_for_room_has_time_for_those_who_have_it_to_run() -> None:
    """It is free only when they have run: what is held before it counts as what is still to be fetched."""
    planner = Waiting(five(), "timeout")
    planner.arrive("a", "b", "c")
    planner.settle()
    assert not planner.prefetcher.progress("c")
    policy = planner.prefetcher.policy
    planner.now_s = (policy.room_wait_s(0, 8) + policy.room_wait_s(16, 8)) / 2
    assert not planner.prefetcher.progress("c")
    planner.now_s = policy.room_wait_s(16, 8)
    assert planner.prefetcher.progress("c")
    planner.gone()


def test_the_time_of_a_fetch_counts_from_when_it_has_room() -> None:
    planner = Waiting(five(), "timeout")
    planner.arrive()
    planner.settle()
    planner.now_s = 100.0
    planner.prefetcher.abort("a")
    planner.step()
    assert planner.prefetcher.fetching_pages("c") == 8 and not planner.prefetcher.progress("c")
    planner.now_s += planner.prefetcher.policy.wait_limit_s(8)
    assert planner.prefetcher.progress("c")
    planner.run()
    planner.gone()


@pytest.mark.parametrize("num_steps", range(4))
def test_an_abort_at_any_step_gives_all_back(num_steps: int) -> None:
    planner = Waiting(five())
    planner.arrive()
    for _ in range(num_steps):
        planner.step()
    planner.gone()


def test_what_joined_one_that_waits_for_room_has_its_place_in_the_order() -> None:
    planner = Waiting(five() | {"e2": prompt(5, 8)})
    planner.arrive()
    planner.settle()
    planner.prefetcher.in_order(["e2", "a"])
    planner.settle()
    assert planner.held() == ["a", "e", "e2"] and planner.prefetcher.progress("e2")
    assert planner.prefetcher.room.reserved_pages() == [16]
    planner.gone()


def test_who_joins_late_asks_for_no_page_behind_its_prompt() -> None:
    """Part of what it was asked for has come to the host meanwhile, and what it joined brings the rest of what
    storage has: what is left to ask for ends where it ended before."""
    planner = Waiting({"big": prompt(1, ROOM), "head": prompt(2, 6, shared=6)})
    longer, head = prompt(3, 8, shared=6), planner.prompts["head"]
    planner.arrive("big")
    planner.prefetcher.start("longer", longer, planner.tree.root)
    planner.run()
    assert planner.prefetcher.room.num_short == 1
    pages = planner.supply.alloc_host(4)
    assert pages is not None
    planner.tree.unlock(planner.tree.insert(head.head(4, PAGE_SIZE), HOST, [pages]).lock)
    planner.prefetcher.abort("big")
    planner.arrive("head")
    planner.prefetcher.room.next_round()
    planner.settle()
    assert planner.prefetcher.progress("longer") and planner.prefetcher.progress("head")
    assert planner.prefetcher.pop_loaded_span("longer") == (4, 2)
    planner.prefetcher.abort("longer")
    planner.gone()


def test_what_is_held_keeps_nothing_on_the_device() -> None:
    """Pages of the device are for those who run: where the host has not got a prefix, it is not held."""
    world = stored_world(6, host_pages=40)
    world.cache.write_through.policy = WritePolicy.from_name("write_back")
    serve(world, stamped(3))
    assert world.cache.tree.resident_pages(Tier.HOST) == 0
    prefetcher, node = world.cache.prefetcher, world.cache.match(stamped(6)).loadable_node
    assert node.end == 3 and prefetcher.start("r", stamped(6), node)
    world.settle()
    assert prefetcher.progress("r") and world.cache.match(stamped(6)).loadable_node.end == 6
    assert world.cache.tree.protected_pages(Tier.DEVICE) == 0
    world.assert_drained()


def test_who_let_go_after_a_long_wait_for_its_turn_is_fetched_again() -> None:
    """What it waited for its first room does not count once more."""
    planner = Waiting(five(), "timeout")
    planner.arrive("a", "b", "c")
    planner.settle()
    assert not planner.prefetcher.progress("c"), "it has no room"
    planner.prefetcher.abort("a")
    planner.settle()
    assert planner.prefetcher.progress("c")
    planner.now_s = 1000.0
    planner.arrive("d")
    planner.prefetcher.in_order("dbc")
    planner.settle()
    assert planner.held() == ["b", "d"] and not planner.prefetcher.progress("c")
    planner.prefetcher.abort("d")
    planner.settle()
    assert planner.held() == ["b", "c"] and planner.prefetcher.progress("c")
    planner.gone()


def test_who_lets_go_again_and_again_goes_on_in_the_end() -> None:
    planner = Waiting(five(), "timeout")
    planner.arrive("b", "c")
    planner.settle()
    num_kept_waiting = 0
    for _ in range(3 * MAX_ROOMS):
        planner.now_s += 1000.0
        planner.arrive("d")
        planner.prefetcher.in_order("dbc")
        planner.settle()
        planner.supply.evict(HOST, HOST_PAGES)
        num_kept_waiting += not planner.prefetcher.progress("c")
        planner.prefetcher.abort("d")
        planner.settle()
    assert num_kept_waiting == MAX_ROOMS - 1
    planner.gone()


def test_of_what_the_host_had_no_more_than_the_room_is_held() -> None:
    planner = Waiting({"big": prompt(1, HOST_PAGES)})
    pages = planner.supply.alloc_host(HOST_PAGES)
    assert pages is not None
    planner.tree.unlock(planner.tree.insert(planner.prompts["big"], HOST, [pages]).lock)
    planner.arrive()
    planner.settle()
    assert planner.prefetcher.progress("big") and planner.tree.protected_pages(HOST) == ROOM
    planner.gone()


def test_an_order_that_names_one_twice_gives_it_one_place() -> None:
    planner = Waiting(five())
    planner.arrive()
    planner.prefetcher.in_order("cca")
    planner.settle()
    assert planner.held() == ["a", "c"]
    planner.prefetcher.abort("c")
    assert planner.prefetcher.state()[1] == 4
    planner.settle()
    assert planner.held() == ["a", "b"]
    planner.gone()


def test_the_same_order_told_again_has_its_say_on_one_that_has_come_since() -> None:
    planner = Waiting(five())
    planner.arrive("a", "b")
    planner.prefetcher.in_order("eab")
    planner.arrive("e")
    planner.prefetcher.in_order("eab")
    planner.settle()
    assert planner.held() == ["a", "e"]
    planner.gone()


def test_what_is_told_counts_from_the_first_time() -> None:
    """Whom the engine had asked for before stands where it is told to."""
    planner = Waiting(five())
    planner.arrive()
    assert not planner.prefetcher.progress("c")
    planner.prefetcher.in_order("ab")
    planner.settle()
    assert planner.held() == ["a", "b"]
    planner.gone()


def test_who_waits_for_one_that_waits_for_another_gets_its_room() -> None:
    """Both of those others have ended: only who has joined them still wants the pages."""
    names = {"p": prompt(5, 8), "joined": prompt(5, 8), "q": prompt(5, 8)}
    planner = Waiting(five() | names)
    planner.arrive("a", "b", "p", "joined")
    planner.settle()
    planner.arrive("q")
    planner.prefetcher.room.next_round()
    planner.settle()
    planner.prefetcher.abort("p")
    planner.prefetcher.abort("q")
    planner.prefetcher.abort("a")
    planner.settle()
    assert "joined" in planner.held() and planner.prefetcher.progress("joined")
    planner.gone()


def test_a_lock_that_nobody_waits_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control of `check`."""
    planner = Waiting(five())
    planner.arrive()
    planner.settle()
    lock: Lock = planner.tree.lock(planner.tree.match(planner.prompts["a"]).loadable_node, HOST)
    planner.tree.unlock(lock)
    monkeypatch.setattr(type(planner.prefetcher), "caps", [10])
    with pytest.raises(Exception, match="are held for those who wait, of"):
        planner.prefetcher.room.check()
    monkeypatch.undo()
    planner.gone()


def test_what_storage_may_serve_only_later_is_asked_for_again_once() -> None:
    """Storage serves nothing until it has compared what it has: those who wait still get it."""
    planner = Waiting(five())
    stored, planner.book.stored = planner.book.stored, set()
    adopted = [0.0]
    planner.prefetcher._num_adopted = lambda: adopted[0]
    planner.arrive()
    planner.settle()
    assert all(planner.prefetcher.progress(name) for name in "abcde") and not planner.book.orders
    planner.book.stored, adopted[0] = stored, 1.0
    assert not any(planner.prefetcher.progress(name) for name in "abcde")
    planner.settle()
    assert planner.held() == ["a", "b"] and planner.book.num_read == 2 * 8
    assert planner.prefetcher.progress("a") and planner.prefetcher.pop_loaded_span("a") == (0, 8)
    planner.book.num_asked, adopted[0] = 0, 2.0
    assert planner.prefetcher.progress("a") and planner.prefetcher.progress("b")
    planner.settle()
    assert not planner.book.num_asked, "all of them is on the host"
    planner.gone()


def test_what_storage_never_serves_is_asked_for_a_bounded_number_of_times() -> None:
    planner = Waiting(five())
    planner.book.stored = set()
    adopted = [0.0]
    planner.prefetcher._num_adopted = lambda: adopted[0]
    planner.arrive("a")
    planner.settle()
    for number in range(1, 10):
        adopted[0] = float(number)
        planner.prefetcher.progress("a")
        planner.settle()
    assert planner.prefetcher.progress("a") and planner.book.num_asked == MAX_QUERIES * 8
    planner.gone()

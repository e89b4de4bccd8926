"""Storage to host inside vLLM: what the cache's prefetches do there as in every engine."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hiradix.adapters.vllm.orders import Orders
from hiradix.policy.no_regret import GatedTransfer
from hiradix.transfer import JobKind
from tests.vllm_roles.mini_vllm import FakeRequest, MiniVLLM, Rank, S, World
from tests.vllm_roles.test_life import request, under_way

PAGES = 8
ROOMY = World(num_blocks=400, host_pages=200, budget=400, max_running=80, load_async=True)


def restarted(world: World = ROOMY, num_pages: int = PAGES, pad: int = 0) -> MiniVLLM:
    """A process whose storage has a prompt's pages from one before it."""
    store: list[dict[str, bytes]] = [{} for _ in range(world.num_workers)]
    first = MiniVLLM(replace(world, no_regret=False), store)
    first.add(request("a", num_pages, max_tokens=1))
    first.drain()
    assert all(len(pages) >= num_pages for pages in store)
    return MiniVLLM(world, store)


def moved(vllm: MiniVLLM, kind: str = "prefetch") -> int:
    """Pages that the first worker has moved."""
    return int(vllm.ranks[0].role.traffic.counts.get(f"{kind}_pages", 0))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("batch_pages", [2, 128])
def test_equal_requests_that_arrive_together_read_their_pages_once(
    num_workers: int, window: int, batch_pages: int
) -> None:
    world = replace(ROOMY, num_workers=num_workers, window=window, batch_pages=batch_pages)
    vllm = restarted(world)
    for name in "bcde":
        vllm.add(request(name, PAGES, max_tokens=1))
    vllm.run(lambda: not len(vllm.role.prefetcher))
    assert vllm.index.tree.resident_pages(1) == PAGES
    vllm.drain()
    windows = -(-(window - 1) // S) if window else 0
    assert moved(vllm) == PAGES + windows, "and no page twice"
    assert vllm.hit_tokens == 4 * PAGES * S
    assert vllm.role.prefetch_figures.asked == vllm.role.prefetch_figures.read == PAGES


def test_a_system_prompt_with_many_waiting_clients_is_read_once() -> None:
    vllm = restarted(replace(ROOMY, num_blocks=1500, host_pages=1500), 32)
    system = request("", 32).all_token_ids[: 32 * S]
    for number in range(64):
        vllm.add(FakeRequest(f"c{number}", [*system, *(100 + number for _ in range(2 * S))], 1))
    vllm.drain()
    assert moved(vllm) == 32 and vllm.hit_tokens == 64 * 32 * S
    assert vllm.role.index.counters.unfulfilled == {}


def waiting_for_one(vllm: MiniVLLM, names: str = "bcd") -> None:
    """Equal requests, the first of which reads for all; storage makes no progress then."""
    for name in names:
        vllm.add(request(name, PAGES, max_tokens=1))
    vllm.run(lambda: under_way(vllm, JobKind.READ) > 0)
    vllm.ranks[0].driver.held.add("fetch")
    vllm.step()


def test_a_prefetch_whose_own_request_is_aborted_goes_on_for_those_that_joined_it() -> None:
    vllm = restarted()
    waiting_for_one(vllm)
    vllm.abort(vllm.waiting[0])
    vllm.step()
    vllm.ranks[0].driver.held.clear()
    vllm.drain()
    assert moved(vllm) == PAGES and vllm.hit_tokens == 2 * PAGES * S


def test_a_prefetch_that_nobody_waits_for_any_more_ends() -> None:
    vllm = restarted(replace(ROOMY, batch_pages=2))
    waiting_for_one(vllm)
    for one in list(vllm.waiting):
        vllm.abort(one)
    vllm.ranks[0].driver.held.clear()
    vllm.drain()
    assert moved(vllm) < PAGES and vllm.role.prefetch_figures.late == vllm.role.prefetch_figures.read


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_reset_overtakes_enters_no_tree(keeps: bool) -> None:
    vllm = restarted(replace(ROOMY, keeps_storage=keeps))
    waiting_for_one(vllm)
    vllm.update_weights(preempts=True)
    vllm.ranks[0].driver.held.clear()
    vllm.run(lambda: not len(vllm.role.prefetcher))
    assert vllm.role.prefetch_figures.read == 0
    vllm.drain()


@pytest.mark.parametrize("then", ["attach", "detach"])
def test_a_detach_lets_those_that_wait_go_on(then: str) -> None:
    vllm = restarted()
    waiting_for_one(vllm)
    vllm.role.storage.ask("fake" if then == "attach" else None, {})
    vllm.step()
    vllm.step()
    assert not vllm.waiting, "they do not wait for what storage gives no more"
    vllm.ranks[0].driver.held.clear()
    vllm.drain()
    assert vllm.role.has_storage is (then == "attach")


@pytest.mark.parametrize("fault", ["exists", "get", "get nothing"])
def test_the_least_of_all_workers_counts(fault: str) -> None:
    vllm = restarted(replace(ROOMY, num_workers=2))
    vllm.ranks[1].storage.fault = fault
    vllm.add(request("b", PAGES, max_tokens=1))
    vllm.drain()
    assert vllm.hit_tokens == (PAGES // 2 * S if fault == "get" else 0)
    vllm.ranks[1].storage.fault = ""
    vllm.index.lose_all()
    vllm.add(request("c", PAGES, max_tokens=1))
    vllm.drain()
    assert vllm.hit_tokens % (PAGES * S) == (PAGES // 2 * S if fault == "get" else 0)


def test_prefetched_pages_are_kept_until_their_request_is_scheduled() -> None:
    """It may wait for long behind others, whose pages would push them out."""
    vllm = restarted(replace(ROOMY, host_pages=20, max_running=1))
    long = FakeRequest("long", [7] * 4 * S, 60)
    vllm.add(long)
    vllm.run(lambda: vllm.running == [long])
    vllm.add(request("b", PAGES, max_tokens=1))
    vllm.run(lambda: not len(vllm.role.prefetcher) and vllm.role.prefetcher.room.reserved_pages() == [PAGES])
    vllm.index.supply.evict(1, 20)  # type: ignore[arg-type]
    vllm.drain()
    assert vllm.hit_tokens == PAGES * S


# -- no regret --------------------------------------------------------------------------------


def computes(vllm: MiniVLLM, pages_per_s: float) -> None:
    """Computing is known to be as fast as this."""
    vllm.role.meter.planned = lambda *_: None  # type: ignore[method-assign]
    for _ in range(3):
        vllm.role.no_regret.computed(PAGES, PAGES / pages_per_s)


@pytest.mark.parametrize(("pages_per_s", "is_taken"), [(1e9, False), (1e-3, True)])
def test_a_fetch_that_is_slower_than_computing_is_not_taken(pages_per_s: float, is_taken: bool) -> None:
    vllm = restarted(replace(ROOMY, no_regret=True))
    computes(vllm, pages_per_s)
    vllm.role.no_regret.moved(GatedTransfer.FETCH, PAGES, 1.0)
    vllm.role.take_stats()
    vllm.add(request("b", PAGES, max_tokens=1))
    vllm.drain()
    assert (vllm.hit_tokens > 0, moved(vllm) > 0) == (is_taken, is_taken)
    told = vllm.role.take_stats()
    assert told.get("prefetch_left_out_pages", 0) == (0 if is_taken else PAGES)
    assert told.get("prefetch_missed_slower_than_compute_pages", 0) == (0 if is_taken else PAGES)


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize(("pages_per_s", "is_taken"), [(1e9, False), (1e-3, True)])
def test_a_load_that_is_slower_than_computing_is_not_promised(
    pages_per_s: float, is_taken: bool, load_async: bool
) -> None:
    vllm = MiniVLLM(replace(ROOMY, load_async=load_async, no_regret=True))
    vllm.add(request("a", PAGES))
    vllm.drain()
    computes(vllm, pages_per_s)
    vllm.role.no_regret.moved(GatedTransfer.LOAD, PAGES, 1.0)
    probe = request("b", PAGES)
    vllm.role.arrived(probe)
    assert {vllm.role.lookup(probe, 0) for _ in range(5)} == {PAGES * S if is_taken else 0}
    assert vllm.role.figures.load_too_slow_pages == (0 if is_taken else PAGES), "it is decided once"
    vllm.role.finished(probe, [[]])
    vllm.drain()


def test_what_computing_and_loading_cost_is_measured_by_steps() -> None:
    vllm = MiniVLLM(replace(ROOMY, load_async=True, no_regret=True))
    vllm.add(request("a", PAGES, max_tokens=4))
    vllm.drain()
    computed = vllm.role.no_regret.rates()["compute"]
    assert computed == pytest.approx((PAGES + 1 / S) / 0.01), "pages of the prompt in the time of a step"
    vllm.add(request("b", PAGES, max_tokens=1))
    vllm.drain()
    assert vllm.hit_tokens and vllm.role.no_regret.rates()["load"] > 0


# -- what storage lacks --------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 6])
def test_what_storage_did_not_take_is_offered_with_its_next_use(window: int) -> None:
    store: list[dict[str, bytes]] = [{}]
    vllm = MiniVLLM(replace(ROOMY, window=window), store)
    vllm.ranks[0].storage.fault = "put"
    vllm.add(request("a", PAGES, max_tokens=1))
    vllm.drain()
    assert not store[0] and vllm.role.figures.store_failed_pages == PAGES
    vllm.ranks[0].storage.fault = ""
    vllm.add(request("b", PAGES, max_tokens=1))
    vllm.drain()
    assert sum("@" not in name for name in store[0]) == PAGES == vllm.role.figures.stored_pages
    assert (sum("@" in name for name in store[0]) >= 2) is bool(window)


def test_what_was_saved_before_storage_was_attached_is_stored_with_its_next_use() -> None:
    store: list[dict[str, bytes]] = [{}]
    vllm = MiniVLLM(ROOMY, store)
    vllm.role.storage.ask(None, {})
    vllm.run(lambda: not vllm.role.has_storage and not vllm.ranks[0].switching)
    vllm.add(request("a", PAGES, max_tokens=1))
    vllm.drain()
    vllm.role.storage.ask("fake", {})
    vllm.run(lambda: vllm.role.has_storage)
    assert not store[0]
    vllm.add(request("b", PAGES, max_tokens=1))
    vllm.drain()
    assert len(store[0]) == PAGES


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("window", [0, 6])
def test_what_a_read_brings_while_storage_is_switched_is_stored_in_the_next(
    num_workers: int, window: int
) -> None:
    vllm = restarted(
        replace(ROOMY, window=window, num_workers=num_workers, batch_pages=2 if not window else 128)
    )
    drivers = [rank.driver for rank in vllm.ranks]
    for rank in vllm.ranks:
        part = rank.storage.parts[0]

        def get(keys: Any, into: Any, own: Any = part.get, held: set[str] = rank.driver.held) -> list[bool]:
            held.add("fetch")
            return list(own(keys, into))

        part.get = get  # type: ignore[method-assign]
    vllm.add(request("b", PAGES, max_tokens=1))
    vllm.run(lambda: all("fetch" in driver.held for driver in drivers))
    vllm.role.storage.ask("fake", {})
    vllm.step()
    vllm.step()
    for rank in vllm.ranks:
        rank.storage.pages.clear()  # the next has nothing yet
        rank.driver.held.clear()
    vllm.run(lambda: vllm.role.has_storage)
    vllm.drain()
    assert moved(vllm) > 0, "it came after all"
    vllm.add(request("c", PAGES, max_tokens=1))
    vllm.drain()
    for rank in vllm.ranks:
        assert sum("@" not in name for name in rank.storage.pages) == PAGES


# -- between processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 6])
def test_orders_and_outcomes_travel_between_processes(window: int) -> None:
    vllm = restarted(replace(ROOMY, window=window, num_workers=2))
    whole: Callable[..., Any] = vllm._work
    told: list[int] = []

    def work(rank: Rank, orders: Orders, plans: Sequence[Any], has_sync_loads: bool) -> Any:
        take: Callable[[], Any] = type(rank.role).take_outcomes.__get__(rank.role)
        rank.role.take_outcomes = lambda: pickle.loads(pickle.dumps(take()))  # noqa: S301  # type: ignore[method-assign]
        sent = pickle.dumps(orders)
        told.append(len(sent))
        return whole(rank, pickle.loads(sent), plans, has_sync_loads)  # noqa: S301

    vllm._work = work  # type: ignore[method-assign]
    for name in "bcd":
        vllm.add(request(name, PAGES + 2, max_tokens=4))
    vllm.drain()
    assert vllm.hit_tokens >= 3 * PAGES * S
    assert vllm.role.figures.stored_pages == 3 and min(told) < 400

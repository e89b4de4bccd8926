"""Loads that fail, at the moments at which vLLM asks for what has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hiradix.adapters.vllm.orders import Orders
from hiradix.adapters.vllm.worker import WorkerRole
from hiradix.cache.host_index import ARRIVING
from hiradix.transfer import JobKind, LoadFailed, StepDriver
from hiradix.tree import Tier
from tests.vllm_roles.mini_vllm import FakeRequest, MiniVLLM, Rank, S, World
from tests.vllm_roles.test_life import request, under_way


def with_a(world: World) -> MiniVLLM:
    vllm = MiniVLLM(world)
    vllm.add(request("a", 4))
    vllm.drain()
    return vllm


def test_an_abort_between_a_failed_load_and_its_report_saves_nothing() -> None:
    """A load ends while the worker answers vLLM, of which it says the end with the next step: the scheduler
    must not hear of it before, or blocks that were never filled pass for computed ones."""
    vllm = with_a(World(load_async=True))
    rank = vllm.ranks[0]
    rank.driver.held.add("load")
    b = request("b", 4)
    vllm.add(b)
    vllm.step()
    assert b.is_loading
    whole, told = rank.role.collect, []

    def collect(orders: Orders) -> Any:
        collected = whole(orders)
        rank.driver.held.clear()
        rank.transports[0].fails = 1
        rank.driver.run()
        rank.role._take_in()
        return collected

    rank.role.collect = collect  # type: ignore[method-assign]
    take, rank.role.take_outcomes = rank.role.take_outcomes, lambda: told.extend(take()) or tuple(told)  # type: ignore[method-assign]
    vllm.step()
    assert b.is_loading and not any(outcome.kind is JobKind.LOAD for outcome in told)
    rank.role.collect, rank.role.take_outcomes = whole, take  # type: ignore[method-assign]
    vllm.abort(b)
    vllm.drain()
    assert vllm.role.figures.load_failed == 1 and vllm.role.figures.saved_pages == 4
    vllm.add(request("c", 4))
    vllm.drain()


def asked_before_the_draft_model(rank: Rank, orders: Orders, plans: Sequence[Any], vllm: MiniVLLM) -> Any:
    """A step as vLLM's runner has it with speculative decoding: results are asked for before the save."""
    rank.role.before_forward(orders)
    waits = rank.role.start_loads(orders)
    if plans:
        vllm._forward(rank, plans, waits)
    controller, whole = rank.role._controller, rank.role._controller.poll
    late = [[]] if waits else []  # layers hear of the end of a load before its result is there
    controller.poll = lambda: late.pop() if late else whole()  # type: ignore[method-assign]
    collected = rank.role.collect(orders)
    controller.poll = whole  # type: ignore[method-assign]
    rank.role.after_forward(orders)
    return collected


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_step_whose_load_failed_says_so_itself_with_speculative_decoding(
    num_workers: int, layers: int
) -> None:
    """With the next step it would be too late: vLLM had sampled from what was never there."""
    vllm = with_a(World(num_workers=num_workers, budget=40))

    def work(rank: Rank, orders: Orders, plans: Sequence[Any], has_sync_loads: bool) -> Any:
        return asked_before_the_draft_model(rank, orders, plans, vllm)

    vllm._work = work  # type: ignore[method-assign]
    transport = vllm.ranks[-1].transports[0]
    whole, copies = transport.copy_pages, []

    def fails_at_the_last_layer(*args: Any) -> None:
        copies.append(args)
        transport.fails = len(copies) == layers
        whole(*args)

    transport.copy_pages = fails_at_the_last_layer  # type: ignore[method-assign]
    b = request("b", 6, max_tokens=3)
    vllm.add(b)
    vllm.drain()
    assert vllm.role.figures.load_failed == 1 and vllm.num_recomputed == 1
    assert vllm.role.figures.save_failed_pages == 2, "what the step computed is not saved"
    vllm.add(request("c", 6, max_tokens=3))
    vllm.drain()
    assert vllm.hit_tokens == (4 + 6) * S
    assert vllm.done[-1].all_token_ids == b.all_token_ids


def stalled_until(role: WorkerRole, driver: StepDriver, method: str) -> None:
    """Once, the load worker is paused while layers wait for its copies; a later call lets it go on."""
    start, later = role.start_loads, getattr(role, method)

    def start_loads(orders: Orders) -> bool:
        waits = start(orders)
        if waits:
            driver.held.add("load")
            role.start_loads = start  # type: ignore[method-assign]
        return waits

    def goes_on(orders: Orders) -> Any:
        driver.held.discard("load")
        return later(orders)

    role.start_loads = start_loads  # type: ignore[method-assign]
    setattr(role, method, goes_on)


@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_load_that_ends_well_after_its_layers_gave_up_on_it_has_failed(
    num_workers: int, drafts: bool
) -> None:
    """What the step computed from its blocks is nothing to go on with, and nothing to be saved."""
    store: list[dict[str, bytes]] = [{} for _ in range(num_workers)]
    vllm = MiniVLLM(World(num_workers=num_workers, budget=40, num_blocks=40, host_pages=30), store)
    vllm.add(request("a", 4))
    vllm.drain()
    rank = vllm.ranks[-1]
    stalled_until(rank.role, rank.driver, "collect" if drafts else "after_forward")

    def work(rank: Rank, orders: Orders, plans: Sequence[Any], has_sync_loads: bool) -> Any:
        rank.role.before_forward(orders)
        waits = rank.role.start_loads(orders)
        if plans:
            vllm._forward(rank, plans, waits)
        collected = rank.role.collect(orders)
        rank.role.after_forward(orders)
        return collected

    if drafts:
        vllm._work = work  # type: ignore[method-assign]
    b = request("b", 6, max_tokens=3)
    vllm.add(b)
    vllm.run(lambda: vllm.num_recomputed == 1)
    vllm.drain()
    assert vllm.role.figures.load_failed == 1
    assert vllm.role.figures.save_failed_pages == 2, "what the step computed is not saved"
    for rank in vllm.ranks:
        rank.driver.run()
    vllm.add(request("c", 6, max_tokens=3))
    vllm.drain()
    assert vllm.done[-1].all_token_ids == b.all_token_ids
    other = MiniVLLM(replace(vllm.world, load_async=True), store)
    other.add(request("d", 6, max_tokens=3))
    other.drain()
    assert other.done[-1].all_token_ids == b.all_token_ids and other.hit_tokens == 6 * S


def test_a_result_that_comes_while_layers_give_up_changes_nothing() -> None:
    """The thread that takes results in may see the good end before the model's thread says it gave up."""
    vllm = with_a(World(budget=40))
    rank = vllm.ranks[0]
    gate = rank.role._controller.layer_done_counter

    def gives_up(layer: int) -> None:
        rank.driver.run()
        rank.role._take_in()
        raise LoadFailed("planted: it gave up")

    gate.wait_until = gives_up  # type: ignore[method-assign]
    b = request("b", 6)
    vllm.add(b)
    vllm.step()
    assert vllm.num_recomputed == 1 and vllm.role.figures.load_failed == 1
    del gate.wait_until
    vllm.drain()
    assert vllm.role.figures.save_failed_pages == 2


def test_a_save_that_a_step_waited_for_in_vain_has_failed_however_it_ends() -> None:
    """What it copies when it goes on at last are the next request's numbers."""
    store: list[dict[str, bytes]] = [{}]
    vllm = MiniVLLM(World(num_blocks=6, budget=40, max_running=1), store)
    rank = vllm.ranks[0]
    rank.driver.held.add("write")
    vllm.add(request("a", 4, max_tokens=1))
    vllm.run(lambda: len(vllm.done) == 1)
    vllm.add(request("b", 4, max_tokens=1, first=50))
    vllm.run(lambda: len(vllm.done) == 2)
    assert vllm.role.figures.fences > 0 and rank.role._overwritten
    rank.driver.held.clear()
    vllm.drain()
    assert vllm.role.figures.save_failed_pages == vllm.role.figures.store_failed_pages == 4
    assert not rank.role._overwritten
    for name, first, hits in (("a2", 1, 0), ("b2", 50, 4 * S)):
        before = vllm.hit_tokens
        vllm.add(request(name, 4, max_tokens=1, first=first))
        vllm.drain()
        assert vllm.hit_tokens - before == hits


def test_a_request_that_went_on_without_its_prefetch_holds_nothing_of_it() -> None:
    """vLLM's own prefix cache had all of its prompt by then: what storage gives is for others."""
    store: list[dict[str, bytes]] = [{}]
    first = MiniVLLM(World(), store)
    first.add(request("a", 4))
    first.drain()
    vllm = MiniVLLM(World(prefix_cache=True, num_blocks=60, host_pages=60), store)
    vllm.ranks[0].driver.held.add("fetch")
    long = request("long", 4, max_tokens=100)
    vllm.add(long)
    vllm.add(request("reads no cache", 4, skip_reading_prefix_cache=True))
    vllm.run(lambda: bool(vllm.running and vllm.running[0] is long))
    assert vllm.local_tokens == 4 * S
    vllm.index.lose_all()
    vllm.ranks[0].driver.held.clear()
    vllm.run(lambda: not len(vllm.role.prefetcher))
    assert vllm.running == [long] and vllm.role.prefetcher.room.reserved_pages() == [0]
    vllm.drain()


DEFERRED = World(load_async=True, deferred=2)


def promised(world: World = DEFERRED) -> tuple[MiniVLLM, FakeRequest]:
    """An engine that has promised a request four pages, which are not taken up yet."""
    vllm = with_a(world)
    b = request("b", 4)
    vllm.add(b)
    vllm.step()
    assert b.is_loading and vllm.deferred and not under_way(vllm, JobKind.LOAD)
    return vllm, b


def evicted(vllm: MiniVLLM, num_pages: int) -> None:
    vllm.index.supply.evict(Tier.HOST, num_pages)


GONE: dict[str, Callable[[MiniVLLM], Any]] = {
    "reset": lambda vllm: vllm.update_weights(preempts=True),
    "evicted": lambda vllm: evicted(vllm, 4),
    "evicted in part": lambda vllm: evicted(vllm, 1),
    "being copied again": lambda vllm: vllm.index._pools[0].state.fill(ARRIVING),
}


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("how", GONE)
def test_a_promise_that_has_gone_when_taken_up_is_a_load_that_failed(how: str, num_workers: int) -> None:
    """vLLM 0.33 takes loads up steps later: what was promised is pinned by nothing until then."""
    vllm, b = promised(replace(DEFERRED, num_workers=num_workers))
    GONE[how](vllm)
    while vllm.deferred:
        vllm.step()
    vllm.index._pools[0].state.fill(0)
    vllm.drain()
    assert vllm.role.figures.load_failed == 1 and vllm.num_recomputed == 1
    assert vllm.done[-1] is b and b.num_computed_tokens >= 4 * S


def test_a_promise_that_is_there_when_it_is_taken_up_is_loaded() -> None:
    vllm, b = promised()
    vllm.drain()
    assert (vllm.role.figures.load_failed, vllm.role.figures.loaded_pages) == (0, 4)
    assert vllm.done[-1] is b


@pytest.mark.parametrize("is_reset", [False, True])
def test_an_abort_before_a_promise_is_taken_up_saves_nothing(is_reset: bool) -> None:
    """vLLM counts tokens as computed from when it has blocks for them: nothing has filled these."""
    vllm, b = promised()
    saved = vllm.role.figures.saved_pages
    evicted(vllm, 4)
    if is_reset:
        vllm.role.reset()
    vllm.abort(b)
    vllm.step()
    vllm.drain()
    assert vllm.role.figures.saved_pages == saved
    vllm.add(request("c", 4))
    vllm.drain()


def test_a_request_that_is_preempted_after_a_reset_takes_promises_up() -> None:
    """When vLLM takes one up it counts its tokens as computed: no sign that they are of before the reset."""
    vllm = MiniVLLM(replace(DEFERRED, budget=40))
    b = request("b", 4, max_tokens=9)
    vllm.add(b)
    vllm.run(lambda: b.num_computed_tokens > 4 * S)
    vllm.update_weights(preempts=False)
    vllm._preempt()
    vllm.waiting.remove(b)
    vllm.run(lambda: vllm.role.is_idle)
    vllm.add(request("a", 4, max_tokens=1))
    vllm.run(lambda: len(vllm.done) == 1 and vllm.role.is_idle)
    vllm.waiting.append(b)
    vllm.drain()
    assert vllm.role.figures.load_failed == 0 and vllm.hit_tokens == 4 * S


def test_a_part_of_a_page_is_not_loaded() -> None:
    """vLLM may take less than was promised: a load brings whole pages."""
    vllm, _ = promised()
    step, one, _ = vllm.deferred["b"]
    vllm.deferred["b"] = (step, one, 3 * S + 1)
    vllm.drain()
    assert vllm.role.figures.load_failed == 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_promise_for_the_step_itself_that_has_gone_fails_its_request_alone(num_workers: int) -> None:
    """The step's other loads are waited for as ever."""
    vllm = with_a(World(budget=40, num_workers=num_workers))
    vllm.add(request("d", 5, first=7))
    vllm.drain()
    allocated = vllm.role.allocated

    def loses_a(one: Any, table: Any, num_tokens: int) -> None:
        if one.request_id == "b":
            lock = vllm.index.tree.lock(vllm.index.resident_end(vllm.role.requests["b"].key(4, S)), Tier.HOST)
            vllm.index.lose_path(lock)
            vllm.index.unlock(lock)
        allocated(one, table, num_tokens)

    vllm.role.allocated = loses_a  # type: ignore[method-assign]
    b, e = request("b", 4), request("e", 5, first=7)
    vllm.add(b)
    vllm.add(e)
    vllm.step()
    assert vllm.num_recomputed == 1 and e.num_computed_tokens > 5 * S > b.num_computed_tokens
    vllm.drain()
    assert (vllm.role.figures.load_failed, vllm.role.figures.loaded_pages) == (1, 5)
    assert vllm.role.figures.save_failed_pages > 0, "what the step computed is not saved"
    vllm.add(request("c", 4))
    vllm.drain()


@pytest.mark.parametrize("kind", ["write", "load"])
def test_memory_that_is_to_be_taken_away_waits_for_copies(kind: str) -> None:
    """As where vLLM goes to sleep. What does not end in time is not forgotten."""
    vllm = with_a(World(load_async=True))
    rank = vllm.ranks[0]
    rank.driver.held.add(kind)
    vllm.add(request("b", 4 if kind == "load" else 3, first=1 if kind == "load" else 5))
    for _ in range(3):
        vllm.step()
    assert not rank.role.settle(0.1)
    rank.driver.held.clear()
    assert rank.role.settle(10.0) and rank.role.settle(0.0)
    vllm.drain()

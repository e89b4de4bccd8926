"""Loads that fail, at the moments at which vLLM asks for what has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hiradix.adapters.vllm.orders import Orders, Stage
from tests.vllm_roles.mini_vllm import MiniVLLM, Rank, S, World
from tests.vllm_roles.test_life import request


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
    assert b.is_loading and not any(outcome.stage is Stage.LOADED for outcome in told)
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
    vllm.run(lambda: not vllm.role.fetches.flights)
    assert vllm.running == [long] and vllm.role.requests["long"].hold is None
    vllm.drain()

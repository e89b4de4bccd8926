"""Wishes between calls of vLLM's scheduler: forgets of what was promised, and of what a first step computes."""

from __future__ import annotations

from typing import Any

from hiradix.adapters.vllm.scheduler_plan import StepRequest
from hiradix.intents import Intent, IntentState, Receipt, Selector, Verb
from hiradix.tree import RadixKey
from tests.vllm_roles.mini_vllm import FakeRequest, MiniVLLM, S, World
from tests.vllm_roles.test_life import request


def forget(vllm: MiniVLLM, one: FakeRequest, tier: str = "host") -> Receipt:
    """As an admin's thread does between two calls of vLLM's scheduler."""
    tokens = one.all_token_ids[: one.num_tokens // S * S]
    selector = Selector.prefix(RadixKey(tokens, cache_salt=one.cache_salt))
    receipt = vllm.role.intents.submit(Intent(Verb.FORGET, selector, (tier,)))
    vllm.role.apply_intents()
    found = vllm.role.intents.receipt(receipt.id)
    assert found is not None
    return found


def test_what_was_promised_and_is_being_forgotten_is_not_loaded() -> None:
    vllm = MiniVLLM(World(budget=40))
    vllm.add(request("a", 4))
    vllm.drain()
    first, second = request("b", 4), request("c", 4)
    for one in (first, second):
        vllm.role.arrived(one)
        assert vllm.role.lookup(one, 0) > 0
    vllm.role.allocated(first, lambda: [[1, 2, 3, 4]], 3 * S)  # its load keeps the pages in use
    assert first.num_computed_tokens == 0
    assert forget(vllm, first).state is IntentState.RUNNING
    loads = len(vllm.role.executor.loads)
    vllm.role.allocated(second, lambda: [[5, 6, 7, 8]], 3 * S)
    assert not any(len(copy.source) for load in vllm.role.executor.loads[loads:] for copy in load.copies)


def test_a_request_whose_load_was_under_way_saves_nothing_of_it_again() -> None:
    vllm = MiniVLLM(World(budget=40))
    vllm.add(request("a", 4))
    vllm.drain()
    one = request("b", 4)
    vllm.role.arrived(one)
    assert vllm.role.lookup(one, 0) > 0
    vllm.role.allocated(one, lambda: [[1, 2, 3, 4]], 3 * S)
    forget(vllm, one)
    assert vllm.role.requests["b"].is_stale


def test_a_request_whose_first_step_is_planned_saves_nothing_of_it_again() -> None:
    vllm = MiniVLLM(World(budget=40))
    one = request("a", 4)
    vllm.add(one)
    vllm.role.lookup(one, 0)
    vllm.role.allocated(one, lambda: [[1, 2, 3, 4]], 0)
    vllm.role.step([StepRequest("a", 4 * S, [1, 2, 3, 4])], lambda _: [[1, 2, 3, 4]])
    assert one.num_computed_tokens == 0, "vLLM counts them when the step is planned"
    forget(vllm, one)
    assert vllm.role.requests["a"].is_stale


def test_a_request_whose_promise_is_not_taken_up_saves_nothing_of_it_again() -> None:
    """vLLM 0.33 counts its tokens as computed some steps before it tells of their blocks."""
    vllm = MiniVLLM(World(budget=40))
    vllm.add(request("a", 4))
    vllm.drain()
    one = request("b", 4)
    vllm.role.arrived(one)
    assert vllm.role.lookup(one, S) > 0
    one.num_computed_tokens = 3 * S  # the first page of it is of vLLM's own prefix cache
    forget(vllm, one)
    assert vllm.role.requests["b"].is_stale


def test_a_request_whose_first_step_is_planned_saves_nothing_of_it_after_a_reset() -> None:
    vllm = MiniVLLM(World(budget=40))
    one = request("a", 4)
    vllm.add(one)
    vllm.role.lookup(one, 0)
    vllm.role.allocated(one, lambda: [[1, 2, 3, 4]], 0)
    vllm.role.step([StepRequest("a", 4 * S, [1, 2, 3, 4])], lambda _: [[1, 2, 3, 4]])
    assert one.num_computed_tokens == 0
    vllm.role.reset()
    assert vllm.role.requests["a"].is_stale


def test_storage_alone_forgets_what_was_on_its_way_there() -> None:
    store: dict[str, bytes] = {}
    vllm = MiniVLLM(World(budget=40), [store])
    vllm.ranks[0].driver.held.add("write")  # its save, and so what follows it to storage, goes on later
    one = request("a", 4)
    vllm.add(one)
    vllm.step()
    wish = forget(vllm, one, "storage")
    assert wish.state is IntentState.RUNNING
    for _ in range(4):
        vllm.step()
    vllm.ranks[0].driver.held.clear()
    vllm.drain()
    for _ in range(8):
        vllm.step()
    ended = vllm.role.intents.receipt(wish.id)
    assert ended is not None and ended.state is IntentState.DONE, ended
    assert not store


def test_a_wish_of_a_prompt_shorter_than_a_page_is_about_no_other_prompt() -> None:
    """The key of its whole pages has no tokens, and would name all of its tenant's."""
    vllm = MiniVLLM(World(budget=40), [{}])
    vllm.add(request("a", 4, cache_salt="x"))
    vllm.drain()
    one: Any = request("b", 0, cache_salt="x")
    one.kv_transfer_params = {"hiradix": [{"verb": "locate"}, {"verb": "bring", "target": "storage"}]}
    vllm.role.arrived(one)
    located, brought = vllm.role.take_wishes(one) or []
    assert located["found"]["host"]["tokens"] == 0 and "1 tokens" in brought["selector"]

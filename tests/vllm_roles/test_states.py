"""Recurrent states beside attention in the roles: exact in every life, and faults in them are seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiradix.adapters.vllm.requests import Tracked
from hiradix.adapters.vllm.scheduler import SchedulerRole
from hiradix.adapters.vllm.scheduler_plan import OfferedState
from hiradix.cache import foreign_device, host_index
from hiradix.cache.foreign_device import BlockTables
from hiradix.transfer import Copy
from hiradix.tree import TokenLog
from tests.seeds import assert_seen
from tests.vllm_roles.mini_vllm import FakeRequest, MiniVLLM, S, World
from tests.vllm_roles.test_random_life import Life

TWO = World(states=2, load_async=True, num_blocks=60, host_pages=40, budget=40)


def drawn_world(rng: random.Random) -> World:
    kind = rng.choice(["", "", "window", "chunk"])
    states = rng.choice([1, 2, 3])
    return World(
        num_blocks=rng.choice([16, 24, 48]) * (2 + states),
        host_pages=rng.choice([3, 8, 30]),
        num_workers=rng.choice([1, 1, 2]),
        window=rng.choice([5, 9]) if kind == "window" else 0,
        chunk=rng.choice([8, 10]) if kind == "chunk" else 0,
        states=states,
        checkpoints=rng.random() < 0.5,
        late=rng.random() < 0.3,
        load_async=True,
        budget=rng.choice([3, 9, 40]),
        max_running=rng.choice([1, 3, 6]),
        prefetch_policy=rng.choice(["best_effort", "timeout", "wait_complete"]),
        batch_pages=rng.choice([1, 2, 128]),
        seed=rng.randrange(1 << 30),
        policy=rng.choice(["lru", "ghd", "2q"]),
    )


def life(seed: int, compares: bool = False) -> Life:
    return Life(seed, compares, drawn_world)


@settings(max_examples=80)
@given(st.integers(0, 1 << 30))
def test_no_wrong_state_is_read_and_everything_is_given_back(seed: int) -> None:
    life(seed).play(90)


@settings(max_examples=20)
@given(st.integers(0, 1 << 30))
def test_no_wrong_state_is_read_of_a_store_that_models_of_one_name_share(seed: int) -> None:
    life(seed, compares=True).play(90)


def prompt(length: int, which: int = 0) -> list[int]:
    return [1 + (which * 31 + i) % 11 for i in range(length)]


def served(vllm: MiniVLLM, tokens: list[int], name: str, max_tokens: int = 1) -> int:
    """Tokens of a prompt that came from the host or storage."""
    before = vllm.hit_tokens
    vllm.add(FakeRequest(name, tokens, max_tokens))
    vllm.drain()
    return vllm.hit_tokens - before


def test_a_prompt_hits_where_its_state_is_and_nowhere_else() -> None:
    """Its last whole block's end; another that leaves it before that has pages, and no state."""
    vllm = MiniVLLM(TWO)
    assert served(vllm, prompt(6 * S + 1), "a") == 0
    assert served(vllm, prompt(6 * S + 1), "b") == 6 * S
    assert served(vllm, [*prompt(4 * S), 99], "c") == 0, "no step of the first one ended there"
    assert served(vllm, [*prompt(4 * S), 98], "d") == 4 * S, "but this one's did"


def test_answers_leave_states_at_their_blocks_ends() -> None:
    vllm = MiniVLLM(TWO)
    asked = FakeRequest("a", prompt(2 * S + 1), 3 * S)
    vllm.add(asked)
    vllm.drain()
    told = asked.all_token_ids
    for end in range(2 * S, len(told) // S * S, S):
        assert served(vllm, [*told[:end], 99], f"b{end}") == end


def test_a_checkpoint_inside_a_step_is_saved_as_what_vllm_says_it_is() -> None:
    """The step ends in a block that is still written to; the state of the last end before is in another."""
    vllm = MiniVLLM(replace(TWO, checkpoints=True))
    assert served(vllm, prompt(6 * S + 2), "a") == 0
    assert vllm.num_steps < 8
    assert served(vllm, prompt(6 * S + 2), "b") == 6 * S


def test_states_come_from_storage_after_a_restart() -> None:
    store: list[dict[str, bytes]] = [{}]
    vllm = MiniVLLM(TWO, store)
    served(vllm, prompt(6 * S + 1), "a")
    assert len([name for name in store[0] if "@1" in name]) == len([n for n in store[0] if "@2" in n]) > 0
    assert served(MiniVLLM(TWO, store), prompt(6 * S + 1), "b") == 6 * S


@pytest.mark.parametrize("component", [0, 1, 2])
def test_one_of_a_boundarys_pages_that_was_not_stored_is_a_miss(component: int) -> None:
    store: list[dict[str, bytes]] = [{}]
    served(MiniVLLM(TWO, store), prompt(6 * S + 1), "a")
    lost = [name for name in store[0] if (f"@{component}" in name if component else "@" not in name)]
    del store[0][lost[-1]]
    assert served(MiniVLLM(TWO, store), prompt(6 * S + 1), "b") == 0


def test_a_junction_gets_a_state_though_its_pages_are_there() -> None:
    """Only the state is copied, and only it is stored."""
    store: list[dict[str, bytes]] = [{}]
    vllm = MiniVLLM(TWO, store)
    served(vllm, prompt(6 * S + 1), "a")
    num_stored, saved = len(store[0]), vllm.role.figures.saved_pages
    served(vllm, [*prompt(4 * S), 99], "b")
    assert vllm.role.figures.saved_pages == saved and len(store[0]) == num_stored + TWO.states
    assert served(MiniVLLM(TWO, store), [*prompt(4 * S), 98], "c") == 4 * S


@pytest.mark.parametrize("group", [1, 2])
def test_a_promise_whose_state_got_no_block_is_one_that_fails(group: int) -> None:
    """Pages without a state behind them are no prefix: the request is computed again."""
    vllm = MiniVLLM(TWO)
    served(vllm, prompt(6 * S + 1), "a")
    asked = FakeRequest("b", prompt(6 * S + 1), 1)
    vllm.role.arrived(asked)
    assert vllm.role.lookup(asked, 0) == 6 * S
    tables = [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 7], [0, 0, 0, 0, 0, 8]]
    tables[group][-1] = 0
    vllm.role.allocated(asked, lambda: tables, 6 * S)
    (load,) = vllm.role.step([], lambda _: tables).jobs.loads
    assert load.error is not None


def test_a_boundary_on_its_way_leaves_the_one_before_it() -> None:
    """What is arriving is waited for, half a second at most; then what is there before it is used."""
    vllm = MiniVLLM(TWO)
    served(vllm, prompt(2 * S + 1), "a")
    vllm.ranks[0].driver.held |= {"copy"}
    vllm.add(FakeRequest("b", prompt(6 * S + 1), 1))
    for _ in range(3):
        vllm.step()
    found = vllm.index.find(
        Tracked(FakeRequest("c", prompt(6 * S + 1), 1), _log(prompt(6 * S + 1)), None).key(6, S)
    )
    vllm.ranks[0].driver.held.clear()
    vllm.drain()
    assert found.num_pages in (2, 6)


def _log(tokens: Sequence[int]) -> Any:

    return TokenLog(tokens, None)


@pytest.mark.parametrize(("saves", "loads"), [(True, False), (False, True)])
def test_a_producer_never_loads_and_a_consumer_never_saves(saves: bool, loads: bool) -> None:
    store: list[dict[str, bytes]] = [{}]
    world = replace(TWO, saves=saves, loads=loads)
    both = MiniVLLM(TWO, store)
    served(both, prompt(6 * S + 1), "a")
    stored = dict(store[0])
    vllm = MiniVLLM(world, store)
    assert served(vllm, prompt(6 * S + 1), "b") == (6 * S if loads else 0)
    served(vllm, prompt(5 * S + 1, 1), "c")
    assert served(vllm, prompt(5 * S + 1, 1), "d") == 0
    figures = vllm.role.figures
    assert (figures.saved_pages > 0, figures.loaded_pages > 0) == (saves, loads)
    assert (store[0] != stored) == saves
    assert not vllm.role.prefetch_figures.asked or loads


# -- planted faults -------------------------------------------------------------------------


def a_state_one_block_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a table has where the next block begins, in place of what vLLM says."""
    whole = SchedulerRole._states

    def states(
        self: SchedulerRole, tracked: Tracked, offered: Sequence[OfferedState], blocks: BlockTables, due: int
    ) -> Any:
        moved = [offer._replace(num_tokens=max(S, offer.num_tokens - S)) for offer in offered]
        return whole(self, tracked, moved, blocks, due)

    monkeypatch.setattr(SchedulerRole, "_states", states)


def the_running_state_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a table, whatever its state is of."""
    whole = SchedulerRole._states

    def states(
        self: SchedulerRole, tracked: Tracked, offered: Sequence[OfferedState], blocks: BlockTables, due: int
    ) -> Any:
        last = {component: blocks[component][-1] for component in self._state_parts}
        return [(end, found or last) for end, found in whole(self, tracked, offered, blocks, due)]

    monkeypatch.setattr(SchedulerRole, "_states", states)


def two_groups_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = foreign_device.ForeignDevice._copies

    def copies(self: foreign_device.ForeignDevice, *args: Any) -> Any:
        found = whole(self, *args)
        pairs = {copy.pair: copy for copy in found or ()}
        if len(self._states) < 2 or not found:
            return found
        one, other = self._states[:2]
        swap = {one: other, other: one}
        return tuple(Copy(c.source, pairs[swap.get(c.pair, c.pair)].target, c.pair) for c in found)

    monkeypatch.setattr(foreign_device.ForeignDevice, "_copies", copies)


def a_stale_state_under_a_known_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record whose copy failed stays, and is served with its page."""
    monkeypatch.setattr(host_index.HostIndex, "lose", lambda self, key, start, taken: self.arrived(taken))


def a_boundary_without_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has pages is promised; of states what the group had last is loaded."""
    whole = foreign_device.ForeignDevice._copies

    def copies(self: foreign_device.ForeignDevice, *args: Any) -> Any:
        return tuple(copy for copy in whole(self, *args) or () if copy.pair not in self._states)

    monkeypatch.setattr(foreign_device.ForeignDevice, "_copies", copies)


def one_group_of_states_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = foreign_device.ForeignDevice._order_save

    def order_save(self: foreign_device.ForeignDevice, job: Any, copies: Any, before: bool) -> None:
        last = self._states[-1]
        whole(self, job, tuple(copy for copy in copies if copy.pair != last) or copies, before)

    monkeypatch.setattr(foreign_device.ForeignDevice, "_order_save", order_save)


def blocks_that_were_handed_out_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerRole, "_still_there", lambda self, offered, blocks, written: offered)


def no_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_device.ForeignDevice, "fences", lambda self, written: ())


FAULTS = (
    a_state_one_block_off,
    the_running_state_is_taken,
    two_groups_exchanged,
    a_stale_state_under_a_known_page,
    a_boundary_without_its_state,
    one_group_of_states_is_not_saved,
    blocks_that_were_handed_out_are_saved,
    no_fences,
)


SEEN_BY = 92
"""A seed that sees the fault that is seen most rarely: it is tried first, the others behind it."""


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert_seen(lambda seed: life(seed).play(90), (SEEN_BY, *range(200)))

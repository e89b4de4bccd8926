"""HiRadixScheduler on vLLM's real scheduler without a model, in simulated time: long lives, many of them."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hiradix.policy.admission_controller import session_name
from tests.vllm.lone_scheduler import Lone
from tests.vllm.test_host import conversation

BLOCK = 16


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch, model: Path) -> Any:
    def make(policy: str = "cached", **how: Any) -> Lone:
        from hiradix.adapters.vllm import HiRadixScheduler

        monkeypatch.setenv("HIRADIX_SCHEDULE_POLICY", policy)
        return Lone(monkeypatch, model, HiRadixScheduler, **how)

    return make


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch, model: Path) -> Any:
    def make(**how: Any) -> Lone:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        return Lone(monkeypatch, model, AsyncScheduler if how.get("is_async") else Scheduler, **how)

    return make


def life(lone: Lone, seed: int, num: int = 120, aborts: bool = True) -> None:
    """Sessions come back, some requests are aborted, blocks run out, the scheduler is paused now and then."""
    from vllm.v1.core.sched.interface import PauseState

    rng = random.Random(seed)
    sessions = [conversation(100 * seed + at, rng.randrange(20, 200)) for at in range(12)]
    doomed: list[str] = []
    for number in range(num):
        at = rng.randrange(len(sessions))
        sessions[at] = sessions[at][:600] + conversation(seed * 1000 + number, rng.randrange(1, 120))
        said: dict[str, Any] = {"session_id": f"s{at}"} if at % 3 == 0 else {}
        said |= {"tenant": f"t{at % 2}"} if at % 2 else {}
        lone.add(f"r{number}", sessions[at], rng.randrange(1, 120), **said)
        if aborts and rng.random() < 0.2:
            doomed.append(f"r{number}")
        if rng.random() < 0.05:
            state = rng.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
            lone.scheduler.set_pause_state(state)
            for _ in range(2):
                lone.step()
            lone.scheduler.set_pause_state(PauseState.UNPAUSED)
        for _ in range(rng.randrange(4)):
            lone.step()
            if doomed and rng.random() < 0.3:
                lone.abort(doomed.pop(rng.randrange(len(doomed))))
    lone.run()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("policy", "threshold"), [("cached", 0), ("cached", 64), ("lpm", 64)])
def test_long_lives_leave_nothing_behind(ours: Any, policy: str, is_async: bool, threshold: int) -> None:
    preempted = 0
    for seed in range(2):
        lone = ours(
            policy, is_async=is_async, num_blocks=60, max_num_seqs=8, max_num_batched_tokens=256,
            long_prefill_token_threshold=threshold,
        )  # fmt: skip
        kind = type(lone.scheduler).__name__
        assert kind == ("HiRadixAsyncScheduler" if is_async else "HiRadixScheduler")
        life(lone, seed)
        lone.assert_nothing_is_left()
        assert set(lone.first_s) | set(lone.ended) <= {f"r{number}" for number in range(120)}
        preempted += lone.preempted
    assert preempted


@pytest.mark.parametrize("is_async", [False, True])
def test_fcfs_is_vllms_own_order(ours: Any, theirs: Any, is_async: bool) -> None:
    how = {"is_async": is_async, "num_blocks": 80, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    for seed in range(2):
        mine, own = ours("fcfs", **how), theirs(**how)
        life(mine, seed)
        life(own, seed)
        assert mine.first_s == own.first_s and mine.ended == own.ended


def growing(num: int, turns: int, first: int, more: int) -> dict[str, list[list[int]]]:
    """Sessions whose prompts each go on from the one before."""
    whole = {f"s{at}": conversation(at, first + turns * more) for at in range(num)}
    return {name: [text[: first + turn * more] for turn in range(turns)] for name, text in whole.items()}


@pytest.mark.parametrize("is_named", [False, True])
def test_agents_wait_a_third_and_none_longer(ours: Any, theirs: Any, is_named: bool) -> None:
    """Twice as much as the device holds, no other tier: served in turn, nothing is ever found."""
    prompts = growing(16, 12, 600, 40)
    how = {"num_blocks": 16 * 1080 // 2 // BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    first, cached = theirs(**how), ours("cached", **how)
    first.agents(prompts, 0.5, is_named)
    cached.agents(prompts, 0.5, is_named)
    cached.assert_nothing_is_left()
    before, after = first.first_s.values(), cached.first_s.values()
    assert len(before) == len(after) == 16 * 12
    assert sum(after) <= sum(before) / 3
    assert max(after) <= max(before)


def test_a_flooding_tenant_does_not_hold_up_the_others(ours: Any) -> None:
    lone = ours("cached", num_blocks=500, max_num_seqs=1, max_num_batched_tokens=512)
    lone.add("warm", conversation(1, 300), tenant="many")
    lone.run()
    for number in range(30):
        lone.add(f"many{number}", conversation(100 + number, 300), tenant="many")
    for number in range(3):
        lone.add(f"few{number}", conversation(200 + number, 300), tenant="few")
    lone.run()
    assert max(lone.first_s[f"few{number}"] for number in range(3)) < lone.first_s["many10"]
    lone.assert_nothing_is_left()


def test_who_is_passed_over_is_offered_again_behind_none(ours: Any) -> None:
    """A step takes what it can; what it looked at and could not take keeps its place."""
    lone = ours("fcfs", num_blocks=50, max_num_seqs=8, max_num_batched_tokens=256)
    for number in range(6):
        lone.add(f"r{number}", conversation(number, 400))
    lone.run()
    assert lone.order() == [f"r{number}" for number in range(6)]


@pytest.mark.parametrize("num_blocked", [1, 5, 40])
def test_nobody_is_held_for_one_that_cannot_be_served_yet(ours: Any, num_blocked: int) -> None:
    """Whoever is due first waits for its grammar, or for storage: the others are served meanwhile, and it goes
    before those that came later when it can."""
    from vllm.v1.request import RequestStatus

    lone = ours("cached", num_blocks=200, max_num_seqs=4, max_num_batched_tokens=256)
    names = [f"blocked{number}" for number in range(num_blocked)]
    for number, name in enumerate(names):
        lone.add(name, conversation(number, 100))
        lone.scheduler.requests[name].status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    lone.now_s += 1e4
    for number in range(12):
        lone.add(f"r{number}", conversation(100 + number, 100))
    lone.now_s += 1e4  # by now all are late
    for _ in range(40):
        lone.step()
    assert sorted(lone.first_s) == sorted(f"r{number}" for number in range(12))
    for number in range(12):
        lone.add(f"later{number}", conversation(200 + number, 100))
    for name in names:
        lone.scheduler.requests[name].status = RequestStatus.WAITING
    lone.run()
    assert set(lone.order()[12 : 12 + num_blocked]) == set(names)
    lone.assert_nothing_is_left()


def test_storage_is_read_in_the_policys_order(ours: Any) -> None:
    """Also while nobody is looked at, as all places are taken."""
    lone, told = ours("lpm", num_blocks=200, max_num_seqs=1), list[list[str]]()
    for number, length in enumerate([50, 300, 100, 200]):
        lone.add(f"r{number}", conversation(number, length), 30)
    lone.scheduler._role = SimpleNamespace(
        has_storage=True,
        index=SimpleNamespace(is_open=True, num_pages=10, page_size=BLOCK),
        plan=SimpleNamespace(writes=SimpleNamespace(writes_on_evict=False)),
        prefetcher=SimpleNamespace(in_order=told.append),
    )
    lone.step()
    assert told[0] == ["r0", "r2", "r3", "r1"] and told[-1] == ["r2", "r3", "r1"]
    lone.add("r4", conversation(4, 20), 30)
    lone.step()
    assert told[-1] == ["r4", "r2", "r3", "r1"]
    lone.run()
    assert lone.order() == ["r0", "r4", "r2", "r3", "r1"]


def test_a_streaming_input_session_is_left_to_vllm(ours: Any) -> None:
    """It is none of the policy's requests: it was offered to nobody where none of those waited."""
    lone = ours("cached", num_blocks=50, max_num_seqs=2)
    lone.add("before", conversation(1, 100))
    lone.run()
    lone.add("streams", conversation(2, 100), resumable=True)
    lone.run()
    assert "streams" in lone.first_s
    lone.abort("streams")
    lone.run()
    lone.assert_nothing_is_left()


def test_blocks_of_a_session_that_left_are_evicted_first(ours: Any) -> None:
    """Those that nobody else has, and from the prompt's end on; what is shared or used stays where it was."""
    lone = ours("cached", num_blocks=150, max_num_seqs=2)
    head = conversation(1, 10 * BLOCK)
    prompts = {name: head + conversation(seed, 15 * BLOCK) for seed, name in enumerate("abc", 2)}
    for name, prompt in prompts.items():
        lone.add(name, prompt, 2, session_id=name)
        lone.run()
    scheduler, pool = lone.scheduler, lone.scheduler.kv_cache_manager.block_pool

    def there(name: str) -> int:
        hashes = list(lone._hasher(_prompt_of(prompts[name])))
        asked = SimpleNamespace(block_hashes=hashes, num_tokens=len(prompts[name]) + 1)
        return int(scheduler._device.find(asked))

    def leave(name: str) -> int:
        return int(scheduler._idle.leave(session_name("", name)))

    assert [there(name) for name in "abc"] == [25, 25, 25]
    assert leave("b") == 0  # there are empty ones
    pool.get_new_blocks(149 - 55 - 4)  # four are left
    assert leave("c") == 15
    pool.get_new_blocks(4)
    assert [there(name) for name in "abc"] == [25, 25, 25]
    pool.get_new_blocks(5)
    assert [there(name) for name in "abc"] == [25, 25, 20]
    pool.get_new_blocks(10)
    assert [there(name) for name in "abc"] == [25, 25, 10]
    pool.get_new_blocks(1)
    assert [there(name) for name in "abc"] == [24, 25, 10]
    assert leave("c") == leave("nobody") == 0


def _prompt_of(tokens: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request("asked", tokens, SamplingParams(max_tokens=1), None)


@pytest.mark.parametrize(
    ("said", "named"),
    [({"policy": "priority"}, "--scheduling-policy priority"), ({}, "HIRADIX_SCHEDULE_POLICY")],
)
def test_what_it_cannot_do_is_refused_by_name(ours: Any, said: dict[str, str], named: str) -> None:
    from hiradix.errors import ConfigError

    how = {"scheduling_policy": said["policy"]} if said else {}
    with pytest.raises(ConfigError, match=f"^{named}"):
        ours("cached" if said else "random", **how)

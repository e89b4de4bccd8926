"""HiRadixScheduler in a real vLLM: the order changes, the answers do not, and nobody is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.player import Player, assert_same, cached
from tests.vllm.test_host import conversation, shared_prefixes
from tests.vllm.test_storage import with_storage

Start = Callable[..., Player]
CLASS = "hiradix.adapters.vllm.HiRadixScheduler"
BLOCK = 32
ONE_AT_A_TIME = {"max_num_seqs": 1, "max_num_batched_tokens": 512}
SLOW_S = 10.0  # a page's computing: nobody is due within a test
NOTHING = {"waiting": 0, "followed": 0, "active": 0, "prefilling": 0, "priced": 0}


def ours(start: Start, connector: dict[str, Any] | None, policy: str = "cached", **engine: Any) -> Player:
    if connector is not None:
        connector = connector | {"schedule_policy": policy}
    return start(connector, env={"HIRADIX_SCHEDULE_POLICY": policy}, scheduler_cls=CLASS, **engine)


def assert_all_gone(player: Player) -> None:
    state = player.ask("admission")
    assert {name: state[name] for name in NOTHING} == NOTHING


@pytest.mark.parametrize("policy", ["cached", "lpm", "fcfs"])
def test_what_vllms_own_cache_has_goes_first(start: Start, plain: Player, policy: str) -> None:
    """Without a connector. fcfs is vLLM's own order."""
    known, cold = conversation(1, 700), [conversation(seed, 720) for seed in range(2, 6)]
    prompts = [*cold, [*known, *conversation(9, 20)]]
    player = ours(start, None, policy, enable_prefix_caching=True, **ONE_AT_A_TIME)
    player.ask("computes_in", page_s=SLOW_S)
    player.generate([known])
    done = player.ask("crowd", requests=[{"prompt": prompt} for prompt in prompts])
    assert done["order"] == ([0, 1, 2, 3, 4] if policy == "fcfs" else [4, 0, 1, 2, 3])
    answers = [done["answers"][str(number)] for number in range(len(prompts))]
    assert cached(answers) == 700 // BLOCK * BLOCK
    assert_same(plain.generate(prompts, max_tokens=4), answers)
    assert player.ask("admission")["policy"] == policy
    assert_all_gone(player)


def test_what_only_the_host_has_goes_first(start: Start, plain: Player) -> None:
    """vLLM's prefix cache is off: what the first prompt left is on the host alone."""
    known, cold = conversation(1, 700), [conversation(seed, 720) for seed in range(2, 6)]
    prompts = [*cold, [*known, *conversation(9, 20)]]
    player = ours(start, {"hicache_size": 0.1}, **ONE_AT_A_TIME)
    player.ask("computes_in", page_s=SLOW_S)
    player.generate([known])
    player.settle()
    done = player.ask("crowd", requests=[{"prompt": prompt} for prompt in prompts])
    assert done["order"] == [4, 0, 1, 2, 3]
    answers = [done["answers"][str(number)] for number in range(len(prompts))]
    assert cached(answers) == 700 // BLOCK * BLOCK
    assert_same(plain.generate(prompts, max_tokens=4), answers)
    player.settle()
    assert player.state()["idle"]
    assert_all_gone(player)


def test_two_hundred_requests_in_little_memory_with_aborts(start: Start, plain: Player) -> None:
    """Both sorts of blocks run short, requests are preempted and aborted: the rest is answered, and right."""
    prompts = shared_prefixes(120)
    expected = plain.generate(prompts, max_tokens=24)
    player = ours(
        start, {"hicache_size": 0.003}, enable_prefix_caching=True, num_gpu_blocks_override=40,
        max_num_seqs=16, max_num_batched_tokens=256, long_prefill_token_threshold=128, max_model_len=1024,
    )  # fmt: skip
    doomed = list(range(1, 120, 4))
    asked = [
        {"prompt": prompt, **({"session": f"s{at % 4}"} if at % 3 else {})}
        for at, prompt in enumerate(prompts)
    ]
    done = player.ask("crowd", requests=asked, max_tokens=24, doomed=doomed)
    kept = [number for number in range(120) if number not in doomed]
    assert sorted(set(map(int, done["answers"])) - set(doomed)) == kept
    assert_same([expected[at] for at in kept], [done["answers"][str(at)] for at in kept])
    player.settle()
    assert player.state()["idle"]
    assert_all_gone(player)


def test_what_storage_has_goes_before_what_nobody_has(start: Start, plain: Player, tmp_path: Path) -> None:
    """After a restart: the prompt that storage has came last."""
    known, cold = conversation(1, 700), [conversation(seed, 720) for seed in range(2, 6)]
    prompts = [*cold, [*known, *conversation(9, 20)]]
    extra = with_storage("file", file_storage_path=str(tmp_path / "pages"))
    before = start(extra, **ONE_AT_A_TIME)
    before.generate([known])
    before.settle()
    before.stop()
    player = ours(start, extra, **ONE_AT_A_TIME)
    player.ask("computes_in", page_s=SLOW_S)
    done = player.ask("crowd", requests=[{"prompt": prompt} for prompt in prompts])
    answers = [done["answers"][str(number)] for number in range(len(prompts))]
    assert done["order"].index(4) <= 1  # storage may have answered when the first had begun
    assert_same(plain.generate(prompts, max_tokens=4), answers)
    assert_all_gone(player)

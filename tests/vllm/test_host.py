"""Hits from the host in a real vLLM: every way to load, chunked prefill, preemption, aborts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.vllm.player import Player, assert_same, cached, judge

Start = Callable[..., Player]
VOCAB = 500


def conversation(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(num_tokens)]


def shared_prefixes(num: int, num_prefixes: int = 4, seed: int = 1) -> list[list[int]]:
    """Prompts that begin alike: lengths from 40 to 360 tokens."""
    rng = random.Random(seed)
    prefixes = [conversation(seed * 100 + i, 320) for i in range(num_prefixes)]
    return [
        prefixes[i % num_prefixes][: rng.randrange(40, 320)] + conversation(i, rng.randrange(2, 40))
        for i in range(num)
    ]


@pytest.mark.parametrize(
    ("mode", "block_size", "chunk"), [("sync", 32, 128), ("async", 64, 128), ("auto", 128, 2048)]
)
def test_second_round_comes_from_the_host(
    start: Start, plain: Player, mode: str, block_size: int, chunk: int
) -> None:
    prompts = [conversation(seed, 150 + 90 * seed) for seed in range(5)]
    expected = plain.generate(prompts)
    ours = start(
        {"hicache_size": 0.1, "load_mode": mode}, block_size=block_size, max_num_batched_tokens=chunk
    )
    first = ours.generate(prompts)
    ours.settle()
    second = ours.generate(prompts)
    assert cached(first) == 0
    want = sum((len(prompt) - 1) // block_size * block_size for prompt in prompts)
    assert cached(second) == want
    assert_same(expected, first)
    assert_same(expected, second)
    ours.settle()
    state = ours.state()
    assert state["idle"] and state["load_async"] == (mode == "async")
    ours.ask("corrupt")  # positive control: these checks do see a wrong page
    assert not judge(expected, ours.generate(prompts)).holds
    assert ours.ask("reset")
    assert_same(expected, ours.generate(prompts))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_hundred_requests_in_little_memory(start: Start, plain: Player, mode: str) -> None:
    """Shared prefixes, vLLM's own prefix cache too, so few blocks that some are preempted; then aborts."""
    prompts = shared_prefixes(200)
    expected = plain.generate(prompts, max_tokens=24)
    ours = start(
        {"hicache_size": 0.02, "load_mode": mode},
        num_gpu_blocks_override=40, max_model_len=1024, max_num_seqs=32,
        enable_prefix_caching=True, max_num_batched_tokens=256,
    )  # fmt: skip
    for _ in range(2):
        assert_same(expected, ours.generate(prompts, max_tokens=24))
    kept = ours.ask("storm", prompts=prompts, max_tokens=24, keep=4)
    assert len(kept) == len(prompts) // 4
    numbers = sorted(kept, key=int)
    assert_same([expected[int(n)] for n in numbers], [kept[n] for n in numbers])
    assert_same(expected[:8], ours.generate(prompts[:8], max_tokens=24))
    ours.settle()
    state = ours.state()
    assert state["preemptions"] > 0 and state["loaded_pages"] > 0
    assert state["waiting"] == 0


def test_write_back_saves_what_vllm_evicts(start: Start, plain: Player) -> None:
    """Nothing while vLLM's prefix cache has room; then what it evicts, before it is written over."""
    ours = start(
        {"hicache_size": 0.1, "hicache_write_policy": "write_back"},
        enable_prefix_caching=True, num_gpu_blocks_override=40, max_model_len=1024,
    )  # fmt: skip
    prompts = [conversation(80 + seed, 300) for seed in range(6)]
    expected = plain.generate(prompts)
    assert_same(expected[:3], ours.generate(prompts[:3]))
    assert ours.state()["saved_pages"] == 0
    for prompt, want in zip(prompts[3:], expected[3:], strict=True):
        assert_same([want], ours.generate([prompt]))
    state = ours.state()
    assert state["saved_pages"] >= 9 and state["fences"] > 0 and state["hit_tokens"] == 0
    ours.settle()
    for prompt, want in zip(prompts, expected, strict=True):
        (got,) = ours.generate([prompt])
        assert_same([want], [got])
        assert got["cached"] == 288
        ours.settle()
    assert ours.state()["loaded_pages"] > 0
    assert_same(expected, ours.generate(prompts))

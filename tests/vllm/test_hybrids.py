"""Recurrent layers beside attention in a real vLLM: a ladder of tiers, each with answers as without any.

Every prompt has a fact far back, in the part that is reused: prompts of a pair differ by that alone. What they
are compared with is vLLM with its own prefix cache and no connector, which computes prompts in the same steps:
the CPU kernel of gated delta layers takes bfloat16 alone, and other steps round otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.seeded_model import seeded_model
from tests.vllm.player import FIRST_LOGPROBS, Answers, Player, assert_same, cached, judge
from tests.vllm.test_host import conversation
from tests.vllm.test_storage import with_storage

Start = Callable[..., Player]
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
BLOCK = 128  # vLLM's least on CPUs that makes the blocks of all groups as large
NUM_NEEDLES = 38


@dataclass(frozen=True)
class Family:
    """A kind of hybrid. budget: tokens of a step.

    The CPU kernels of Mamba 2 leave no state behind inside of a step, so none of theirs goes over a block's end.
    """

    kind: str
    dtype: str
    budget: int
    fields: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "gated delta": Family(
        "Qwen3Next", "bfloat16", 1024,
        {
            "head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
            "full_attention_interval": 4,
        },
    ),
    "mamba 2": Family(
        "GraniteMoeHybrid", "float32", BLOCK,
        {
            "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1,
            "mamba_expand": 2, "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
        },
    ),
}  # fmt: skip


def needles() -> list[list[int]]:
    """Pairs of prompts that differ in half of the first block alone, and have two to four of them."""
    prompts = []
    for number in range(NUM_NEEDLES):
        tokens = conversation(number // 2, BLOCK * (2 + number // 2 % 3) + 7)
        tokens[: BLOCK // 2] = conversation(1000 + number, BLOCK // 2)
        prompts.append(tokens)
    return prompts


def one_by_one(player: Player, prompts: Sequence[Sequence[int]], max_tokens: int = 6) -> Answers:
    """Steps of one prompt each, so that they are the same wherever it begins."""
    return [player.generate([prompt], max_tokens)[0] for prompt in prompts]


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far the first token's log probabilities are from each other."""
    a, b = one["logprobs"][0], other["logprobs"][0]
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=math.inf)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ladder(start: Start, tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    path, folder = tmp_path / "model", tmp_path / "pages"
    model = seeded_model(family.kind, 3, **SIZES | family.fields)
    model.to(getattr(torch, family.dtype)).save_pretrained(path)
    engine = {
        "skip_tokenizer_init": True, "dtype": family.dtype, "enable_prefix_caching": True, "block_size": None,
        "max_num_batched_tokens": family.budget, "disable_hybrid_kv_cache_manager": False,
    }  # fmt: skip
    extra = with_storage("file", file_storage_path=str(folder)) | {"hicache_size": 0.2}
    plain, ours = start(None, path, **engine), start(extra, path, **engine)
    prompts = needles()
    pages = [(len(prompt) - 1) // BLOCK for prompt in prompts]
    whole = sum(pages) * BLOCK

    expected = one_by_one(plain, prompts)
    assert cached(expected) == 0
    pairs = zip(expected[::2], expected[1::2], strict=True)
    assert all(apart(*pair) > 30 * FIRST_LOGPROBS for pair in pairs), "answers know of the fact"
    assert_same(expected, one_by_one(plain, prompts))  # vLLM's own prefix cache

    def arm(player: Player, want: int | None = whole, some: slice = slice(None)) -> dict[str, Any]:
        """Prompts that are judged; what the figures have grown by. want: how much of them is cached."""
        player.settle()
        before, answers = player.state(), one_by_one(player, prompts[some])
        assert_same(expected[some], answers)
        assert want is None or cached(answers) == want
        after = player.state()
        assert after["load_failed"] == before["load_failed"]
        return {key: after[key] - before[key] for key in ("hit_tokens", "loaded_pages", "fetch_read")}

    from_host = {"hit_tokens": whole, "loaded_pages": sum(pages), "fetch_read": 0}
    from_storage = from_host | {"fetch_read": sum(pages)}
    assert arm(ours, 0)["hit_tokens"] == 0
    assert arm(ours)["hit_tokens"] == 0, "vLLM has it all itself"
    ours.ask("forget")
    assert arm(ours) == from_host
    ours.ask("forget", host=True)
    assert arm(ours) == from_storage
    ours.ask("forget", host=True)
    kept = ours.ask("storm", prompts=prompts * 2, max_tokens=6, keep=3)  # steps of many, aborts
    assert len(kept) == -(-2 * NUM_NEEDLES // 3)
    judge([expected[int(at) % NUM_NEEDLES] for at in kept], list(kept.values())).assert_holds()
    ours.ask("attach", name="naughty", keys={})
    ours.ask("forget", host=True)
    some = slice(0, 8)
    arm(ours, 0, some)
    for fault in ("lie", "raise"):
        ours.settle()
        ours.ask("fault", mode=fault)
        ours.ask("forget", host=True)
        arm(ours, 0, some)
    ours.stop()

    restarted = start(extra, path, **engine)
    assert arm(restarted) == from_storage
    for number, file in enumerate(sorted(states_in(folder))):
        if number % 4 == 0:
            file.unlink()
    restarted.ask("forget", host=True)
    some_left = arm(restarted, None)["hit_tokens"]
    assert 0 < some_left < whole, "a boundary that lacks one of its states is none"
    restarted.settle()
    restarted.ask("forget")
    restarted.ask("corrupt", components=[1, 2, 3])  # positive control: the checks do see a wrong state
    with pytest.raises(AssertionError):
        assert_same(expected, one_by_one(restarted, prompts))


def states_in(folder: Path) -> list[Path]:
    """The files of states in a store: those of attention are larger."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    largest = max(file.stat().st_size for file in files)
    found = [file for file in files if largest / 8 < file.stat().st_size < largest]
    assert found
    return found

"""What else a model can be: latent attention, adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lora import adapter
from tests.vllm.player import Player, assert_same, cached, judge
from tests.vllm.test_host import conversation
from tests.vllm.test_kinds import both, checkpoint

Start = Callable[..., Player]


def test_latent_attention(start: Start, tmp_path: Path) -> None:
    """A row per token that all heads share, in a host pool of its own shape; beside vLLM's ExampleConnector.

    One request at a time: vLLM's CPU kernel answers otherwise when prompts share a step, with no connector
    either. And after a hit its numbers differ a little, whoever loaded the pages: so both must hit.
    """
    path = checkpoint(
        tmp_path / "deepseek", "DeepseekV2", num_hidden_layers=2, num_key_value_heads=4, kv_lora_rank=512,
        q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, head_dim=64,
        first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        n_group=1, topk_group=1,
    )  # fmt: skip
    example = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }  # fmt: skip
    prompts = [conversation(seed, 200 + 70 * seed) for seed in range(3)]
    theirs, ours = (
        # the kernel for any processor: what those with AMX have takes no float32
        start(connector, path, skip_tokenizer_init=True, max_num_seqs=1, attention_backend="CPU_MLA")
        for connector in (example, {"hicache_size": 0.1})
    )
    for want in (0, sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)):  # the kernel's blocks
        expected, got = theirs.generate(prompts), ours.generate(prompts)
        assert cached(expected) == cached(got) == want
        assert_same(expected, got)
        ours.settle()


def test_adapters_and_salts_are_apart(start: Start, model: Path, tmp_path: Path) -> None:
    """The same prompts under two adapters and none: each hits only its own pages, and answers its own.

    Then under salts, which change no answer.
    """
    folders = [adapter(model, tmp_path / name, seed) for seed, name in enumerate("ab")]
    loras: list[dict[str, Any] | None] = [None] + [
        {"lora_name": folder.name, "lora_int_id": number, "lora_path": str(folder)}
        for number, folder in enumerate(folders, 1)
    ]
    prompts = [conversation(seed, 150 + 60 * seed) for seed in range(3)]
    plain, ours = both(start, model, {}, enable_lora=True, max_loras=2, max_lora_rank=8)
    expected = [plain.generate(prompts, lora=lora) for lora in loras]
    assert not judge(expected[0], expected[1]).holds and not judge(expected[1], expected[2]).holds
    for want in (0, sum((len(prompt) - 1) // 32 * 32 for prompt in prompts)):
        for lora, answers in zip(loras, expected, strict=True):
            got = ours.generate(prompts, lora=lora)
            assert cached(got) == want
            assert_same(answers, got)
        ours.settle()
    fresh, hits = [conversation(9, 200)], []
    for salt in (None, "a", "b", "a", None):
        hits.append(cached(ours.generate(fresh, salt=salt)))
        ours.settle()
    assert hits == [0, 0, 0, 192, 192]
    assert_same(plain.generate(fresh), ours.generate(fresh, salt="b"))

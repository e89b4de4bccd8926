"""Tiny seeded checkpoints of the families the engine runs, and the answers transformers itself gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.identity import Identity
from tests.seeded_model import seeded_model

VOCAB = 384
CONTEXT = 2048
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
_GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "pad_token_id": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_MAMBA2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral-window": ("Mistral", {"head_dim": 16, "sliding_window": 24}),
    "llama-plain": ("Llama", {"num_key_value_heads": 4}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "num_hidden_layers": 4,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "deepseek": (
        "DeepseekV3",
        {
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "bamba": ("Bamba", {**_MAMBA2, "attn_layer_indices": [1, 3]}),
    "granite": (
        "GraniteMoeHybrid",
        {
            **_MAMBA2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 4,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "num_hidden_layers": 4,
            "conv_L_cache": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
    ),
    "qwen3-next": ("Qwen3Next", {**_GATED_DELTA, "num_experts": 0}),
    "qwen3-next-moe": (
        "Qwen3Next",
        {
            **_GATED_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3.5": ("Qwen3_5", _GATED_DELTA),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
}


def write_checkpoint(
    family: str, folder: Path, change: Callable[[Any], None] | None = None,
    save: dict[str, Any] | None = None, *, seed: int = 7, **more: Any,
) -> None:  # fmt: skip
    """A seeded model of `family` in `folder`, in transformers' own format.

    more: fields of its config. change: made to its weights; save: how they are saved.
    """
    kind, fields = FAMILIES[family]
    model = seeded_model(kind, seed, **{**_SIZES, **fields, **more})
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith("A_log"):
                values.fill_(-4.0)  # a state that remembers: what it was is seen many tokens later
        if change is not None:
            change(model)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder, **(save or {}))


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with a chat template, trained on a few sentences of ours."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = "the radix tree keeps what the engine computed: pages, slots, tiers, and their order"
    inner.train_from_iterator([text] * 3, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    tokenizer.save_pretrained(folder)


@dataclass
class Reference:
    """transformers itself on one checkpoint."""

    path: Path
    model: Any

    @staticmethod
    def load(path: Path) -> Reference:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return Reference(path, model.eval())

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The greedy answer of transformers.generate."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
        return out[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logprobs_after(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log probabilities float32 [vocab] of the token after `tokens`."""
        return torch.log_softmax(self.model(torch.tensor([list(tokens)])).logits[0, -1], dim=-1)

    def judge(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Identity:
        """The answers to `prompts` held against transformers' own, by the identity rule."""
        identity = Identity()
        for prompt, answer in zip(prompts, answers, strict=True):
            identity.compare(prompt, self.answer(prompt, len(answer)), answer, self.logprobs_after)
        return identity


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]

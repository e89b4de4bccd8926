"""Tiny random models beside the Llama: windows, latent attention (MLA), gated delta networks, Mamba 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.tiny_model import CONTEXT_LENGTH, VOCAB_SIZE, write_tiny_tokenizer

WINDOW = 64
_COMMON = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.2,
    "max_position_embeddings": CONTEXT_LENGTH, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def write_window_model(folder: Path) -> Path:
    """Four layers, every other one with a window of 64 tokens: SGLang serves it from two pools."""
    from transformers import LagunaConfig, LagunaForCausalLM

    num_layers = 4
    config = LagunaConfig(
        **_COMMON, num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_attention_heads_per_layer=[4] * num_layers, mlp_layer_types=["dense"] * num_layers,
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * (num_layers // 2),
    )  # fmt: skip
    return _saved(LagunaForCausalLM, config, folder)


def write_latent_model(folder: Path) -> Path:
    """Two dense layers of multi-head latent attention, with the fields SGLang's CPU path asks for."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_COMMON, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None,
        kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, first_k_dense_replace=2,
        moe_intermediate_size=64, n_routed_experts=2, num_experts_per_tok=1, n_shared_experts=1,
    )  # fmt: skip
    _saved(DeepseekV2ForCausalLM, config, folder)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    yarn = {
        "type": "yarn", "rope_type": "yarn", "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": CONTEXT_LENGTH, "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    written |= {"rope_scaling": yarn, "rope_parameters": yarn | {"rope_theta": 10000.0}}
    path.write_text(json.dumps(written | {"rope_theta": 10000.0, "moe_layer_freq": 1}))
    return folder


def write_gated_delta_model(folder: Path) -> Path:
    """Four layers, every other one full attention, the rest with recurrent states that remember for long.

    One expert, as with several a router turns roundings into other answers: with four, up to 2 of 60 concurrent
    answers are other ones without any prefix cache, too. Without the expert that all share, whose gate is a
    kernel for GPUs alone.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    num_layers = 4
    config = Qwen3NextConfig(
        **_COMMON, num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8,
        num_experts=1, num_experts_per_tok=1, moe_intermediate_size=64, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"] * (num_layers // 2),
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config).to(torch.float32).eval()
    for name, values in model.named_parameters():
        if name.endswith("A_log"):
            values.data.fill_(-4.0)
    kept = {name: value for name, value in model.state_dict().items() if "shared_expert" not in name}
    model.save_pretrained(folder, state_dict=kept)
    path = folder / "config.json"
    changed = {"shared_expert_intermediate_size": 0, "full_attention_interval": 2, "rope_theta": 10000.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed | {"partial_rotary_factor": 0.25}))
    write_tiny_tokenizer(folder)
    return folder


def write_mamba2_model(folder: Path) -> Path:
    """Four layers of Granite 4, every other one full attention, the rest with states that remember for long."""
    import torch
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    num_layers = 4
    config = GraniteMoeHybridConfig(
        **_COMMON, num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, mamba_n_heads=8,
        mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2, num_local_experts=0,
        shared_intermediate_size=64, layer_types=["linear_attention", "full_attention"] * (num_layers // 2),
    )  # fmt: skip
    torch.manual_seed(0)
    model = GraniteMoeHybridForCausalLM(config).to(torch.float32).eval()
    for name, values in model.named_parameters():
        if name.endswith("A_log"):
            values.data.fill_(-4.0)
    model.save_pretrained(folder)
    path = folder / "config.json"
    changed = {"layer_types": ["mamba", "attention"] * (num_layers // 2), "rope_theta": 10000.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    write_tiny_tokenizer(folder)
    return folder


def _saved(model_class: Any, config: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    model_class(config).to(torch.float32).eval().save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder

"""A LoRA adapter for a model, as `peft` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 4


def adapter(model: Path, folder: Path, seed: int) -> Path:
    """A seeded adapter of a model's attention, strong enough to change what it says."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    config = json.loads((model / "config.json").read_text())
    width, kv = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in (("q_proj", width), ("k_proj", kv), ("v_proj", kv)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, width, generator=generator)
            weights[f"{at}.lora_B.weight"] = torch.randn(out, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    about: dict[str, Any] = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder

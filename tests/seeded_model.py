"""Models with random weights, the same for the same seed."""

from __future__ import annotations

from typing import Any


def seeded_model(kind: str, seed: int, **fields: Any) -> Any:
    """A float32 model of transformers' class `kind`, such as "Llama". fields: its config's."""
    import torch
    import transformers

    text = f"{kind}TextConfig"
    name = text if hasattr(transformers, text) else f"{kind}Config"
    config = getattr(transformers, name)(**fields)
    torch.manual_seed(seed)
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()

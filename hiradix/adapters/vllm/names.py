"""What vLLM takes names for, and models whose pages nobody can name."""

from __future__ import annotations

import os
from typing import Any

from hiradix.adapters.rope import DYNAMIC, LONG, unfixed
from hiradix.errors import ConfigError


def names_are_hub() -> bool:
    """Whether vLLM takes the names of models and adapters for Hugging Face's."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() not in ("1", "true")


def refuse_ropes(model: Any) -> None:
    """Raise ConfigError for a rope whose factors a batch decides, so that no prefix has KV of its own.

    model: vLLM's ModelConfig. Those of Transformers, for models that vLLM has no code for, do; vLLM's own
    have fixed ones.
    """
    is_foreign = getattr(model, "using_transformers_backend", None)
    if is_foreign is None or not is_foreign():
        return
    rope = unfixed(model.hf_text_config, model.max_model_len, (LONG, DYNAMIC))
    if rope is not None:
        raise ConfigError(
            f"--model-impl transformers: its rope {rope.kind} is chosen by the longest sequence of a batch; "
            f"--max-model-len {rope.trained} has all take the same"
        )

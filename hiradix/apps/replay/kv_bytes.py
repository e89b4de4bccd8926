"""How many bytes of KV a token has, by a model's `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hiradix.errors import ConfigError

MAX_BYTES = 16 << 20
_TYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# With these some layers keep a window or a state, and no bytes for each token.
_OTHER_LAYERS = (
    "layers_block_type", "hybrid_override_pattern", "attn_layer_period", "full_attention_interval",
    "linear_attn_config", "state_size", "ssm_cfg", "recurrent_block_types", "block_types",
)  # fmt: skip
_FULL = {"full_attention", "attention"}


def read_bytes_per_token(path: Path, element_bytes: int | None) -> int:
    """Of the model in a folder, or of its config.json. element_bytes: of a number in the cache; None: as the
    model's type. ConfigError names --model, the file and the field.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            config = json.loads(opened.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model {file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {file}: is no object")
    try:
        return bytes_per_token(config.get("text_config") or config, element_bytes)
    except (KeyError, TypeError, ValueError) as error:
        said = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"--model {file}: {said}; --bytes-per-token says it instead") from error


def bytes_per_token(config: Mapping[str, Any], element_bytes: int | None = None) -> int:
    """Of all layers together. KeyError or ValueError where the fields do not say it."""
    _refuse_other_layers(config)
    if element_bytes is None:
        name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if name not in _TYPE_BYTES:
            raise ValueError(f"dtype is {name:.64}, none of {', '.join(_TYPE_BYTES)}: --kv-element-bytes")
        element_bytes = _TYPE_BYTES[name]
    layers = _count(config, "num_hidden_layers")
    if config.get("kv_lora_rank"):  # one latent for all heads
        return layers * (_count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")) * element_bytes
    heads = _count(config, "num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads")
    size = (
        _count(config, "hidden_size") // heads if not config.get("head_dim") else _count(config, "head_dim")
    )
    return 2 * layers * kv_heads * size * element_bytes


def _refuse_other_layers(config: Mapping[str, Any]) -> None:
    kinds = config.get("layer_types") or ()
    if not set(kinds) <= _FULL:
        raise ValueError(f"layer_types has {', '.join(sorted(set(map(str, kinds)) - _FULL))}")
    for name in _OTHER_LAYERS:
        if config.get(name):
            raise ValueError(f"{name}: not all of its layers keep every token")
    if config.get("sliding_window") and config.get("use_sliding_window", True) and not kinds:
        raise ValueError("sliding_window: its layers do not keep every token")


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 24:
        raise ValueError(f"{name} is {str(value):.64}, no whole number above 0")
    return value

"""Computes the bytes that a model's cache takes, from its `config.json`: of each token, of a window, of a
state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiradix.errors import ConfigError

MAX_BYTES = 16 << 20
_TYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_FP32 = 4
_BITS = 8
FULL, WINDOW, STATE, NONE = "full", "window", "state", "none"
_LAYER_TYPES = {
    "full_attention": FULL, "attention": FULL, "sliding_attention": WINDOW, "chunked_attention": WINDOW,
    "linear_attention": STATE, "conv": STATE, "mamba": STATE, "mamba2": STATE, "mlp": NONE, "moe": NONE,
}  # fmt: skip
_PATTERN = {"*": FULL, "M": STATE, "-": NONE, "E": NONE}
_ALTERNATING = ("gemma2", "gpt_oss")  # a window, then all, and so on
# With these some layers keep a state, or are unlike the others, in ways that the fields here do not tell.
_OTHER_LAYERS = (
    "state_size", "ssm_cfg", "recurrent_block_types", "block_types", "cross_attention_layers",
    "num_kv_shared_layers", "global_head_dim",
)  # fmt: skip


@dataclass(frozen=True)
class KVBytes:
    """Bytes of all layers of a kind together.

    per_token: of layers that keep every token. per_window_token: of those that look back `window` tokens only,
    for each token that they keep. per_state: of a recurrent state, one for each prefix that has one; None where
    the config does not say it. layers: by kind. element: of a number in the cache.
    """

    per_token: int
    per_window_token: int
    window: int
    per_state: int | None
    layers: Mapping[str, int]
    element: int

    @property
    def most_per_token(self) -> int:
        """Bytes of a token if layers with a window keep every token, too: one pool for all layers."""
        return self.per_token + self.per_window_token

    def lines(self) -> Iterator[str]:
        """The sizes as lines of text for people."""
        yield f"{self.per_token} bytes per token, in {self.layers[FULL]} layers that keep every token"
        if self.layers[WINDOW]:
            yield (
                f"{self.per_window_token} bytes per token, in {self.layers[WINDOW]} layers that keep the last "
                f"{self.window}: {self.per_window_token * self.window} bytes of a prefix where they have a pool "
                f"of their own; in one pool for all layers a token has {self.most_per_token} bytes"
            )
        if self.layers[STATE]:
            told = self.per_state is not None
            size = f"of {self.per_state} bytes" if told else "of a size that the config does not tell"
            yield f"a state {size}, in {self.layers[STATE]} layers, for each prefix that is to be resumed"
        if self.most_per_token:
            yield f"a GiB holds {(1 << 30) // self.most_per_token} tokens ({self.element} bytes a number)"


def is_model(path: Path) -> bool:
    """Whether it is a folder with a model's config."""
    return path.is_dir() and (path / "config.json").is_file()


def read_kv_bytes(path: Path, element_bytes: int | None, flag: str = "--model ") -> KVBytes:
    """The cache sizes of the model in a folder, or with this config.json. element_bytes: of a number in the
    cache; None: as the config says. ConfigError names the flag, the file and the field."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            config = json.loads(opened.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}{file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{flag}{file}: is no object")
    try:
        return kv_bytes(_of_text(config), element_bytes)
    except (KeyError, TypeError, ValueError) as error:
        said = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{flag}{file}: {said}; --bytes-per-token says it instead") from error


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model of several kinds that keeps a cache, with what stands beside it."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    outer = {name: config[name] for name in ("dtype", "torch_dtype", "quantization_config") if name in config}
    return {**outer, **inner}


def kv_bytes(config: Mapping[str, Any], element_bytes: int | None = None) -> KVBytes:
    """KeyError or ValueError where the fields do not say it."""
    for name in _OTHER_LAYERS:
        if config.get(name):
            raise ValueError(f"{name}: what its layers keep is not told by the config")
    kinds = list(_kinds(config))
    layers = {kind: kinds.count(kind) for kind in (FULL, WINDOW, STATE)}
    element = element_bytes or _element_bytes(config)
    of_layer = _layer_bytes(config, element) if layers[FULL] or layers[WINDOW] else 0
    window = _count(config, _window_field(config)) if layers[WINDOW] else 0
    state = _state_bytes(config, layers[STATE], element) if layers[STATE] else 0
    return KVBytes(layers[FULL] * of_layer, layers[WINDOW] * of_layer, window, state, layers, element)


# -- what each layer keeps ----------------------------------------------------------------


def _kinds(config: Mapping[str, Any]) -> Iterator[str]:
    """The kind of each layer, from the first field that tells it."""
    num = _count(config, "num_hidden_layers")
    listed = config.get("layer_types") or config.get("layers_block_type")
    if listed:
        unknown = sorted({str(kind) for kind in listed} - set(_LAYER_TYPES))
        if unknown:
            raise ValueError(f"layer_types has {', '.join(unknown)}")
        yield from (_LAYER_TYPES[kind] for kind in listed)
    elif config.get("hybrid_override_pattern"):
        pattern = str(config["hybrid_override_pattern"])
        if set(pattern) - set(_PATTERN):
            raise ValueError("hybrid_override_pattern: expected M, *, - and E only")
        yield from (_PATTERN[kind] for kind in pattern)
    elif (attention := config.get("attn_layer_indices") or config.get("full_attn_idxs")) is not None:
        yield from (FULL if layer in attention else STATE for layer in range(num))
    elif config.get("linear_attn_config"):
        attention = config["linear_attn_config"].get("full_attn_layers") or ()
        yield from (FULL if layer in attention else STATE for layer in range(1, num + 1))
    elif config.get("full_attention_interval"):
        step = _count(config, "full_attention_interval")
        yield from (STATE if layer % step else FULL for layer in range(1, num + 1))
    elif config.get("attn_layer_period"):
        step, offset = _count(config, "attn_layer_period"), int(config.get("attn_layer_offset") or 0)
        yield from (STATE if (layer - offset) % step else FULL for layer in range(num))
    else:
        yield from _windowed(config, num)


def _windowed(config: Mapping[str, Any], num: int) -> Iterator[str]:
    """The kind of each layer of a model without a list of layers: all alike, or some with a window."""
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        yield from [FULL] * num
    elif config.get("sliding_window_pattern"):
        step = _count(config, "sliding_window_pattern")
        yield from (WINDOW if layer % step else FULL for layer in range(1, num + 1))
    elif config.get("model_type") in _ALTERNATING:
        yield from (FULL if layer % 2 else WINDOW for layer in range(num))
    else:
        first = config.get("max_window_layers") if "use_sliding_window" in config else 0
        yield from (WINDOW if layer >= (first or 0) else FULL for layer in range(num))


def _window_field(config: Mapping[str, Any]) -> str:
    return "sliding_window" if config.get("sliding_window") else "attention_chunk_size"


# -- bytes --------------------------------------------------------------------------------


def _element_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of a number in the cache: as the checkpoint asks for, else as its weights."""
    quantised = config.get("quantization_config") or {}
    scheme = quantised.get("kv_cache_scheme") or {}
    if scheme.get("num_bits"):
        return max(1, _count(scheme, "num_bits") // _BITS)
    if str(quantised.get("kv_cache_quant_algo") or "").upper().startswith("FP8"):
        return 1
    return _type_bytes(config)


def _type_bytes(config: Mapping[str, Any]) -> int:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in _TYPE_BYTES:
        raise ValueError(f"dtype is {name:.64}, none of {', '.join(_TYPE_BYTES)}: --kv-element-bytes")
    return _TYPE_BYTES[name]


def _layer_bytes(config: Mapping[str, Any], element: int) -> int:
    """Bytes of one token in one layer of attention."""
    if config.get("kv_lora_rank"):  # one latent for all heads
        latent = (_count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")) * element
        if not config.get("index_head_dim"):
            return latent
        index = _count(config, "index_head_dim")  # of a sparse attention: bytes, and a scale for each 128
        return latent + index + index // 128 * _FP32
    heads = _count(config, "num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads")
    if config.get("multi_query") and config.get("num_key_value_heads") is None:
        kv_heads = 1
    size = (
        _count(config, "hidden_size") // heads if not config.get("head_dim") else _count(config, "head_dim")
    )
    return 2 * kv_heads * size * element


def _state_bytes(config: Mapping[str, Any], num_layers: int, element: int) -> int | None:
    """Bytes of one recurrent state in all layers that keep one: a convolution's tail, and float32 numbers."""
    if "linear_num_key_heads" in config:  # a gated delta rule
        keys = _count(config, "linear_num_key_heads") * _count(config, "linear_key_head_dim")
        values = _count(config, "linear_num_value_heads") * _count(config, "linear_value_head_dim")
        tail = (2 * keys + values) * (_count(config, "linear_conv_kernel_dim") - 1)
        numbers = values * _count(config, "linear_key_head_dim")
    elif "mamba_n_heads" in config:  # Mamba 2
        inner = _count(config, "mamba_n_heads") * _count(config, "mamba_d_head")
        tail = inner + 2 * _count(config, "mamba_n_groups") * _count(config, "mamba_d_state")
        tail *= _count(config, "mamba_d_conv") - 1
        numbers = inner * _count(config, "mamba_d_state")
    elif "conv_L_cache" in config:  # short convolutions
        tail, numbers = _count(config, "hidden_size") * (_count(config, "conv_L_cache") - 1), 0
    else:
        return None
    try:
        tail_element = _type_bytes(config)
    except ValueError:
        tail_element = element
    return num_layers * (tail * tail_element + numbers * _FP32)


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 24:
        raise ValueError(f"{name} is {str(value):.64}, no whole number above 0")
    return value

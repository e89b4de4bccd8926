"""A transformers causal model from a local directory, run over paged KV through our attention function."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hiradix.apps.engine.attention import ATTENTION_NAME, paged_attention
from hiradix.apps.engine.packing import Pools, Work, pack
from hiradix.apps.engine.recurrent import FAMILIES, CurrentPass, replace_recurrent, states_of
from hiradix.apps.engine.rope import FixedRope, fix_ropes, fixed_ropes
from hiradix.apps.engine.tensor_parallel import check_divisible, cut
from hiradix.errors import ConfigError
from hiradix.memory import KVShape, MLAShape
from hiradix.transfer.process_group import ProcessGroup

MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "ministral",
    "gemma3_text",
    "deepseek_v2",
    "deepseek_v3",
    *FAMILIES,
)
_FULL, _WINDOW = "full_attention", "sliding_attention"


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks are the paged attention's own business."""


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    import transformers

    logging: Any = transformers.utils.logging
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def load_config(path: str) -> Any:
    """The transformers config of a local model directory; ConfigError when it is not one we can run."""
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model path {path!r}: no config.json there; a local model directory is needed")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(f"model path {path!r}: unreadable config.json: {error}") from error
    if config.model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ConfigError(f"model path {path!r}: model type {config.model_type!r} is not one of {known}")
    if (reason := _refusal(config)) is not None:
        raise ConfigError(f"model path {path!r}: {reason}")
    return config


def _refusal(config: Any) -> str | None:
    """The reason why a model of a known type is not served, None if it is.

    Most of it makes KV depend on more than the tokens before: on those behind, on pictures, or on what else a
    pass computes.
    """
    if getattr(config, "attn_logit_softcapping", None):
        return "attn_logit_softcapping is not supported"
    for option in ("use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention"):
        if getattr(config, option, None):
            return f"{option} is not supported: what a token sees is not only what is before it"
    if getattr(config, "is_causal", True) is False:
        return "is_causal=False is not supported: what a token sees is not only what is before it"
    for part in ("text_config", "vision_config", "audio_config"):
        if getattr(config, part, None):
            return f"{part}: models of more than text are not supported"
    if getattr(config, "quantization_config", None):
        return "quantization_config is not supported: such kernels may choose their scales by the whole pass"
    family, kinds = FAMILIES.get(config.model_type), getattr(config, "layer_types", None) or ()
    known = {_FULL, _WINDOW} if family is None else {_FULL, family.kind}
    if unknown := sorted(set(kinds) - known):
        return f"layer_types: {unknown} are not among {sorted(known)}"
    return None


def kv_shape(config: Any, dtype: torch.dtype, tp_size: int = 1) -> KVShape | MLAShape:
    """Shape of what the model keeps per token, in all layers, on one of `tp_size` ranks."""
    if getattr(config, "kv_lora_rank", None):
        return MLAShape(config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim, dtype)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads // tp_size,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=dtype,
    )


@dataclass(frozen=True)
class Windows:
    """The layers of a model that see all of a sequence, and those that see only its last `size` tokens."""

    size: int
    full_layers: tuple[int, ...]
    other_layers: tuple[int, ...]


def windows_of(config: Any) -> Windows | None:
    """The windows of a model that mixes both kinds of layers, None for any other."""
    kinds, size = list(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if size is None or set(kinds) != {_FULL, _WINDOW}:
        return None
    places = {kind: tuple(layer for layer, own in enumerate(kinds) if own == kind) for kind in set(kinds)}
    return Windows(size, places[_FULL], places[_WINDOW])


def stop_token_ids(config: Any, path: str) -> frozenset[int]:
    """End-of-sequence ids of the model config and of generation_config.json, where there is one."""
    found: set[int] = set()
    sources = [config.eos_token_id]
    generation = Path(path) / "generation_config.json"
    if generation.is_file():
        sources.append(json.loads(generation.read_text()).get("eos_token_id"))
    for source in sources:
        found.update([source] if isinstance(source, int) else source or ())
    return frozenset(found)


def _context_length(config: Any, asked: int | None) -> int:
    known: int = config.max_position_embeddings
    if asked is not None and asked > known:
        raise ConfigError(f"context_length={asked}: the model's is {known}")
    return asked or known


def _ropes_of(path: str, config: Any, context_length: int) -> dict[str | None, FixedRope]:
    try:
        return fixed_ropes(config, context_length)
    except ConfigError as error:
        raise ConfigError(f"model path {path!r}: {error}") from error


class PagedModel:
    """A causal language model whose KV lives in a device pool's pages.

    `shape` is that of a pool for all layers, `windows` says which layers look back a window only, so that
    they may have a pool of their own, `states` which keep a recurrent state, so that they must;
    `context_length` the most tokens a sequence may have: as asked, or what the model was made for. It decides
    the rotary factors of models that have several; `fixed_rope` says which these are, by kind of layer.
    With a group, both weights and shape are this rank's share. Used by one thread.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        device: str,
        group: ProcessGroup | None = None,
        context_length: int | None = None,
    ) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
        config = load_config(path)
        self.context_length = _context_length(config, context_length)
        ropes = _ropes_of(path, config, self.context_length)
        if group is not None:
            check_divisible(config, group.size)
        load: Any = AutoModelForCausalLM.from_pretrained
        try:
            with _no_progress_bars():
                self._model = load(
                    path,
                    config=config,
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    attn_implementation=ATTENTION_NAME,
                ).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"model path {path!r}: cannot load the weights: {error}") from error
        fix_ropes(self._model, ropes)
        self.fixed_rope = {kind or "": rope.about for kind, rope in ropes.items()}
        if group is not None:
            cut(self._model, config, group)
        self._model.to(device)
        self.config = config
        self.device = torch.device(device)
        tp_size = 1 if group is None else group.size
        self.shape = kv_shape(config, dtype, tp_size)
        self.windows = windows_of(config)
        self.states = states_of(config, dtype, tp_size)
        self._current_pass = CurrentPass()
        if self.states is not None:
            replace_recurrent(self._model, config, self._current_pass)
        self._no_mask = torch.zeros(1, 1, 1, 1, device=device)
        self.vocab_size: int = config.vocab_size
        self.stop_token_ids = stop_token_ids(config, path)

    @torch.inference_mode()
    def forward(self, work: Sequence[Work], pools: Pools) -> torch.Tensor:
        """Logits float32 [rows, vocab] after each sequence's last token, or last `num_logits` of them; writes
        the new tokens' K and V. The states behind them are written by `commit`.

        Waits per layer on the pool's load-back gate; LoadFailed and the like pass through, and the pass has
        then written only slots of its own new tokens, or behind them in a page begun.
        """
        packed = pack(work, pools, self.device)
        latent: dict[str, Any] = {"attention_mask": None}
        if isinstance(self.shape, MLAShape):  # a mask of four dimensions is taken as it is, and not made
            latent = {"attention_mask": self._no_mask, "past_key_values": packed.paged}
        self._current_pass.states = packed.states
        out = self._model(
            input_ids=packed.token_ids[None],
            position_ids=packed.positions[None],
            **latent,
            use_cache=False,
            logits_to_keep=packed.logit_rows,
            paged=packed.paged,
        )
        logits: torch.Tensor = out.logits[0].float()
        return logits

    def commit(self) -> None:
        """The last pass counts: write the states that it has left. Without this call it may be run again."""
        if self._current_pass.states is not None:
            self._current_pass.states.commit()

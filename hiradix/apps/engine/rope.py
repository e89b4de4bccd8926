"""Rotary factors that are the same in every pass, so that what is before a token alone decides its KV.

transformers chooses the factors of some kinds of rope anew in each forward pass, by the last position in it
(`dynamic_rope_update`). A prefix that was computed in a short pass then has other KV than in a long one, and
requests of one pass change each other's. Here they are chosen once, by the context length that the engine was
started with: the factors of a sequence that long serve all. Which they are belongs to the model's identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hiradix.errors import ConfigError, Misuse

OF_POSITIONS = ("default", "linear", "yarn", "llama3", "proportional")
"""Kinds of rope whose factors the config alone decides."""
OF_LENGTHS = ("longrope", "dynamic")
"""Kinds that transformers decides by the longest sequence of a pass."""


@dataclass(frozen=True)
class FixedRope:
    """The factors of one kind of layer for all passes. about: what they are, for the model's identity."""

    frequencies: torch.Tensor
    scaling: float
    about: str


def fixed_ropes(config: Any, context_length: int) -> dict[str | None, FixedRope]:
    """The ropes that depend on lengths, by kind of layer (None: all), fixed for sequences of
    `context_length`.

    Raises ConfigError naming the key for factors that cannot be computed, and for kinds of rope of which
    nothing is known.
    """
    found: dict[str | None, FixedRope] = {}
    for kind, rope in _ropes(config).items():
        name = "rope_parameters" if kind is None else f"rope_parameters.{kind}"
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type in OF_POSITIONS:
            continue
        if rope_type not in OF_LENGTHS:
            known = ", ".join((*OF_POSITIONS, *OF_LENGTHS))
            raise ConfigError(f"{name}: rope_type {rope_type!r} is not one of {known}")
        found[kind] = _fixed(config, context_length, kind, rope, name)
    return found


def _ropes(config: Any) -> dict[str | None, Mapping[str, Any]]:
    """The config's rope parameters by kind of layer, as they are or in one piece for all."""
    whole = getattr(config, "rope_parameters", None) or {}
    nested = {kind: own for kind, own in whole.items() if isinstance(own, Mapping)}
    if not nested:
        return {None: whole} if whole else {}
    return {kind: own for kind, own in nested.items() if own}


def _fixed(
    config: Any, context_length: int, kind: str | None, rope: Mapping[str, Any], name: str
) -> FixedRope:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = rope["rope_type"]
    if rope_type == "longrope":
        original = rope.get("original_max_position_embeddings")
        if not isinstance(original, int) or original < 1:
            raise ConfigError(f"{name}: original_max_position_embeddings {original!r} is no length")
        about = "longrope, long factors" if context_length > original else "longrope, short factors"
    else:
        about = f"dynamic, {max(context_length, config.max_position_embeddings)} tokens"
    try:
        compute: Any = ROPE_INIT_FUNCTIONS[rope_type]
        frequencies, scaling = compute(config, torch.device("cpu"), seq_len=context_length, layer_type=kind)
    except (KeyError, TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise ConfigError(f"{name}: the factors of {rope_type} cannot be computed: {error}") from error
    if not bool(torch.isfinite(frequencies).all()):
        raise ConfigError(f"{name}: the factors of {rope_type} are no numbers")
    return FixedRope(frequencies, float(scaling), about)


def fix_ropes(model: torch.nn.Module, ropes: Mapping[str | None, FixedRope]) -> None:
    """Have `model` use these factors in every pass. transformers looks at a module's rope type in each."""
    for module in model.modules():
        held = getattr(module, "rope_type", None)
        if isinstance(held, str):
            kinds: dict[str | None, str] = {None: held}
        elif isinstance(held, dict):
            kinds = dict(held)
        else:
            continue
        for kind, rope_type in kinds.items():
            if rope_type in OF_POSITIONS:
                continue
            if kind not in ropes:
                raise Misuse(f"a rope of type {rope_type!r} for {kind or 'all layers'} got past loading")
            _set(module, kind, ropes[kind])


def _set(module: Any, kind: str | None, rope: FixedRope) -> None:
    prefix = "" if kind is None else f"{kind}_"
    old = getattr(module, f"{prefix}inv_freq")
    if old.shape != rope.frequencies.shape:
        raise ConfigError(
            f"rope_parameters: {rope.frequencies.numel()} factors where the model has {old.numel()}"
        )
    setattr(module, f"{prefix}inv_freq", rope.frequencies.to(old.device))
    setattr(module, f"{prefix}attention_scaling", rope.scaling)
    if kind is None:
        module.rope_type = "default"
    else:
        module.rope_type = {**module.rope_type, kind: "default"}

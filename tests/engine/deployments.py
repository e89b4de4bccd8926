"""Deployments of small models, and what storage sees of them: what they say, and what they do."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from hiradix.apps.engine import Engine, EngineConfig
from hiradix.apps.engine.smollm2 import find_gguf
from hiradix.config import parse_extra_config
from hiradix.prefix_cache import ModelIdentity, model_identity, run_with
from hiradix.storage import PageFingerprint
from tests.engine.checkpoints import write_checkpoint
from tests.engine.configs import with_storage
from tests.engine.conftest import recorded_openings

Change = Callable[[Any], None]
Patch = Callable[[pytest.MonkeyPatch], None]
TOKENS, LAYERS = 1024, 4
NEUTRAL = ModelIdentity("model")


def nothing(_: Any) -> None: ...


@dataclass(frozen=True)
class Deployment:
    """One server of a model, as a step from `family`'s seeded checkpoint, or from `smollm2`.

    made: fields a seeded model is built with. change: made to its weights. save: how they are saved. config:
    fields written over in config.json. files: done to the folder at last. engine, cache: of the
    configuration; extra: of the storage's. patch: made to the code that runs it.
    """

    family: str = "smollm2"
    made: dict[str, Any] = field(default_factory=dict)
    change: Change = nothing
    save: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    files: Callable[[Path], None] = nothing
    engine: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    patch: Patch = nothing

    @property
    def has_plain_weights(self) -> bool:
        return self.change is nothing and not self.made and not self.save

    def write(self, folder: Path, plain: Path | None = None) -> None:
        """Its checkpoint; plain: one of the family, whose weights are linked where they are the same."""
        if plain is not None and self.has_plain_weights:
            folder.mkdir()
            for file in plain.iterdir():
                (folder / file.name).hardlink_to(file)
        elif self.family == "smollm2":
            model = copy.deepcopy(smollm2())
            with torch.no_grad():
                self.change(model)
            model.save_pretrained(folder, **self.save)
        else:
            write_checkpoint(self.family, folder, self.change, self.save, **self.made)
        self._write_config(folder / "config.json")
        self.files(folder)

    def _write_config(self, path: Path) -> None:
        fields = json.loads(path.read_text())
        for name, value in self.config.items():
            is_merged = isinstance(value, dict) and isinstance(fields.get(name), dict)
            fields[name] = {**fields[name], **value} if is_merged else value
        path.unlink()
        path.write_text(json.dumps(fields))


class _Weights(gguf.GGUFReader):
    """Passes over the metadata's lists, which are the tokenizer's and take seconds to read."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if gguf.GGUFValueType(raw_type) is not gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data, at = memoryview(self.data), orig_offs + 12
        kind = gguf.GGUFValueType(int.from_bytes(data[orig_offs : orig_offs + 4], "little"))
        count = int.from_bytes(data[orig_offs + 4 : at], "little")
        if kind is not gguf.GGUFValueType.STRING:
            at += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        else:
            for _ in range(count):
                at += 8 + int.from_bytes(data[at : at + 8], "little")
        return at - orig_offs, [], [], []


@functools.cache
def smollm2() -> Any:
    """The first layers and tokens of SmolLM2-135M, read from its package: trained weights, float32."""
    tensors = {tensor.name: tensor for tensor in _Weights(find_gguf()).tensors}
    fields: dict[str, Any] = {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "vocab_size": TOKENS,
        "num_hidden_layers": LAYERS, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    build: Any = transformers.LlamaForCausalLM
    with torch.device("meta"):
        model = build(transformers.LlamaConfig(**fields))
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()

    def values(name: str, heads: int = 0) -> torch.Tensor:
        data = tensors[name].data
        found = gguf.quants.dequantize(data[:TOKENS] if "embd" in name else data, tensors[name].tensor_type)
        if heads:  # its pairs of rotated numbers are neighbours
            found = found.reshape(heads, -1, 2, found.shape[1]).swapaxes(1, 2).reshape(found.shape)
        return torch.from_numpy(np.array(found, dtype=np.float32))

    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(values("token_embd.weight"))
        model.model.norm.weight.copy_(values("output_norm.weight"))
        for number, layer in enumerate(model.model.layers):
            for name, module, heads in (
                ("attn_q", layer.self_attn.q_proj, 9), ("attn_k", layer.self_attn.k_proj, 3),
                ("attn_v", layer.self_attn.v_proj, 0), ("attn_output", layer.self_attn.o_proj, 0),
                ("ffn_gate", layer.mlp.gate_proj, 0), ("ffn_up", layer.mlp.up_proj, 0),
                ("ffn_down", layer.mlp.down_proj, 0), ("attn_norm", layer.input_layernorm, 0),
                ("ffn_norm", layer.post_attention_layernorm, 0),
            ):  # fmt: skip
                module.weight.copy_(values(f"blk.{number}.{name}.weight", heads))
    return model


@dataclass(frozen=True)
class Seen:
    """What storage saw of a deployment. identity: the model's, as claimed; pages: of its stores, under a name
    that all have; label: an operator's. figures: what the canary found in a store that another deployment has
    used before; canary: its first page."""

    identity: ModelIdentity
    pages: tuple[PageFingerprint, ...]
    label: str | None
    figures: dict[str, float]
    canary: bytes | None


def see(deployment: Deployment, folder: Path, store: Path, name: str = "model") -> Seen:
    """Start it, its checkpoint in `folder`, on `store`, and stop it."""
    claimed: list[ModelIdentity] = []

    def claim(path: str, name: str) -> ModelIdentity:
        claimed.append(model_identity(path, name))
        return NEUTRAL

    def claim_with(model: ModelIdentity, options: Any) -> ModelIdentity:
        claimed.append(run_with(claimed[-1], options))
        return model

    cache = with_storage(store, "file", **deployment.cache)
    keys = {**cache.hicache_storage_backend_extra_config.backend, "prefetch_threshold": 8, **deployment.extra}
    cache = replace(cache, hicache_storage_backend_extra_config=parse_extra_config(json.dumps(keys)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hiradix.apps.engine.engine.model_identity", claim)
        patch.setattr("hiradix.apps.engine.engine.run_with", claim_with)
        opened = recorded_openings(patch)
        deployment.patch(patch)
        fields = {"model_name": name, "dtype": "bfloat16", "max_total_tokens": 256, **deployment.engine}
        engine = Engine(EngineConfig(str(folder), cache=cache, **fields))
        try:
            figures = dict(engine.cache.stats().storage)
        finally:
            engine.close()
    witness = opened.trusts[-1].witness
    canary = None if witness is None else witness.pages[0][0]
    return Seen(claimed[-1], opened.fingerprints[-1], cache.hicache_storage_identity, figures, canary)

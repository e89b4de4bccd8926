"""Whose pages vLLM's are, by its own records: configs of models whose ropes lengths decide, adapters."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Phi3Config
from vllm.config import CacheConfig, LoadConfig, ModelConfig
from vllm.lora.request import LoRARequest

from hiradix.adapters.vllm.names import refuse_ropes
from hiradix.adapters.vllm.requests import AdapterChanged, _adapter
from hiradix.adapters.vllm.worker_factory import identity_of
from hiradix.errors import ConfigError
from hiradix.prefix_cache import ModelIdentity
from hiradix.tree import TokenLog

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2,
    "vocab_size": 64, "intermediate_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip


def written(folder: Path, config: Any) -> str:
    config.save_pretrained(folder)
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    return str(folder)


def phi3(folder: Path) -> str:
    """A model whose short factors are for 64 tokens."""
    config = Phi3Config(
        **SIZES, max_position_embeddings=256, original_max_position_embeddings=64,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
        architectures=["Phi3ForCausalLM"],
    )  # fmt: skip
    return written(folder, config)


def made(path: str, **given: Any) -> ModelConfig:
    return ModelConfig(model=path, skip_tokenizer_init=True, dtype="float32", **given)


def named(model: ModelConfig) -> ModelIdentity:
    config = SimpleNamespace(model_config=model, cache_config=CacheConfig(), load_config=LoadConfig())
    return identity_of(config, "m", "torch.float32")


def test_the_length_that_decides_a_longropes_factors_tells_models_apart(tmp_path: Path) -> None:
    path = phi3(tmp_path / "phi3")
    short, also, longer = (named(made(path, max_model_len=length)) for length in (32, 64, 65))
    assert short == also != longer
    plain = written(tmp_path / "llama", LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]))
    first = named(made(plain, max_model_len=32))
    assert first == named(made(plain, max_model_len=2048))
    half = made(
        plain, max_model_len=32, hf_overrides={"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}
    )
    assert named(half) != first


@pytest.mark.parametrize(("length", "is_refused"), [(64, False), (65, True)])
def test_transformers_own_longrope_is_refused_where_a_batch_decides(
    tmp_path: Path, length: int, is_refused: bool
) -> None:
    model = made(phi3(tmp_path), max_model_len=length, model_impl="transformers")
    assert model.using_transformers_backend()
    if is_refused:
        with pytest.raises(ConfigError, match="--model-impl transformers.*--max-model-len 64 "):
            refuse_ropes(model)
    else:
        refuse_ropes(model)
    refuse_ropes(made(str(tmp_path), max_model_len=length))


def test_an_adapter_is_its_weights_as_vllm_has_loaded_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = tmp_path / "hub" / "models--org--sql"
    for folder in (tmp_path / "lora", hub / "snapshots" / "c1", hub / "snapshots" / "c2", hub / "refs"):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 8}')
        (folder / "adapter_model.safetensors").write_bytes(b"w")
    (hub / "refs" / "main").write_text("c1")

    def name(path: str, number: int, **how: Any) -> str:
        found = _adapter(LoRARequest("sql", number, path, **how))
        assert found is not None
        return found

    paths = ("~/lora", "lora", str(tmp_path / "lora"), os.path.join("~", "lora", ""))
    first = {name(path, 1) for path in paths}
    assert len(first) == 1
    of_hub = name("org/sql", 1)
    (tmp_path / "lora" / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    (hub / "refs" / "main").write_text("c2")
    for path in (*paths, "org/sql"):
        with pytest.raises(AdapterChanged):
            name(path, 1)
    second = {name(path, 2) for path in paths}
    assert len(second) == 1 and not second & first and name("org/sql", 2) != of_hub
    in_place = name("org/sql", 3, load_inplace=True)
    (hub / "refs" / "main").write_text("c1")
    assert name("org/sql", 3, load_inplace=True) != in_place
    assert name("org/none", 1) == name("org/none", 1) != name("org/none", 2)


def test_no_salt_is_an_adapters_namespace(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"w")
    adapter = _adapter(LoRARequest("sql", 1, str(tmp_path)))
    tokens = list(range(16))
    logs = [TokenLog(tokens, adapter), TokenLog(tokens, None, cache_salt=adapter), TokenLog(tokens)]
    assert len({log.key(16).space.seed for log in logs}) == 3

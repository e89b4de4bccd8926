"""Whose pages SGLang's are, by its flags and records, and which ropes have pages of nobody."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hiradix.adapters.sglang import cache_factory
from hiradix.adapters.sglang.weights import UNSEEN, Weights
from hiradix.errors import ConfigError
from hiradix.prefix_cache import ModelIdentity


def named(
    path: str,
    weights: Weights = UNSEEN,
    config: Any = None,
    kept_as: torch.dtype = torch.bfloat16,
    **flags: Any,
) -> ModelIdentity:
    pool = SimpleNamespace(dtype=kept_as, start_layer=0, end_layer=3)
    params = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), attn_tp_cache_group=None,
        tp_cache_group=None, pp_rank=0, pp_size=1,
    )  # fmt: skip
    given = {"served_model_name": "assistant", "model_path": path, "json_model_override_args": "{}"} | flags
    context = SimpleNamespace(params=params, model_config=config)
    return cache_factory._identity(context, SimpleNamespace(**given), weights)


def model(value: float) -> Weights:
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(value)
        layer.bias.fill_(0.0)
    return Weights(layer)


def test_behind_one_served_name_paths_tell_models_apart() -> None:
    paths = ("org/v1", "org/v2", "s3://b/v1", "s3://b/v2", "gs://b/v1", "/no/such/folder")
    assert len({named(path) for path in paths}) == len(paths)
    assert named(paths[0], revision="v1") != named(paths[0]) == named(paths[0], revision="main")


def test_weights_that_are_in_no_file_here_are_known_as_they_are_in_memory(tmp_path: Path) -> None:
    """Other weights behind the same path, as after an upload."""
    (tmp_path / "config.json").write_text("{}")
    for path, flags in (
        ("s3://b/v1", {}),
        (str(tmp_path), {}),
        ("org/v1", {"load_format": "remote_instance"}),
    ):
        one, other = (named(path, model(value), **flags) for value in (1.0, 2.0))
        assert one == named(path, model(1.0), **flags) != other
    (tmp_path / "model.safetensors").write_bytes(b"w")
    assert named(str(tmp_path), model(1.0)) == named(str(tmp_path), model(2.0)), "its files say it"
    for kind in ("remote_instance", "rdma", "private"):
        assert named(str(tmp_path), model(1.0), load_format=kind) != named(
            str(tmp_path), model(2.0), load_format=kind
        )


def test_how_weights_are_run_tells_them_apart(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"w")
    file = tmp_path / "given.json"
    file.write_text("{}")
    half, whole = (SimpleNamespace(dtype=dtype) for dtype in (torch.float16, torch.bfloat16))
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 8}
    texts = [
        SimpleNamespace(hf_text_config=SimpleNamespace(rope_parameters=rope, max_position_embeddings=longest))
        for longest in (8, 16)
    ]
    rows: list[dict[str, Any]] = [
        {}, {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_theta": 1}'}, {"load_format": "dummy"},
        {"load_format": "pt"}, {"torchao_config": "int8wo"}, {"quantization_param_path": str(file)},
        {"decrypted_config_file": str(file)}, {"kept_as": torch.float16},
        {"kept_as": torch.float8_e4m3fn, "config": half}, {"kept_as": torch.float8_e4m3fn, "config": whole},
        *({"config": text} for text in texts),
    ]  # fmt: skip
    assert len({named(str(tmp_path), **row) for row in rows}) == len(rows)
    same: list[dict[str, Any]] = [{"load_format": "auto"}, {"load_format": "safetensors"}, {"config": whole}]
    assert {named(str(tmp_path), **row) for row in same} == {named(str(tmp_path))}


def in_context(rope: dict[str, Any], length: int, own: Any = None) -> Any:
    text = SimpleNamespace(rope_parameters=rope, max_position_embeddings=4096)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, context_len=length),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=own)),
    )


class TransformersForCausalLM:
    """A model that SGLang has no code for."""


def test_ropes_that_batches_decide_are_refused() -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 1024}
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    foreign = TransformersForCausalLM()
    refused = [(longrope, 1025, None), (longrope, 4096, foreign), (dynamic, 4097, foreign)]
    for rope, length, own in refused:
        with pytest.raises(ConfigError, match=rf"{rope['rope_type']} with --context-length {length}"):
            cache_factory._refuse_ropes(in_context(rope, length, own))
    fixed = [
        (longrope, 1024, None),
        (dynamic, 8192, None),
        (dynamic, 4096, foreign),
        ({"rope_type": "yarn"}, 9999, None),
    ]
    for rope, length, own in fixed:
        cache_factory._refuse_ropes(in_context(rope, length, own))

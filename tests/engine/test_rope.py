"""KV is a function of the prefix alone: ropes that go by lengths are fixed, what else would be is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hiradix.apps.engine import Engine, EngineConfig
from hiradix.apps.engine.rope import OF_LENGTHS, OF_POSITIONS
from hiradix.errors import ConfigError
from hiradix.prefix_cache import build_prefix_cache
from tests.engine.checkpoints import Reference, prompts, write_checkpoint
from tests.engine.configs import CONFIGS, with_storage
from tests.engine.conftest import MakeEngine, Openings
from tests.engine.driving import serve, tokens
from tests.engine.test_tiers import GREEDY

ORIGINAL = 64
MakeModel = Callable[..., Path]


def rope(kind: str, num_pairs: int = 8) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "longrope": {
            "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "short_factor": [1.0] * num_pairs,
            "long_factor": [4.0] * num_pairs,
        },
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        "linear": {"factor": 4.0},
        "llama3": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        "proportional": {"partial_rotary_factor": 0.5},
    }  # fmt: skip
    return {"rope_type": kind, "rope_theta": 10000.0, **own[kind]}


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    def make(family: str = "llama", **fields: Any) -> Path:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        write_checkpoint(family, folder, **fields)
        return folder

    return make


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama {kind}": ("llama", {"rope_parameters": rope(kind)}) for kind in ROPE_INIT_FUNCTIONS},
    "qwen3 longrope": ("qwen3", {"rope_parameters": rope("longrope", 16)}),
    "windows longrope": ("mistral-window", {"rope_parameters": rope("longrope")}),
    "latents longrope": ("deepseek", {"rope_parameters": rope("longrope", 4)}),
    "states longrope": ("lfm2", {"rope_parameters": rope("longrope")}),
    "part of the head longrope": (
        "qwen3-next", {"rope_parameters": {**rope("longrope", 2), "partial_rotary_factor": 0.25}},
    ),
    "per kind of layer, longrope in one": (
        "gemma3",
        {"rope_parameters": {
            "full_attention": rope("longrope"),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }},
    ),
    "per kind of layer, two kinds": (
        "gemma3",
        {"rope_parameters": {"full_attention": rope("dynamic"), "sliding_attention": rope("longrope")}},
    ),
}  # fmt: skip


def test_every_kind_of_rope_is_known() -> None:
    assert set(ROPE_INIT_FUNCTIONS) | {"default"} == {*OF_POSITIONS, *OF_LENGTHS}


@pytest.mark.parametrize("name", CASES)
def test_answers_do_not_depend_on_the_cache_or_on_what_runs_beside(
    name: str, make_model: MakeModel, make_engine: MakeEngine
) -> None:
    """A conversation that grows past the length that decides, over each kind of cache, and a short prompt
    beside a long one."""
    family, fields = CASES[name]
    path = str(make_model(family, **fields))
    [long, other] = prompts([100, 90], seed=3)
    short = long[:50]
    own: dict[str, Any] = {"max_mamba_cache_size": 64} if family in ("lfm2", "qwen3-next") else {}
    found = {}
    for kind in ("off", "tiers"):
        engine = make_engine(
            model_path=path, cache=CONFIGS[kind], max_total_tokens=1024, build_cache=build_prefix_cache, **own
        )
        found[kind] = [tokens(serve(engine, asked, GREEDY)) for asked in ([short], [long], [short, other])]
    assert found["tiers"] == found["off"]
    assert found["off"][0][0] == found["off"][2][0], "alone and beside a long one"


@pytest.mark.parametrize("kind", OF_LENGTHS)
def test_which_factors_there_are_belongs_to_the_identity(
    kind: str, tmp_path: Path, make_model: MakeModel, make_engine: MakeEngine, openings: Openings
) -> None:
    path = str(make_model(rope_parameters=rope(kind)))
    for length in (ORIGINAL, ORIGINAL + 1, None):
        engine = make_engine(
            model_path=path, context_length=length, cache=with_storage(tmp_path, "file"),
            build_cache=build_prefix_cache, max_total_tokens=256,
        )  # fmt: skip
        engine.close()
    names = [own.digest() for [own] in openings.fingerprints]
    same = 1 if kind == "dynamic" else 2  # transformers' dynamic factors change beyond the context alone
    assert len(set(names)) == same and names[1] == names[2]


def test_answers_in_a_context_of_the_original_length_are_those_of_transformers(
    make_model: MakeModel, make_engine: MakeEngine
) -> None:
    """As are those to long prompts in a long context."""
    path = make_model(rope_parameters=rope("longrope"))
    judge = Reference.load(path)
    for length, asked in ((ORIGINAL, prompts([30, 44])), (None, prompts([70, 100]))):
        answers = tokens(serve(make_engine(model_path=str(path), context_length=length), asked, GREEDY))
        judge.judge(asked, answers).assert_holds()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rope of unknown kind": ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "rope_type 'su'"),
    "a rope made dynamic elsewhere": (
        {"rope_parameters": {"rope_type": "my-dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'my-dynamic'",
    ),
    "long factors missing": (
        {"rope_parameters": {key: value for key, value in rope("longrope").items() if key != "long_factor"}},
        "rope_parameters",
    ),
    "too few factors": ({"rope_parameters": rope("longrope", 3)}, "longrope"),
    "a length that is none": (
        {"rope_parameters": {**rope("longrope"), "original_max_position_embeddings": "long"}},
        "original_max_position_embeddings",
    ),
    "looks ahead": ({"is_causal": False}, "is_causal=False"),
    "an encoder beside it": ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    "attends to another": ({"add_cross_attention": True}, "add_cross_attention"),
    "pictures": ({"vision_config": {"hidden_size": 8}}, "vision_config"),
    "quantised kernels": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "softcap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "both directions": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "layers of another kind": ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    **{
        model_type: ({"model_type": model_type}, f"model type '{model_type}' is not one of")
        for model_type in (
            "phi3", "llama4", "gemma3", "paligemma", "t5", "bert", "bloom", "gpt_oss",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_kv_is_no_function_of_the_prefix_are_refused(
    name: str, tmp_path: Path, llama: Reference
) -> None:
    """Before any weight is read."""
    fields, said = REFUSED[name]
    config = json.loads((llama.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ConfigError, match=said):
        Engine(EngineConfig(str(tmp_path)))

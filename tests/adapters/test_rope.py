"""Ropes whose factors lengths decide, by configs of the models that have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from hiradix.adapters.rope import DYNAMIC, LONG, Rope, lengths_that_decide, ropes_of, unfixed
from hiradix.adapters.vllm.names import refuse_ropes
from hiradix.errors import ConfigError

HALF = [1.0] * 8
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, "vocab_size": 64,
    "pad_token_id": 0,
}  # fmt: skip


def phi3(kind: str) -> Any:
    scaling = {"rope_type": kind, "type": kind, "short_factor": HALF, "long_factor": HALF}
    return transformers.Phi3Config(**SIZES, original_max_position_embeddings=1024, rope_scaling=scaling)


def llama(kind: str, **more: Any) -> Any:
    return transformers.LlamaConfig(**SIZES, rope_scaling={"rope_type": kind, **more})


def gemma() -> Any:
    return transformers.Gemma3TextConfig(num_hidden_layers=6)


def test_ropes_of_models() -> None:
    assert list(ropes_of(phi3("longrope"))) == [Rope(LONG, 1024)]
    assert list(ropes_of(llama("dynamic", factor=2.0))) == [Rope(DYNAMIC, 4096)]
    assert {rope.kind for rope in ropes_of(gemma())} == {"default"}
    assert list(ropes_of(SimpleNamespace(rope_scaling={"type": "su"}, max_position_embeddings=9))) == [
        Rope(LONG, 9)
    ]
    assert list(ropes_of(None)) == list(ropes_of(SimpleNamespace())) == []


@pytest.mark.parametrize(
    ("config", "length", "is_unfixed"),
    [
        (phi3("longrope"), 1024, False), (phi3("longrope"), 1025, True), (phi3("longrope"), None, True),
        (llama("dynamic", factor=2.0), 4096, False), (llama("dynamic", factor=2.0), 8192, True),
        (llama("linear", factor=2.0), 99999, False), (gemma(), 99999, False),
    ],
)  # fmt: skip
def test_transformers_own_ropes_are_refused_where_lengths_decide(
    config: Any, length: int | None, is_unfixed: bool
) -> None:
    assert (unfixed(config, length, (LONG, DYNAMIC)) is not None) == is_unfixed
    for is_foreign in (True, False):
        model = SimpleNamespace(
            using_transformers_backend=lambda answer=is_foreign: answer,
            hf_text_config=config,
            max_model_len=length,
        )
        if is_foreign and is_unfixed:
            with pytest.raises(ConfigError, match=r"--model-impl transformers.*--max-model-len \d+"):
                refuse_ropes(model)
        else:
            refuse_ropes(model)


def test_a_length_that_an_engine_put_into_the_config_counts_where_ropes_take_it() -> None:
    assert lengths_that_decide(phi3("longrope")) == {"max_position_embeddings": 4096}
    assert lengths_that_decide(gemma()) == lengths_that_decide(None) == {}

"""Engines of one claimed identity on one store: each is served what its own weights have computed alone."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hiradix.apps.engine import Engine
from hiradix.config import HiCacheConfig, parse_extra_config
from hiradix.prefix_cache import ModelIdentity, build_prefix_cache
from tests.engine.checkpoints import Reference, prompts
from tests.engine.configs import TIERED, with_storage
from tests.engine.conftest import MakeEngine
from tests.engine.driving import drain, serve
from tests.engine.test_tiers import GREEDY, settle

ASKED = prompts([100, 60], seed=2)
SIZES = {"max_total_tokens": 1024, "build_cache": build_prefix_cache}

Change = Callable[[Any], None]


@pytest.fixture(autouse=True)
def one_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the weights are, they are said to be the same."""
    same = ModelIdentity("model")
    monkeypatch.setattr("hiradix.apps.engine.engine.model_identity", lambda path, name: same)


def hits(engine: Engine) -> list[int]:
    """Tokens of `ASKED` that came from storage; the engine's pages are stored then, and it is closed."""
    answers = serve(engine, ASKED, GREEDY)
    settle(engine)
    figures = dict(engine.cache.stats().storage)
    engine.close()
    assert figures["canary_adopted"] + figures["canary_own"] == 1, figures
    return [answer.usage.cached_storage for answer in answers if answer.usage]


def altered(model: Reference, folder: Path, change: Change = lambda model: None, **config: Any) -> str:
    """A copy of a checkpoint with other weights, or another config."""
    shutil.copytree(model.path, folder)
    changed: Any = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    with torch.no_grad():
        change(changed)
    changed.save_pretrained(folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    for name, value in config.items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(fields))
    return str(folder)


def rounded_to(bits: int) -> Change:
    """Weights that were quantised, a scale per row."""

    def change(model: Any) -> None:
        for values in model.parameters():
            if values.dim() == 2:
                step = values.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                values.copy_((values / step).round() * step)

    return change


def with_adapter(model: Any) -> None:
    """A LoRA of rank 2 merged into the values' projections, 3% of their size."""
    generator = torch.Generator().manual_seed(1)
    for name, values in model.named_parameters():
        if "v_proj" in name:
            update = torch.randn(len(values), 2, generator=generator) @ torch.randn(
                2, values.shape[1], generator=generator
            )
            values += 0.03 * values.norm() / update.norm() * update


def one_layer(model: Any) -> None:
    """Only the last layer is another."""
    model.model.layers[-1].self_attn.v_proj.weight *= 1.1


OTHERS: dict[str, tuple[Change, dict[str, Any]]] = {
    "other weights": (lambda model: [values.neg_() for values in model.parameters()] and None, {}),
    "int8": (rounded_to(8), {}),
    "4 bits": (rounded_to(4), {}),
    "an adapter merged in": (with_adapter, {}),
    "one layer": (one_layer, {}),
    "rope base": (lambda _: None, {"rope_parameters": {"rope_theta": 20000.0}}),
    "rope scale": (lambda _: None, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "rope of far positions": (
        lambda _: None,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2048,
            }
        },
    ),
    "epsilon": (lambda _: None, {"rms_norm_eps": 1e-3}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_served_nothing_of_the_first(
    name: str, dtype: str, tmp_path: Path, llama: Reference, make_engine: MakeEngine,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    change, config = OTHERS[name]
    other = altered(llama, tmp_path / "other", change, **config)
    stored = with_storage(tmp_path, "file")
    assert hits(make_engine(cache=stored, dtype=dtype, **SIZES)) == [0, 0]
    with caplog.at_level(logging.WARNING, "hiradix.storage"):
        assert hits(make_engine(model_path=other, cache=stored, dtype=dtype, **SIZES)) == [0, 0]
    assert "other weights have computed" in caplog.text
    for path in (str(llama.path), other):
        assert hits(make_engine(model_path=path, cache=stored, dtype=dtype, **SIZES)) == [96, 56], "its own"


def test_without_the_canary_the_other_model_is_served_the_first_ones_pages(
    tmp_path: Path, llama: Reference, make_engine: MakeEngine
) -> None:
    """The positive control: a label says that they are the same, and they are not."""
    other = altered(llama, tmp_path / "other", rounded_to(4))
    stored = replace(with_storage(tmp_path, "file"), hicache_storage_identity="same")
    found = []
    for path in (str(llama.path), other):
        engine = make_engine(model_path=path, cache=stored, **SIZES)
        answers = serve(engine, ASKED, GREEDY)
        settle(engine)
        engine.close()
        found.append([answer.usage.cached_storage for answer in answers if answer.usage])
    assert found == [[0, 0], [96, 56]]


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2", "deepseek", "qwen3-next", "bamba"])
@pytest.mark.parametrize(("backend", "dtype"), [("file", "float32"), ("disk", "bfloat16")])
def test_all_kinds_of_models_find_their_own_pages_and_not_those_of_a_sibling(
    family: str, backend: str, dtype: str, tmp_path: Path, reference: Callable[[str], Reference],
    make_engine: MakeEngine,
) -> None:  # fmt: skip
    own = {
        "lfm2": {"max_mamba_cache_size": 64},
        "gemma3": {"swa_full_tokens_ratio": 0.5, "chunked_prefill_size": 32},
    }
    own |= dict.fromkeys(("qwen3-next", "bamba"), own["lfm2"])
    model, stored = reference(family), with_storage(tmp_path, backend)
    sibling = altered(model, tmp_path / "sibling", rounded_to(8))
    settings = {"cache": stored, "dtype": dtype, **SIZES, **own.get(family, {})}
    if family in own:
        settings.pop("build_cache")
    first, again = (hits(make_engine(model_path=str(model.path), **settings)) for _ in range(2))
    assert first == [0, 0] and min(again) > 0, again
    assert hits(make_engine(model_path=sibling, **settings)) == [0, 0]
    assert hits(make_engine(model_path=str(model.path), **settings)) == again


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_another_build_of_the_same_model_is_served(
    dtype: str, tmp_path: Path, llama: Reference, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other thread counts, kernels, chunks and pool sizes."""
    stored = with_storage(tmp_path, "file")
    assert hits(make_engine(cache=stored, dtype=dtype, **SIZES)) == [0, 0]
    more = {**SIZES, "max_total_tokens": 2048, "chunked_prefill_size": 16, "num_threads": 2}
    assert hits(make_engine(cache=stored, dtype=dtype, **more)) == [96, 56]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    torch.set_num_threads(1)
    assert hits(make_engine(cache=stored, dtype=dtype, **SIZES)) == [96, 56]


def test_storage_is_told_by_it_when_it_is_attached_while_serving(
    tmp_path: Path, llama: Reference, make_engine: MakeEngine
) -> None:
    stored = with_storage(tmp_path, "file")
    extra = json.dumps({**stored.hicache_storage_backend_extra_config.backend, "prefetch_threshold": 8})
    hits(make_engine(cache=stored, **SIZES))
    other = altered(llama, tmp_path / "other", with_adapter)
    for path, found in ((other, [0, 0]), (str(llama.path), [96, 56])):
        engine = make_engine(model_path=path, cache=TIERED, **SIZES)
        engine.cache.attached.served_model_name = None  # both claim one identity here
        for _ in range(2):
            ok, message = engine.attach_storage("file", extra, "wait_complete")
            assert ok, message
            assert engine.detach_storage()[0]
        assert engine.attach_storage("file", extra, "wait_complete")[0]
        assert hits(engine) == found


def test_a_flush_keeps_what_was_adopted(tmp_path: Path, llama: Reference, make_engine: MakeEngine) -> None:
    engine = make_engine(cache=with_storage(tmp_path, "file"), **SIZES)
    serve(engine, ASKED, GREEDY)
    settle(engine)
    assert engine.flush()
    assert hits(engine) == [96, 56]


def test_lossy_pages_are_told_apart_too(tmp_path: Path, llama: Reference, make_engine: MakeEngine) -> None:
    keys = with_storage(tmp_path, "file").hicache_storage_backend_extra_config
    lossy = parse_extra_config(json.dumps({**keys.backend, "quantise": "fp8", "prefetch_threshold": 8}))
    stored: HiCacheConfig = replace(
        with_storage(tmp_path, "file"), hicache_storage_backend_extra_config=lossy
    )
    other = altered(llama, tmp_path / "other", rounded_to(4))
    found = [
        hits(make_engine(model_path=path, cache=stored, **SIZES))
        for path in (str(llama.path), other, str(llama.path), other)
    ]
    assert found == [[0, 0], [0, 0], [96, 56], [96, 56]]


def test_an_identity_of_ones_own_is_a_label_or_nothing() -> None:
    for value in ("", " ", 7):
        with pytest.raises(ValueError, match="hicache-storage-identity"):
            replace(TIERED, hicache_storage_identity=value)


def test_pools_with_no_room_for_a_canary_store_apart(
    tmp_path: Path, llama: Reference, make_engine: MakeEngine
) -> None:
    """Nothing can be computed beforehand: the first request's pages are compared instead."""
    small = {**SIZES, "max_total_tokens": 8}
    stored = with_storage(tmp_path, "file")
    for _ in range(2):
        engine = make_engine(cache=stored, **small)
        engine.add_request("r", ASKED[0][:7], GREEDY)
        drain(engine)
        engine.close()

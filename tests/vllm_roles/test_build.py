"""A worker from vLLM's groups and tensors: what its store calls their pages, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hiradix.adapters.vllm import build
from hiradix.adapters.vllm.build import KVGroup, WorkerPlan, build_worker, identity_of
from hiradix.adapters.vllm.layout import Interior, grouping
from hiradix.adapters.vllm.settings import parse_settings
from hiradix.prefix_cache import ModelIdentity, model_identity
from hiradix.storage import ComponentPages
from tests.vllm_roles.test_layout import BLOCKS, HEADS, FullAttentionSpec, S, SlidingWindowSpec

Asked = list[ComponentPages]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The pages of the store opened last."""
    found: Asked = []
    whole = build.open_stores

    def opened(name: str, keys: Any, components: Sequence[ComponentPages], required: bool) -> Any:
        found[:] = components
        return whole(name, keys, components, required=required)

    monkeypatch.setattr(build, "open_stores", opened)
    return found


def built(
    folder: object,
    groups: list[tuple[Any, list[int]]],
    interior: Interior = Interior.TOKENS,
    labels: Sequence[str] = (),
) -> None:
    """A worker over `groups`, each a spec and its layers, with a store of files; closed again.

    labels: with each of these the store is opened again.
    """
    named = [KVGroup(spec, [f"layers.{layer}.attn" for layer in layers]) for spec, layers in groups]
    keys = {"file_storage_path": str(folder)}
    extra = {
        "hicache_size": 0.001, "hicache_storage_backend": "file", "hicache_storage_backend_extra_config": keys
    }  # fmt: skip
    plan = WorkerPlan(
        parse_settings(extra, S), grouping([spec for spec, _ in groups]), named, BLOCKS, None,
        ModelIdentity("m"), 1, interior,
    )  # fmt: skip
    caches = {name: torch.zeros(BLOCKS, HEADS, S, 8) for group in named for name in group.layers}
    made = build_worker(plan, caches)
    assert made.facts.has_storage
    for label in labels:
        made.role.switch.open_storage("file", keys, label).close()
    made.role.close(1.0)


def test_windows_are_told_from_full_attention_whatever_order_the_groups_have(
    asked: Asked, tmp_path: object
) -> None:
    built(tmp_path, [(SlidingWindowSpec(), [0, 2]), (FullAttentionSpec(), [1, 3])])
    assert [pages.fingerprint.component for pages in asked] == ["", "window-17"]
    again = [pages.fingerprint.digest() for pages in asked]
    built(tmp_path, [(FullAttentionSpec(), [1, 3]), (SlidingWindowSpec(), [0, 2])])
    assert [pages.fingerprint.digest() for pages in asked] == again


def test_groups_of_one_kind_are_told_apart_by_their_layers(asked: Asked, tmp_path: object) -> None:
    windows = [(SlidingWindowSpec(), layers) for layers in ([0, 3], [1, 4])]
    built(tmp_path, [(FullAttentionSpec(), [2, 5]), *windows])
    names = [pages.fingerprint.component for pages in asked]
    assert names == ["", "window-17-layers-0-3", "window-17-layers-1-4"]
    built(tmp_path, [(FullAttentionSpec(), [2]), (FullAttentionSpec(), [5]), *windows])
    assert [pages.fingerprint.component for pages in asked[:2]] == ["full-layers-2", "full-layers-5"]


def test_one_group_is_the_backbone_whatever_it_is(asked: Asked, tmp_path: object) -> None:
    for spec in (FullAttentionSpec(), SlidingWindowSpec()):
        built(tmp_path, [(spec, [0, 1])])
        assert [pages.fingerprint.component for pages in asked] == [""]


def test_pages_that_only_a_kernel_understands_are_stored_under_names_of_their_own(
    asked: Asked, tmp_path: object
) -> None:
    digests = []
    for interior in (Interior.TOKENS, Interior.K_THEN_V, Interior.OWN):
        built(tmp_path, [(FullAttentionSpec(), [0, 1])], interior)
        digests += [pages.fingerprint.digest() for pages in asked]
    plain, translated, own = digests
    assert plain == translated != own


def test_pages_of_before_a_reset_have_other_names(asked: Asked, tmp_path: object) -> None:
    digests = []
    for labels in ((), ("",), ("x",), ("y",)):
        built(tmp_path, [(FullAttentionSpec(), [0, 1])], labels=labels)
        digests += [pages.fingerprint.digest() for pages in asked]
    assert digests[0] == digests[1] and len(set(digests)) == 3


class Config:
    """vLLM's configs as far as it is read which model's pages they make. given: fields of the model's."""

    def __init__(self, path: str, dtype: str = "auto", load_format: str = "auto", **given: Any) -> None:
        unset = {
            "quantization": None,
            "quantization_config": None,
            "hf_overrides": {},
            "hf_config_path": None,
        }
        seen = {"rope": 1, "transformers_version": "5", "_name_or_path": path} | given.get("hf_overrides", {})
        self.model_config = SimpleNamespace(
            model=path, revision=None, hf_config=SimpleNamespace(to_dict=lambda: seen), **unset | given
        )
        self.cache_config = SimpleNamespace(cache_dtype=dtype)
        self.load_config = SimpleNamespace(load_format=load_format)


def test_the_same_weights_run_otherwise_are_another_model(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    def name(number: int = 0, **given: Any) -> ModelIdentity:
        return identity_of(Config(str(folders[number]), **given), "m")

    rows: list[dict[str, Any]] = [
        {"hf_overrides": {"rope": 2}},
        {"hf_overrides": {"rope": 3}},
        {"hf_config_path": "elsewhere"},
        {"quantization": "fp8"},
        {"quantization_config": {"linear": "int8"}},
        {"dtype": "fp8_e5m2"},
        {"dtype": "fp8"},
        {"load_format": "dummy"},
    ]
    assert name() == model_identity(str(folders[0]), "m"), "as in every engine that runs it as it is"
    assert len({name(**row).revision for row in rows} | {name().revision}) == 1 + len(rows)
    for row in rows:
        assert name(0, **row) == name(1, **row), "wherever the model lies"
    assert name(dtype="fp8") == name(dtype="fp8_e4m3") and name(dtype="bfloat16") == name()
    assert identity_of(Config("org/model"), "") == ModelIdentity("model", "org/model@main")

"""A worker from vLLM's groups and tensors: what its store calls their pages, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hiradix.adapters.vllm import names, worker_factory
from hiradix.adapters.vllm.layout import Interior, grouping, shape_of
from hiradix.adapters.vllm.settings import parse_settings
from hiradix.adapters.vllm.worker_factory import KVGroup, WorkerPlan, build_worker, identity_of
from hiradix.prefix_cache import ModelIdentity, model_identity
from hiradix.storage import ComponentPages
from tests.vllm_roles.test_layout import (
    BLOCKS,
    HEADS,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    S,
    SlidingWindowSpec,
)

Asked = list[ComponentPages]
MODEL = ModelIdentity("m")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The pages of the store opened last."""
    found: Asked = []
    whole = worker_factory.open_stores

    def opened(name: str, keys: Any, components: Sequence[ComponentPages], required: bool) -> Any:
        found[:] = components
        return whole(name, keys, components, required=required)

    monkeypatch.setattr(worker_factory, "open_stores", opened)
    return found


def cache_of(spec: Any) -> torch.Tensor:
    """One layer's, with states padded to what attention has."""
    cache = torch.zeros(BLOCKS, HEADS, S, 8)
    if not isinstance(spec, MambaSpec):
        return cache
    num_bytes = shape_of(spec, 1, None).arrays[0].row_bytes
    return cache.view(torch.int8).view(BLOCKS, 1, 1, -1)[..., :num_bytes]


def built(
    folder: object,
    groups: list[tuple[Any, list[int]]],
    interior: Interior = Interior.TOKENS,
    labels: Sequence[str] = (),
    model: ModelIdentity = MODEL,
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
        model, 1, interior,
    )  # fmt: skip
    caches = {name: cache_of(group.spec) for group in named for name in group.layers}
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


def test_states_have_a_name_and_a_layout_of_their_own(asked: Asked, tmp_path: object) -> None:
    """Another layout, as after a restart with other options, finds nothing: no field of it can be overlooked."""
    full = (FullAttentionSpec(), [1])
    built(tmp_path, [(MambaSpec(), [0, 2]), full])
    assert [pages.fingerprint.component for pages in asked] == ["", "state-mamba2"]
    assert asked[1].fingerprint.page_size == S
    digests = [asked[1].fingerprint.digest()]
    for spec in (
        MambaSpec(mamba_type="GDN_ATTN"),
        MambaSpec(dtypes=(torch.float16, torch.float32)),
        MambaSpec(dtypes=(torch.bfloat16, torch.bfloat16)),
        MambaSpec(shapes=((4, 3), (2, 2, 4))),
        MambaSpec(shapes=((3, 4), (4, 4))),
    ):
        built(tmp_path, [(spec, [0, 2]), full])
        digests.append(asked[1].fingerprint.digest())
    assert len(set(digests)) == len(digests)
    groups = [(MambaSpec(), [0]), full, (MambaSpec(), [2])]
    built(tmp_path, groups)
    names = {pages.fingerprint.component: pages.fingerprint.digest() for pages in asked}
    assert list(names) == ["", "state-mamba2-layers-0", "state-mamba2-layers-2"]
    built(tmp_path, groups[::-1])
    assert {pages.fingerprint.component: pages.fingerprint.digest() for pages in asked} == names


def test_windows_without_full_attention_are_told_apart(asked: Asked, tmp_path: object) -> None:
    chunks = ChunkedLocalAttentionSpec(attention_chunk_size=9)
    built(tmp_path, [(SlidingWindowSpec(sliding_window=9), [0]), (SlidingWindowSpec(), [1]), (chunks, [2])])
    assert [pages.fingerprint.component for pages in asked] == ["window-17", "window-9", "chunk-9"]


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

    def __init__(
        self, path: str, dtype: str = "auto", load_format: str = "auto", extra: Any = None, **given: Any
    ) -> None:
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
        self.load_config = SimpleNamespace(load_format=load_format, model_loader_extra_config=extra)


def test_the_same_weights_run_otherwise_are_another_model(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    def name(number: int = 0, **given: Any) -> ModelIdentity:
        computed_in = {"dtype": given.pop("computed_in", "bfloat16")}
        config = Config(str(folders[number]), **given)
        vars(config.model_config).update(computed_in)
        return identity_of(config, "m", "bfloat16")

    rows: list[dict[str, Any]] = [
        {"hf_overrides": {"rope": 2}},
        {"hf_overrides": {"rope": 3}},
        {"hf_config_path": "elsewhere"},
        {"quantization": "fp8"},
        {"quantization_config": {"linear": "int8"}},
        {"dtype": "fp8_e5m2"},
        {"dtype": "fp8"},
        {"load_format": "dummy"},
        {"load_format": "pt"},
        {"load_format": "tensorizer", "extra": {"tensorizer_uri": "s3://b/1"}},
        {"load_format": "tensorizer", "extra": {"tensorizer_uri": "s3://b/2"}},
        {"code_revision": "v2"},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"size": 2})},
        {"dtype": "fp8", "computed_in": "float16"},
    ]
    assert name() == model_identity(str(folders[0]), "m"), "as in every engine that runs it as it is"
    assert len({name(**row).revision for row in rows} | {name().revision}) == 1 + len(rows)
    for row in rows:
        assert name(0, **row) == name(1, **row), "wherever the model lies"
    assert name(dtype="fp8") == name(dtype="fp8_e4m3") and name(dtype="bfloat16") == name()
    assert identity_of(Config("org/model"), "") == ModelIdentity("model", "org/model@main")


def snapshot(cache: Path, commit: str, weights: bytes, name: str = "models--org--model") -> Path:
    """A repository in a hub's cache whose main branch is at `commit`."""
    folder = cache / name / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    (cache / name / "refs").mkdir(exist_ok=True)
    (cache / name / "refs" / "main").write_text(commit)
    return folder


def test_a_name_of_the_hub_is_the_commit_that_vllm_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has resolved it to a commit, or offline to the snapshot's folder: one model, online or not."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = snapshot(tmp_path, "c1", b"one")
    online = Config("org/model")
    first = identity_of(online, "")
    assert first == identity_of(Config(str(folder)), "") and first.model_id == "model"
    online.model_config.revision = SimpleNamespace(resolved="c1")
    snapshot(tmp_path, "c2", b"two")
    assert identity_of(online, "") == first != identity_of(Config("org/model"), "")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert identity_of(Config("org/model"), "") == ModelIdentity("model", "org/model@main")


class ModelScope:
    """ModelScope's client, which has these folders by names and revisions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: dict[tuple[str, str | None, str | None], Path] = {}
        for known in (names._of_modelscope, names._warn_unknown):
            known.cache_clear()
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
        for name in ("modelscope", "modelscope.hub", "modelscope.hub.snapshot_download"):
            module = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
        module.snapshot_download = self.snapshot_download  # type: ignore[attr-defined]

    def snapshot_download(
        self, model_id: str, revision: str | None, cache_dir: str | None, local_files_only: bool
    ) -> str:
        assert local_files_only, "nothing is fetched for a name"
        try:
            return str(self.folders[model_id, revision, cache_dir])
        except KeyError:
            raise ValueError(f"Cannot find cached snapshot for {model_id}") from None


def test_a_name_of_modelscope_is_what_its_client_has_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And not what the other hub's cache has under that name."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot(tmp_path, "c1", b"of the other hub")
    client = ModelScope(monkeypatch)
    assert identity_of(Config("org/model"), "") == ModelIdentity("model", "org/model@main")
    assert "org/model is in no cache of ModelScope's here" in caplog.text
    folder = tmp_path / "org" / "my___model"
    folder.mkdir(parents=True)
    client.folders["org/model", None, None] = folder
    found = []
    for weights in (b"one", b"two", b"one"):
        (folder / "model.safetensors").write_bytes(weights)
        found.append(identity_of(Config("org/model"), ""))
    assert found[0] == found[2] != found[1] and found[0].model_id == "model"
    assert found[0] == identity_of(Config(str(folder)), "model")
    assert identity_of(Config(str(folder)), "") != found[0], "a folder is a folder"


def test_weights_in_object_storage_are_known_by_their_path(tmp_path: Path) -> None:
    """vLLM pulls what describes them into a folder, whose name is none of the model's."""
    (tmp_path / "config.json").write_text("{}")
    uris = ("s3://b/v1", "s3://b/v2", "gs://b/v1")
    names = [identity_of(Config(str(tmp_path), model_weights=uri), "served") for uri in uris]
    assert len({one.revision for one in names}) == 3
    again = tmp_path / "again"
    again.mkdir()
    (again / "config.json").write_text("{}")
    assert identity_of(Config(str(again), model_weights=uris[0]), "served") == names[0]
    (again / "config.json").write_text('{"rope_theta": 1}')
    assert identity_of(Config(str(again), model_weights=uris[0]), "served") != names[0]


def test_a_file_of_weights_is_what_is_in_it(tmp_path: Path) -> None:
    file, digests = tmp_path / "q4.gguf", []
    for data in (b"GGUF one", b"GGUF two", b"GGUF one"):
        file.write_bytes(data)
        digests.append(identity_of(Config(str(file)), "m"))
    assert digests[0] == digests[2] != digests[1]


def test_lengths_that_decide_a_rope_tell_models_apart_and_no_others(tmp_path: Path) -> None:
    half = [1.0] * 4
    longrope = {"rope_type": "longrope", "short_factor": half, "long_factor": half}
    trained = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072}

    def named(max_model_len: int, **text: Any) -> ModelIdentity:
        config = SimpleNamespace(**text)
        return identity_of(Config("m", hf_text_config=config, max_model_len=max_model_len), "m")

    for params in (
        longrope,
        longrope | {"rope_type": "su"},
        {"full": longrope, "sliding": {"rope_type": "default"}},
    ):
        short, also, longer, longest = (
            named(length, rope_parameters=params, **trained) for length in (100, 4096, 4097, 131072)
        )
        assert short == also != longer == longest
    for params in ({"rope_type": "default"}, {"rope_type": "llama3"}, {"rope_type": "linear", "factor": 2.0}):
        assert named(100, rope_parameters=params, **trained) == named(
            131072, rope_parameters=params, **trained
        )
        assert named(100, rope_parameters=params, **trained) == named(100)
    yarn = {"rope_type": "yarn", "factor": 4.0}
    other = trained | {"max_position_embeddings": 65536}
    assert named(100, rope_parameters=yarn, **trained) != named(100, rope_parameters=yarn, **other)


def test_a_long_context_scales_llama_4s_queries() -> None:
    def named(max_model_len: int, given: dict[str, Any], generation: dict[str, Any]) -> ModelIdentity:
        config = Config(
            "m", hf_text_config=SimpleNamespace(model_type="llama4_text"), max_model_len=max_model_len,
            try_get_generation_config=lambda: generation, override_generation_config=given,
        )  # fmt: skip
        return identity_of(config, "m")

    short, long = named(32768, {}, {}), named(32769, {}, {})
    assert short != long == named(1_000_000, {}, {})
    tuned = {"attn_temperature_tuning": True}
    assert named(100, tuned, {}) == long == named(100, {}, tuned)
    assert named(1_000_000, {"attn_temperature_tuning": False}, tuned) == short


def test_stages_cut_at_other_layers_are_other_pages(asked: Asked, tmp_path: Path) -> None:
    digests = []
    for layers in ([10, 11, 12], [9, 10, 11], [10, 11, 12]):
        stage = ModelIdentity("m", pp_rank=1, pp_size=3)
        built(tmp_path, [(FullAttentionSpec(), layers)], model=stage)
        digests += [pages.fingerprint.digest() for pages in asked]
    assert digests[0] == digests[2] != digests[1]

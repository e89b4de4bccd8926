"""Where weights are, as engines find them, and that every byte of their files counts."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from hiradix.prefix_cache import Origin, origin_of
from hiradix.prefix_cache import weight_files as wf
from tests.prefix_cache.test_identity import safetensors

COMMIT, OTHER = "a" * 40, "b" * 40


def fetched(cache: Path, commit: str, weights: bytes, branch: str | None = "main") -> Path:
    """A snapshot of `org/model` in a hub's cache, whose files are links to blobs."""
    repository = cache / "models--org--model"
    folder, blobs = repository / "snapshots" / commit, repository / "blobs"
    for path in (folder, blobs, repository / "refs"):
        path.mkdir(parents=True, exist_ok=True)
    for name, data in (("config.json", b"{}"), ("model.safetensors", weights)):
        blob = blobs / f"{name}-{commit[:4]}"
        blob.write_bytes(data)
        (folder / name).symlink_to(os.path.relpath(blob, folder))
    if branch is not None:
        (repository / "refs" / branch).write_text(commit)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def test_one_changed_byte_anywhere_is_other_weights(tmp_path: Path) -> None:
    """A row that was edited, at the file's parts' edges too."""
    file = tmp_path / "model.safetensors"
    safetensors(file)
    data = file.read_bytes()
    found = {origin_of(str(tmp_path))}
    rng, edges = random.Random(1), (0, 1 << 20, len(data) - 1)
    for at in (*edges, *(rng.randrange(len(data)) for _ in range(5))):
        changed = bytearray(data)
        changed[at] ^= 1
        file.write_bytes(changed)
        found.add(origin_of(str(tmp_path)))
    assert len(found) == 1 + 8 and all(origin.is_read for origin in found)
    file.write_bytes(data)
    assert origin_of(str(tmp_path)) in found


def test_parts_of_a_file_count_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wf, "_PART_BYTES", 1000)
    file, found = tmp_path / "m.bin", set()
    parts = [bytes([n]) * 1000 for n in range(5)] + [b"rest"]
    for order in (parts, [*parts[1:5], parts[0], parts[5]], parts[:5], [*parts, b"!"]):
        file.write_bytes(b"".join(order))
        found.add(origin_of(str(tmp_path)).revision)
    assert len(found) == 4


@pytest.mark.parametrize(
    "name", ["modeling_own.py", "model.safetensors.index.json", "params.json", "hf_quant_config.json"]
)
def test_what_says_how_weights_are_read_counts(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"w")
    found = [origin_of(str(tmp_path))]
    for text in ("one", "two"):
        (tmp_path / name).write_text(text)
        found.append(origin_of(str(tmp_path)))
    assert len(set(found)) == 3


def test_a_shard_below_the_folder_counts_where_the_index_names_it(tmp_path: Path) -> None:
    shard, index = tmp_path / "deep" / "one.safetensors", tmp_path / "model.safetensors.index.json"
    shard.parent.mkdir()
    found = []
    named = '{"weight_map": {"a": "deep/one.safetensors", "b": 1, "c": "\\u0000"}}'
    for text in ("{}", "[", '{"weight_map": 7}', named):
        index.write_text(text)
        for data in (b"one", b"two"):
            shard.write_bytes(data)
            found.append(origin_of(str(tmp_path)).revision)
    assert [one == other for one, other in zip(found[::2], found[1::2])] == [True, True, True, False]


def test_a_folder_is_the_same_model_wherever_it_lies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    bare = [origin_of(str(tmp_path / name)) for name in ("one", "two")]
    assert bare[0] != bare[1] and not bare[0].is_read, "their weights are elsewhere"
    for name in ("one", "two"):
        (tmp_path / name / "model.safetensors").write_bytes(b"w")
    assert origin_of(str(tmp_path / "one")) == origin_of(str(tmp_path / "two"))


def test_a_name_is_the_snapshot_it_stands_for(cache: Path, tmp_path: Path) -> None:
    unknown = origin_of("org/model")
    assert unknown == Origin("org/model@main", False)
    fetched(cache, COMMIT, b"one")
    first = origin_of("org/model")
    assert first.is_read and first == origin_of("org/model", "main") == origin_of("org/model", COMMIT)
    fetched(cache, OTHER, b"one")
    moved = origin_of("org/model")
    assert moved.revision != first.revision, "the main branch has moved"
    assert origin_of("org/model", COMMIT) == first
    fetched(cache, "c" * 40, b"tagged", branch="v1.0")
    assert origin_of("org/model", "v1.0") == origin_of("org/model", "c" * 40) != moved
    assert origin_of("org/model", "no such") == Origin("org/model@no such", False)
    assert origin_of("org/model", is_hub=False) == unknown
    assert origin_of("org/model", cache_dir=str(tmp_path / "other")) == unknown
    fetched(tmp_path / "other", COMMIT, b"one")
    assert origin_of("org/model", cache_dir=str(tmp_path / "other")) == first
    assert origin_of(str(cache / "models--org--model" / "snapshots" / COMMIT)) == first, "as offline"


def test_the_hubs_cache_is_where_its_client_has_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(cache, COMMIT, b"one")
    assert wf.hub_snapshot("org/model") is not None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert wf.hub_snapshot("org/model") is None
    fetched(tmp_path / "elsewhere", OTHER, b"two")
    found = wf.hub_snapshot("org/model")
    assert found is not None and found.name == OTHER
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    fetched(tmp_path / "xdg" / "huggingface" / "hub", OTHER, b"two")
    found = wf.hub_snapshot("org/model")
    assert found is not None and tmp_path / "xdg" in found.parents


def test_a_large_file_of_the_hub_is_known_by_its_blob_and_pieces(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client names a blob by the SHA-256 of what it fetched; what is trained over it shows too."""
    monkeypatch.setattr(wf, "_WHOLE_BYTES", 0)
    folder = fetched(cache, COMMIT, b"")
    file, blobs = folder / "model.safetensors", cache / "models--org--model" / "blobs"
    found = set()
    for name in ("0" * 64, "1" * 64):
        file.unlink()
        safetensors(blobs / name)
        file.symlink_to(blobs / name)
        found.add(origin_of("org/model"))
    safetensors(blobs / ("1" * 64), "layers.1.k")
    found.add(origin_of("org/model"))
    assert len(found) == 3


def test_a_gguf_file_is_what_is_in_all_its_shards(tmp_path: Path) -> None:
    files = [tmp_path / f"m-{n:05}-of-00002.gguf" for n in (1, 2)]
    other = tmp_path / "m-00001-of-00003.gguf"
    for file in (*files, other):
        file.write_bytes(b"GGUF")
    first = origin_of(str(files[0]))
    other.write_bytes(b"changed")
    assert origin_of(str(files[0])) == first and first.is_read
    files[1].write_bytes(b"GGU!")
    assert origin_of(str(files[0])) != first


def test_a_quantisation_out_of_a_repository_is_its_own_files(cache: Path, tmp_path: Path) -> None:
    """A name as `org/model:Q4_K_M`, whose main branch moves as others do."""
    names = [f"org/model:{kind}" for kind in ("Q4_K_M", "Q5_K_M", "Q8_0", "IQ1_S")]
    unknown = [origin_of(name) for name in names]
    assert unknown == [Origin(f"{name}@main", False) for name in names]
    folder = fetched(cache, COMMIT, b"of transformers")
    assert origin_of(names[0]) == unknown[0], "a repository without such files"
    files = {"model-Q4_K_M.gguf": b"4", "model-Q5_K_M.gguf": b"5", "deep/x-q8_0-00001-of-00002.gguf": b"8",
             "deep/x-q8_0-00002-of-00002.gguf": b"9", "model-Q14_K_M.gguf": b"14"}  # fmt: skip
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    found = [origin_of(name) for name in names]
    assert len({one.revision for one in found}) == 4 and found[3] == unknown[3]
    assert all(one.is_read for one in found[:3]) and COMMIT in found[0].revision
    (folder / "model-Q14_K_M.gguf").write_bytes(b"another")
    (folder / "model.safetensors").unlink()
    assert [origin_of(name) for name in names[1:3]] != found[1:3], "what is beside may be read, too"
    now = [origin_of(name) for name in names]
    (folder / "model-Q4_K_M.gguf").write_bytes(b"trained")
    (folder / "deep/x-q8_0-00002-of-00002.gguf").write_bytes(b"trained")
    after = [origin_of(name) for name in names]
    assert [one == other for one, other in zip(now, after)] == [False, True, False, True]
    fetched(cache, OTHER, b"moved")
    assert origin_of(names[0]) == unknown[0], "the main branch has moved, and has none"
    assert origin_of(names[0], COMMIT) == after[0]
    assert origin_of(names[0], is_hub=False) == unknown[0]


@pytest.mark.parametrize(
    "path", ["s3://b/v1", "gs://b/v1", "instance://h:1/m", "org/a/b", "redis://h/m", "C:\\m"]
)
def test_other_places_are_known_by_their_text(cache: Path, path: str) -> None:
    assert origin_of(path, "v1") == Origin(f"{path}@v1", False)

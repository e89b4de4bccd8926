"""Which model's pages these are: weights that differ anywhere, and the same weights run otherwise."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiradix.prefix_cache import ModelIdentity
from hiradix.prefix_cache.identity import run_with
from hiradix.prefix_cache.weight_files import weights_digest

SIZES = {"embed": 1 << 21, "layers.0.k": 40_000, "layers.1.k": 40_000, "layers.1.norm": 64, "last": 3_000_000}


def safetensors(file: Path, changed: str | None = None) -> None:
    """A file of that format. changed: the tensor that has other numbers in it."""
    header, data = {}, []
    at = 0
    for name, size in SIZES.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        data.append(random.Random(f"{name}{name == changed}").randbytes(size))
        at += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def folder(path: Path, files: Mapping[str, bytes]) -> str:
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return str(path)


def test_a_tensor_anywhere_in_the_weights_makes_them_others(tmp_path: Path) -> None:
    """As an adapter merged into a model does: same config, same sizes, same first tensors."""
    digests = set()
    for number, changed in enumerate((None, *SIZES)):
        path = tmp_path / str(number)
        path.mkdir()
        safetensors(path / "model.safetensors", changed)
        digests.add(weights_digest(str(path), "config.json"))
    assert len(digests) == 1 + len(SIZES)
    again = tmp_path / "again"
    again.mkdir()
    safetensors(again / "model.safetensors")
    assert weights_digest(str(again), "config.json") in digests


def test_small_tensors_far_into_the_weights_are_not_stepped_over(tmp_path: Path) -> None:
    """Pieces at even distances would fall beside half of these."""
    size, count, file = 8192, 4096, tmp_path / "model.safetensors"
    spans = {f"{n:04}": {"data_offsets": [n * size, n * size + size]} for n in range(count)}
    text = json.dumps(spans).encode()
    begin = 8 + len(text)
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size * count))
    digests = {weights_digest(str(tmp_path), "config.json")}
    for number in range(2000, 2008):
        with file.open("r+b") as stream:
            stream.seek(begin + number * size)
            stream.write(b"\1" * size)
        digests.add(weights_digest(str(tmp_path), "config.json"))
    assert len(digests) == 1 + 8


@pytest.mark.parametrize("name", ["adapter_model.bin", "weights.pt", "model.gguf", "consolidated.00.pth"])
def test_weights_of_other_formats_count(tmp_path: Path, name: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8)
    half = data.copy()
    half[len(half) // 2 :] ^= 1  # what a training run changes is not a byte here and there
    folders = [
        folder(tmp_path / str(n), {name: d.tobytes(), "config.json": b"{}"})
        for n, d in enumerate((data, half))
    ]
    assert len({weights_digest(path, "config.json") for path in folders}) == 2


def claimed(length: int, header: bytes) -> bytes:
    return length.to_bytes(8, "little") + header


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff" * 8, b"\xff" * 100, claimed(4, b"nope" * 3), claimed(2, b"[]"), claimed(2, b"{}"),
        claimed(34, b'{"a":{"data_offsets":[-9,9999999]}}'), claimed(24, b'{"a":{"data_offsets":1}}'),
        claimed(7, b'{"a":1}'), claimed(5000, b"[" * 5000), claimed(32, b'{"a":{"data_offsets":[0,1e999]}}'),
    ],
)  # fmt: skip
def test_a_file_that_is_no_safetensors_is_bytes_like_any_other(
    tmp_path: Path, data: bytes, filled: bool
) -> None:
    """Whether it can be loaded is the engine's to say."""
    data += bytes((1 << 21) * filled)
    one = folder(tmp_path / "one", {"a.safetensors": data})
    two = folder(tmp_path / "two", {"a.safetensors": data + b"!"})
    assert weights_digest(one, "config.json") != weights_digest(two, "config.json")


def test_files_that_are_no_weights_and_a_folder_do_not_count(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"config.json": b"{}", "README.md": b"one"})
    two = folder(tmp_path / "two", {"config.json": b"{}"})
    (tmp_path / "two" / "old.safetensors").mkdir()
    assert weights_digest(one, "config.json") == weights_digest(two, "config.json")


def test_the_same_weights_run_otherwise_are_another_model() -> None:
    model = ModelIdentity("m", "r", 1, 2)
    assert run_with(model, {}) == model == run_with(model, {"quantization": None, "overrides": {}, "x": ""})
    rows: list[dict[str, Any]] = [
        {"quantization": "fp8"},
        {"quantization": "awq"},
        {"overrides": {"rope_theta": 1.0}},
        {"overrides": {"rope_theta": 2.0}},
        {"overrides": "fp8"},
    ]
    named = [run_with(model, row) for row in rows]
    assert len({one.revision for one in named} | {model.revision}) == 1 + len(rows)
    assert all((one.model_id, one.tp_rank, one.tp_size) == ("m", 1, 2) for one in named)
    ordered = {"b": {"y": 1, "x": 2}, "a": 3}
    assert run_with(model, ordered) == run_with(model, {"a": 3, "b": {"x": 2, "y": 1}})


def test_files_in_each_others_places_are_other_weights(tmp_path: Path) -> None:
    """Files are read side by side; the digest is that of their order by name, whoever ends first."""
    contents = [bytes([number]) * 5000 for number in range(40)]
    one, two = (
        folder(tmp_path / name, {f"model-{n:02}.safetensors": part for n, part in enumerate(parts)})
        for name, parts in (("one", contents), ("two", [*contents[1:], contents[0]]))
    )
    digests = {weights_digest(one, "config.json") for _ in range(5)}
    assert len(digests) == 1 and weights_digest(two, "config.json") not in digests

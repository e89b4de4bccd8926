"""Releases in the registry against what the adapters use of them, and against the tables in the docs.

A new release that no table has yet is told in a warning: its row is what is printed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from hiradix.adapters import versions
from hiradix.adapters.probe import Reads
from hiradix.adapters.sglang import support as sglang_support
from hiradix.adapters.vllm import support as vllm_support
from tests.differential.engine_wheels import newest, sources_of

DOCS = Path(__file__).parents[2] / "docs"
LACKING: dict[str, Callable[[Reads], tuple[str, ...]]] = {
    "sglang": sglang_support.lacking,
    "vllm": vllm_support.lacking,
}
_ROW = re.compile(r"^\| (\d+\.\d+\.\d+\S*) \| (served|refused)[^|]*\| ([^|]*) \|$", re.MULTILINE)


def rows(package: str) -> dict[str, tuple[str, str]]:
    """Of the docs' table, by release: served or refused, and why."""
    text = (DOCS / f"{package}.md").read_text(encoding="utf-8")
    return {release: (verdict, why.strip()) for release, verdict, why in _ROW.findall(text)}


def verdict(package: str, release: str) -> tuple[str, str]:
    pieces = LACKING[package](sources_of(package, release))
    return ("refused", "; ".join(pieces)) if pieces else ("served", "")


@pytest.mark.parametrize(
    ("package", "release"), [(package, release) for package in LACKING for release in rows(package)]
)
def test_a_release_is_served_or_refused_as_the_docs_say(package: str, release: str) -> None:
    told, why = rows(package)[release]
    is_served, pieces = verdict(package, release)
    assert is_served == told
    if told == "refused":
        assert pieces == why


@pytest.mark.parametrize(
    ("package", "least"),
    [("sglang", ["0.5.15", "0.5.15.post1", *(f"0.5.{n}" for n in range(16, 24))]), ("vllm", ["0.32.0"])],
)
def test_the_tables_have_every_release_up_to_the_newest(package: str, least: list[str]) -> None:
    known = rows(package)
    assert set(least) <= known.keys()
    latest = newest(package)
    if latest not in known:
        warnings.warn(
            f"docs/{package}.md: | {latest} | {' | '.join(verdict(package, latest))} |", stacklevel=1
        )


@pytest.mark.parametrize(
    ("package", "module", "name", "told"),
    [
        ("sglang", "sglang.srt.managers.schedule_batch", "lora_id", "Req has no lora_id"),
        (
            "sglang",
            "sglang.srt.mem_cache.registry",
            "model_config",
            "TreeCacheBuildContext has no model_config",
        ),
        ("sglang", "sglang.srt.configs.model_config", "context_len", "ModelConfig has no context_len"),
        (
            "vllm",
            "vllm.config.model",
            "using_transformers_backend",
            "there is no ModelConfig.using_transformers",
        ),
        ("vllm", "vllm.config.load", "download_dir", "LoadConfig has no download_dir"),
        ("vllm", "vllm.lora.request", "load_inplace", "LoRARequest has no load_inplace"),
    ],
)
def test_what_decides_whose_pages_these_are_is_looked_for(
    package: str, module: str, name: str, told: str
) -> None:
    """It is read with a default, or by a hook: where it has another name pages would be taken for others."""
    release = {"sglang": sglang_support.TESTED, "vllm": vllm_support.TESTED}[package]
    read = sources_of(package, release)

    def renamed(asked: str) -> str | None:
        text = read(asked)
        return re.sub(rf"\b{name}\b", "renamed", text) if text and asked == module else text

    assert [piece for piece in LACKING[package](renamed) if piece.startswith(told)]


@pytest.mark.parametrize(
    ("package", "tested"),
    [
        ("sglang", (sglang_support.TESTED, *sglang_support.TESTED_TOO)),
        ("vllm", (vllm_support.TESTED,)),
    ],
)
def test_what_was_tested_is_served(package: str, tested: tuple[str, ...]) -> None:
    served = [release for release, (told, _) in rows(package).items() if told == "served"]
    assert all(any(versions.is_of(one, release) for one in served) for release in tested)

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
    ("package", "tested"),
    [
        ("sglang", (sglang_support.TESTED, *sglang_support.TESTED_TOO)),
        ("vllm", (vllm_support.TESTED,)),
    ],
)
def test_what_was_tested_is_served(package: str, tested: tuple[str, ...]) -> None:
    served = [release for release, (told, _) in rows(package).items() if told == "served"]
    assert all(any(versions.is_of(one, release) for one in served) for release in tested)

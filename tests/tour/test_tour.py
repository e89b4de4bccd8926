"""docs/tour.md names functions that a page really passes, in the order in which it passes them."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import pytest

from hiradix.apps import tour
from tests.project.repo import ROOT

PAGE = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
COMPILED = not hasattr(tour.tree_key.RadixKey.page_aligned, "__code__")


class Row(NamedTuple):
    step: int
    thread: str
    module: str
    function: str


def rows() -> list[Row]:
    """The tables of the eight steps."""
    sections = re.split(r"^## (\d)\. ", PAGE, flags=re.MULTILINE)[1:]
    row = re.compile(r"^\| ([\w-]+) \| `([\w.]+)` \| `([\w.]+)` \|", re.MULTILINE)
    return [
        Row(int(number), *found)
        for number, text in zip(sections[::2], sections[1::2])
        for found in row.findall(text)
    ]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[tour.TracedCall]:
    if COMPILED:
        pytest.skip("the compiled form has no calls to show")
    return tour.walk(tmp_path_factory.mktemp("store"))


def test_the_page_has_the_steps_of_the_command() -> None:
    titles = re.findall(r"^## (\d\. .*)$", PAGE, re.MULTILINE)
    assert titles == [f"{number}. {title}" for number, title in enumerate(tour.STEPS, 1)]
    assert {row.step for row in rows()} == set(range(1, len(tour.STEPS) + 1))
    assert len(rows()) == PAGE.split("## Where")[0].count("| `hiradix.")  # no row escapes the pattern


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.step}-{row.function}")
def test_a_named_function_exists(row: Row) -> None:
    assert callable(reduce(getattr, row.function.split("."), importlib.import_module(row.module)))


def test_each_named_function_is_called_in_its_step_in_order(calls: list[tour.TracedCall]) -> None:
    """Of several rows for one function the next call after the row before counts."""
    for step in range(1, len(tour.STEPS) + 1):
        for thread in {row.thread for row in rows() if row.step == step}:
            seen = iter([(c.module, c.function) for c in calls if (c.step, c.thread) == (step, thread)])
            for row in (row for row in rows() if (row.step, row.thread) == (step, thread)):
                assert (row.module, row.function) in seen, row


def test_a_function_that_is_not_called_would_be_seen(calls: list[tour.TracedCall]) -> None:
    first = [(c.module, c.function) for c in calls if c.step == 1]
    assert first and ("hiradix.prefix_cache.cache", "PrefixCache.evict") not in first


def test_figures_count_what_was_called(calls: list[tour.TracedCall]) -> None:
    for step in tour.summary(calls):
        own = [call for call in calls if call.step == step["step"]]
        assert step["calls"] == len(own) > 0
        assert step["calls"] == sum(sum(stay["functions"].values()) for stay in step["route"])
        assert step["files"] == len({stay["module"] for stay in step["route"]})
        assert 0 < step["crossings"] < step["calls"]
        assert 0 < step["classes"] < step["calls"]


@pytest.mark.skipif(COMPILED, reason="the compiled form has no calls to show")
def test_the_command_prints_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hiradix.apps.tour", "--json"],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [step["title"] for step in told["steps"]] == list(tour.STEPS)
    assert told["all"]["calls"] == sum(step["calls"] for step in told["steps"])


@pytest.mark.skipif(COMPILED, reason="the compiled form has no calls to show")
@pytest.mark.parametrize("policy", ["lru", "ghd"])
def test_the_tour_ends_whatever_the_policy(policy: str, tmp_path: Path) -> None:
    assert {call.step for call in tour.walk(tmp_path, policy)} == set(range(1, len(tour.STEPS) + 1))

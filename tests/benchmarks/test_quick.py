"""Each benchmark's quick form ends well, prints every row that it promises, and writes what others read.

Nothing here depends on a time. What is not installed is skipped by name; with HIRADIX_BENCH_ALL=1, as in
`make test-bench`, which installs it, that is a failure.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hiradix.apps.demo.process import ServerProcess
from tests.benchmarks.quick_forms import FORMS, Quick
from tests.e2e.tiny_model import write_tiny_model
from tests.project.repo import ROOT

LIMIT_S = 900  # of one program, on a machine with other work
SPECIAL = ("chitchat_trace", "gpu_session", "serve_multiturn")


def run(form: Quick, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Its quick form; fails the test unless it ended with 0."""
    if missing := form.missing():
        told = f"{form.program}: not installed: {', '.join(missing)}"
        pytest.fail(told) if os.environ.get("HIRADIX_BENCH_ALL") else pytest.skip(told)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        form.command(out, *more), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done


def rows_in(out: Path) -> list[dict[str, Any]]:
    """The file's rows, each as the schema says, with finite numbers."""

    def refused(name: str) -> float:
        raise AssertionError(f"{out.name} has {name}")

    report = json.loads(out.read_text(encoding="utf-8"), parse_constant=refused)
    assert report["machine"], "no machine"
    assert "left_out" not in report["machine"], report["machine"]["left_out"]
    rows: list[dict[str, Any]] = report["rows"]
    for row in rows:
        assert set(row) == {"case", "metric", "unit", "ours", "peers"}, row
        assert all(isinstance(row[name], str) and row[name] for name in ("case", "metric", "unit")), row
        for value in (row["ours"], *row["peers"].values()):
            assert type(value) in (int, float) and math.isfinite(value), row
    return rows


def assert_shown(rows: list[dict[str, Any]], stdout: str) -> None:
    """Each row is a line of what was printed."""
    lines = stdout.splitlines()
    for row in rows:
        names = (row["case"], row["unit"])
        assert any(all(name in line for name in names) for line in lines), f"not printed: {row}"


def assert_promises(form: Quick, rows: list[dict[str, Any]]) -> None:
    for promise in form.promises:
        found = [
            row for row in rows
            if row["case"].startswith(promise.case) and row["metric"].startswith(promise.metric)
        ]  # fmt: skip
        assert found, f"no row {promise.case!r} {promise.metric!r}"
        peers = max((set(row["peers"]) for row in found), key=lambda own: len(own & set(promise.peers)))
        assert peers >= set(promise.peers), f"{promise.case!r} has {sorted(peers)}, promised {promise.peers}"


GENERAL = [form for form in FORMS if form.program not in SPECIAL]


@pytest.mark.parametrize("form", GENERAL, ids=lambda form: form.program)
def test_quick_form(form: Quick, tmp_path: Path) -> None:
    out = tmp_path / form.out
    done = run(form, out)
    rows = rows_in(out)
    assert_shown(rows, done.stdout)
    assert_promises(form, rows)


def form_of(program: str) -> Quick:
    return next(form for form in FORMS if form.program == program)


def test_the_serving_benchmark_beside_a_server_without_the_cache(tmp_path: Path) -> None:
    form, out = form_of("serve_multiturn"), tmp_path / "serve.json"
    model = str(write_tiny_model(tmp_path / "model"))
    shared = ["--model-path", model, "--context-length", "4096", "--max-total-tokens", "16384"]
    with (
        ServerProcess([*shared, "--enable-hierarchical-cache"], tmp_path / "on.log") as on,
        ServerProcess([*shared, "--disable-radix-cache"], tmp_path / "off.log") as off,
    ):
        done = run(form, out, on.url, off.url)
    rows = rows_in(out)
    assert_shown(rows, done.stdout)
    assert_promises(form, rows)
    assert all(set(row["peers"]) == {off.url} for row in rows if row["case"] == "all"), rows
    tokens = {row["case"]: row["ours"] for row in rows if row["metric"] == "prompt_tokens"}
    assert tokens["device"] + tokens["host"] > 0, tokens


def test_the_trace_of_conversations_is_one_that_replays(tmp_path: Path) -> None:
    form, out = form_of("chitchat_trace"), tmp_path / "chitchat.jsonl.gz"
    done = run(form, out)
    with gzip.open(out, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    assert records and f"{len(records)} requests" in done.stdout
    assert all(record["prompt_tokens"] >= 16 * len(record["blocks"]) for record in records)
    assert [record["time_s"] for record in records] == sorted(record["time_s"] for record in records)


def test_what_a_gpu_has_to_show_walks_its_steps_without_one(tmp_path: Path) -> None:
    form = form_of("gpu_session")
    done = run(form, tmp_path)
    assert "every step ended well" in done.stdout
    for piece, steps in (("correctness", 5), ("copies", 2), ("overlap", 3)):
        rows = rows_in(tmp_path / f"gpu_session_{piece}.json")
        assert_shown(rows, done.stdout)
        assert len(rows) == steps and all("limit" in row["peers"] for row in rows)

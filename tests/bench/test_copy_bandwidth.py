"""The copy benchmark runs where there is no GPU, says so, and keeps its raw numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.project.repo import ROOT


def test_rows_of_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "results" / "cpu.json"
    command = ["benchmarks/copy_bandwidth.py", "--device", "cpu", "--shape", "SmolLM2-fp32"]
    command += ["--megabytes", "8", "--layout", "page_first", "--repeats", "1", "--page-size", "64"]
    command += ["--out", str(out)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=150,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no GPU here" in done.stdout and "needs a GPU" in done.stdout
    raw = json.loads(out.read_text(encoding="utf-8"))
    assert {row["transport"] for row in raw["rows"]} == {"torch", "dma", "pack", "auto"}
    assert {row["direction"] for row in raw["rows"]} == {"to host", "to device"} == set(raw["ceiling"])
    assert raw["machine"]["versions"]["torch"] and len(raw["overlap"]) == 2 and raw["interference"] == []

"""The tree benchmark runs our side without the peers and writes the JSON that others read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.project.repo import ROOT

KINDS = ("multi-turn ", "host-tier ", "turn-at ", "match ", "insert ", "evict ")


def test_quick_run_without_peers_writes_every_kind_of_row(tmp_path: Path) -> None:
    out = tmp_path / "tree.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_tree.py"), "--quick", "--peers", "none"]
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    log = out.with_suffix(".log")
    assert done.returncode == 0, done.stderr[-2000:] + (log.read_text() if log.exists() else "")
    report = json.loads(out.read_text())
    assert report["machine"]["cores"] >= 1 and report["machine"]["peers"] == []
    rows = report["rows"]
    assert all(set(row) == {"case", "metric", "unit", "ours", "peers"} for row in rows)
    assert all(isinstance(row["ours"], float) and row["ours"] >= 0 and row["peers"] == {} for row in rows)
    for kind in KINDS:
        assert any(row["case"].startswith(kind) for row in rows), kind
    hits = {row["case"]: row["ours"] for row in rows if row["metric"] == "hits"}
    assert all(0.7 < share < 0.8 for share in hits.values()), hits  # turn 2 to 8 of 8 find what came before

"""The whole demo on a tiny model: three server processes, three tiers, a restart, the same answers."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hiradix.apps.bench.report import compare
from hiradix.apps.bench.workload import Size, make_workload
from hiradix.apps.demo.driver import Demo, DemoConfig
from hiradix.apps.demo.view import View

pytest.importorskip("chitchat_dataset")


@pytest.mark.long(25)
@pytest.mark.timeout(600)
def test_demo_serves_from_all_tiers_and_answers_the_same(tiny_model: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    view = View(Console(file=out, force_terminal=False, width=100, highlight=False))
    workload = make_workload(Size(6, 2, 1, 2, 1, 1))
    config = DemoConfig(tiny_model, tmp_path, device_tokens=9216, num_threads=1)
    demo = Demo(config, workload, view)
    asyncio.run(demo.run())
    text, log = out.getvalue(), (tmp_path / "server.log").read_text()
    assert compare(demo.answers, demo.reference).holds, text + log[-2000:]
    assert len(demo.answers) == workload.num_requests
    assert demo.num_restored_tokens > 0, text
    result = json.loads((tmp_path / "result.json").read_text())
    assert all(result["tokens"][tier] > 0 for tier in ("device", "host", "storage")), text
    assert text.endswith(
        f"answers identical to cache-off: {workload.num_requests} of {workload.num_requests}\n"
    )

"""The copy benchmark: both directions at once, and a transport that fails. `make test-bench` runs it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hiradix.memory import TorchTransport
from tests.project.repo import ROOT
from tests.transfer.fake_cuda import FakeCuda

SMALL = ["--device", "cpu", "--shape", "SmolLM2-fp32", "--megabytes", "8", "--layout", "page_first"]
SMALL += ["--repeats", "1", "--page-size", "64"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("copy_bandwidth")


def test_both_ways_is_both_at_once(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: the second copy waited for the first one's end, so the ceiling was one way after the other."""
    cuda, done = FakeCuda(), list[str]()
    monkeypatch.setattr(torch, "cuda", cuda)
    cuda.current_stream().launch(lambda: done.append("before"))

    def copy(name: str) -> None:
        cuda.current_stream().launch(lambda: done.append(name))

    benchmark.both(lambda: copy("load"), lambda: copy("write"))
    own = cuda.current_stream()
    second = cuda._streams[-1]
    second.run()
    assert second is not own and done == ["before", "write"]
    own.run()
    assert done == ["before", "write", "load"], "who waits for the current stream waits for both"


def test_a_transport_that_copies_other_bytes_fails_the_run(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found: it was a line and an entry in the file, the program ended well, and so did a GPU session."""

    class Deaf(TorchTransport):
        """Copies nothing."""

        def copy_pages(self, *args: object) -> None:
            pass

    made = benchmark.transports
    monkeypatch.setattr(benchmark, "transports", lambda *args: [Deaf(), *made(*args)])
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["copy_bandwidth.py", *SMALL, "--part", "sweep", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 1 and "FAILED" in capsys.readouterr().out
    raw = json.loads(out.read_text(encoding="utf-8"))
    assert len(raw["faults"]) == 1 and {row["transport"] for row in raw["copies"]} >= {"dma", "pack"}

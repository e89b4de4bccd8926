"""Storage that was damaged while the server was down: a miss with checks on, wrong answers without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hiradix.bench_client import Answer
from hiradix.bench_report import compare, tokens_by_source
from hiradix.demo.process import ServerProcess
from tests.e2e.load import ask_all, prompts, reference_answers, three_tiers

REQUESTS = prompts(4, 1600, seed=77)


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    return reference_answers(tiny_model, REQUESTS, tmp_path_factory.mktemp("off") / "off.log")


def damage(storage: Path) -> int:
    """Overwrite a stretch in the middle of every page file; how many there were."""
    pages = [path for path in storage.rglob("*") if path.is_file() and path.stat().st_size > 8192]
    for path in pages:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"\x41" * 1024)  # as float32: 12.08
    return len(pages)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checked", [True, False], ids=["checks-on", "positive-control"])
def test_damaged_pages(tiny_model: Path, tmp_path: Path, reference: list[Answer], checked: bool) -> None:
    storage, log = tmp_path / "storage", tmp_path / "server.log"
    extra = json.dumps({"prefetch_threshold": 16, "checksum": checked})
    arguments = three_tiers(tiny_model, storage, "--hicache-storage-backend-extra-config", extra)
    with ServerProcess(arguments, log) as server:
        assert compare(ask_all(server.url, REQUESTS), reference).holds
    assert damage(storage) > 20
    with ServerProcess(arguments, log) as server:
        answers = ask_all(server.url, REQUESTS)
    served = tokens_by_source(answers)["storage"]
    assert compare(answers, reference).holds == checked
    assert (served == 0) == checked, f"{served} tokens from damaged pages"

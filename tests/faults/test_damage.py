"""Storage that was damaged while the server was down: a miss with checks on, wrong answers without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hiradix.apps.bench.client import Answer
from hiradix.apps.bench.report import compare, tokens_by_source
from tests.e2e.load import ask_all, prompts, three_tiers
from tests.e2e.warm import WarmServer

REQUESTS = prompts(4, 1600, seed=77)
BY_NAME = {"hicache_storage_identity": "tiny"}  # or the canary, which is damaged too, would see it


def damage(storage: Path) -> int:
    """Overwrite a stretch in the middle of every page file; how many there were."""
    pages = [path for path in storage.rglob("*") if path.is_file() and path.stat().st_size > 8192]
    for path in pages:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"\x41" * 1024)  # as float32: 12.08
    return len(pages)


def life(model: Path, storage: Path, checked: bool) -> list[Answer]:
    """What a server with this storage directory answers."""
    extra = json.dumps({"prefetch_threshold": 16, "deadline_s": 60, "checksum": checked, **BY_NAME})
    arguments = three_tiers(model, storage, "--hicache-storage-backend-extra-config", extra)
    with WarmServer(arguments, storage.with_suffix(".log")) as server:
        return ask_all(server.url, REQUESTS)


@pytest.mark.timeout(300)
def test_damaged_pages_are_misses_and_the_comparison_sees_them(tiny_model: Path, tmp_path: Path) -> None:
    first = life(tiny_model, tmp_path / "storage", checked=True)
    assert tokens_by_source(first)["storage"] == 0
    assert damage(tmp_path / "storage") > 20
    shutil.copytree(tmp_path / "storage", tmp_path / "trusted")
    checked = life(tiny_model, tmp_path / "storage", checked=True)
    assert tokens_by_source(checked)["storage"] == 0
    assert compare(checked, first).holds
    trusting = life(tiny_model, tmp_path / "trusted", checked=False)
    assert tokens_by_source(trusting)["storage"] > 0
    assert not compare(trusting, first).holds, "damaged pages were used and nobody noticed"

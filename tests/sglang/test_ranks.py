"""Two tensor parallel ranks on this CPU, kept equal by one vector a step over SGLang's own group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.conftest import DEVICE_TOKENS, HIRADIX, HOST, LENGTH, PAGE_SIZE, WHOLE
from tests.sglang.prompts import families, prompts
from tests.sglang.server import PATIENT, Apart, Server, assert_right_at_once

# SGLang gives each rank a NUMA node, and refuses more ranks than there are, unless it is told the cores.
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def two_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ranks")
    keys = {"disk_storage_path": str(folder / "pages"), "max_size": "32MiB", "prefetch_threshold": PAGE_SIZE}
    keys |= PATIENT | {"lock_timeout_s": 60.0}
    storage = ("--hicache-storage-backend", "disk", "--hicache-storage-prefetch-policy", "wait_complete")
    extra = ("--hicache-storage-backend-extra-config", json.dumps(keys))
    server = Server(model, folder, (*HIRADIX, *HOST, "--tp-size", "2", *storage, *extra), dict(CORES))
    try:
        yield server.launch().wait()
    finally:
        server.stop()


@pytest.mark.timeout(900)
def test_all_tiers_with_two_ranks(two_ranks: Server) -> None:
    """The storage, one of ours, was named on the command line."""
    asked = prompts(2 * DEVICE_TOKENS // LENGTH, LENGTH, "ranks")
    reference = Apart(two_ranks)
    reference.prepare(asked)
    two_ranks.flush()
    answers = [two_ranks.ask(p) for p in [*asked, *asked]]
    assert sum(a.tier("host") for a in answers) >= WHOLE * len(asked) // 2
    two_ranks.flush()
    stored = [two_ranks.ask(p) for p in asked[:3]]
    assert [a.tier("storage") for a in stored] == [WHOLE] * 3
    reference.assert_same([*answers, *stored])
    two_ranks.assert_healthy()


@pytest.mark.timeout(900)
def test_concurrent_requests_with_two_ranks(two_ranks: Server) -> None:
    assert_right_at_once(two_ranks, families(40, 5, "ranks load"))
    two_ranks.flush()
    two_ranks.assert_healthy()

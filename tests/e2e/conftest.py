"""One tiny model a test run, and how often the random tests repeat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that `hiradix serve` can load."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def num_runs() -> int:
    """How often kill and abort tests repeat: 10 here, 100 on demand (`make test-faults`)."""
    return int(os.environ.get("HIRADIX_FAULT_RUNS", "10"))

"""One tiny model a test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that `hiradix serve` can load."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))

"""One real server for all clients: a tiny model behind every tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hiradix.apps.demo.process import ServerProcess
from tests.e2e.tiny_model import write_tiny_model

KEY = "secret"


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it is served; it asks for KEY and knows its model as `tiny`."""
    folder: Path = tmp_path_factory.mktemp("clients")
    flags = [
        *("--model-path", str(write_tiny_model(folder / "model")), "--served-model-name", "tiny"),
        *("--enable-hierarchical-cache", "--hicache-no-regret", "off", "--page-size", "16"),
        *("--max-total-tokens", "4096", "--hicache-ratio", "2", "--api-key", KEY),
    ]
    with ServerProcess(flags, folder / "server.log") as server:
        yield server.url

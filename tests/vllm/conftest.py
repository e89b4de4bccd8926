"""Models for the lane, and vLLM on each without a connector to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny_model import write_tiny_model
from tests.vllm.player import Player, WarmPlayer

Start = Callable[..., Player]
REAL = {"max_model_len": 1024, "max_num_seqs": 4}  # how vLLM runs SmolLM2 here


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    """vLLM on the tiny model, without connector and prefix cache."""
    player = WarmPlayer(model, None, tmp_path_factory.mktemp("plain") / "log")
    yield player
    player.kill()


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M."""
    from hiradix.apps.engine.smollm2 import smollm2_path

    return smollm2_path(dtype="float32")


@pytest.fixture
def plain_real(real_model: Path, tmp_path: Path) -> Iterator[Player]:
    """vLLM on SmolLM2, without connector and prefix cache. It takes 2 GB, so it ends with its test."""
    player = WarmPlayer(real_model, None, tmp_path / "plain_log", **REAL)
    yield player
    player.kill()


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts vLLM with our connector; everything started is ended with the test."""
    players: list[Player] = []

    def start_one(
        connector: dict[str, Any] | None,
        path: Path = model,
        env: dict[str, str] | None = None,
        kind: type[Player] = WarmPlayer,
        **engine: Any,
    ) -> Player:
        players.append(kind(path, connector, tmp_path / f"log{len(players)}", env, **engine))
        return players[-1]

    yield start_one
    for player in players:
        player.kill()

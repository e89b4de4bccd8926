"""This lane needs clients and servers that `make test-storage` installs; without them it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage_servers.servers import Server, rclone, redis_like, weed


@pytest.fixture(scope="session", params=["redis-server", "valkey-server"])
def redis_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server of each kind for the whole session."""
    with redis_like(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture(scope="session", params=["weed", "rclone"])
def s3_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS and rclone, one of each for the whole session."""
    make = {"weed": weed, "rclone": rclone}[request.param]
    with make(tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may stall, kill and start again."""
    with rclone(tmp_path / "rclone") as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may stall, kill and start again."""
    with redis_like("redis-server", tmp_path / "redis") as server:
        yield server

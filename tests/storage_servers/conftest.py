"""This lane needs clients and servers that `make test-storage` installs; without them it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.storage_servers.servers import Server, rclone, redis_like, weed

TRIES = 3
os.environ.setdefault("MC_RPC_TIMEOUT_MS", "30000")  # Mooncake's wait for its master, which may be busy


@contextmanager
def running(make: Callable[[Path], Server], folder: Path) -> Iterator[Server]:
    """A server; another, on other ports, where it ends at its start: between the choice of a port and its use
    another process may take it. SeaweedFS has ten, and several workers start one at the same moment."""
    for number in range(TRIES):
        server = make(folder / str(number))
        try:
            server.start()
            break
        except AssertionError:
            server.kill()
            if number == TRIES - 1:
                raise
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session", params=["redis-server", "valkey-server"])
def redis_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server of each kind for the whole session."""
    with running(partial(redis_like, request.param), tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture(scope="session", params=["weed", "rclone"])
def s3_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS and rclone, one of each for the whole session."""
    make = {"weed": weed, "rclone": rclone}[request.param]
    with running(make, tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may stall, kill and start again."""
    with running(rclone, tmp_path / "rclone") as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may stall, kill and start again."""
    with running(partial(redis_like, "redis-server"), tmp_path / "redis") as server:
        yield server

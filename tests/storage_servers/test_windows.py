"""Kill -9 of a server whose model has windows, over storage that goes on serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_kill import Store, assert_windows_survive
from tests.storage_servers.servers import Server, redis_keys

NUM_RUNS = 3


@pytest.mark.long(20)
@pytest.mark.timeout(600)
def test_killed_while_writing_windows_it_restarts_and_answers_the_same(
    own_redis: Server, tmp_path: Path
) -> None:
    url = f"redis://127.0.0.1:{own_redis.port}/0"
    keys = redis_keys(own_redis) | {"deadline_s": 20.0}
    assert_windows_survive(Store(url, "redis", keys), tmp_path, NUM_RUNS)

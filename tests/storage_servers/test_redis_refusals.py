"""A Redis that answers with errors: it cannot save, is full, became a replica, loads, wants a password."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from hiradix.storage import BreakerState, GuardedStorage, open_storage
from hiradix.storage.backends.redis.commands import Refusals
from tests.contracts.storage import hits, keys_of, put
from tests.storage_servers.servers import Server, free_port, wait_for
from tests.storage_servers.test_redis_faults import context, url_of

WAYS = [
    pytest.param({"zero_copy": zero_copy, "ttl_s": ttl_s}, id=f"zero_copy={zero_copy}, ttl_s={ttl_s}")
    for zero_copy in (True, False)
    for ttl_s in (0, 1000)
]


@pytest.fixture
def client(own_redis: Server) -> Iterator[redis.Redis]:
    found = redis.Redis(port=own_redis.port)
    yield found
    found.close()


def cannot_save(server: Server, client: Any) -> Callable[[], None]:
    """Have saving to disk fail, on which it takes no writes; what mends it."""
    blocked = server.folder / "dump.rdb"
    blocked.mkdir()
    client.config_set("save", "3600 1")
    saves(client, "err")

    def mend() -> None:
        blocked.rmdir()
        saves(client, "ok")

    return mend


def saves(client: Any, status: str) -> None:
    client.execute_command("BGSAVE")
    wait_for(lambda: not client.info("persistence")["rdb_bgsave_in_progress"])
    assert client.info("persistence")["rdb_last_bgsave_status"] == status


def is_full(_: Server, client: Any) -> Callable[[], None]:
    client.config_set("maxmemory", "1mb")
    return lambda: client.config_set("maxmemory", "0")


def is_replica(_: Server, client: Any) -> Callable[[], None]:
    client.replicaof("127.0.0.1", free_port())
    return lambda: client.replicaof("NO", "ONE")


def lacks_replicas(_: Server, client: Any) -> Callable[[], None]:
    client.config_set("min-replicas-to-write", 1)
    return lambda: client.config_set("min-replicas-to-write", 0)


REFUSING = {
    "MISCONF": cannot_save,
    "OOM": is_full,
    "READONLY": is_replica,
    "NOREPLICAS": lacks_replicas,
}


def open_guard(server: Server, clock: Callable[[], float], **keys: Any) -> GuardedStorage:
    keys = {"deadline_s": 60.0, "breaker_failures": 2, "breaker_retry_s": 5.0} | keys
    return open_storage("redis", context(url_of(server), **keys), clock=clock)


def warnings_of(caplog: Any) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("keys", WAYS)
@pytest.mark.parametrize("code", REFUSING)
def test_writes_that_are_refused_cost_no_read(
    own_redis: Server, client: Any, caplog: Any, code: str, keys: dict[str, Any]
) -> None:
    """Reads that renew a page's time to live are writes to the server, and were refused with these."""
    guard = open_guard(own_redis, lambda: 0.0, **keys)
    assert all(put(guard, keys_of(3)))
    mend = REFUSING[code](own_redis, client)
    caplog.clear()
    for _ in range(4):
        assert put(guard, keys_of(6)) == [True] * 3 + [False] * 3
        assert hits(guard, keys_of(6)) == [True] * 3 + [False] * 3 and guard.exists(keys_of(6)) == 3
    stats = guard.stats()
    assert guard.state is BreakerState.CLOSED and stats["workers_busy"] == 0 and stats["late_answers"] == 0
    assert stats["backend_put_refused"] == 12
    told = warnings_of(caplog)
    assert len(told) == 1 and code in told[0]
    mend()
    assert all(put(guard, keys_of(6))) and all(hits(guard, keys_of(6)))
    assert len(warnings_of(caplog)) == 1
    guard.close()


def test_each_refusal_is_told_once_in_ten_minutes(caplog: Any) -> None:
    """A server that is full takes one page and refuses the next."""
    now_s = [0.0]
    refusals = Refusals(lambda: now_s[0])
    for at_s, replies, num_told in (
        (0, (b"-OOM no", b"-OOM no"), 1),
        (1, (b"+OK", b"-OOM no"), 1),
        (2, (b"-MISCONF no", b"-OOM no"), 2),
        (599, (b"-OOM no", b"-MISCONF no"), 2),
        (601, (b"-OOM no", b"-MISCONF no"), 3),
        (603, (b"-OOM no", b"-MISCONF no"), 4),
    ):
        now_s[0] = at_s
        assert [refusals.is_stored(reply) for reply in replies] == [reply == b"+OK" for reply in replies]
        assert len(warnings_of(caplog)) == num_told


def assert_all_fails_and_heals(
    guard: GuardedStorage, now_s: list[float], caplog: Any, mend: Callable[[], None]
) -> None:
    caplog.clear()
    for _ in range(4):
        assert put(guard, keys_of(4)) == [False] * 4 and hits(guard, keys_of(4)) == [False] * 4
    assert guard.state is BreakerState.OPEN and guard.stats()["workers_busy"] == 0
    told = warnings_of(caplog)
    assert len(told) == 2 and "open for writes" in told[0] and "open for reads" in told[1]
    now_s[0] += 6.0
    assert hits(guard, keys_of(4)) == [False] * 4 and guard.state is BreakerState.OPEN, "the probe passed"
    mend()
    now_s[0] += 61.0
    assert hits(guard, keys_of(4)) == [True] * 3 + [False]
    assert all(put(guard, keys_of(4))) and all(hits(guard, keys_of(4)))
    assert guard.state is BreakerState.CLOSED


@pytest.mark.parametrize("keys", WAYS)
def test_a_server_that_loads_what_it_saved(
    own_redis: Server, client: Any, caplog: Any, keys: dict[str, Any]
) -> None:
    now_s = [0.0]
    guard = open_guard(own_redis, lambda: now_s[0], **keys)
    assert all(put(guard, keys_of(3)))
    client.mset({f"other{number}": "x" for number in range(60_000)})
    client.save()
    slow = ["--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024"]
    own_redis.command = [*own_redis.command, *slow]  # ten minutes, unless it is told otherwise
    own_redis.restart()

    def mend() -> None:
        client.config_set("key-load-delay", 0)
        wait_for(lambda: not client.info("persistence")["loading"])

    assert_all_fails_and_heals(guard, now_s, caplog, mend)
    guard.close()


@pytest.mark.parametrize("keys", WAYS)
def test_a_server_that_wants_a_password_meanwhile(
    own_redis: Server, client: Any, caplog: Any, keys: dict[str, Any]
) -> None:
    now_s = [0.0]
    guard = open_guard(own_redis, lambda: now_s[0], **keys)
    assert all(put(guard, keys_of(3)))
    client.ping()  # this connection stays let in
    client.config_set("requirepass", "new")
    client.client_kill_filter(_type="normal", skipme=True)
    assert_all_fails_and_heals(guard, now_s, caplog, lambda: client.config_set("requirepass", ""))
    guard.close()

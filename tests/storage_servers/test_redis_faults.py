"""What a real Redis does when it dies, stalls, fills up or refuses: misses in time, hits afterwards."""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from hiradix.errors import ConfigError, StorageError
from hiradix.storage import BreakerState, StorageContext, open_storage
from hiradix.storage.backends.redis.backend import RedisBackend
from hiradix.storage.backends.redis.commands import socket_of
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    blank,
    bytes_of,
    content,
    hits,
    key_of,
    keys_of,
    page_of,
    put,
)
from tests.storage_servers.servers import PATIENT, Server, binary, free_port, opened, redis_like, wait_for

PREFIX = f"hiradix:{FINGERPRINT.digest()[:32]}:"


def context(url: str, **config: Any) -> StorageContext:
    return StorageContext(FINGERPRINT, {"url": url, **PATIENT} | config, PAGE_BYTES)


def url_of(server: Server, user: str = "", scheme: str = "redis") -> str:
    return f"{scheme}://{user}127.0.0.1:{server.port}/0"


@pytest.fixture
def backend(own_redis: Server) -> Iterator[RedisBackend]:
    store = RedisBackend(context(url_of(own_redis)))
    yield store
    store.close()


@pytest.fixture
def client(own_redis: Server) -> Iterator[redis.Redis]:
    found = redis.Redis(port=own_redis.port)
    yield found
    found.close()


def test_pages_are_plain_strings_under_prefix_and_fingerprint(backend: RedisBackend, client: Any) -> None:
    put(backend, keys_of(2))
    assert sorted(client.keys("*")) == sorted((PREFIX + key).encode() for key in keys_of(2))
    assert client.get(PREFIX + key_of(0)) == bytes_of(key_of(0))


def test_payload_bypasses_the_client_and_the_connection_goes_on(backend: RedisBackend) -> None:
    pool = backend._client.connection_pool
    connection = pool.get_connection()
    before = socket_of(connection)
    pool.release(connection)
    put(backend, keys_of(3))
    assert all(hits(backend, keys_of(3))) and backend._client.ping()
    connection = pool.get_connection()
    assert socket_of(connection) is before, "a batch cost the connection"
    pool.release(connection)


@pytest.mark.parametrize("value", [b"", b"short", bytes_of(key_of(0)) + b"x", bytes_of(key_of(0))[:-1]])
def test_value_of_another_length_is_a_miss_and_is_replaced(
    backend: RedisBackend, client: Any, value: bytes
) -> None:
    client.set(PREFIX + key_of(0), value)
    put(backend, [key_of(1)])
    assert hits(backend, keys_of(2)) == [False, True]
    assert put(backend, keys_of(1)) == [True] and hits(backend, keys_of(1)) == [True]


def test_value_of_another_type_is_a_miss_and_is_replaced(backend: RedisBackend, client: Any) -> None:
    client.rpush(PREFIX + key_of(0), "a")
    assert backend.exists(keys_of(1)) == 0 and hits(backend, keys_of(1)) == [False]
    assert put(backend, keys_of(1)) == [True] and hits(backend, keys_of(1)) == [True]


def test_a_flipped_bit_is_a_miss_behind_the_guard(own_redis: Server, client: Any) -> None:
    guard = open_storage("redis", context(url_of(own_redis), deadline_s=60.0))
    put(guard, keys_of(2))
    for name in client.keys("*"):
        client.setrange(name, 100, bytes([client.getrange(name, 100, 100)[0] ^ 4]))
        break
    assert sorted(hits(guard, keys_of(2))) == [False, True]
    assert guard.stats()["get_missed_damaged"] == 1
    assert all(put(guard, keys_of(2))) and all(hits(guard, keys_of(2))), "the damaged page stays"
    guard.close()


def test_swapped_values_are_foreign(own_redis: Server, client: Any) -> None:
    guard = open_storage("redis", context(url_of(own_redis), deadline_s=60.0))
    put(guard, keys_of(2))
    a, b = client.keys("*")
    one, two = client.get(a), client.get(b)
    client.set(a, two)
    client.set(b, one)
    assert hits(guard, keys_of(2)) == [False, False] and guard.stats()["get_missed_foreign"] == 2
    assert all(put(guard, keys_of(2))) and all(hits(guard, keys_of(2))), "foreign pages stay"
    guard.close()


def test_killed_server_is_an_error_and_comes_back_empty(own_redis: Server, backend: RedisBackend) -> None:
    put(backend, keys_of(4))
    own_redis.kill()
    with pytest.raises((StorageError, OSError)):
        hits(backend, keys_of(4))
    with pytest.raises((StorageError, OSError)):
        put(backend, keys_of(4))
    own_redis.start()
    assert hits(backend, keys_of(4)) == [False] * 4
    assert all(put(backend, keys_of(4))) and all(hits(backend, keys_of(4)))


def test_server_killed_within_a_batch(own_redis: Server, backend: RedisBackend) -> None:
    """It stops answering in the middle of the replies; pages that came are right, the call fails."""
    keys = keys_of(64)
    big = [[memoryview(bytearray(1 << 20))] for _ in keys]
    assert all(backend.put(keys, big))
    own_redis.signal(19)  # SIGSTOP: what it wrote so far is in the socket, no more comes
    backend._client.connection_pool.disconnect()
    own_redis.go_on()
    assert all(backend.get(keys, big))
    pool = backend._client.connection_pool
    connection = pool.get_connection()
    sock = socket_of(connection)
    sock.sendall(b"*2\r\n$3\r\nGET\r\n$1\r\nx\r\n")  # an answer nobody waits for
    assert select.select([sock], [], [], 30)[0]
    pool.release(connection)
    assert all(hits_big(backend, keys, big)), "a connection with a stray answer was used"
    own_redis.kill()
    with pytest.raises((StorageError, OSError)):
        backend.get(keys, big)


def hits_big(backend: RedisBackend, keys: list[str], pages: list[list[memoryview]]) -> list[bool]:
    return backend.get(keys, pages)


def test_stalled_server_times_out_and_then_serves(own_redis: Server) -> None:
    """The late answer of the call that timed out is not taken for the next one's."""
    patient = RedisBackend(context(url_of(own_redis)))
    store = opened(lambda: RedisBackend(context(url_of(own_redis), timeout_s=0.2, connect_timeout_s=0.2)))
    put(patient, keys_of(3))
    own_redis.stall()
    with pytest.raises((StorageError, OSError)):
        hits(store, keys_of(2))
    own_redis.go_on()

    def serves() -> bool:
        try:
            assert hits(store, [key_of(9), key_of(2)]) == [False, True]
        except (StorageError, OSError):  # a busy machine takes longer than this store waits
            return False
        return True

    wait_for(serves)
    store.close()
    patient.close()


def test_guard_opens_while_the_server_is_gone_and_closes_when_it_is_back(own_redis: Server) -> None:
    clock = [0.0]
    keys = {"breaker_failures": 2, "deadline_s": 30.0, "breaker_retry_s": 5.0}
    guard = open_storage("redis", context(url_of(own_redis), **keys), clock=lambda: clock[0])
    put(guard, keys_of(2))
    own_redis.kill()
    for _ in range(3):
        assert hits(guard, keys_of(2)) == [False, False]
    assert guard.state is BreakerState.OPEN and guard.stats()["get_missed_breaker_open"] == 2
    own_redis.start()
    clock[0] += 6.0
    assert hits(guard, keys_of(2)) == [False, False]
    assert guard.state is BreakerState.CLOSED
    assert all(put(guard, keys_of(2))) and all(hits(guard, keys_of(2)))
    guard.close()


@pytest.mark.parametrize("zero_copy", [True, False])
def test_full_server_refuses_pages_and_keeps_others(own_redis: Server, client: Any, zero_copy: bool) -> None:
    store = RedisBackend(context(url_of(own_redis), zero_copy=zero_copy))
    assert all(put(store, keys_of(2)))
    client.config_set("maxmemory", "1mb")
    assert put(store, keys_of(4)) == [True, True, False, False]
    assert hits(store, keys_of(4)) == [True, True, False, False]
    client.config_set("maxmemory", "0")
    assert all(put(store, keys_of(4)))
    store.close()


def test_expiry_is_renewed_by_reading(own_redis: Server, client: Any) -> None:
    store = RedisBackend(context(url_of(own_redis), ttl_s=1000))
    put(store, keys_of(1))
    name = PREFIX + key_of(0)
    assert 900_000 < client.pttl(name) <= 1_000_000
    client.pexpire(name, 500_000)
    assert hits(store, keys_of(1)) == [True] and client.pttl(name) > 900_000
    store.close()


@pytest.mark.parametrize("zero_copy", [True, False])
def test_expiry_is_renewed_by_putting_what_is_there(own_redis: Server, client: Any, zero_copy: bool) -> None:
    store = RedisBackend(context(url_of(own_redis), ttl_s=1000, zero_copy=zero_copy))
    assert all(put(store, keys_of(2)))
    client.pexpire(PREFIX + key_of(0), 500_000)
    assert put(store, keys_of(3)) == [True] * 3
    assert all(client.pttl(PREFIX + key) > 900_000 for key in keys_of(3)), "a page just put may soon go"
    assert store.stats()["put_present"] == 2
    store.close()


def test_password_and_user(tmp_path: Path) -> None:
    server = redis_like("redis-server", tmp_path / "r", "--requirepass", "s3cret pass").start()
    (tmp_path / "password").write_text("s3cret pass\n")
    for keys in ({"password": "s3cret pass"}, {"password_file": str(tmp_path / "password")}):
        store = RedisBackend(context(url_of(server), **keys))
        assert all(put(store, keys_of(2))) and all(hits(store, keys_of(2)))
        store.close()
    for keys in ({}, {"password": "wrong"}):
        with pytest.raises(ConfigError, match="url: cannot use the redis server") as raised:
            RedisBackend(context(url_of(server), **keys))
        assert "s3cret" not in str(raised.value)
    server.kill()


def test_password_that_changes_under_a_handle_is_an_error(own_redis: Server, client: Any) -> None:
    store = RedisBackend(context(url_of(own_redis)))
    put(store, keys_of(1))
    client.config_set("requirepass", "new")
    store._client.connection_pool.disconnect()
    with pytest.raises((StorageError, OSError)):
        hits(store, keys_of(1))
    store.close()


def test_unix_socket(tmp_path: Path) -> None:
    server = redis_like("redis-server", tmp_path / "r", "--unixsocket", "s.sock").start()
    store = RedisBackend(context(f"unix://{server.folder}/s.sock"))
    assert all(put(store, keys_of(40))) and all(hits(store, keys_of(40)))
    store.close()
    server.kill()


def make_certificate(folder: Path) -> dict[str, str]:
    """Of 127.0.0.1, trusting itself: paths of its `cert` and `key`."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return {name: str(folder / f"{name}.pem") for name in ("key", "cert")}


def test_tls(tmp_path: Path) -> None:
    pem = make_certificate(tmp_path)
    port = free_port()
    server = redis_like(
        "redis-server", tmp_path / "r", "--tls-port", str(port), "--tls-auth-clients", "no",
        "--tls-cert-file", pem["cert"], "--tls-key-file", pem["key"], "--tls-ca-cert-file", pem["cert"],
    ).start()  # fmt: skip
    url = f"rediss://127.0.0.1:{port}/0"
    store = RedisBackend(context(url, tls_ca_file=pem["cert"]))
    page = [[memoryview(bytearray(300_000))], page_of("x")]
    assert store.put(["big", "x"], page) == [True, True]
    assert hits(store, ["x"]) == [True] and store.get(["big"], page[:1]) == [True]
    store.close()
    with pytest.raises(ConfigError, match="cannot use the redis server"):
        RedisBackend(context(url))  # its certificate is not trusted
    server.kill()


def test_sentinel_names_the_master(own_redis: Server, tmp_path: Path) -> None:
    conf = tmp_path / "sentinel.conf"
    conf.write_text(f"sentinel monitor pages 127.0.0.1 {own_redis.port} 1\n")
    port = free_port()
    sentinel = Server(
        [binary("redis-server"), str(conf), "--sentinel", "--port", str(port), "--bind", "127.0.0.1"],
        port, tmp_path / "sentinel",
    ).start()  # fmt: skip
    keys = {"sentinels": f"127.0.0.1:{port}", "sentinel_service": "pages"}
    store = RedisBackend(context("redis://unused", **keys))
    assert all(put(store, keys_of(20))) and all(hits(store, keys_of(20)))
    store.close()
    with pytest.raises(ConfigError, match="sentinels: cannot use"):
        RedisBackend(context("redis://unused", **(keys | {"sentinel_service": "other"})))
    sentinel.kill()


def is_whole(node: Any) -> bool:
    return "'cluster_state': 'ok'" in str(node.execute_command("CLUSTER INFO"))


def meet(nodes: list[Any], others: list[tuple[int, int]]) -> None:
    """Until each of the nodes knows all by name; `others` are the ports of all but the first. A meeting that
    takes longer than a node may be silent ends without a result, and is begun again."""
    names = [as_text(node.execute_command("CLUSTER", "MYID")) for node in nodes]

    def known(node: Any) -> set[str]:
        found = node.execute_command("CLUSTER NODES").values()
        return {one["node_id"] for one in found if one["connected"] and "handshake" not in one["flags"]}

    def have_met() -> bool:
        missing = [at for at, name in enumerate(names[1:]) if name not in known(nodes[0])]
        if missing and time.monotonic() > again_s[0]:
            again_s[0] = time.monotonic() + 5.0
            for at in missing:
                nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", *others[at])
        return not missing and all(known(node) >= set(names) for node in nodes)

    again_s = [0.0]
    wait_for(have_met)


def as_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[Server]]:
    bus = [free_port(), free_port()]
    servers = [
        redis_like(
            "valkey-server", tmp_path / f"n{number}", "--cluster-enabled", "yes", "--cluster-port", str(port)
        ).start()
        for number, port in enumerate(bus)
    ]
    nodes = [redis.Redis(port=server.port) for server in servers]
    for node, (low, high) in zip(nodes, ((0, 8000), (8001, 16383))):
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
    meet(nodes, [(servers[1].port, bus[1])])
    wait_for(lambda: all(is_whole(node) for node in nodes))
    yield servers
    for server in servers:
        server.kill()


@pytest.mark.parametrize("zero_copy", [True, False])
def test_cluster(cluster: list[Server], zero_copy: bool) -> None:
    store = RedisBackend(context(url_of(cluster[0]), cluster=True, zero_copy=zero_copy))
    keys = keys_of(60)
    assert put(store, keys) == [True] * 60 and store.exists(keys) == 60
    assert hits(store, keys + keys_of(5, 100)) == [True] * 60 + [False] * 5
    assert all(redis.Redis(port=server.port).dbsize() > 5 for server in cluster)
    store.delete(keys[:1])
    assert store.exists(keys) == 0 and store.exists(keys[1:]) == 59
    store.clear()
    assert [redis.Redis(port=server.port).dbsize() for server in cluster] == [0, 0]
    store.close()


def test_cluster_slot_that_moves(cluster: list[Server]) -> None:
    """A slot given to the other node while a handle is open: MOVED is followed, and nothing is lost."""
    store = RedisBackend(context(url_of(cluster[0]), cluster=True))
    keys = keys_of(30)
    nodes = [redis.Redis(port=server.port) for server in cluster]
    slot = nodes[0].execute_command("CLUSTER", "KEYSLOT", PREFIX + keys[0])
    owner = 0 if slot <= 8000 else 1
    target = nodes[1 - owner].execute_command("CLUSTER", "MYID")
    source = nodes[owner].execute_command("CLUSTER", "MYID")
    # Who imports a slot has it with a later epoch: what the other one said before has no weight any more.
    nodes[1 - owner].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source)
    for node in (nodes[1 - owner], nodes[owner]):
        node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target)
    assert put(store, keys) == [True] * 30 and hits(store, keys) == [True] * 30
    store.close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"url": "http://x"}, "url must begin"),
        ({"sentinels": "nowhere"}, 'expected "host:port'),
        ({"key_prefix": "a*b"}, "key_prefix must be"),
        ({"ttl": 5}, "ttl is no key of storage backend redis"),
        ({"cluster": True, "sentinels": "a:1"}, "exclude each other"),
        ({"password_file": "/does/not/exist"}, "password_file: cannot read"),
        ({"timeout_s": 0}, "timeout_s must be"),
    ],
)
def test_bad_keys_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RedisBackend(StorageContext(FINGERPRINT, keys, PAGE_BYTES))


@pytest.mark.parametrize("cluster", [False, True])
def test_unreachable_server_is_refused_at_start(cluster: bool) -> None:
    with pytest.raises(ConfigError, match="url: cannot use the redis server"):
        RedisBackend(context(f"redis://127.0.0.1:{free_port()}/0", cluster=cluster))


def test_large_pages_and_unusual_replies(backend: RedisBackend) -> None:
    """Payloads far longer than any buffer, and pages that hold what looks like protocol."""
    data = (b"\r\n$5\r\n-ERR\r\n+OK\r\n:1\r\n" * 200_000)[:3_000_001]
    assert backend.put(["a", "b"], [[memoryview(data)], [memoryview(data[:-1])]]) == [True, True]
    into = [blank(len(data)), blank(len(data) - 1), blank(5)]
    assert backend.get(["a", "b", "a"], into) == [True, True, False]
    assert content(into[0]) == data and content(into[1]) == data[:-1]

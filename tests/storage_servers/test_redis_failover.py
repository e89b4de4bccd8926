"""Another server takes the first one's place: pages are stored there, and nobody stays with the old one."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from hiradix.errors import ConfigError, StorageError
from hiradix.storage.backends.redis.backend import RedisBackend
from hiradix.storage.backends.redis.commands import SocketCommands
from tests.contracts.storage import hits, keys_of, put
from tests.storage_servers.servers import Server, binary, free_port, redis_like, wait_for
from tests.storage_servers.test_redis_faults import context, is_whole, meet, url_of


class Name(socketserver.ThreadingTCPServer):
    """A name that stands for a server: connections go to `port`, those that are there stay where they are."""

    daemon_threads = True

    def __init__(self, port: int):
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.port = port
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def finish_request(self, request: object, address: object) -> None:
        assert isinstance(request, socket.socket)
        with socket.create_connection(("127.0.0.1", self.port)) as far:
            back = threading.Thread(target=_pass_on, args=(far, request), daemon=True)
            back.start()
            _pass_on(request, far)
            back.join()


def _pass_on(source: object, target: object) -> None:
    assert isinstance(source, socket.socket) and isinstance(target, socket.socket)
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_master_that_became_a_replica_is_left(own_redis: Server, tmp_path: Path, zero_copy: bool) -> None:
    with redis_like("redis-server", tmp_path / "other") as other:
        name = Name(own_redis.port)
        store = RedisBackend(context(f"redis://127.0.0.1:{name.server_address[1]}/0", zero_copy=zero_copy))
        assert all(put(store, keys_of(4)))
        name.port = other.port
        redis.Redis(port=own_redis.port).execute_command("REPLICAOF", "127.0.0.1", other.port)
        put(store, keys_of(4, 10))
        assert all(put(store, keys_of(4, 10))), "pages are refused by a replica for ever"
        assert redis.Redis(port=other.port).dbsize() == 4
        store.close()
        name.shutdown()
        name.server_close()


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("call", [hits, put, RedisBackend.delete])
def test_a_replica_is_left_by_calls_that_let_pages_live_longer_or_go(
    own_redis: Server, tmp_path: Path, zero_copy: bool, call: Callable[..., object]
) -> None:
    with redis_like("redis-server", tmp_path / "other") as other:
        name, old = Name(own_redis.port), redis.Redis(port=own_redis.port)
        url = f"redis://127.0.0.1:{name.server_address[1]}/0"
        store = RedisBackend(context(url, zero_copy=zero_copy, ttl_s=60))
        assert all(put(store, keys_of(4)))
        name.port = other.port
        old.execute_command("REPLICAOF", "127.0.0.1", free_port())  # nobody there: it keeps what it has
        if (call, zero_copy) == (put, True):  # pages that it sends unasked are refused at once
            assert put(store, keys_of(4)) == [True] * 4, "pages were not put again into the new master"
        else:
            if call is RedisBackend.delete:
                with pytest.raises(StorageError, match="READONLY"):
                    store.delete(keys_of(4))
            else:  # goes on without renewing: a read by the new master, a put with what the replica has
                assert call(store, keys_of(4)) == [call is put] * 4
            assert hits(store, keys_of(4)) == [False] * 4, "pages are asked of a replica for ever"
        assert all(put(store, keys_of(4))) and redis.Redis(port=other.port).dbsize() == 4
        store.close()
        name.shutdown()
        name.server_close()


@contextmanager
def _cluster(tmp_path: Path) -> Iterator[list[Server]]:
    bus = [free_port() for _ in range(4)]
    servers = [
        redis_like(
            "valkey-server", tmp_path / f"n{number}", "--cluster-enabled", "yes", "--cluster-port", str(port),
            "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no",
        ).start()
        for number, port in enumerate(bus)
    ]  # fmt: skip
    try:
        nodes = [redis.Redis(port=server.port) for server in servers]
        for node, (low, high) in zip(nodes, ((0, 5000), (5001, 10000), (10001, 16383))):
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
        for number, node in enumerate(nodes):
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        meet(nodes, [(other.port, port) for other, port in zip(servers[1:], bus[1:])])
        nodes[3].execute_command("CLUSTER", "REPLICATE", nodes[2].execute_command("CLUSTER", "MYID"))
        wait_for(lambda: nodes[3].info("replication")["master_link_status"] == "up")
        wait_for(lambda: all(is_whole(node) for node in nodes))
        yield servers
    finally:
        for server in servers:
            server.kill()


def _masters(node: redis.Redis) -> set[int]:
    """The ports of those that have slots, as far as `node` knows."""
    return {master[1] for _, _, master, *_ in node.execute_command("CLUSTER SLOTS")}


@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_replica_that_takes_a_dead_nodes_place_is_found(tmp_path: Path, zero_copy: bool) -> None:
    with _cluster(tmp_path) as servers:
        store = RedisBackend(context(url_of(servers[0]), cluster=True, zero_copy=zero_copy))
        keys = keys_of(60)
        assert all(put(store, keys))
        servers[2].kill()
        left = [redis.Redis(port=server.port) for server in (servers[0], servers[1], servers[3])]
        wait_for(lambda: all(servers[2].port not in _masters(node) for node in left))
        for _ in range(3):
            try:
                found = put(store, keys)
                break
            except (StorageError, OSError) as error:
                found = [repr(error)]
        assert found == [True] * 60, "who takes over is not asked for"
        assert hits(store, keys) == [True] * 60
        store.close()


def test_a_sentinels_master_has_the_urls_database_and_password(tmp_path: Path) -> None:
    conf = tmp_path / "sentinel.conf"
    with redis_like("redis-server", tmp_path / "r", "--requirepass", "p/w") as master:
        conf.write_text(f"sentinel monitor pages 127.0.0.1 {master.port} 1\nsentinel auth-pass pages p/w\n")
        port = free_port()
        command = [
            binary("redis-server"),
            str(conf),
            "--sentinel",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
        ]
        with Server(command, port, tmp_path / "sentinel"):
            keys = {"sentinels": f"127.0.0.1:{port}", "sentinel_service": "pages"}
            store = RedisBackend(context("redis://:p%2Fw@unused/3", **keys))
            assert all(put(store, keys_of(5)))
            assert redis.Redis(port=master.port, password="p/w", db=3).dbsize() == 5
            store.close()


@pytest.mark.parametrize(
    "url",
    ["redis://me:s3cr/et@h:1/0", "redis://:s3cr#et@h:1/0", "redis://:s3cr?et@h:1/0",
     "redis://:5#s3cr@h:1/0", "redis://:6?s3cr@h:1/0", "redis://:7/s3cr@h:1/0", "redis://:s3cr[@h:1/0"],
)  # fmt: skip
def test_a_password_that_splits_the_url_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="url cannot be read: .*percent") as raised:
        RedisBackend(context(url))
    seen: BaseException | None = raised.value
    while seen is not None:
        assert "s3cr" not in str(seen)
        seen = seen.__cause__


@pytest.mark.parametrize("option", ["protocol=3", "decode_responses=true"])
def test_a_url_does_not_choose_how_replies_are_read(option: str) -> None:
    with pytest.raises(ConfigError, match=f"url: {option.partition('=')[0]} cannot be chosen"):
        RedisBackend(context(f"redis://127.0.0.1:1/0?{option}"))


@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_master_without_its_replicas_refuses_pages_and_gives_others(
    own_redis: Server, zero_copy: bool
) -> None:
    store = RedisBackend(context(url_of(own_redis), zero_copy=zero_copy))
    assert all(put(store, keys_of(2)))
    redis.Redis(port=own_redis.port).config_set("min-replicas-to-write", 1)
    assert put(store, keys_of(4)) == [True, True, False, False]
    assert hits(store, keys_of(4)) == [True, True, False, False]
    store.close()


class OneConnection:
    """A pool and its only connection, whose other end is the test's."""

    def __init__(self) -> None:
        self._sock, self.far = socket.socketpair()
        self._sock.settimeout(0.05)  # what has been sent is there
        self.connection_pool, self.num_closed = self, 0

    def get_connection(self) -> OneConnection:
        return self

    def release(self, connection: OneConnection) -> None:
        assert connection is self

    def disconnect(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize(
    ("replies", "is_closed"),
    [
        (b"$4\r\nab", True),  # the rest may come when the next call waits for its own
        (b"$4\r\nabcd", True),
        (b"$4", True),
        (b"?what\r\n", True),
        (b"$4\r\nabcd\r\n:1\r\n", True),
        (b"$4\r\nabcdXY", True),  # longer than it said
        (b"$-7\r\n", True),
        (b"$x\r\n", True),
        (b"$" + b"9" * 5000 + b"\r\n", True),
        (b"$4\r\nabcd\r\n", False),
        (b"$-1\r\n", False),
        (b"-LOADING wait\r\n", False),
    ],
)
def test_a_connection_is_kept_only_behind_its_last_reply(replies: bytes, is_closed: bool) -> None:
    only = OneConnection()
    only.far.sendall(replies)
    with suppress(OSError, StorageError):
        SocketCommands(only).get([b"name"], [[memoryview(bytearray(4))]], 0)
    assert only.num_closed == is_closed
    only.far.close()


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("reply", [b":x\r\n", b"$x\r\n", b":" + b"9" * 5000 + b"\r\n"])
def test_replies_that_are_none_are_faults_of_the_store(reply: bytes, zero_copy: bool) -> None:
    """Whatever a client library makes of them: only such faults are tried again."""
    greeting = {b"PING": b"+PONG\r\n", b"CLIENT": b"+OK\r\n", b"INFO": b"$0\r\n\r\n"}

    class Babbler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                lengths = (int(self.rfile.readline()[1:]) for _ in range(int(line[1:])))
                words = [self.rfile.read(length + 2)[:-2] for length in lengths]
                self.wfile.write(greeting.get(words[0], reply))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Babbler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"redis://127.0.0.1:{server.server_address[1]}"
        store = RedisBackend(context(url, zero_copy=zero_copy, timeout_s=5.0))
        keys = keys_of(2)
        calls: list[Callable[[], object]] = [
            lambda: store.exists(keys), lambda: hits(store, keys), lambda: put(store, keys),
            lambda: store.delete(keys), store.clear,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises((StorageError, OSError)):
                call()
        store.close()
        server.shutdown()


def test_a_page_that_expires_while_it_is_put_is_stored_anew(
    own_redis: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisBackend(context(url_of(own_redis), ttl_s=100))
    assert all(put(store, keys_of(2)))
    lengths = store._commands.lengths

    def then_gone(names: Sequence[bytes]) -> list[int]:
        found = lengths(names)
        redis.Redis(port=own_redis.port).delete(names[0])
        return found

    monkeypatch.setattr(store._commands, "lengths", then_gone)
    assert put(store, keys_of(2)) == [True, True] and hits(store, keys_of(2)) == [True, True]
    store.close()

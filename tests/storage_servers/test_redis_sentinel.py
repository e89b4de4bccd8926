"""Sentinels that put a replica in a killed master's place, as a store lives through it; dead sentinels."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from hiradix.errors import ConfigError, StorageError
from hiradix.storage.backends.redis.backend import RedisBackend
from tests.contracts.storage import blank, bytes_of, content, keys_of, put
from tests.storage_servers.servers import Server, binary, free_port, redis_like, wait_for
from tests.storage_servers.test_redis_faults import context, make_certificate

SECRET, SENTINEL_SECRET = "p/w-s3cr", "snt-s3cr"
AUTH = ("--requirepass", SECRET, "--masterauth", SECRET, "--repl-diskless-sync-delay", "0")
CONF = """port {port}
bind 127.0.0.1
requirepass {secret}
sentinel monitor pages 127.0.0.1 {master} 2
sentinel auth-pass pages {password}
sentinel down-after-milliseconds pages 600000
sentinel failover-timeout pages 3000
"""


@dataclass(frozen=True)
class Watched:
    """A master and its replica, and three sentinels that know all of these."""

    master: Server
    replica: Server
    sentinels: tuple[Server, ...]

    def is_ready(self) -> bool:
        kept = redis.Redis(port=self.replica.port, password=SECRET)
        asked = [redis.Redis(port=one.port, password=SENTINEL_SECRET) for one in self.sentinels]
        told = [one.sentinel_master("pages") for one in asked]
        known = all(one["num-other-sentinels"] == 2 and one["num-slaves"] == 1 for one in told)
        return known and kept.info("replication")["master_link_status"] == "up"

    def notice(self) -> None:
        """From now on the sentinels that are left take a silent master for dead: until here a busy machine
        could make it so."""
        for one in self.sentinels[1:]:
            client = redis.Redis(port=one.port, password=SENTINEL_SECRET)
            client.sentinel_set("pages", "down-after-milliseconds", 1000)

    def keys(self, sentinel_secret: str = SENTINEL_SECRET) -> dict[str, str]:
        return {
            "sentinels": ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels),
            "sentinel_service": "pages",
            "sentinel_password": sentinel_secret,
        }


def _sentinel(folder: Path, master: Server) -> Server:
    folder.mkdir()
    port, path = free_port(), folder / "sentinel.conf"
    path.write_text(CONF.format(port=port, secret=SENTINEL_SECRET, master=master.port, password=SECRET))
    return Server([binary("redis-server"), str(path), "--sentinel"], port, folder)


@contextmanager
def _watched(folder: Path) -> Iterator[Watched]:
    with ExitStack() as stack:
        master = stack.enter_context(redis_like("redis-server", folder / "m", *AUTH))
        follow = ("--replicaof", "127.0.0.1", str(master.port))
        replica = stack.enter_context(redis_like("redis-server", folder / "r", *AUTH, *follow))
        sentinels = [stack.enter_context(_sentinel(folder / f"s{n}", master)) for n in range(3)]
        found = Watched(master, replica, tuple(sentinels))
        wait_for(found.is_ready)
        yield found


def _exact_hits(store: RedisBackend, keys: list[str]) -> list[bool]:
    pages = [blank() for _ in keys]
    ok = store.get(keys, pages)
    for key, page, good in zip(keys, pages, ok):
        assert not good or content(page) == bytes_of(key), f"{key}: not what was stored"
    return ok


@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_killed_master_is_followed_to_the_replica_that_takes_its_place(
    tmp_path: Path, zero_copy: bool
) -> None:
    """The first sentinel dies with it, as where both run on one host."""
    with _watched(tmp_path) as watched:
        store = RedisBackend(context("redis://:p%2Fw-s3cr@unused/0", zero_copy=zero_copy, **watched.keys()))
        old, new = keys_of(8), keys_of(8, 100)
        kept = redis.Redis(port=watched.replica.port, password=SECRET)
        assert all(put(store, old))
        wait_for(lambda: kept.dbsize() == 8)
        watched.master.kill()
        watched.sentinels[0].kill()
        watched.notice()
        errors: list[str] = []

        def served() -> bool:
            try:
                return all(_exact_hits(store, old)) and all(put(store, new))
            except (StorageError, OSError) as error:
                errors.append(repr(error))
                return False

        wait_for(served)
        assert errors, "the master was killed and nobody noticed"
        assert not [text for text in errors if "s3cr" in text]
        assert kept.dbsize() == 16 and all(_exact_hits(store, new))
        store.close()


def test_a_sentinels_refusal_shows_no_secret(tmp_path: Path) -> None:
    with _watched(tmp_path) as watched:
        for keys in (watched.keys("wrong-s3cr"), watched.keys() | {"sentinel_service": "others"}):
            with pytest.raises(ConfigError, match="sentinels: cannot use the redis server") as raised:
                RedisBackend(context("redis://:p%2Fw-s3cr@unused/0", **keys))
            assert "s3cr" not in str(raised.value)


@contextmanager
def _over_tls(folder: Path, pem: dict[str, str]) -> Iterator[int]:
    """A master that a sentinel watches, neither of which speaks without TLS. Gives the sentinel's port."""
    port, asked = free_port(), free_port()
    files = {"tls-cert-file": pem["cert"], "tls-key-file": pem["key"], "tls-ca-cert-file": pem["cert"]}
    more = {**files, "tls-replication": "yes", "tls-auth-clients": "yes", "port": "0"}
    arguments = [text for name, value in more.items() for text in (f"--{name}", value)]
    conf = folder / "sentinel.conf"
    lines = [f"{name} {value}" for name, value in more.items()]
    lines += [f"tls-port {asked}", "bind 127.0.0.1", f"sentinel monitor pages 127.0.0.1 {port} 1"]
    lines += [f"sentinel auth-pass pages {SECRET}", f"requirepass {SENTINEL_SECRET}"]
    conf.write_text("\n".join(lines))
    master = redis_like("redis-server", folder / "m", "--tls-port", str(port), *arguments, *AUTH, port=port)
    with master, Server([binary("redis-server"), str(conf), "--sentinel"], asked, folder):
        yield asked


def test_sentinels_over_tls(tmp_path: Path) -> None:
    pem = make_certificate(tmp_path)
    files = {"tls_ca_file": pem["cert"], "tls_cert_file": pem["cert"], "tls_key_file": pem["key"]}
    url = "rediss://:p%2Fw-s3cr@unused/0"
    with _over_tls(tmp_path, pem) as port:
        keys = {"sentinels": f"127.0.0.1:{port}", "sentinel_service": "pages",
                "sentinel_password": SENTINEL_SECRET, **files}  # fmt: skip
        store = RedisBackend(context(url, sentinel_tls=True, **keys))
        assert all(put(store, keys_of(8))) and all(_exact_hits(store, keys_of(8)))
        store.close()
        for wrong in ({"sentinel_tls": False}, {"sentinel_tls": True, "tls_ca_file": ""}):
            with pytest.raises(ConfigError, match="sentinels: cannot use the redis server") as raised:
                RedisBackend(context(url, **(keys | wrong), timeout_s=5.0))
            assert "s3cr" not in str(raised.value)


class Silent:
    """Takes connections, closes them at once, and counts."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.num_asked += 1
            connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def test_a_sentinel_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    """redis-py's own retries wait for seconds in between, longer than a call may take."""
    silent = Silent()
    with _watched(tmp_path) as watched:
        keys = watched.keys()
        keys["sentinels"] = f"127.0.0.1:{silent.port},{keys['sentinels']}"
        store = RedisBackend(context("redis://:p%2Fw-s3cr@unused/0", **keys))
        assert silent.num_asked == 1
        assert all(put(store, keys_of(2)))
        store.close()
    silent.close()

"""The conformance suite on real Redis and Valkey servers: on the socket, through redis-py, and guarded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hiradix.storage import GuardedStorage, PageFingerprint, StorageContext, open_storage
from hiradix.storage.backends.redis.backend import RedisBackend
from tests.contracts.storage import (
    FINGERPRINT,
    PAGE_BYTES,
    NamespaceContract,
    PersistentContract,
    SharedContract,
    SharedQuotaContract,
    StorageContract,
)
from tests.storage_servers.servers import Server, prefix_of, redis_keys


class OnServer:
    """`place` becomes a key prefix: one server holds the stores of all tests."""

    keys: dict[str, Any] = {}
    server: Server

    @pytest.fixture(autouse=True)
    def _server(self, redis_server: Server) -> None:
        self.server = redis_server

    def context(self, place: Path, fingerprint: PageFingerprint, config: dict[str, Any]) -> StorageContext:
        prefix = prefix_of(place)
        extra = redis_keys(self.server) | {"key_prefix": prefix} | self.keys | config
        return StorageContext(fingerprint, extra, PAGE_BYTES)

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> Any:
        return RedisBackend(self.context(place, fingerprint, config))


class TestRedis(OnServer, StorageContract, PersistentContract, NamespaceContract, SharedContract):
    """Payload straight on the socket."""


class TestRedisThroughClient(OnServer, StorageContract, SharedContract):
    keys = {"zero_copy": False}


class TestRedisWithTtl(OnServer, StorageContract):
    keys = {"ttl_s": 600}


class TestGuardedRedis(
    OnServer, StorageContract, PersistentContract, NamespaceContract, SharedContract, SharedQuotaContract
):
    raises = False

    def open(self, place: Path, fingerprint: PageFingerprint = FINGERPRINT, **config: Any) -> GuardedStorage:
        name = "valkey" if "valkey" in self.server.command[0] else "redis"
        return open_storage(name, self.context(place, fingerprint, {"deadline_s": 30.0} | config))

"""The redis-py client of the `redis` backend: pool, AUTH, TLS, Sentinel, cluster."""

from __future__ import annotations

import re
import ssl
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import parse_url
from redis.exceptions import (
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    RedisClusterException,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from hiradix.errors import ConfigError, Unreachable
from hiradix.storage.backends.redis.config import TLS, RedisConfig
from hiradix.storage.kit.options import flag
from hiradix.storage.kit.reach import causes, is_unreachable

CLIENT_FAULTS = (redis.RedisError, RedisClusterException)
"""All that redis-py raises of its own: the second is none of the first."""
_FAULTS = (*CLIENT_FAULTS, OSError, ValueError, TypeError)
_AWAY = (
    redis.BusyLoadingError, redis.TimeoutError, ClusterDownError, MasterDownError, MasterNotFoundError,
    TryAgainError,
)  # fmt: skip
_AWAY_TEXT = re.compile(
    r"LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY |MISCONF|OOM |max number of clients", re.IGNORECASE
)
"""Of a server that answers that it cannot serve at the moment."""
_OF_VALUES = (redis.AuthenticationError, AuthorizationError, NoPermissionError, ValueError, TypeError)
_SSL_ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""A connection that ended: the others are of certificates, protocols and ciphers."""


def connect(config: RedisConfig) -> Any:
    """A `redis.Redis` or `RedisCluster` whose server has answered. Raises ConfigError with its reason.

    Unreachable where none has, or one that cannot serve yet; what it says of a password, a database or a
    certificate is of values.
    """
    client = None
    try:
        client = _client(config)
        client.ping()
    except _FAULTS as error:
        is_away = _is_away(error) and not (config.sentinels and _is_refused_by_sentinels(config))
        if client is not None:
            with suppress(Exception):  # the first fault is to be told
                client.close()
        where = "sentinels" if config.sentinels else "url"
        kind = Unreachable if is_away else ConfigError
        raise kind(f"{flag(where)}: cannot use the redis server: {error}") from error
    return client


def _is_away(error: BaseException) -> bool:
    """Whether the server does not answer, or says that it cannot serve at the moment."""
    chain = list(causes(error))
    if any(isinstance(one, _OF_VALUES) or "certificate" in str(one).lower() for one in chain):
        return False
    if any(isinstance(one, ssl.SSLError) and not isinstance(one, _SSL_ENDS) for one in chain):
        return any(isinstance(one, TimeoutError) for one in chain)
    if any(isinstance(one, _AWAY) or _AWAY_TEXT.match(str(one)) for one in chain):
        return True
    return any(map(is_unreachable, chain)) and not any(
        isinstance(one, redis.ResponseError | redis.InvalidResponse) for one in chain
    )


def _is_refused_by_sentinels(config: RedisConfig) -> bool:
    """Whether a sentinel answers, and what is wrong is the password or the service's name."""
    faults: list[BaseException] = []
    for sentinel in _keeper(config).sentinels:
        try:
            if config.sentinel_service in sentinel.sentinel_masters():
                return False
            faults.append(ConfigError("no such service"))
        except _FAULTS as error:
            if not _is_away(error):
                faults.append(error)
        finally:
            with suppress(Exception):
                sentinel.close()
    return bool(faults)


def _common(config: RedisConfig) -> dict[str, Any]:
    """Arguments of redis-py for the server that keeps the pages."""
    common: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        **config.secrets,
    }
    if config.url.startswith("unix://"):
        common.pop("socket_connect_timeout")
    return common


def _client(config: RedisConfig) -> Any:
    common = _common(config)
    if config.cluster:
        return RedisCluster.from_url(config.url, **common | {"retry": Retry(NoBackoff(), 1)})
    if config.sentinels:
        tls = {"ssl": True} if config.url.startswith(TLS) else {}
        return _keeper(config).master_for(config.sentinel_service, **tls, **common | _asked(config))
    return redis.Redis.from_url(config.url, **common)


def _keeper(config: RedisConfig) -> Any:
    """The client of the sentinels."""
    common = _common(config)
    shared = ("protocol", "socket_timeout", "socket_connect_timeout", "retry")
    own = {name: common[name] for name in shared if name in common}
    own |= {"password": config.sentinel_password} if config.sentinel_password else {}
    if config.sentinel_tls:
        given = {**common, **_asked(config)}
        own |= {"ssl": True} | {name: value for name, value in given.items() if name.startswith("ssl_")}
    return Sentinel(list(config.sentinels), sentinel_kwargs=own)


def _asked(config: RedisConfig) -> dict[str, Any]:
    """The options in the URL, beside the server's address."""
    where = ("host", "port", "path", "connection_class")
    return {name: value for name, value in parse_url(config.url).items() if name not in where}


def server_memory(client: Any) -> tuple[int, str]:
    """The server's `maxmemory` in bytes (0: none) and its eviction policy; (0, "") where it does not say."""
    try:
        found = client.info("memory")
    except _FAULTS:
        return 0, ""
    if found and all(isinstance(value, dict) for value in found.values()):  # of a cluster: by node
        found = next(iter(found.values()))
    return int(found.get("maxmemory", 0)), str(found.get("maxmemory_policy", ""))

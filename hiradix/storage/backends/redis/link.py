"""Keys of the `redis` backend, and the redis-py client made from them: pool, AUTH, TLS, Sentinel, cluster."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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

from hiradix.config import read_small_file
from hiradix.errors import ConfigError, Unreachable
from hiradix.storage.kit.options import MAX_TIMEOUT_S, Options, flag, parse_address
from hiradix.storage.kit.reach import causes, is_unreachable

SCHEMES = ("redis://", "rediss://", "unix://")
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:\-]{0,63}")
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
_OURS = ("protocol", "decode_responses")  # pages are read as RESP2, as bytes
_TLS = "rediss://"
_TLS_FILES = {"tls_ca_file": "ssl_ca_certs", "tls_cert_file": "ssl_certfile", "tls_key_file": "ssl_keyfile"}
_SHORTEST_TTL_S = 0.001  # the server counts milliseconds, and takes none for an error


@dataclass(frozen=True)
class RedisConfig:
    """Where the server is and how long to wait for it. Secrets are in no repr.

    ttl_s: seconds after its last use at which the server forgets a page; 0 never. timeout_s: longest silence
    of the server within a call. zero_copy: payloads pass between socket and page, not through redis-py.
    """

    url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    secrets: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sentinels: tuple[tuple[str, int], ...] = ()
    sentinel_service: str = "mymaster"
    sentinel_password: str = field(default="", repr=False)
    sentinel_tls: bool = False
    cluster: bool = False
    key_prefix: str = "hiradix"
    ttl_s: float = 0.0
    timeout_s: float = 1.0
    connect_timeout_s: float = 1.0
    zero_copy: bool = True

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> RedisConfig:
        """Reads and checks the keys; raises ConfigError naming the bad one."""
        options, default = Options(values), RedisConfig()
        options.accept("checksum")
        url = options.text("url", default.url)
        if not url.startswith(SCHEMES):
            raise ConfigError(f"{flag('url')} must begin with one of {', '.join(SCHEMES)}")
        inside = _require_url(url)
        config = RedisConfig(
            url=url,
            secrets=_secrets(options, inside) | _tls_files(options, url),
            sentinels=_sentinels(options),
            sentinel_service=options.text("sentinel_service", default.sentinel_service),
            sentinel_password=options.text("sentinel_password", ""),
            sentinel_tls=options.boolean("sentinel_tls", default.sentinel_tls),
            cluster=options.boolean("cluster", default.cluster),
            key_prefix=options.text("key_prefix", default.key_prefix),
            ttl_s=_ttl_s(options, default.ttl_s),
            timeout_s=options.seconds("timeout_s", default.timeout_s, 0.001, MAX_TIMEOUT_S),
            connect_timeout_s=options.seconds(
                "connect_timeout_s", default.connect_timeout_s, 0.001, MAX_TIMEOUT_S
            ),
            zero_copy=options.boolean("zero_copy", default.zero_copy),
        )
        options.finish("redis")
        if _PREFIX.fullmatch(config.key_prefix) is None:
            raise ConfigError(f"{flag('key_prefix')} must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        if config.cluster and config.sentinels:
            raise ConfigError(f"{flag('cluster')} and {flag('sentinels')} exclude each other")
        if config.sentinel_tls and not url.startswith(_TLS):
            raise ConfigError(f"{flag('sentinel_tls')} is for TLS: {flag('url')} must begin with {_TLS}")
        return config


def _require_url(url: str) -> Mapping[str, Any]:
    """What redis-py reads in it. Raises ConfigError unless all of the URL is read as what it says, and shows
    no part of it: which of them is a password cannot be told when one splits it."""
    found: Mapping[str, Any] | None = None
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix" or not (parts.fragment or "@" in parts.path + parts.query):
            found = parse_url(url) if parts.scheme == "unix" or parts.port != 0 else None
    except ValueError:
        pass  # its text has a part of the URL
    if found is None:
        raise ConfigError(
            f"{flag('url')} cannot be read: an option's value is wrong, or in its user or password one of "
            "/ ? # @ [ ] is not percent-encoded (they may be given as username and password)"
        )
    for name in _OURS:
        if name in found:
            raise ConfigError(f"{flag('url')}: {name} cannot be chosen")
    return found


def _secrets(options: Options, inside: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of redis-py that are not in the URL; only those that are set. Of two only one would be used.

    inside: what is in the URL.
    """
    username, password = options.text("username", ""), options.text("password", "")
    password_file = options.text("password_file", "")
    if password and password_file:
        raise ConfigError(f"{flag('password')} and {flag('password_file')} exclude each other")
    given = {"username": username, "password": password, "password_file": password_file}
    for key in (key for key, value in given.items() if value and inside.get(key.removesuffix("_file"))):
        raise ConfigError(f"{flag(key)} is in {flag('url')}, too: give it once")
    if password_file:
        try:
            password = read_small_file(password_file)[0].decode("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{flag('password_file')}: cannot read {password_file}: {error}") from error
    found = {"username": username, "password": password}
    return {name: value for name, value in found.items() if value}


def _tls_files(options: Options, url: str) -> dict[str, Any]:
    """Arguments of redis-py for the files of TLS; only those that are set. Raises ConfigError."""
    found = {key: path for key in _TLS_FILES if (path := options.text(key, ""))}
    for key, path in found.items():
        if not url.startswith(_TLS):
            raise ConfigError(f"{flag(key)} is for TLS: {flag('url')} must begin with {_TLS}")
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{flag(key)}: cannot read {path}: {error}") from error
    if "tls_key_file" in found and "tls_cert_file" not in found:
        raise ConfigError(f"{flag('tls_key_file')} needs {flag('tls_cert_file')}")
    return {_TLS_FILES[key]: path for key, path in found.items()}


def _ttl_s(options: Options, default: float) -> float:
    seconds = options.seconds("ttl_s", default)
    if 0 < seconds < _SHORTEST_TTL_S:
        raise ConfigError(f"{flag('ttl_s')} must be 0 or at least {_SHORTEST_TTL_S:g}, got {seconds}")
    return seconds


def _sentinels(options: Options) -> tuple[tuple[str, int], ...]:
    """Pairs from "host:port,host:port"."""
    text = options.text("sentinels", "")
    pairs = [parse_address("sentinels", part.strip()) for part in text.split(",") if part.strip()]
    if text and not pairs:
        raise ConfigError(f'{flag("sentinels")}: expected "host:port,host:port", got {text!r}')
    if not pairs:
        for key in ("sentinel_service", "sentinel_password", "sentinel_tls"):
            if options.given(key):
                raise ConfigError(f"{flag(key)} needs {flag('sentinels')}")
    return tuple(pairs)


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
        tls = {"ssl": True} if config.url.startswith(_TLS) else {}
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
    """What the URL says beside where the server is."""
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

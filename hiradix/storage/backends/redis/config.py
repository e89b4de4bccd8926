"""Keys of the `redis` backend. `docs/storage-keys.md` lists them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from hiradix.config_files import read_small_file
from hiradix.errors import ConfigError
from hiradix.settings import MAX_TIMEOUT_S, OPEN, Type, setting
from hiradix.storage.kit.options import CHECKSUM, flag, parse_address, read_keys

SCHEMES = ("redis://", "rediss://", "unix://")
TLS = "rediss://"
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:\-]{0,63}")
_OURS = ("protocol", "decode_responses")  # pages are read as RESP2, as bytes
_TLS_FILES = {"tls_ca_file": "ssl_ca_certs", "tls_cert_file": "ssl_certfile", "tls_key_file": "ssl_keyfile"}
_SHORTEST_TTL_S = 0.001  # the server counts milliseconds, and takes none for an error


def _sentinels(text: str) -> tuple[tuple[str, int], ...]:
    """Pairs from "host:port,host:port"."""
    pairs = [parse_address("sentinels", part.strip()) for part in text.split(",") if part.strip()]
    if text and not pairs:
        raise ConfigError(f'{flag("sentinels")}: expected "host:port,host:port", got {text!r}')
    return tuple(pairs)


def _tls_file(name: str, text: str) -> Any:
    return setting(name, Type.FILE, "", f"{text}; for `rediss://`, refused without", over_http=OPEN)


def _wait(name: str, text: str) -> Any:
    return setting(name, Type.SECONDS, 1.0, text, minimum=0.001, maximum=MAX_TIMEOUT_S, over_http=OPEN)


@dataclass(frozen=True)
class RedisConfig:
    """The server's address and the timeouts. Secrets are in no repr.

    secrets: arguments of redis-py that are not in the URL; only those that are set.
    """

    ALSO: ClassVar = (CHECKSUM,)

    url: str = setting(
        "url",
        Type.ADDRESS,
        "redis://127.0.0.1:6379/0",
        "`redis://`, `rediss://` (TLS) or `unix://`, as redis-py reads it; `/ ? # @ [ ]` in user and "
        "password are percent-encoded",
        over_http=OPEN,
        shown=False,
    )
    username: str = setting(
        "username",
        Type.TEXT,
        "",
        "AUTH; only once, the `url` included",
        over_http=OPEN,
        shown=False,
    )
    password: str = setting(
        "password", Type.SECRET, "", "AUTH; only once, the `url` included", over_http=OPEN
    )
    password_file: str = setting(
        "password_file",
        Type.FILE,
        "",
        "the password is its text without the line end",
        over_http=OPEN,
    )
    tls_ca_file: str = _tls_file("tls_ca_file", "certificates to trust; without it the system's are used")
    tls_cert_file: str = _tls_file("tls_cert_file", "this client's certificate")
    tls_key_file: str = _tls_file("tls_key_file", "the key of `tls_cert_file`")
    sentinels: tuple[tuple[str, int], ...] = setting(
        "sentinels",
        Type.ADDRESS,
        "",
        '`"host:port,host:port"`: ask these for the master; user, password, database and TLS of the master '
        "are the `url`'s, its host is not used",
        to=_sentinels,
        over_http=OPEN,
    )
    sentinel_service: str = setting(
        "sentinel_service",
        Type.TEXT,
        "mymaster",
        "the master's name",
        over_http=OPEN,
    )
    sentinel_password: str = setting(
        "sentinel_password",
        Type.SECRET,
        "",
        "password of the sentinels themselves",
        over_http=OPEN,
    )
    sentinel_tls: bool = setting(
        "sentinel_tls",
        Type.BOOL,
        False,
        "the sentinels speak TLS, too, with the `url`'s settings and files",
        over_http=OPEN,
    )
    cluster: bool = setting(
        "cluster",
        Type.BOOL,
        False,
        "the server is a node of a cluster; slots that move are followed",
        over_http=OPEN,
    )
    key_prefix: str = setting(
        "key_prefix",
        Type.TEXT,
        "hiradix",
        "keys are `<key_prefix>:<fingerprint>:<page>`; `clear` removes those of its own fingerprint",
        over_http=OPEN,
    )
    ttl_s: float = setting(
        "ttl_s",
        Type.SECONDS,
        0.0,
        "a page is forgotten this long after it was last stored or read, at least 0.001; 0 never (else needs "
        "Redis 6.2)",
        over_http=OPEN,
    )
    timeout_s: float = _wait("timeout_s", "longest silence of the server within a call")
    connect_timeout_s: float = _wait("connect_timeout_s", "longest wait for a connection")
    zero_copy: bool = setting(
        "zero_copy",
        Type.BOOL,
        True,
        "pages are sent from staging memory, and copied to their place as they come from the socket; false: "
        "through redis-py, with two copies more",
        over_http=OPEN,
    )
    secrets: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> RedisConfig:
        """Reads and checks the keys; raises ConfigError naming the bad one."""
        config = read_keys(RedisConfig, values, "redis")
        if not config.url.startswith(SCHEMES):
            raise ConfigError(f"{flag('url')} must begin with one of {', '.join(SCHEMES)}")
        inside = _require_url(config.url)
        config = dataclasses.replace(config, secrets=_secrets(config, inside) | _tls_files(config))
        if not config.sentinels:
            for key in ("sentinel_service", "sentinel_password", "sentinel_tls"):
                if values.get(key) is not None:
                    raise ConfigError(f"{flag(key)} needs {flag('sentinels')}")
        if 0 < config.ttl_s < _SHORTEST_TTL_S:
            raise ConfigError(
                f"{flag('ttl_s')} must be 0 or at least {_SHORTEST_TTL_S:g}, got {config.ttl_s}"
            )
        if _PREFIX.fullmatch(config.key_prefix) is None:
            raise ConfigError(f"{flag('key_prefix')} must be 1 to 64 of A-Z a-z 0-9 _ . : -")
        if config.cluster and config.sentinels:
            raise ConfigError(f"{flag('cluster')} and {flag('sentinels')} exclude each other")
        if config.sentinel_tls and not config.url.startswith(TLS):
            raise ConfigError(f"{flag('sentinel_tls')} is for TLS: {flag('url')} must begin with {TLS}")
        return config


def _require_url(url: str) -> Mapping[str, Any]:
    """The parts that redis-py reads in the URL. Raises ConfigError unless it reads all of it as meant.

    The error shows no part of the URL: which of them is a password is not known when it is split wrongly.
    """
    from redis.connection import parse_url

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


def _secrets(config: RedisConfig, inside: Mapping[str, Any]) -> dict[str, Any]:
    """User and password, which may be in the URL, where redis-py has read `inside`, in a file or in keys of
    their own. Raises ConfigError: of two only one would be used."""
    username, password, password_file = config.username, config.password, config.password_file
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


def _tls_files(config: RedisConfig) -> dict[str, Any]:
    """Arguments of redis-py for the files of TLS; only those that are set. Raises ConfigError."""
    found = {key: path for key in _TLS_FILES if (path := getattr(config, key))}
    for key, path in found.items():
        if not config.url.startswith(TLS):
            raise ConfigError(f"{flag(key)} is for TLS: {flag('url')} must begin with {TLS}")
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{flag(key)}: cannot read {path}: {error}") from error
    if "tls_key_file" in found and "tls_cert_file" not in found:
        raise ConfigError(f"{flag('tls_key_file')} needs {flag('tls_cert_file')}")
    return {_TLS_FILES[key]: path for key, path in found.items()}

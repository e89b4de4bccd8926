"""Keys of the `s3` backend. `docs/storage-keys.md` lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from hiradix.errors import ConfigError
from hiradix.settings import MAX_COUNT, MAX_TIMEOUT_S, OPEN, OverHttp, Type, setting
from hiradix.storage.kit.options import CHECKSUM, flag, read_keys

SCHEMES = ("s3://", "gs://", "az://", "abfs://", "abfss://")
_PASSWORD = re.compile(r"[^:]*://[^@/]*:[^@]*@")


def _credential(name: str, text: str) -> Any:
    return setting(name, Type.SECRET, "", text, default_text="environment, instance role", over_http=OPEN)


@dataclass(frozen=True)
class S3Config:
    """Settings of the S3 backend: the bucket, credentials, waits. Secrets are in no repr.

    A failed request is sent `retries` times more, all within `retry_timeout_s`.
    """

    ALSO: ClassVar = (CHECKSUM,)

    url: str = setting(
        "url",
        Type.ADDRESS,
        "",
        "`s3://bucket/prefix`, `gs://...`, `az://...`; objects are `<url>/<fingerprint>/<page>`",
        default_text="required",
        over_http=OPEN,
    )
    endpoint: str = setting(
        "endpoint",
        Type.ADDRESS,
        "",
        "address of a server that is not the provider's; an `http://` endpoint is spoken to without TLS; an "
        "address with a user or password in it is refused",
        default_text="the provider's",
        over_http=OPEN,
    )
    region: str = setting(  # a part of the host's name
        "region",
        Type.ADDRESS,
        "",
        "the bucket's region",
        default_text="the provider's",
        over_http=OPEN,
    )
    access_key_id: str = _credential("access_key_id", "as obstore reads it")
    secret_access_key: str = _credential("secret_access_key", "as obstore reads it")
    session_token: str = _credential("session_token", "as obstore reads it")
    store_options: Mapping[str, Any] = setting(
        "store_options",
        Type.OBJECT,
        dict,
        "any other setting of obstore's store, by its name",
        to=lambda values: {str(name): value for name, value in values.items()},
    )
    max_bytes: int = setting(
        "max_size",
        Type.SIZE,
        0,
        "cap on this fingerprint's objects, kept by this process; 0: none",
        over_http=OPEN,
    )
    timeout_s: float = setting(
        "timeout_s",
        Type.SECONDS,
        5.0,
        "longest wait for one request",
        minimum=0.001,
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )
    connect_timeout_s: float = setting(
        "connect_timeout_s",
        Type.SECONDS,
        1.0,
        "longest wait for its connection",
        minimum=0.001,
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )
    retries: int = setting(
        "request_retries",
        Type.INTEGER,
        1,
        "a failed request is sent so often again",
        maximum=MAX_COUNT,
        over_http=OverHttp(100),
    )
    retry_timeout_s: float = setting(
        "retry_timeout_s",
        Type.SECONDS,
        5.0,
        "all attempts of a request together take at most this",
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )
    num_connections: int = setting(
        "num_connections",
        Type.INTEGER,
        16,
        "requests at once",
        minimum=1,
        maximum=MAX_COUNT,
        over_http=OverHttp(256),
    )

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> S3Config:
        """Reads and checks the keys; raises ConfigError naming the bad one."""
        config = read_keys(S3Config, values, "s3")
        url, settings = config.url, config.settings
        if not url.startswith(SCHEMES):
            raise ConfigError(
                f"{flag('url')} must begin with one of {', '.join(SCHEMES)}, as in s3://bucket/x"
            )
        endpoints = {key: str(value) for key, value in settings.items() if "endpoint" in key.lower()}
        for key, address in {"url": url, **endpoints}.items():
            if _PASSWORD.match(address):  # addresses stand in errors, ours and obstore's
                raise ConfigError(f"{flag(key)} must not have a password: other keys are for that")
        for key, value in settings.items():
            if key in endpoints:
                _require_endpoint(key, endpoints[key])
            elif isinstance(value, str) and not (value.isascii() and value.isprintable()):
                raise ConfigError(f"{flag(key)} must be printable ASCII text")  # or the library panics
        return config

    @property
    def settings(self) -> Mapping[str, Any]:
        """obstore's settings of the store."""
        names = ("endpoint", "region", "access_key_id", "secret_access_key", "session_token")
        return {**{name: value for name in names if (value := getattr(self, name))}, **self.store_options}


def _require_endpoint(key: str, address: str) -> None:
    """Raise ConfigError unless it is an address: with some of the others the library panics."""
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not address.isascii() or any(map(str.isspace, address)):
        raise ConfigError(f"{flag(key)}: expected http://host:port or https://host:port, got {address!r}")

"""Keys of the `s3` backend, and the obstore client made from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import from_url

from hiradix.errors import ConfigError
from hiradix.storage.kit.options import MAX_TIMEOUT_S, Options, flag

SCHEMES = ("s3://", "gs://", "az://", "abfs://", "abfss://")
_PASSWORD = re.compile(r"[^:]*://[^@/]*:[^@]*@")
_STATUS = re.compile(r"status code: (\d{3})")
_SENDING = re.compile(r"error sending request|HTTP error|timed? ?out|connection|dns error", re.IGNORECASE)
_OF_VALUES = (
    InvalidPathError, NotFoundError, NotSupportedError, PermissionDeniedError, UnauthenticatedError,
    UnknownConfigurationKeyError,
)  # fmt: skip
CREDENTIALS = ("access_key_id", "secret_access_key", "session_token")


@dataclass(frozen=True)
class S3Config:
    """Which bucket, how to get in, how long to wait. Secrets are in no repr.

    settings: obstore's own settings of the store. max_bytes: cap on this fingerprint's objects, 0 for none.
    timeout_s: of one request; a failed one is sent `retries` times more, all within `retry_timeout_s`.
    """

    url: str
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    max_bytes: int = 0
    timeout_s: float = 5.0
    connect_timeout_s: float = 1.0
    retries: int = 1
    retry_timeout_s: float = 5.0
    num_connections: int = 16

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> S3Config:
        """Reads and checks the keys; raises ConfigError naming the bad one."""
        options = Options(values)
        options.accept("checksum")
        url = options.text("url", "")
        if not url.startswith(SCHEMES):
            raise ConfigError(f"{flag('url')} must begin with one of {', '.join(SCHEMES)}, as in s3://bucket/x")
        settings = _settings(options, values.get("store_options"))
        endpoints = {key: str(value) for key, value in settings.items() if "endpoint" in key.lower()}
        for key, address in {"url": url, **endpoints}.items():
            if _PASSWORD.match(address):  # addresses stand in errors, ours and obstore's
                raise ConfigError(f"{flag(key)} must not have a password: other keys are for that")
        for key, value in settings.items():
            if key in endpoints:
                _require_endpoint(key, endpoints[key])
            elif isinstance(value, str) and not (value.isascii() and value.isprintable()):
                raise ConfigError(f"{flag(key)} must be printable ASCII text")  # or the library panics
        config = S3Config(
            url=url,
            settings=settings,
            max_bytes=options.size("max_size", S3Config.max_bytes),
            timeout_s=options.seconds("timeout_s", S3Config.timeout_s, 0.001, MAX_TIMEOUT_S),
            connect_timeout_s=options.seconds(
                "connect_timeout_s", S3Config.connect_timeout_s, 0.001, MAX_TIMEOUT_S
            ),
            retries=options.integer("request_retries", S3Config.retries),
            retry_timeout_s=options.seconds(
                "retry_timeout_s", S3Config.retry_timeout_s, maximum=MAX_TIMEOUT_S
            ),
            num_connections=options.integer("num_connections", S3Config.num_connections, 1),
        )
        options.finish("s3")
        return config

    def client(self) -> Any:
        """An obstore store. Raises ConfigError; asks nobody."""
        endpoint = str(self.settings.get("endpoint", ""))
        try:
            return from_url(
                self.url,
                config=self._unsigned() | dict(self.settings),
                client_options={
                    "timeout": timedelta(seconds=self.timeout_s),
                    "connect_timeout": timedelta(seconds=self.connect_timeout_s),
                    "allow_http": endpoint.startswith("http://"),
                },
                retry_config={
                    "max_retries": self.retries,
                    "retry_timeout": timedelta(seconds=self.retry_timeout_s),
                    "backoff": {"init_backoff": timedelta(milliseconds=50),
                                "max_backoff": timedelta(seconds=1), "base": 2},
                },
            )  # fmt: skip
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{flag('url')}: {told(error)}") from error

    def _unsigned(self) -> dict[str, Any]:
        """No hash of the payload in a request's signature: pages are checked when they are read."""
        return {"unsigned_payload": True} if self.url.startswith("s3://") else {}


def is_away(error: BaseException) -> bool:
    """Whether the service does not answer, or says that it cannot serve at the moment; else a value is wrong.

    obstore has one exception for most of it, so its text has to tell.
    """
    text = str(error)
    if isinstance(error, _OF_VALUES) or "certificate" in text.lower():
        return False
    status = _STATUS.search(text)
    if status is not None:
        return int(status[1]) >= 500 or int(status[1]) in (408, 425, 429)
    return _SENDING.search(text) is not None


def told(error: BaseException) -> str:
    """What obstore says of an error, without its insides, which follow, nor pages that servers answer."""
    return " ".join(str(error).partition("\n\nDebug source")[0][:1000].split())


def _require_endpoint(key: str, address: str) -> None:
    """Raise ConfigError unless it is an address: with some of the others the library panics."""
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not address.isascii() or any(map(str.isspace, address)):
        raise ConfigError(f"{flag(key)}: expected http://host:port or https://host:port, got {address!r}")


def _settings(options: Options, more: object) -> dict[str, Any]:
    names = ("endpoint", "region", *CREDENTIALS)
    found = {name: options.text(name, "") for name in names}
    options.accept("store_options")
    if more is None:
        more = {}
    if not isinstance(more, Mapping):
        raise ConfigError(f"{flag('store_options')} must be an object, got {type(more).__name__}")
    more = {str(name): value for name, value in more.items()}
    return {**{name: value for name, value in found.items() if value}, **more}

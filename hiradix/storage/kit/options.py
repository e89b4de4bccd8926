"""Reading a backend's keys: every key is known, typed and within bounds, or the error names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from hiradix.config import EXTRA_CONFIG_FLAG
from hiradix.errors import ConfigError
from hiradix.settings import MAX_PORT, OverHttp, Setting, Type, read, require_size, settings_of

CHECKSUM = Setting(
    "checksum", Type.BOOL, True,
    "false: identity and length are checked, the payload is not. Only for trusted storage",
    over_http=OverHttp(refused=(False,)),
)  # fmt: skip
"""A key of every backend, which the guard reads, and those that check pages themselves."""

_Config = TypeVar("_Config")


def flag(key: str) -> str:
    """A storage key as error messages name it; a flag is returned unchanged."""
    return key if key.startswith("--") else f"{EXTRA_CONFIG_FLAG}: {key}"


def read_keys(config: type[_Config], values: Mapping[str, Any], owner: str) -> _Config:
    """The configuration of backend `owner` from its keys. ConfigError names the bad or unknown one."""
    found = read(config, values, flag)
    known = {one.name for one in settings_of(config)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"{flag(unknown[0])} is no key of storage backend {owner}; known: {', '.join(sorted(known))}"
        )
    return found


def parse_size(key: str, value: object) -> int:
    """Bytes from an integer or text such as "64GiB", "500MB", "10g" (binary without the B)."""
    return require_size(flag(key), value)


def parse_address(key: str, text: str) -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 address stands in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not host or any(map(str.isspace, host)) or not 1 <= number <= MAX_PORT:
        raise ConfigError(f'{flag(key)}: expected "host:port" with a port of 1 to {MAX_PORT}, got {text!r}')
    return host.removeprefix("[").removesuffix("]"), number

"""Reading a backend's keys: every key is known, typed and within bounds, or the error names it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

from hiradix.config import (
    EXTRA_CONFIG_FLAG,
    MAX_PORT,
    MAX_SECONDS,
    redact,
    require_bool,
    require_int,
    require_number,
)
from hiradix.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
MAX_BYTES = (1 << 63) - 1
"""What files, SQLite and the libraries count bytes with."""
MAX_COUNT = (1 << 31) - 1
MAX_TIMEOUT_S = 1e6
"""Waits for a lock or a socket are milliseconds in 32 bits to the system."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def flag(key: str) -> str:
    """How an error names a key; a flag of its own is one already."""
    return key if key.startswith("--") else f"{EXTRA_CONFIG_FLAG}: {key}"


def parse_size(key: str, value: object) -> int:
    """Bytes from an integer or text such as "64GiB", "500MB", "10g" (binary without the B)."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f'{flag(key)}: expected bytes or a size such as "64GiB", got {value!r}')
        size = float(match[1]) * _UNITS[match[2].lower()]
        if size > MAX_BYTES:
            raise ConfigError(f"{flag(key)}: {value:.20}{'...' if len(value) > 20 else ''} is too large")
        return int(size)
    num_bytes = require_int(flag(key), value)
    if num_bytes > MAX_BYTES:
        raise ConfigError(f"{flag(key)}: {num_bytes} is too large")
    return num_bytes


def _is_told(text: str) -> bool:
    """Whether the system's calls take it: they end at a zero byte, and take no halves of characters but those
    that stand for bytes of a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def parse_address(key: str, text: str) -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 address stands in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not host or any(map(str.isspace, host)) or not 1 <= number <= MAX_PORT:
        raise ConfigError(f'{flag(key)}: expected "host:port" with a port of 1 to {MAX_PORT}, got {text!r}')
    return host.removeprefix("[").removesuffix("]"), number


class Options:
    """Typed reads of a mapping. `finish` refuses keys that nobody read."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values
        self._read: set[str] = set()

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or not _is_told(value):
            raise ConfigError(f"{flag(key)} must be text, got {redact(value, key)!r}")
        return value

    def choice(self, key: str, default: str, choices: Collection[str]) -> str:
        value = self._get(key, default)
        if value not in choices:
            raise ConfigError(f"{flag(key)}: unknown value {value!r}, expected one of {', '.join(choices)}")
        return str(value)

    def size(self, key: str, default: int) -> int:
        return parse_size(key, self._get(key, default))

    def integer(self, key: str, default: int, minimum: int = 0, maximum: int = MAX_COUNT) -> int:
        return require_int(flag(key), self._get(key, default), minimum, maximum)

    def number(
        self, key: str, default: float, minimum: float = 0.0, maximum: float = sys.float_info.max
    ) -> float:
        return require_number(flag(key), self._get(key, default), minimum, maximum)

    def seconds(self, key: str, default: float, minimum: float = 0.0, maximum: float = MAX_SECONDS) -> float:
        """A number of seconds; of one that somebody sleeps for, `maximum` is `MAX_TIMEOUT_S`."""
        return self.number(key, default, minimum, maximum)

    def boolean(self, key: str, default: bool) -> bool:
        return require_bool(flag(key), self._get(key, default))

    def given(self, key: str) -> bool:
        """Whether there is a value for `key`."""
        return self._get(key, None) is not None

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._get(key, {})
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{flag(key)} must be an object, got {value!r:.80}")
        return value

    def accept(self, *keys: str) -> None:
        """Keys that are someone else's, or have no effect here."""
        self._read.update(keys)

    def finish(self, owner: str) -> None:
        """Raise ConfigError if a key is left that nobody read."""
        unknown = sorted(set(self._values) - self._read)
        if unknown:
            known = ", ".join(sorted(self._read))
            raise ConfigError(f"{flag(unknown[0])} is no key of storage backend {owner}; known: {known}")

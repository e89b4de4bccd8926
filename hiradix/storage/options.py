"""Reading a backend's keys: every key is known, typed and within bounds, or the error names it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from hiradix.config import EXTRA_CONFIG_FLAG, require_bool, require_int, require_number
from hiradix.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def flag(key: str) -> str:
    """How an error names a key."""
    return f"{EXTRA_CONFIG_FLAG}: {key}"


def parse_size(key: str, value: object) -> int:
    """Bytes from an integer or text such as "64GiB", "500MB", "10g" (binary without the B)."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f'{flag(key)}: expected bytes or a size such as "64GiB", got {value!r}')
        try:
            return int(float(match[1]) * _UNITS[match[2].lower()])
        except OverflowError:
            raise ConfigError(f"{flag(key)}: {value:.20}... is too large") from None
    return require_int(flag(key), value)


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
        if not isinstance(value, str) or "\0" in value:
            raise ConfigError(f"{flag(key)} must be text, got {value!r}")
        return value

    def choice(self, key: str, default: str, choices: Collection[str]) -> str:
        value = self._get(key, default)
        if value not in choices:
            raise ConfigError(f"{flag(key)}: unknown value {value!r}, expected one of {', '.join(choices)}")
        return str(value)

    def size(self, key: str, default: int) -> int:
        return parse_size(key, self._get(key, default))

    def integer(self, key: str, default: int, minimum: int = 0) -> int:
        return require_int(flag(key), self._get(key, default), minimum)

    def number(self, key: str, default: float, minimum: float = 0.0) -> float:
        return require_number(flag(key), self._get(key, default), minimum)

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

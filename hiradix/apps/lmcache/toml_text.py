"""A TOML file from plain values, which the standard library reads but does not write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hiradix.errors import ConfigError


def toml(settings: Mapping[str, Any]) -> str:
    """Settings as a TOML file. Raises ConfigError for what TOML cannot say: null."""
    return "\n".join(_toml_lines(settings, ())) + "\n"


def _toml_lines(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    for key, value in values.items():
        if not isinstance(value, Mapping):
            yield f"{_toml_key(key)} = {_toml_value(key, value)}"
    for key, value in values.items():
        if isinstance(value, Mapping):
            below = (*path, key)
            yield ""
            yield f"[{'.'.join(map(_toml_key, below))}]"
            yield from _toml_lines(value, below)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _toml_text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(key, item) for item in value)}]"
    raise ConfigError(f"{key}: {type(value).__name__} is no value of TOML")

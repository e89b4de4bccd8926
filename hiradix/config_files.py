"""Files of settings: JSON, TOML or YAML to plain values, and the line on which each key begins; and of keys.

Only loaders that make plain values are used. No error repeats what a file says but its keys: it may hold a
password.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import stat
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiradix.errors import ConfigError

MAX_FILE_BYTES = 1 << 20  # of settings, or of a key
MAX_VALUES = 100_000  # in a file, one that stands at several places counted at each
MAX_DEPTH = 64
FILE_TIMEOUT_S = 10.0  # until such a file, which may be a pipe, has been written
FORMATS = (".json", ".toml", ".yaml", ".yml")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:\n]')
_TOML_KEY = re.compile(
    r"""^[^\S\n]*(?:(\[+)[^\S\n]*)?(?:"([^"\n]*)"|'([^'\n]*)'|([\w-]+))[^\S\n]*(?(1)[\].]|[=.])""",
    re.MULTILINE,
)
"""What looks like a key or a table's heading, at the beginning of a line."""


@dataclass(frozen=True)
class ConfigFile:
    """A file of settings as it was read.

    lines: by outermost key, the line (from 1) on which it begins. mode: who else may read the file.
    """

    path: str
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    mode: int

    def place(self, key: str) -> str:
        """Where `key` is said: "serve.toml:3"."""
        return f"{self.path}:{self.lines[key]}" if key in self.lines else self.path


def read_small_file(path: str | Path) -> tuple[bytes, int]:
    """The contents of a file of settings or of a key, and the file's mode.

    Of a pipe, such as a shell's `<(command)`, what comes within FILE_TIMEOUT_S. Raises OSError, also for more
    than MAX_FILE_BYTES.
    """
    descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    until, num_remaining = time.monotonic() + FILE_TIMEOUT_S, MAX_FILE_BYTES + 1
    parts: list[bytes] = []
    try:
        about = os.fstat(descriptor)
        waits = select.poll()
        waits.register(descriptor, select.POLLIN)
        while num_remaining > 0:
            remaining_s = until - time.monotonic()
            if not stat.S_ISREG(about.st_mode) and (remaining_s <= 0 or not waits.poll(remaining_s * 1000)):
                raise OSError(errno.ETIMEDOUT, f"was not written and closed within {FILE_TIMEOUT_S:g} s")
            try:
                part = os.read(descriptor, num_remaining)
            except BlockingIOError:
                continue
            if not part:
                return b"".join(parts), stat.S_IMODE(about.st_mode)
            parts.append(part)
            num_remaining -= len(part)
    finally:
        os.close(descriptor)
    raise OSError(errno.EFBIG, f"has more than {MAX_FILE_BYTES} bytes")


def checked_key(where: str, value: str) -> str:
    """`value` where it can be a bearer key; ConfigError that does not show it."""
    if not value or value != value.strip() or not value.isascii() or not value.isprintable():
        raise ConfigError(f"{where}: a key must be non-empty printable ASCII text without spaces around it")
    return value


def read_secret_file(flag: str, path: str) -> tuple[str, tuple[str, ...]]:
    """A file's text, and a note where others than its owner may read it. Raises ConfigError naming the
    flag."""
    try:
        data, mode = read_small_file(path)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        raise ConfigError(f"{flag} {path}: {reason}") from error
    others = mode & 0o077
    return text, ((f"{flag} {path}: others may read or write it (mode {mode:o})",) if others else ())


def read_config_file(path: str | Path) -> ConfigFile:
    """A .json, .toml, .yaml or .yml file with an object. Raises ConfigError that names the file."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(f"Unsupported config file {path} (config format: {suffix})")
    try:
        data, mode = read_small_file(path)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        if suffix == ".json":
            values = _as_object(_load_json(text))
            lines = _json_lines(text)
        elif suffix == ".toml":
            values = tomllib.loads(text)
            lines = _toml_lines(text, values)
        else:
            value, lines = _load_yaml(text)
            values = _as_object(value)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:  # of JSON and TOML their own, and numbers of endless digits
        raise ConfigError(f"{path} is not valid: {error}") from error
    return ConfigFile(str(path), values, lines, mode)


def load_mapping(flag: str, text: str | None) -> dict[str, Any]:
    """The object in `text` (JSON), or in the file of `@path` (.json, .toml, .yaml, .yml); {} for nothing."""
    text = (text or "").strip()
    if not text:
        return {}
    try:
        if text.startswith("@"):
            return dict(read_config_file(Path(text[1:]).expanduser()).values)
        return _as_object(_load_json(text))
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: the text ({len(text)} characters) is not valid: {error}") from error


def _load_json(text: str) -> Any:
    """Raises ConfigError, ValueError or RecursionError."""
    return json.loads(text, object_pairs_hook=_without_twins)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_twins(name for name, _ in pairs)
    return dict(pairs)


def _check_twins(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"key {name!r:.80} is there twice")
        seen.add(name)


def _load_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """What it says, and the line on which each of its outermost keys begins."""
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "YAML needs the package pyyaml (pip install pyyaml), or use .json or .toml"
        ) from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        _check_yaml_keys(node)
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        lines = {key.value: key.start_mark.line + 1 for key in keys if isinstance(key.value, str)}
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:  # as text it shows the line
        at = error.problem_mark
        where = "" if at is None else f" (line {at.line + 1}, column {at.column + 1})"
        raise ConfigError(f"not valid YAML: {_problem(error.problem)}{where}") from None
    except yaml.YAMLError:
        raise ConfigError("not valid YAML: it has characters that YAML does not allow") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid YAML: {type(error).__name__}") from None


def _problem(text: str | None) -> str:
    """A parser's complaint without its quotes of the file."""
    return re.sub(r"'[^']*'|\"[^\"]*\"", "...", text or "no reason given")


def _check_yaml_keys(node: Any) -> None:
    """A key stands once in its object, which YAML's own loader does not look at; and no value holds itself."""
    num_seen, waiting = 0, [(node, 0)]
    while waiting:
        one, depth = waiting.pop()
        num_seen += 1
        if num_seen > MAX_VALUES or depth > MAX_DEPTH:
            raise ConfigError(f"more than {MAX_VALUES} values, or {MAX_DEPTH} within each other")
        if not isinstance(getattr(one, "value", None), list):
            continue
        if one.id == "sequence":
            waiting += [(item, depth + 1) for item in one.value]
            continue
        _check_twins(key.value for key, _ in one.value if isinstance(key.value, str))
        waiting += [(item, depth + 1) for _, item in one.value]


def _as_object(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"expected an object with string keys, got {type(value).__name__}")
    return value


def _json_lines(text: str) -> dict[str, int]:
    """The line on which each of the outermost keys of a JSON object begins."""
    found: dict[str, int] = {}
    depth, line, name, begun = 0, 1, "", 1
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token == "\n":
            line += 1
        elif token in "{[":
            depth += 1
        elif token in "}]":
            depth -= 1
        elif token != ":":
            name, begun = token, line
        elif depth == 1:
            found[json.loads(name)] = begun
    return found


def _toml_lines(text: str, values: Mapping[str, Any]) -> dict[str, int]:
    """The first line that begins with each key, as far as it is told by looking."""
    found: dict[str, int] = {}
    line, at = 1, 0
    for match in _TOML_KEY.finditer(text):
        line, at = line + text.count("\n", at, match.end()), match.end()
        found.setdefault(match[match.lastindex or 0], line)
    return {key: line for key, line in found.items() if key in values}

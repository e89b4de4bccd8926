"""A setting as one record: its name, which values it takes, its default and what it means. Standard library.

A configuration is a dataclass whose fields are made by `setting`:

    max_bytes: int = setting("max_size", Type.SIZE, 32 << 30, "cap on all files", over_http=OPEN)

Its owner reads a mapping into it with `read`. The flags of `hiradix serve`, the keys that other engines pass
on, the tables in `docs/`, what a request over HTTP may carry and what logs hide come from the same records.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from hiradix.config_files import load_mapping
from hiradix.errors import ConfigError

MAX_PORT = 65535
MAX_SECONDS = 1e9  # thirty years: clocks and libraries can add it to today
MAX_TIMEOUT_S = 1e6  # waits for a lock or a socket are milliseconds in 32 bits to the system
MAX_COUNT = (1 << 31) - 1
MAX_BYTES = (1 << 63) - 1  # what files, SQLite and the libraries count bytes with

REQUIRED: Any = object()
"""The default of a setting that has none: it must be given."""

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


class Type(enum.Enum):
    """The type of a setting's values. The enum's value is its name in the docs."""

    BOOL = "bool"
    INTEGER = "integer"
    NUMBER = "number"
    SECONDS = "seconds"
    SIZE = "size"  # bytes, or text such as "64GiB"
    TEXT = "text"
    LABEL = "label"  # text that is not blank
    SECRET = "secret"  # text that nothing shows
    FOLDER = "folder"  # is written to
    FILE = "file"  # is read
    ADDRESS = "address"  # is connected to
    LIST = "list of texts"
    OBJECT = "object"
    SIZES = "object of sizes"
    STORE = "store"  # an object with `backend` and that backend's keys
    STORES = "object of stores"  # by their names; each is such an object, or its text


NUMBERS = (Type.INTEGER, Type.NUMBER, Type.SECONDS)
UNSHOWN = (Type.SECRET, Type.OBJECT, Type.STORE, Type.STORES)
"""In no repr. What somebody else reads may have secrets of any name."""
TEXTS = (Type.TEXT, Type.SECRET, Type.FOLDER, Type.FILE, Type.ADDRESS)
OBJECTS = (Type.OBJECT, Type.SIZES, Type.STORE, Type.STORES)
PREFIX = "HIRADIX_"
"""Of the environment variables that say settings."""
_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_ON_OFF = ("on", "off")


@dataclass(frozen=True)
class OverHttp:
    """Values that a request over HTTP may give. most: the largest number. refused: these it may not give."""

    most: float | None = None
    refused: tuple[object, ...] = ()


OPEN = OverHttp()


@dataclass(frozen=True)
class Setting:
    """One flag, or one key of a mapping.

    name: with underscores; the flag is `--name` with dashes.
    default: as a user would write it; a callable is asked each time. `default_text` shows a computed one.
    minimum, maximum: bounds of a number, both included; no maximum is the type's own.
    choices: the only texts it may be; `refused` has the reasons against some of them.
    none_at: a number that stands for None: no limit.
    env: the environment variable that says it, where it is not called as the setting is.
    aliases, metavar: other names of the flag, and what stands for its value in `--help`.
    over_http: None is never: it runs code, is handed to a library, or weakens what a hit promises.
    """

    name: str
    type: Type
    default: Any
    text: str
    minimum: float = 0.0
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    none_at: int | None = None
    default_text: str = ""
    env: str = ""
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    over_http: OverHttp | None = None

    def __post_init__(self) -> None:
        if self.type is Type.SECRET and not says_secret(self.name):
            raise ValueError(f"{self.name}: logs hide secrets by their names, and would show this one")

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that says it."""
        return self.env or PREFIX + self.name.upper()

    def from_text(self, where: str, text: str) -> Any:
        """The value in the text of a flag or environment variable, as a file would give it; not yet checked.
        Raises ConfigError that begins with `where`, and repeats no text that may be secret."""
        shown = redact(text, self.name)
        if self.type is Type.BOOL:
            value = _SWITCH.get(text.strip().lower())
            if value is None:
                raise ConfigError(f"{where} must be bool (true or false), got {shown!r:.80}")
            return value
        if self.type in NUMBERS:
            try:
                return int(text) if self.type is Type.INTEGER else float(text)
            except ValueError:
                kind = "int" if self.type is Type.INTEGER else "number"
                raise ConfigError(f"{where} must be {kind}, got {shown!r:.80}") from None
        if self.type is Type.LIST:
            return [part.strip() for part in text.split(";") if part.strip()]
        return load_mapping(where, text) if self.type in OBJECTS else text

    def check(self, where: str, value: Any) -> Any:
        """`value` as it is used: bytes of a size, a float of a number. Raises ConfigError that begins with
        `where`."""
        if value is None and self.default is None:
            return None
        if self.none_at is not None and value == self.none_at and not isinstance(value, bool):
            return None
        if self.choices == _ON_OFF and isinstance(value, bool):  # YAML's `on` is a bool
            return "on" if value else "off"
        match self.type:
            case Type.BOOL:
                return require_bool(where, value)
            case Type.INTEGER:
                maximum = None if self.maximum is None else int(self.maximum)
                return require_int(where, value, int(self.minimum), maximum)
            case Type.NUMBER:
                return require_number(where, value, self.minimum, self.maximum or sys.float_info.max)
            case Type.SECONDS:
                return require_number(where, value, self.minimum, self.maximum or MAX_SECONDS)
            case Type.SIZE:
                return require_size(where, value)
            case Type.LABEL:
                return require_label(where, value)
            case Type.LIST:
                if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                    raise ConfigError(f"{where} must be a list of texts, got {value!r:.80}")
                return tuple(value)
            case Type.OBJECT:
                return require_object(where, value)
            case Type.STORES:
                return require_stores(where, value)
            case Type.STORE:
                if not isinstance(value, Mapping) or not isinstance(value.get("backend"), str):
                    raise ConfigError(
                        f'{where} must be an object with "backend": the name of a storage backend'
                    )
                return value
            case Type.SIZES:
                if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                    raise ConfigError(f"{where} must be an object, got {value!r:.80}")
                return value
        if self.choices:
            return require_choice(where, value, self.choices, self.refused)
        return require_text(where, value, self.name)


# -- configurations made of settings ------------------------------------------------------

_Config = TypeVar("_Config")


def setting(
    name: str,
    type: Type,
    default: Any,
    text: str,
    *,
    to: Callable[[Any], Any] | None = None,
    shown: bool = True,
    **more: Any,
) -> Any:
    """A field of a configuration, with the `Setting` of these arguments.

    to: makes the field's value of a checked one, and of the default.
    shown: whether the configuration's repr has it, if its type is none of `UNSHOWN`.
    """
    return field_of(Setting(name, type, default, text, **more), to, shown)


def field_of(one: Setting, to: Callable[[Any], Any] | None = None, shown: bool = True) -> Any:
    """The same for a setting that several configurations have."""
    default = one.default
    about = {"setting": one, "to": to}
    is_shown = shown and one.type not in UNSHOWN
    if default is REQUIRED:
        return dataclasses.field(metadata=about, repr=is_shown)

    def value() -> Any:
        found = default() if callable(default) else default
        return found if to is None else to(found)

    if callable(default) or one.type in (Type.LIST, *OBJECTS):
        return dataclasses.field(default_factory=value, metadata=about, repr=is_shown)
    return dataclasses.field(default=value(), metadata=about, repr=is_shown)


def group(config: type) -> Any:
    """A field that is a configuration of its own, read from the same mapping."""
    return dataclasses.field(default_factory=config, metadata={"group": config})


def fields_of(config: type) -> Iterator[tuple[str, Setting]]:
    """The settings of `config` by field; those of its groups are left out."""
    for entry in dataclasses.fields(config):
        if "setting" in entry.metadata:
            yield entry.name, entry.metadata["setting"]


def settings_of(config: type) -> tuple[Setting, ...]:
    """All keys that a mapping for `config` may have: its own, those of its groups, and those that its `ALSO`
    names, which somebody else reads or nobody."""
    found: list[Setting] = []
    for entry in dataclasses.fields(config):
        if "setting" in entry.metadata:
            found.append(entry.metadata["setting"])
        elif "group" in entry.metadata:
            found += settings_of(entry.metadata["group"])
    return (*found, *getattr(config, "ALSO", ()))


def setting_of(config: type, name: str) -> Setting:
    """The setting of that name."""
    (found,) = (one for one in settings_of(config) if one.name == name)
    return found


def read(config: type[_Config], values: Mapping[str, Any], where: Callable[[str], str]) -> _Config:
    """A `config` with what `values` say, and defaults for the rest: None is as if the key were not there.

    where: how an error names a key. Keys that are no setting of `config` are not looked at.
    """
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(config):  # type: ignore[arg-type]
        if "group" in entry.metadata:
            found[entry.name] = read(entry.metadata["group"], values, where)
        if "setting" not in entry.metadata:
            continue
        one: Setting = entry.metadata["setting"]
        given, to = values.get(one.name), entry.metadata["to"]
        if given is not None or one.default is REQUIRED:
            value = one.check(where(one.name), given)
            found[entry.name] = value if to is None else to(value)
    return config(**found)


# -- in the docs --------------------------------------------------------------------------


def shown_values(one: Setting) -> str:
    """The permitted values of a setting, for a table in Markdown."""
    if one.choices:
        return ", ".join(f"`{choice}`" for choice in one.choices)
    shown = one.type.value
    if one.type in NUMBERS and one.minimum > 0:
        shown += f", at least {one.minimum:.12g}"
    if one.type in NUMBERS and one.maximum not in (None, MAX_COUNT, MAX_TIMEOUT_S):
        shown += f", at most {one.maximum:.12g}"
    return shown


def shown_default(one: Setting) -> str:
    """A setting's default, for a table in Markdown."""
    if one.default_text:
        return one.default_text
    if one.default is REQUIRED:
        return "required"
    if one.default in (None, "", ()) or callable(one.default):
        return "none"
    if one.type is Type.BOOL:
        return str(one.default).lower()
    if one.type is Type.SIZE and one.default:
        return f'`"{shown_size(one.default)}"`'
    return f"`{one.default:.12g}`" if one.type in NUMBERS else f"`{one.default}`"


def shown_size(num_bytes: int) -> str:
    """Bytes as one would write them: "8MiB"."""
    power = next(power for power in (3, 2, 1, 0) if num_bytes % 1024**power == 0)
    return f"{num_bytes // 1024**power}{('', 'KiB', 'MiB', 'GiB')[power]}"


# -- checks -------------------------------------------------------------------------------


def require_label(flag: str, value: object) -> str | None:
    """`value` when it is text that is not blank, or None."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(f"{flag}: expected a label, got {value!r:.80}")
    return value


def require_choice(
    flag: str, value: object, choices: Collection[str], refused: Mapping[str, str] = MappingProxyType({})
) -> str:
    """`value` when it is one of `choices`; those in `refused` raise ConfigError with the reason."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{flag}: unknown value {value!r}, expected one of {', '.join(choices)}")
    if value in refused:
        raise ConfigError(f"{flag} {value}: {refused[value]}")
    return value


def require_int(flag: str, value: object, minimum: int = 0, maximum: int | None = None) -> int:
    """`value` when it is an int (a bool is not), at least `minimum` and, where given, at most `maximum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{flag} must be int, got {type(value).__name__}")
    if value < minimum:
        raise ConfigError(f"{flag} must be >= {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{flag} must be <= {maximum}, got {value}")
    return value


def require_number(
    flag: str, value: object, minimum: float = 0.0, maximum: float = sys.float_info.max
) -> float:
    """`value` as a float when it is a finite int or float (a bool is not) in [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{flag} must be number, got {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value) or value < minimum:
        raise ConfigError(f"{flag} must be a finite number >= {minimum:g}, got {value}")
    if value > maximum:
        raise ConfigError(f"{flag} must be at most {maximum:g}, got {value}")
    return float(value)


def require_bool(flag: str, value: object) -> bool:
    """`value` when it is a bool; 0 and 1 are not."""
    if not isinstance(value, bool):
        raise ConfigError(f"{flag} must be bool, got {type(value).__name__}")
    return value


def require_size(flag: str, value: object) -> int:
    """Bytes from an integer or text such as "64GiB", "500MB", "10g" (binary without the B)."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f'{flag}: expected bytes or a size such as "64GiB", got {value!r}')
        size = float(match[1]) * _UNITS[match[2].lower()]
        if size > MAX_BYTES:
            raise ConfigError(f"{flag}: {value:.20}{'...' if len(value) > 20 else ''} is too large")
        return int(size)
    num_bytes = require_int(flag, value)
    if num_bytes > MAX_BYTES:
        raise ConfigError(f"{flag}: {num_bytes} is too large")
    return num_bytes


def require_stores(flag: str, value: object) -> Mapping[str, Any]:
    """`value` when it is an object of objects or texts, by name."""
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(one, Mapping | str) for name, one in value.items()
    ):
        raise ConfigError(f"{flag} must be an object of configurations by name")
    return value


def require_object(flag: str, value: object) -> Mapping[str, Any]:
    """`value` when it is a mapping."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{flag} must be an object, got {type(value).__name__}")
    return value


def require_text(flag: str, value: object, name: str = "") -> str:
    """`value` when it is text that the system's calls take: they end at a zero byte, and take no halves of
    characters but those that stand for bytes of a path. name: of the setting; a secret is not repeated."""
    try:
        if isinstance(value, str) and b"\0" not in os.fsencode(value):
            return value
    except UnicodeEncodeError:
        pass
    raise ConfigError(f"{flag} must be text, got {redact(value, name)!r}")


def nearest_name(name: str, known: Iterable[str], likeness: float = 0.7) -> str | None:
    """The known name that an unknown one may be meant for. likeness: 1 is equal."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff=likeness)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error on an unknown name: "; did you mean ...?", or "" if no known name is near."""
    found = nearest_name(name, known)
    return "" if found is None else f"; did you mean {found}?"


# -- what is hidden -----------------------------------------------------------------------

_SECRET = re.compile(  # a number per 1024 tokens is no token
    r"passw|secret|credential|private|api_?key|access_?key|authorization|signature|(^|_)auth$"
    r"|(^|_)(?<!_ki_)token$|(^|_)key(_base64)?$|(^|_)(ak|sk|pwd|sig)$",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(?<=[?&])(?P<name>[^=&#\s]+)=[^&#\s]+")
_USER_INFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/@\s]*@", re.IGNORECASE)


def says_secret(name: str) -> bool:
    """Whether a setting of this name is shown as '***': by the name, as libraries have keys of their own."""
    return _SECRET.search(name) is not None


def redact(value: Any, name: str = "") -> Any:
    """`value` for display: '***' where a name says secret, also in URLs, and for their user info."""
    if value is not None and says_secret(name):
        return "***"
    if isinstance(value, Mapping):
        return {str(key): redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if not isinstance(value, str):
        return value
    return _QUERY.sub(_hide, _USER_INFO.sub(r"\g<scheme>***@", value))


def _hide(found: re.Match[str]) -> str:
    name = found["name"]
    return f"{name}=***" if says_secret(name) else found[0]

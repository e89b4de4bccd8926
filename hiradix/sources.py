"""Resolves each setting from its sources: a flag, the environment, a file, or the default; the first of these
counts.

    found = resolve(table, {"port": Given(30001, SettingSource.FLAG, "--port")}, os.environ)
    found["port"]              # 30001, whatever HIRADIX_PORT and the file say
    found.given["port"].place  # "--port"

A setting is taken whole: an object or a list of one source is not joined with that of another.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hiradix.config_files import ConfigFile, read_config_file
from hiradix.errors import ConfigError
from hiradix.settings import PREFIX, REQUIRED, UNSHOWN, Setting, Type, nearest, nearest_name, redact

CONFIG = Setting(
    "config",
    Type.FILE,
    None,
    "File of settings (.toml, .yaml, .yml or .json), by the names of the flags; flags and environment go "
    "before it. See docs/configuration.md.",
    metavar="FILE",
)
OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        "ALL_CLIENTS ATTACH_CYCLES ATTACK_SECONDS ATTACK_SEED BENCH_ALL BENCH_POLICY BROKEN "
        "CACHE_SEEDS COMPILE COMPILED COMPILE_LEVEL COMPONENT_RUNS CRASH_RUNS DIFFERENTIAL_SEEDS "
        "EVENT_RUNS EXECUTOR_MOVES FAULTS FAULT_RUNS GPU_TESTS_ON INTENT_MOVES JUDGING LADDER_FAULT "
        "LIVES RANKS_BUDGET_S RANKS_FULL RANKS_SEEDS SECONDS SEED SIM_OPS SIM_SECONDS SIM_SEED "
        "STORAGE_FAULTS TREE_EXAMPLES TREE_RUNS "
    ).split()
)
"""Variables of the build, the tests and the benchmarks; those that begin with HIRADIX_TEST_ are, too."""
_KUBERNETES = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_OF_TESTS = f"{PREFIX}TEST_"
_MAX_SUGGESTED = 50  # problems with a name that may be meant: to look for one takes a millisecond
_MAX_COMPARED = 1000  # a guest's unknown names; those behind them are noted without a look
_NEARLY = 0.85  # alike, of a name that is a slip of another; what settings have in common is less
_KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


class SettingSource(enum.IntEnum):
    """The source of a value; the lower one counts."""

    FLAG = 0
    ENVIRONMENT = 1
    FILE = 2
    DEFAULT = 3


@dataclass(frozen=True)
class Given:
    """A value and who says it.

    value: checked, as it is used. place: "--port", "HIRADIX_PORT" or "serve.toml:3". text: of a flag or a
    variable, as it was written.
    """

    value: Any = field(repr=False)
    source: SettingSource
    place: str
    text: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Resolved:
    """The result of all sources together.

    given: by setting, what counts. overruled: by setting, what others say of it. problems: a sentence for
    each value that cannot be taken, and each unknown key. notes: what was read and does nothing here.
    """

    table: Mapping[str, Setting]
    given: Mapping[str, Given]
    overruled: Mapping[str, tuple[Given, ...]]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        """The value that counts, or the default; None for a required one that is not given."""
        if name in self.given:
            return self.given[name].value
        default = self.table[name].default
        if default is REQUIRED:
            return None
        return default() if callable(default) else default

    def source(self, name: str) -> SettingSource:
        return self.given[name].source if name in self.given else SettingSource.DEFAULT

    def where(self, name: str) -> str:
        """The name of a setting in errors: as it was given."""
        given = self.given.get(name)
        if given is None:
            return self.table[name].flag
        return f"{given.place}: {name}" if given.source is SettingSource.FILE else given.place

    @property
    def places(self) -> dict[str, str]:
        """By flag, the place of its value, if not on the command line."""
        return {
            self.table[name].flag: given.place
            for name, given in self.given.items()
            if given.source is not SettingSource.FLAG
        }

    def check(self) -> None:
        """Raises ConfigError with the first problem, if there is one."""
        if self.problems:
            more = len(self.problems) - 1
            rest = f" (and {more} more: hiradix config check)" if more else ""
            raise ConfigError(self.problems[0] + rest)


def placed(message: str, places: Mapping[str, str]) -> str:
    """`message` with the places of the flags that it names and that are said elsewhere."""
    named = [
        f"{flag} is set by {place}"
        for flag, place in places.items()
        if place not in message and re.search(rf"(?<![\w-]){flag}(?![\w-])", message)
    ]
    return f"{message} ({', '.join(named)})" if named else message


@dataclass
class _Findings:
    """The findings on the way to a `Resolved`."""

    is_guest: bool = False
    said: dict[str, list[Given]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, one: Setting, source: SettingSource, place: str, where: str, value: Any) -> None:
        """A value as it was written: text of a variable, anything of a file."""
        text = value if source is SettingSource.ENVIRONMENT else None
        try:
            read = one.from_text(where, value) if text is not None else value
            checked = one.check(where, read)
        except ConfigError as error:
            self.problems.append(" ".join(str(error).split()))
            return
        self.said.setdefault(one.name, []).append(Given(checked, source, place, text))

    def unknown(self, name: str, text: str, place: str, names: Iterable[str]) -> None:
        """A name that is none of `names`."""
        said = f"{place} {text}" if place == name else f"{place}: {text}"
        if not self.is_guest:
            near = nearest(name, names) if len(self.problems) < _MAX_SUGGESTED else ""
            self.problems.append(said + near)
            return
        bare = {one.removeprefix(PREFIX).lower(): one for one in names}
        is_compared = len(self.problems) + len(self.notes) < _MAX_COMPARED
        meant = nearest_name(name.removeprefix(PREFIX).lower(), bare if is_compared else (), _NEARLY)
        if meant is None:
            self.notes.append(f"{said} that is read here")
        else:
            self.problems.append(f"{said}; did you mean {bare[meant]}?")


def resolve(
    table: Iterable[Setting],
    said: Mapping[str, Given],
    environment: Mapping[str, str],
    elsewhere: Mapping[str, str] | None = None,
    foreign: Callable[[str], str | None] = lambda name: None,
    is_guest: bool = False,
) -> Resolved:
    """Resolve each setting of `table`: the value that counts, and all that is wrong in the environment and
    the file.

    said: by setting, what flags say, or an engine's own configuration; checked. The file is `config` of these
    or HIRADIX_CONFIG. elsewhere: by name, whose other settings are: in a file that several programs share they
    are passed over with a note. foreign: what to say of a key that is another product's. is_guest: the table is
    that of a guest in an engine, which does not know all names there are: an unknown one is an error only where
    it is nearly one of its own.
    """
    by_name = {one.name: one for one in (*table, CONFIG)}
    others = dict(elsewhere or {})
    found = _Findings(is_guest)
    for name, given in said.items():
        found.said[name] = [given]
    _read_environment(by_name, others, environment, found)
    for given in found.said.get(CONFIG.name, ())[:1]:
        try:
            file = read_config_file(given.value)
        except ConfigError as error:
            found.problems.append(f"{given.place}: {error}")
        else:
            _read_file(by_name, others, file, foreign, found)
    return Resolved(
        by_name,
        {name: given[0] for name, given in found.said.items()},
        {name: tuple(given[1:]) for name, given in found.said.items() if len(given) > 1},
        tuple(found.problems),
        tuple(found.notes),
    )


def _read_environment(
    table: Mapping[str, Setting], others: Mapping[str, str], environment: Mapping[str, str], found: _Findings
) -> None:
    variables = {one.variable: one for one in table.values()}
    known = {*OTHER_VARIABLES, *(PREFIX + name.upper() for name in others)}
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        value = environment[name]
        if name.startswith(_OF_TESTS) or _is_of_kubernetes(name, value):
            continue
        if name in variables:
            one = variables[name]
            if one.type is Type.SECRET:
                value = value.rstrip("\r\n")
            if not value.strip():
                found.problems.append(f"{name} is empty: unset it, or give a value")
                continue
            found.add(one, SettingSource.ENVIRONMENT, name, name, value)
        elif name not in known:
            found.unknown(name, "is no variable of hiradix", name, variables)


def _is_of_kubernetes(name: str, value: str) -> bool:
    """Whether it is one that Kubernetes sets in every container beside a Service called `hiradix`."""
    if _KUBERNETES.fullmatch(name) is not None:
        return True
    return name.endswith("PORT") and _KUBERNETES_ADDRESS.match(value) is not None


def _read_file(
    table: Mapping[str, Setting],
    others: Mapping[str, str],
    file: ConfigFile,
    foreign: Callable[[str], str | None],
    found: _Findings,
) -> None:
    names = dict(_spellings(table.values()))
    seen: dict[str, str] = {}
    for key, value in file.values.items():
        place = file.place(key)
        one = names.get(key.replace("-", "_"))
        if one is None:
            _unknown(key, place, names, others, foreign, found)
        elif one.name in seen:
            found.problems.append(f"{place}: {key} is given twice, as {seen[one.name]}, too")
        elif one.name == CONFIG.name:
            found.problems.append(f"{place}: config: a file names no other file")
        elif value is not None:
            seen[one.name] = key
            found.add(one, SettingSource.FILE, place, f"{place}: {key}", value)
    secrets = [one.name for name, one in names.items() if one.type is Type.SECRET and one.name in seen]
    if secrets and file.mode & 0o077:
        found.notes.append(
            f"{file.path} has {' and '.join(sorted(set(secrets)))}: others may read or write it "
            f"(mode {file.mode:o})"
        )


def _spellings(settings: Iterable[Setting]) -> Iterator[tuple[str, Setting]]:
    for one in settings:
        for name in (one.name, *one.aliases):
            yield name, one


def _unknown(
    key: str,
    place: str,
    names: Mapping[str, Setting],
    others: Mapping[str, str],
    foreign: Callable[[str], str | None],
    found: _Findings,
) -> None:
    name = key.replace("-", "_")
    if name in others:
        found.notes.append(f"{place}: {key} is for {others[name]}, nothing here")
        return
    said = foreign(name)
    if said is not None:
        found.problems.append(f"{place}: {key} {said}")
    else:
        found.unknown(name, f"{key!r:.80} is no setting", place, names)


def shown_value(one: Setting, value: Any) -> Any:
    """A value for a reader: a secret as '***', what somebody else reads without what its names call secret."""
    if value is None:
        return None
    if one.type is Type.SECRET:
        return "***"
    if one.type not in UNSHOWN:
        return redact(list(value) if isinstance(value, tuple) else value, one.name)
    return redact({name: _without_json(item) for name, item in dict(value).items()})


def _without_json(value: Any) -> Any:
    """The value without JSON text, such as a store's, which is hidden whole at any depth."""
    if isinstance(value, Mapping):
        return {name: _without_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_json(item) for item in value]
    return "***" if isinstance(value, str) and value.lstrip().startswith(("{", "[")) else value

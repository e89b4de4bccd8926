"""hiradix config: check a configuration, show what counts of it, explain a setting, migrate LMCache's."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hiradix.adapters.vllm import settings as vllm_settings
from hiradix.apps.configure.catalogue import EXTRA, CatalogueEntry, explained
from hiradix.apps.configure.example import example_toml
from hiradix.apps.lmcache.keys import LMCacheKey
from hiradix.apps.lmcache.migrate import Migration, from_variables, migrate
from hiradix.apps.lmcache.toml_text import toml
from hiradix.apps.server.flag_table import TABLE
from hiradix.apps.server.flags import resolve_serve, serve_config
from hiradix.config_files import read_config_file
from hiradix.errors import ConfigError
from hiradix.settings import Setting, Type, shown_default
from hiradix.sources import Resolved, SettingSource, placed, shown_value

USAGE = """usage: hiradix config {check,show,explain,example,migrate} ...

  check [FILE] [FLAGS]    whether `hiradix serve --config FILE FLAGS` would take them; all that is wrong
  show [FLAGS]            each setting, its value and who says it: a flag, a variable, a line of the file
  explain NAME ...        type, bounds, default, meaning, and where it can be said
  example                 a file with every setting, its meaning and its default
  migrate [FILE]          LMCache's settings (of FILE, else its variables) as ours, with a line for each key

FLAGS are those of `hiradix serve`, --config FILE among them. --json before them prints JSON. show --given
leaves defaults out; migrate --for vllm or sglang prints what goes into that engine's extra config.
"""
_NAMES = {
    SettingSource.FLAG: "flag",
    SettingSource.ENVIRONMENT: "environment",
    SettingSource.FILE: "file",
    SettingSource.DEFAULT: "default",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """hiradix config: 0, or 2 where something is wrong."""
    command, *rest = [*(sys.argv[2:] if arguments is None else arguments)] or [""]
    commands = {"check": _check, "show": _show, "explain": _explain, "example": _example, "migrate": _migrate}
    if command in ("-h", "--help") or {"-h", "--help"} & set(rest):
        print(USAGE, end="")
        return 0
    if command not in commands:
        known = ", ".join(commands)
        print(f"hiradix config: error: {command or 'no command'!r}, expected one of {known}", file=sys.stderr)
        return 2
    try:
        return commands[command](rest)
    except ConfigError as error:
        print(f"hiradix config {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _taken(arguments: list[str], *switches: str) -> set[str]:
    """Remove the leading arguments that are among `switches`; the set of those removed."""
    found = set()
    while arguments and arguments[0] in switches:
        found.add(arguments.pop(0))
    return found


def _json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


# -- check --------------------------------------------------------------------------------


def _check(arguments: list[str]) -> int:
    as_json = bool(_taken(arguments, "--json"))
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--config", *arguments]
    problems, notes, num_given = _problems(arguments)
    if as_json:
        _json({"ok": not problems, "problems": problems, "notes": list(notes)})
    else:
        for note in notes:
            print(f"note: {note}")
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        if not problems:
            print(f"ok: {num_given} settings are given, the rest are defaults")
    return 2 if problems else 0


def _problems(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...], int]:
    """All that is wrong, what the start would tell, and how many settings are given."""
    try:
        found = resolve_serve(arguments)
    except ConfigError as error:
        return [str(error)], (), 0
    if found.problems:
        return list(found.problems), found.notes, len(found.given)
    try:
        return [], serve_config(found).notes, len(found.given)
    except ConfigError as error:
        return [placed(str(error), found.places)], found.notes, len(found.given)


# -- show ---------------------------------------------------------------------------------


def _show(arguments: list[str]) -> int:
    switches = _taken(arguments, "--json", "--given")
    found = resolve_serve(arguments)
    rows = [_row(found, one) for one in TABLE if "--given" not in switches or one.name in found.given]
    if "--json" in switches:
        _json({"settings": rows, "problems": list(found.problems), "notes": list(found.notes)})
    else:
        _print_rows(rows)
        for problem in found.problems:
            print(f"error: {problem}", file=sys.stderr)
    return 2 if found.problems else 0


def _row(found: Resolved, one: Setting) -> dict[str, Any]:
    given = found.given.get(one.name)
    value = shown_default(one).replace("`", "") if given is None else shown_value(one, given.value)
    if given is None and one.type is Type.BOOL:
        value = found[one.name]
    return {
        "name": one.name,
        "value": value,
        "source": _NAMES[found.source(one.name)],
        "place": None if given is None else given.place,
        "overrules": [other.place for other in found.overruled.get(one.name, ())],
    }


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        value = row["value"] if isinstance(row["value"], str) else json.dumps(row["value"], default=str)
        place = row["place"] or row["source"]
        also = f" (over {', '.join(row['overrules'])})" if row["overrules"] else ""
        print(f"{row['name']:<{width}}  {value:<24}  {place}{also}")


# -- explain ------------------------------------------------------------------------------


def _explain(arguments: list[str]) -> int:
    as_json = bool(_taken(arguments, "--json"))
    if not arguments:
        raise ConfigError("a NAME is needed: a setting's, a flag or a variable")
    found = [entry for name in arguments for entry in explained(name)]
    if as_json:
        _json([_entry_json(entry) for entry in found])
        return 0
    print("\n\n".join(_entry_text(entry) for entry in found))
    return 0


def _entry_json(entry: CatalogueEntry | LMCacheKey) -> dict[str, Any]:
    if isinstance(entry, CatalogueEntry):
        return entry.as_json()
    return {"name": entry.name, "owner": "LMCache", "becomes": list(entry.to), "text": entry.text}


def _entry_text(entry: CatalogueEntry | LMCacheKey) -> str:
    if isinstance(entry, CatalogueEntry):
        return "\n".join(entry.lines())
    to = ", ".join(entry.to) or entry.fate.value
    return f"{entry.name}  (LMCache's)\n  here: {to}\n  {entry.text.replace('`', '')}"


def _example(arguments: list[str]) -> int:
    if arguments:
        raise ConfigError("example takes nothing behind it")
    print(example_toml(), end="")
    return 0


# -- migrate ------------------------------------------------------------------------------


def _migrate(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="hiradix config migrate", allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path)
    parser.add_argument("--for", dest="engine", choices=("serve", "vllm", "sglang"), default="serve")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    values = from_variables(os.environ) if args.file is None else dict(read_config_file(args.file).values)
    if not values:
        raise ConfigError("no settings of LMCache's: give its file, or set its variables")
    done = migrate(values)
    _check_migrated(done.settings)
    settings = _for_engine(done.settings, args.engine)
    if args.json:
        _json({"settings": settings, "keys": [vars(told) | {"fate": told.fate.value} for told in done.told]})
        return 0
    if args.engine != "serve":
        for told in done.told:
            print(told.line, file=sys.stderr)
        _json(settings)
        return 0
    print(_as_file(done, "the environment" if args.file is None else args.file.name), end="")
    return 0


def _as_file(done: Migration, origin: str) -> str:
    head = [f"Settings of hiradix serve, from LMCache's of {origin}.", *(told.line for told in done.told)]
    return "\n".join([*(f"# {line}" for line in head), "", toml(done.settings)])


def _check_migrated(settings: Mapping[str, Any]) -> None:
    """Check that our own table accepts the migrated settings. Raises ConfigError."""
    known = {one.name: one for one in (*TABLE, *vllm_settings.own_settings())}
    for name, value in settings.items():
        known[name].check(name, value)


def _for_engine(settings: Mapping[str, Any], engine: str) -> Mapping[str, Any]:
    """The part of the settings that goes into an engine's extra config; the rest are that engine's flags."""
    if engine == "vllm":
        own = (*vllm_settings.CONFIG_KEYS, *(one.name for one in vllm_settings.own_settings()))
        return {name: value for name, value in settings.items() if name in own}
    if engine == "sglang":
        return dict(settings.get(EXTRA, {}))
    return settings

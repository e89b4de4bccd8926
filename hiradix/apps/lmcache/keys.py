"""LMCache's settings, and what each became here: `keys.toml` beside this file, as records."""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


class Fate(enum.Enum):
    """The outcome of a key's migration. The value is the table's text for it."""

    BECOMES = "becomes"
    ALWAYS = "always so"
    ABSENT = "not here"


@dataclass(frozen=True)
class LMCacheKey:
    """to: the settings it becomes, those of a store with the name of their backend before them."""

    name: str
    fate: Fate
    text: str
    to: tuple[str, ...] = ()


def _keys(rows: list[dict[str, Any]]) -> dict[str, LMCacheKey]:
    found = {}
    for row in rows:
        if "becomes" in row:
            fate, text = Fate.BECOMES, row["why"]
        else:
            fate = Fate.ALWAYS if "always" in row else Fate.ABSENT
            text = row["always"] if "always" in row else row["absent"]
        for name in row["names"]:
            found[name] = LMCacheKey(name, fate, text, tuple(row.get("becomes", ())))
    return found


_TABLES = tomllib.loads(resources.files(__package__).joinpath("keys.toml").read_text(encoding="utf-8"))
KEYS: Mapping[str, LMCacheKey] = _keys(_TABLES["keys"])
"""By name: the outermost keys of LMCache's file, each also a variable with LMCACHE_ before it."""
EXTRA_KEYS: Mapping[str, LMCacheKey] = _keys(_TABLES["extra_config"])
"""By name: keys of `extra_config` there."""


def foreign_key(name: str) -> str | None:
    """The advice on an outermost key of LMCache's in a file of ours; None for other keys."""
    key = KEYS.get(name)
    if key is None:
        return None
    became = f" it became {', '.join(key.to)};" if key.to else ""
    return f"is LMCache's:{became} {key.text}; `hiradix config migrate FILE` prints the whole"


def lmcache_markdown() -> str:
    """The tables of `docs/lmcache.md`."""
    lines: list[str] = []
    for title, table in (("Keys", KEYS), ("Keys of `extra_config`", EXTRA_KEYS)):
        lines += [f"## {title}", "", "| LMCache | here | |", "|---|---|---|"]
        for key in table.values():
            to = ", ".join(f"`{name}`" for name in key.to) or key.fate.value
            lines.append(f"| `{key.name}` | {to} | {key.text} |")
        lines.append("")
    return "\n".join(lines)

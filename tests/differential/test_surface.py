"""Every public name of SGLang's classes is on ours, or stands in docs/differences.md with the reason.

Upstream's names are read out of its unpacked wheels: methods, annotated fields, and what a class sets on itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hiradix import prefix_cache
from tests.differential.door import NEWEST, OLDEST
from tests.differential.wheels import wheel_folder

ROOT = Path(__file__).parents[2]
TABLE = "## Names that are not here"


@dataclass(frozen=True)
class Theirs:
    """A class of a release. bases: others whose names it has too, all as `module.Class`."""

    version: str
    place: str
    bases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.place.partition(".")[2]

    def names(self) -> set[str]:
        return set().union(*(names_of(self.version, place) for place in (self.place, *self.bases)))

    def __str__(self) -> str:
        return f"{self.version} {self.name}"


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def class_names(body: ast.Module, name: str) -> set[str]:
    """The public names of a class: what its body defines, and what its methods set on `self`."""
    (found,) = (node for node in body.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {each for each in _defined(found) if not each.startswith("_")}


def _defined(found: ast.ClassDef) -> Iterator[str]:
    for part in found.body:
        if isinstance(part, ast.FunctionDef):
            yield part.name
        elif isinstance(part, (ast.Assign, ast.AnnAssign)):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
    for node in ast.walk(found):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


@cache
def names_of(version: str, place: str) -> set[str]:
    module, _, name = place.partition(".")
    folder = wheel_folder(version) / "sglang" / "srt" / "mem_cache"
    return class_names(parsed(folder / f"{module}.py"), name)


def _of(kind: Any) -> set[str]:
    return set(dir(kind)) | set(getattr(kind, "__dataclass_fields__", ()))


def _cache_names(kind: type[prefix_cache.PrefixCache]) -> set[str]:
    """Those of a cache that exists: some are set when it is made."""
    return set(dir(prefix_cache.RadixCache.create_simulated())) | set(dir(kind))


def _adapter_names() -> set[str]:
    """Those of the class in front inside SGLang of today, which inherits what SGLang's base has."""
    own = {"front": "Front", "cache": "HiRadixPrefixCache", "tiers": "HiRadixHostCache"}
    folder = ROOT / "hiradix" / "adapters" / "sglang"
    found = [class_names(parsed(folder / f"{module}.py"), name) for module, name in own.items()]
    return set().union(*found, names_of(NEWEST, _BASE))


_BASE = "base_prefix_cache.BasePrefixCache"
CACHES = [
    (Theirs(OLDEST, "radix_cache.RadixCache", (_BASE,)), prefix_cache.RadixCache),
    (
        Theirs(OLDEST, "hiradix_cache.HiRadixCache", (_BASE, "radix_cache.RadixCache")),
        prefix_cache.HiRadixCache,
    ),
    (Theirs(OLDEST, "swa_radix_cache.SWARadixCache", (_BASE,)), prefix_cache.SWARadixCache),
    (Theirs(OLDEST, "swa_radix_cache.SWARadixCache", (_BASE,)), prefix_cache.SWAHiRadixCache),
    (Theirs(OLDEST, "mamba_radix_cache.MambaRadixCache", (_BASE,)), prefix_cache.StateRadixCache),
]
RECORDS = [
    (Theirs(version, f"{module}.{name}"), getattr(prefix_cache, name))
    for version in (OLDEST, NEWEST)
    for module, name in (
        ("cache_init_params", "CacheInitParams"),
        ("radix_cache", "RadixKey"),
        ("base_prefix_cache", "MatchPrefixParams"),
        ("base_prefix_cache", "MatchResult"),
        ("base_prefix_cache", "InsertParams"),
        ("base_prefix_cache", "InsertResult"),
        ("base_prefix_cache", "EvictParams"),
        ("base_prefix_cache", "EvictResult"),
    )
]
NODES = (Theirs(OLDEST, "radix_cache.TreeNode"), prefix_cache.RadixCache.create_simulated().root_node)
INSIDE = [
    Theirs(NEWEST, "radix_cache.RadixCache", (_BASE,)),
    Theirs(NEWEST, "unified_radix_cache.UnifiedRadixCache", (_BASE,)),
]


def all_pairs() -> list[tuple[Theirs, set[str]]]:
    """Each of upstream's classes, and the names that ours has for it."""
    own = [(theirs, _cache_names(kind)) for theirs, kind in CACHES]
    own += [(theirs, _of(kind)) for theirs, kind in (*RECORDS, NODES)]
    return own + [(theirs, _adapter_names() | _cache_names(prefix_cache.HiRadixCache)) for theirs in INSIDE]


def rows() -> list[tuple[list[str], list[str]]]:
    """Classes and names in each row of the table of docs/differences.md. Every row says why."""
    text = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    section = text.partition(TABLE)[2].partition("\n## ")[0]
    found = re.findall(r"^\| (`.*) \| (`.*) \| (\S.*) \|$", section, re.MULTILINE)
    return [(re.findall(r"`(\w+)`", kinds), re.findall(r"`(\w+)`", names)) for kinds, names, _ in found]


def listed(kind: str) -> set[str]:
    return {name for kinds, names in rows() if kind in kinds for name in names}


@pytest.mark.parametrize(("theirs", "own"), all_pairs(), ids=lambda given: str(given)[:40])
def test_each_name_is_there_or_listed(theirs: Theirs, own: set[str]) -> None:
    missing = theirs.names() - own
    assert sorted(missing - listed(theirs.name)) == []


def test_what_is_listed_is_upstreams_and_not_here() -> None:
    missing: dict[str, set[str]] = {}
    for theirs, own in all_pairs():
        missing.setdefault(theirs.name, set()).update(theirs.names() - own)
    for kinds, names in rows():
        assert sorted(set(names) - set().union(*(missing[kind] for kind in kinds))) == []


def test_a_name_that_is_missing_would_be_seen() -> None:
    theirs = Theirs(OLDEST, "radix_cache.RadixCache")
    assert {"evict", "insert", "root_node", "evictable_size_", "page_size"} <= theirs.names()
    assert theirs.names() - _cache_names(prefix_cache.RadixCache) != set()
    assert "evict" not in {name for _, names in rows() for name in names}

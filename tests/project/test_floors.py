"""A module imports its own folder and lower floors; nothing else of the package."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.project.repo import Module, imports, modules

FLOORS = {
    "errors": -3,
    "config_files": -2,
    "settings": -1,
    "browsers": 0,
    "config": 0,
    "sources": 1,
    "os_memory": 0,
    "tree": 1,
    "triton_kernels": 1,
    "explain": 1,
    "events": 2,
    "intents": 2,
    "memory": 2,
    "storage": 2,
    "transfer": 3,
    "policy": 3,
    "cache": 4,
    "prefix_cache": 5,
    "testing": 3,
    "adapters": 6,
    "apps": 6,
    "apps.storage_tools": 6,
    "apps.tour": 6,
    "apps.ctl": 6,
    "apps.lmcache": 6,
    "apps.engine": 6,
    "apps.traces": 6,
    "apps.replay": 7,
    "apps.bench": 7,
    "apps.certify": 8,
    "apps.server": 7,
    "apps.demo": 8,
    "apps.configure": 8,
    "cli": 9,
}
HEAVY = {"torch", "triton", "transformers"}
# Modules that must import without torch and triton, and those that must not even have them installed.
TORCH_FREE_FLOORS = {
    "errors",
    "settings",
    "config_files",
    "browsers",
    "config",
    "sources",
    "os_memory",
    "tree",
    "explain",
    "events",
    "storage",
    "apps.storage_tools",
    "apps.ctl",
    "apps.lmcache",
    "apps.traces",
    "apps.bench",
    "apps.certify",
    "apps.demo",
    "cli",
}


def floor_name(dotted: str) -> str | None:
    """The part of the package a dotted name belongs to; None for other packages and for hiradix itself."""
    parts = dotted.split(".")
    if parts[0] != "hiradix":
        return None
    return next((name for name in (".".join(parts[1:3]), ".".join(parts[1:2])) if name in FLOORS), None)


def offences(module: Module) -> list[str]:
    own = floor_name(module.name)
    if own is None:
        return []
    found = []
    for name, line in imports(module):
        other = floor_name(name)
        if other is not None and other != own and FLOORS[other] >= FLOORS[own]:
            found.append(
                f"{module.shown}:{line}: {own} (floor {FLOORS[own]}) imports {name} ({FLOORS[other]})"
            )
    return found


def at_import(module: Module) -> set[str]:
    """Top-level packages imported when the module is, TYPE_CHECKING blocks and functions left out."""
    found: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_modules_import_only_lower_floors() -> None:
    assert [offence for module in modules() for offence in offences(module)] == []


def test_every_module_has_a_floor() -> None:
    homeless = [m.name for m in modules() if m.name != "hiradix" and floor_name(m.name) is None]
    assert homeless == []


def test_light_modules_need_no_tensor_library() -> None:
    light = [m for m in modules() if floor_name(m.name) in TORCH_FREE_FLOORS]
    assert len(light) > 20
    assert [(m.shown, name) for m in light for name in sorted(at_import(m) & HEAVY)] == []


def test_the_rule_sees_an_upward_import() -> None:
    source = "from hiradix.cache import core\nfrom ..apps.engine import api\nimport hiradix.tree.node"
    bad = Module("hiradix.memory.pool", Path(__file__), ast.parse(source))
    shown = [text.split(": ", 1)[1] for text in offences(bad)]
    assert any("imports hiradix.cache " in text for text in shown)
    assert any("imports hiradix.apps.engine " in text for text in shown)
    assert not any("hiradix.tree" in text for text in shown)

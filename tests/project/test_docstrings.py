"""A docstring says what its function or class is, instead of where that is written."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.project.repo import Module, modules

POINTERS = ("See `", "See the module", "See above", "See below", "As above", "Likewise")


def offences(module: Module) -> list[str]:
    """Public functions and classes whose docstring begins by pointing elsewhere."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node) or ""
            if not node.name.startswith("_") and text.startswith(POINTERS):
                found.append(f"{module.shown}:{node.lineno} {node.name}: {text.splitlines()[0]}")
    return found


def test_no_docstring_only_points_elsewhere() -> None:
    assert [offence for module in modules() for offence in offences(module)] == []


def test_the_rule_sees_a_pointer() -> None:
    source = "class A:\n    'See the module.'\n    def b(self):\n        'Sees b.'"
    bad = Module("hiradix.bad", Path(__file__), ast.parse(source))
    assert [text.split(" ")[1] for text in offences(bad)] == ["A:"]

"""A docstring says in a main clause what its function or class is or does, instead of pointing elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.project.repo import Module, modules

POINTERS = ("See `", "See the module", "See above", "See below", "As above", "As `", "As the ", "Likewise")
CLAUSES = ("What ", "Whatever ", "Whoever ")


def offences(module: Module, openings: tuple[str, ...] = POINTERS) -> list[str]:
    """Public functions and classes whose docstring begins like that."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node) or ""
            if not node.name.startswith("_") and text.startswith(openings):
                found.append(f"{module.shown}:{node.lineno} {node.name}: {text.splitlines()[0]}")
    return found


def test_no_docstring_only_points_elsewhere() -> None:
    assert [offence for module in modules() for offence in offences(module)] == []


def test_no_docstring_is_a_clause_without_a_verb_of_its_own() -> None:
    found = [offence for module in modules() for offence in offences(module, CLAUSES)]
    assert found == [], "say what it is or does: 'The pages that ...', 'Release ...'"


def test_the_rule_sees_a_pointer() -> None:
    source = "class A:\n    'See the module.'\n    def b(self):\n        'Sees b.'"
    bad = Module("hiradix.bad", Path(__file__), ast.parse(source))
    assert [text.split(" ")[1] for text in offences(bad)] == ["A:"]

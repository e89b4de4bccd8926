"""A class name is defined once in the package, so that it means one thing wherever it is read."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.project.repo import Module, modules


def defined_twice(found: Iterable[Module]) -> list[str]:
    """Each class name that several places define, with the places."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module.shown}:{node.lineno}")
    return [f"{name}: {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]


def test_a_class_name_is_defined_once() -> None:
    assert defined_twice(modules()) == []


def test_the_rule_sees_a_name_that_two_modules_define() -> None:
    module = next(m for m in modules() if m.name == "hiradix.tree.node")
    offences = defined_twice([module, Module("hiradix.twin", module.path, ast.parse("class Node: ..."))])
    assert [offence.partition(":")[0] for offence in offences] == ["Node"]

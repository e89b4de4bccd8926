"""Faults are found on the syntax tree: names of locals, layout and files do not matter."""

from __future__ import annotations

import ast
from itertools import islice
from pathlib import Path

import pytest

from tests.mutants import OPERATORS, SUITES, Mutant, functions, mutants_of, plant, spread
from tests.planting import NEVER_ENDS, Fault, Stale, copied, failing_test, places_of, planted

CODE = '''
"""A module."""


class Shelf:
    """A class."""

    def take(self, count: int, *, last: int = 1) -> list[int]:
        """Give some."""
        found = []
        for place in range(count):
            if place > last and self.is_free(place):
                found.append(place)
        self.num_taken += len(found)
        return sorted(found, reverse=True)
'''
RENAMED = CODE.replace("found", "given").replace("place", "p").replace("count", "wanted")
LAID_OUT = CODE.replace(
    "sorted(found, reverse=True)", "sorted(\n            found,\n            reverse=True)"
)

CONDITION = Fault("", "Shelf.take", "_1 > _2 and self.is_free(_1)", "self.is_free(_1)")
STATEMENT = Fault("", "Shelf.take", "self.num_taken += len(_1)", "pass")
BROUGHT_IN = Fault("", "Shelf.take", "sorted(_1, reverse=True)", "sorted(_1, reverse=_a2 > _a1)")


def tree(folder: Path, code: str, file: str = "shelf.py") -> Path:
    path = folder / "hiradix" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "code", [CODE, RENAMED, LAID_OUT], ids=["as it is", "locals renamed", "laid out anew"]
)
@pytest.mark.parametrize("file", ["shelf.py", "somewhere/else.py"])
@pytest.mark.parametrize(
    ("fault", "lost"), [(CONDITION, " > "), (STATEMENT, "num_taken"), (BROUGHT_IN, "reverse=True")]
)
def test_a_fault_is_planted_whatever_locals_are_called(
    tmp_path: Path, code: str, file: str, fault: Fault, lost: str
) -> None:
    path = tree(tmp_path, code, file)
    planted(fault, tmp_path)
    after = path.read_text(encoding="utf-8")
    assert lost not in after and ast.dump(ast.parse(after)) != ast.dump(ast.parse(code))


def test_of_equal_pieces_the_asked_one_is_changed(tmp_path: Path) -> None:
    path = tree(tmp_path, "def f(a):\n    g(a)\n    g(a)\n    return a\n")
    planted(Fault("", "f", "g(_1)", "h(_1)", at=1), tmp_path)
    assert path.read_text() == "def f(a):\n    g(a)\n    h(a)\n    return a"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("", "Shelf.take", "_1 < _2", "False"),
        Fault("", "Shelf.give", "_1 > _2", "False"),
        Fault("", "Shelf.take", "sorted(_1, reverse=True)", "_1", at=1),
    ],
    ids=["no such piece", "no such function", "not so many"],
)
def test_what_is_no_longer_there_is_stale(tmp_path: Path, fault: Fault) -> None:
    tree(tmp_path, CODE)
    with pytest.raises(Stale):
        planted(fault, tmp_path)


def test_two_locals_are_not_one(tmp_path: Path) -> None:
    tree(tmp_path, CODE)
    assert not list(places_of(Fault("", "Shelf.take", "_1 > _1 and self.is_free(_1)", "False"), tmp_path))


def test_each_operator_changes_the_code_and_nothing_else(tmp_path: Path) -> None:
    seen = set()
    for number, node in enumerate(ast.walk(dict(functions(ast.parse(CODE)))["Shelf.take"])):
        for name, operator in OPERATORS.items():
            for part, _ in operator(node):
                path = tree(tmp_path, CODE)
                plant(Mutant("shelf.py", "Shelf.take", name, number, part, ""), tmp_path)
                after = path.read_text(encoding="utf-8")
                assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(CODE)), name
                seen.add(name)
    assert seen == set(OPERATORS) - {"sign turned", "arguments exchanged"} | {"sign turned"}


def test_every_suite_has_code_and_a_sample_is_spread() -> None:
    for name, suite in SUITES.items():
        mutants = list(islice(mutants_of(suite), 250))  # showing all takes ten seconds
        assert len(mutants) > 200, name
        chosen = spread(mutants, 20)
        assert len(set(chosen)) == 20 and chosen == spread(mutants, 20)


def test_what_takes_too_long_without_a_fault_has_not_seen_one(tmp_path: Path) -> None:
    assert failing_test(copied(tmp_path), ["tests/project/planted/a_loop.py"], 2) is None


def test_a_loop_that_a_fault_brings_is_seen(tmp_path: Path) -> None:
    quick = "tests/project/planted/nothing.py"
    loop = Path(__file__).with_name("planted") / "a_loop.py"
    (copied(tmp_path) / quick).write_text(loop.read_text(encoding="utf-8"), encoding="utf-8")
    assert failing_test(tmp_path, [quick], 10) == NEVER_ENDS  # importing alone takes some seconds

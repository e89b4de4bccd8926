"""Small pieces: files under 400 lines, classes under 300, functions under 40, at most five parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.project.repo import ROOT, Module, modules

MAX_FILE, MAX_CLASS, MAX_FUNCTION, MAX_PARAMETERS = 400, 300, 40, 5
# Signatures that another project's engine calls: their length is not ours to choose.
FOREIGN_SIGNATURES = {"prefetch_from_storage", "attach_storage_backend"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_kernel(node: Function) -> bool:
    """Whether it is a Triton kernel, whose parameters are registers and cannot be a record."""
    return any("jit" in ast.unparse(d) for d in node.decorator_list)


def num_lines(node: ast.ClassDef | Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_parameters(node: Function) -> int:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def offences(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and num_lines(node) >= MAX_CLASS:
            yield f"class {node.name} has {num_lines(node)} lines"
        if not isinstance(node, Function):
            continue
        if num_lines(node) >= MAX_FUNCTION:
            yield f"{node.name} has {num_lines(node)} lines"
        ours = node.name not in FOREIGN_SIGNATURES and not is_kernel(node)
        if ours and num_parameters(node) > MAX_PARAMETERS:
            yield f"{node.name} has {num_parameters(node)} parameters"


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_module_is_made_of_small_pieces(module: Module) -> None:
    lines = len(module.path.read_text(encoding="utf-8").splitlines())
    assert lines < MAX_FILE, f"{module.shown} has {lines} lines"
    assert list(offences(module.tree)) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_test_file_is_short(path: object) -> None:
    from pathlib import Path

    assert isinstance(path, Path)
    assert len(path.read_text(encoding="utf-8").splitlines()) < 2 * MAX_FILE


def test_the_rule_sees_each_kind() -> None:
    body = "\n".join("    x = 1" for _ in range(MAX_FUNCTION))
    source = f"def long():\n{body}\ndef wide(a, b, c, *, d, e, f): ...\ndef fine(self, a, b, c, d, e): ..."
    assert list(offences(ast.parse(source))) == ["long has 41 lines", "wide has 6 parameters"]

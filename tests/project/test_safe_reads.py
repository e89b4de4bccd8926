"""Nothing the product reads can run code: no pickle, no eval, no torch.load."""

from __future__ import annotations

import ast

from tests.project.repo import ROOT, Module, imports, modules

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BANNED_NAMES = {"eval", "exec", "compile", "__import__"}
BANNED_CALLS = {"torch.load", "yaml.load", "yaml.unsafe_load", "torch.save", "torch.jit.load"}


def offences(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in BANNED_NAMES:
            found.append(f"line {node.lineno}: {node.func.id}()")
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in BANNED_CALLS:
            found.append(f"line {node.lineno}: {ast.unparse(node.func)}()")
        for keyword in node.keywords:
            loose = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            if keyword.arg in ("allow_pickle", "trust_remote_code") and loose:
                found.append(f"line {node.lineno}: {keyword.arg}=True")
    return found


def of_module(module: Module) -> list[str]:
    """The offences of a module, its imports among them, each with its file."""
    used = {name.split(".")[0] for name, _ in imports(module)} & BANNED_MODULES
    found = [f"import {name}" for name in sorted(used)] + offences(module.tree)
    return [f"{module.shown}: {offence}" for offence in found]


def test_modules_read_nothing_that_runs() -> None:
    assert [offence for module in modules() for offence in of_module(module)] == []


def test_the_rule_sees_each_kind() -> None:
    source = "eval(x)\ntorch.load(p)\nnp.load(p, allow_pickle=True)\nmodel.eval()\nnp.load(p)"
    assert len(offences(ast.parse(source))) == 3
    bad = Module("hiradix.bad", ROOT / "hiradix" / "bad.py", ast.parse("from pickle import load\neval(x)"))
    assert of_module(bad) == ["hiradix/bad.py: import pickle", "hiradix/bad.py: line 2: eval()"]

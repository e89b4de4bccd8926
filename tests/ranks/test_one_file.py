"""torch.distributed is imported in one file of the package, whatever else speaks to other ranks."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.project.repo import Module, imports, modules

HOME = "hiradix.transfer.process_group"


def offenders(candidates: tuple[Module, ...]) -> set[str]:
    found = ((module.name, name) for module in candidates for name, _ in imports(module))
    return {module for module, name in found if name.startswith("torch.distributed")}


def test_torch_distributed_is_imported_in_one_file() -> None:
    assert offenders(modules()) == {HOME}


def test_the_rule_sees_each_form() -> None:
    forms = ("import torch.distributed as d", "from torch import distributed", "import torch.distributed.rpc")
    for source in forms:
        assert offenders((Module("bad", Path(__file__), ast.parse(source)),)) == {"bad"}, source

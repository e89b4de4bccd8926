"""The reference pages have what the code has; code on the pages imports; the site has every page."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re

import pytest
import yaml

from hiradix.apps.server import metrics
from hiradix.prefix_cache import AttachedStorage, PrefixCache
from hiradix.storage import Traits
from hiradix.tree import RadixTree
from tests.project.repo import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def first_cells(text: str) -> set[str]:
    """What is in backticks in the first cell of each row of the tables."""
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_each_method_of_the_drop_in_classes_has_a_row() -> None:
    text = page("library.md").split("## The tree")[0]
    sizes = {f"{kind}{name}" for kind in ("full_", "swa_", "mamba_")
             for name in ("evictable_size", "protected_size", "total_size")}  # fmt: skip
    for cls in (PrefixCache, AttachedStorage):
        shown = {name for name in public(cls) if not isinstance(inspect.getattr_static(cls, name), str | int)}
        assert shown - sizes - first_cells(text) == set(), cls
    known = public(PrefixCache) | public(AttachedStorage) | {"AttachedStorage"}
    assert {name for name in first_cells(text) if not name.endswith("_")} - known == set()


def test_each_method_of_the_tree_has_a_row() -> None:
    text = page("library.md").split("## The tree")[1].split("## Docstrings")[0]
    assert first_cells(text) - {"RadixTree"} == public(RadixTree)


def test_each_trait_of_a_backend_has_a_row() -> None:
    text = page("your-backend.md").split("`hiradix.storage.kit`")[0]
    rows = {re.split("=", name)[0] for name in first_cells(text)}
    assert {field.name for field in dataclasses.fields(Traits)} - {"guarded"} == rows


def test_each_metric_has_a_row() -> None:
    named = set(re.findall(r'"((?:sglang|hiradix):\w+)"', inspect.getsource(metrics)))
    rows = {name.removesuffix("_total") for name in first_cells(page("metrics.md").split("## What")[0])}
    assert named == {name for name in rows if ":" in name}


def test_each_page_is_in_the_site() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = re.findall(r"[\w/-]+\.md", str(nav))
    assert len(named) == len(set(named))
    assert set(named) - {"CONTRIBUTING.md", "CHANGELOG.md"} == {str(p.relative_to(DOCS)) for p in PAGES}


@pytest.mark.parametrize("name", [str(p.relative_to(DOCS)) for p in PAGES if "```python" in p.read_text()])
def test_python_on_a_page_compiles_and_imports(name: str) -> None:
    for code in re.findall(r"```python\n(.*?)```", page(name), re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hiradix"):
                module = importlib.import_module(str(node.module))
                assert [a.name for a in node.names if not hasattr(module, a.name)] == [], node.module


@pytest.mark.parametrize("name", [str(p.relative_to(DOCS)) for p in PAGES])
def test_paths_on_a_page_exist(name: str) -> None:
    """Files and folders of the repository in backticks; `*` stands for any."""
    paths = re.findall(r"`((?:hiradix|tests|benchmarks|examples|triton_kernels)/[\w./*-]+)`", page(name))
    assert [path for path in paths if not list(ROOT.glob(path.split("::")[0]))] == []


@pytest.mark.parametrize("name", [str(p.relative_to(DOCS)) for p in PAGES])
def test_dotted_names_on_a_page_exist(name: str) -> None:
    """Modules, and names in them, in backticks; `hiradix.audit` is a logger."""
    lost = []
    for dotted in set(re.findall(r"`(hiradix(?:\.\w+)+)`", page(name))) - {"hiradix.audit"}:
        try:
            pkgutil.resolve_name(dotted)
        except (ImportError, AttributeError):
            lost.append(dotted)
    assert lost == []

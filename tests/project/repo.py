"""The repository as the project tests see it: its files and its Python modules."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache"}


@dataclass(frozen=True)
class Module:
    """One product module: its dotted name, file and syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def shown(self) -> str:
        """Its path inside the repository."""
        return str(self.path.relative_to(ROOT))


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in SKIPPED or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


@cache
def committed_files() -> tuple[Path, ...]:
    """Files under version control, new ones included; outside a checkout every file there is."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return tuple(_walk(ROOT))
    names = listed.stdout.decode().split("\0")
    return tuple(path for name in names if name and (path := ROOT / name).is_file())


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package, kernels under the name they are installed as."""
    found = []
    for folder, prefix in (
        (ROOT / "hiradix", "hiradix"),
        (ROOT / "triton_kernels", "hiradix.triton_kernels"),
    ):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([prefix, *(p for p in parts if p != "__init__")])
            found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """Dotted names a module imports, at any depth, with lines; `from a import b` gives both a and a.b."""
    is_package = module.path.name == "__init__.py"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)

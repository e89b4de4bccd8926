"""Faults planted in a copy of the code, one at a time, to show that something sees each.

A fault is addressed on the syntax tree: by the function that it is in, and by a piece of that function in
which every local name stands as `_1`, `_2`, ... in the order of appearance. So renaming a local name, moving
a function to another file or laying out its lines anew changes nothing; a piece that is no longer there makes
the fault stale, which the survey says and no test minds.
"""

from __future__ import annotations

import ast
import atexit
import copy as copying
import importlib
import io
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEST_S = 120  # longest a single test may wait for what a fault keeps from coming
NEVER_ENDS = "never ends"
BUSY = 10  # a busy machine may take so many seconds for one of processor time

Function = ast.FunctionDef | ast.AsyncFunctionDef
Piece = ast.expr | list[ast.stmt]


@dataclass(frozen=True)
class Fault:
    """Have `code` in `function` become something else.

    function: "Class.method" or "function", wherever it is defined; a class's or module's own statements are
    in "Class" and "". code: an expression or statements, with local names as `_1`, `_2`. becomes: the same,
    in terms of the same names and of the function's parameters as `_a1`, `_a2`. at: which of several equal
    pieces, in source order, from 0.
    """

    name: str
    function: str
    code: str
    becomes: str
    at: int = 0


@dataclass(frozen=True)
class Place:
    """A piece found in the code: `holder.field` is it, or holds its statements from `start` to `stop`."""

    file: Path
    module: ast.Module
    holder: ast.AST
    field: str
    start: int | None
    stop: int | None
    names: dict[str, str]  # by placeholder


class Stale(LookupError):
    """What a fault is planted in is no longer in the code."""


@dataclass(frozen=True)
class Planting:
    """A row of a survey. shown: its first columns; killer: what sees the fault in a copy, None if nothing."""

    shown: tuple[str, ...]
    fault: Fault
    killer: Callable[[Path], str | None]


def planted(fault: Fault, copy: Path) -> None:
    """Plant `fault` in the copy. Raises Stale if its place is not there."""
    places = list(places_of(fault, copy))
    if len(places) <= fault.at:
        raise Stale(f"{fault.function}: {fault.code}")
    place = places[fault.at]
    new = _named(_both(fault)[1], place.names)
    body = getattr(place.holder, place.field)
    if place.start is None:
        setattr(place.holder, place.field, new)
    else:
        body[place.start : place.stop] = new if isinstance(new, list) else [new]
    place.file.write_text(ast.unparse(ast.fix_missing_locations(place.module)), encoding="utf-8")


def _both(fault: Fault) -> tuple[Piece, Piece]:
    """What a fault replaces and by what: two expressions, or statements both."""
    code, becomes = ast.parse(fault.code).body, ast.parse(fault.becomes).body
    if all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in (code, becomes)):
        return code[0].value, becomes[0].value  # type: ignore[attr-defined]
    return code, becomes


def places_of(fault: Fault, root: Path) -> Iterator[Place]:
    """Where in hiradix/ below `root` the fault could be planted, in order of files and lines."""
    for file in sorted((root / "hiradix").rglob("*.py")):
        yield from _places_in(file, fault)


def _places_in(file: Path, fault: Fault) -> Iterator[Place]:
    text = file.read_text(encoding="utf-8")
    if fault.function.rpartition(".")[2] not in text:
        return
    pattern = _both(fault)[0]
    size = len(pattern) if isinstance(pattern, list) else None
    wanted = _shape(pattern, _is_placeholder)[0]
    module = ast.parse(text)
    for scope in _scopes(module, fault.function):
        local = local_names(scope)
        for holder, field, start, stop, piece in _pieces(scope, size):
            shape, names = _shape(piece, local.__contains__)
            if shape == wanted:
                yield Place(file, module, holder, field, start, stop, names | _parameters(scope))


def _scopes(module: ast.Module, qualified: str) -> Iterator[ast.AST]:
    def walk(node: ast.AST, prefix: str) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
                if name == qualified:
                    yield child
                elif qualified.startswith(f"{name}."):
                    yield from walk(child, name)
            elif not isinstance(child, ast.expr):
                yield from walk(child, prefix)

    if qualified:
        yield from walk(module, "")
    else:
        yield module


def local_names(scope: ast.AST) -> frozenset[str]:
    """What a function binds: parameters, targets and names of inner functions; of no function nothing."""
    if not isinstance(scope, Function):
        return frozenset()
    found = set()
    for node in ast.walk(scope):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.FunctionDef(name=name) if node is not scope:
                found.add(name)
    return frozenset(found - {"self", "cls"})


def _parameters(scope: ast.AST) -> dict[str, str]:
    """A function's parameters as `_a1`, `_a2`, ..., for what a fault brings in from outside of its piece."""
    if not isinstance(scope, Function):
        return {}
    names = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)]
    return {f"_a{n}": name for n, name in enumerate((n for n in names if n not in ("self", "cls")), 1)}


def _pieces(scope: ast.AST, size: int | None) -> Iterator[tuple[ast.AST, str, int | None, int | None, Piece]]:
    """Each expression below `scope`, or each run of `size` statements, and where it hangs."""
    for holder in ast.walk(scope):
        if not isinstance(scope, Function) and _is_inside_function(scope, holder):
            continue
        for field, value in ast.iter_fields(holder):
            if size is None and _is_value(value):
                yield holder, field, None, None, value
            elif isinstance(value, list) and value and isinstance(value[0], ast.stmt) and size is not None:
                for start in range(len(value) - size + 1):
                    yield holder, field, start, start + size, value[start : start + size]
            elif isinstance(value, list) and size is None:
                for index, item in enumerate(value):
                    if _is_value(item):
                        yield holder, field, index, index + 1, item


def _is_value(node: object) -> bool:
    loads = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
    return isinstance(node, ast.expr) and loads and not isinstance(node, ast.Slice | ast.Starred)


def _is_inside_function(scope: ast.AST, node: ast.AST) -> bool:
    return any(node in ast.walk(f) for f in ast.walk(scope) if isinstance(f, Function))


class _Numbered(ast.NodeTransformer):
    """Renames what `is_local` to `_1`, `_2`, ... in the order of appearance."""

    def __init__(self, is_local: Callable[[str], bool]) -> None:
        self._is_local = is_local
        self.marks: dict[str, str] = {}

    def _mark(self, name: str) -> str:
        return self.marks.setdefault(name, f"_{len(self.marks) + 1}") if self._is_local(name) else name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._mark(node.id), ast.Load())

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._mark(node.arg), None)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = self._mark(node.name) if node.name else None
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._mark(node.name)
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if hasattr(node, "ctx"):
            node.ctx = ast.Load()
        return node


def numbered(piece: Piece, is_local: Callable[[str], bool]) -> tuple[Piece, dict[str, str]]:
    """The piece with local names as placeholders, and what each of them stands for."""
    transformer = _Numbered(is_local)
    piece = copying.deepcopy(piece)
    new: Piece
    new = [transformer.visit(s) for s in piece] if isinstance(piece, list) else transformer.visit(piece)
    return new, {mark: name for name, mark in transformer.marks.items()}


def _shape(piece: Piece, is_local: Callable[[str], bool]) -> tuple[str, dict[str, str]]:
    new, names = numbered(piece, is_local)
    return "\n".join(map(ast.dump, new)) if isinstance(new, list) else ast.dump(new), names


def _is_placeholder(name: str) -> bool:
    return re.fullmatch(r"_\d+", name) is not None


def _named(piece: Piece, names: dict[str, str]) -> Piece:
    class Named(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.Name:
            return ast.Name(names.get(node.id, node.id), node.ctx)

        def visit_arg(self, node: ast.arg) -> ast.arg:
            return ast.arg(names.get(node.arg, node.arg), node.annotation)

    return [Named().visit(s) for s in piece] if isinstance(piece, list) else Named().visit(piece)


def copied(to: Path) -> Path:
    """Code and tests copied; what no fault is planted in, and tests read, is linked."""
    for name in ("hiradix", "tests"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("benchmarks", "docs", "examples", "pyproject.toml"):
        (to / name).symlink_to(ROOT / name)
    return to


def run_in(copy: Path, *command: str, timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the copy to its end; `env` comes on top of this process's."""
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=copy, env=env, capture_output=True, text=True, timeout=timeout_s
    )


class _FirstFailure:
    """A pytest plugin that keeps the id of what failed first."""

    node: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._keep(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._keep(report)

    def _keep(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and self.node is None:
            self.node = report.nodeid


def warm() -> None:
    """Import what is not ours and takes long, once for all forks."""
    for name in ("hypothesis", "numpy", "torch", "triton", "pytest_timeout", "xdist"):
        importlib.import_module(name)


def failing_test(copy: Path, tests: Sequence[str], timeout_s: float, **env: str) -> str | None:
    """The first of these tests that fails on the copy, as `tests/...::name`; None if none does.

    They run in a fork of this process, which imports the copy's code anew and keeps all other imports:
    after `warm` a fault is judged in a second. timeout_s: of processor time. Tests that take longer without the
    fault, too, have not seen it. AssertionError for a test that fails without the fault, too.
    """
    seen = _first_failing(copy, tests, timeout_s, env)
    if seen == NEVER_ENDS and not _ends(tuple(tests), timeout_s, tuple(sorted(env.items()))):
        return None
    if seen is None or not seen.startswith("tests/"):
        return seen
    assert _passes(seen, timeout_s, tuple(sorted(env.items()))), f"{seen} fails on the code as it is"
    return seen.partition("[")[0]


@cache
def _ends(tests: tuple[str, ...], timeout_s: float, env: tuple[tuple[str, str], ...]) -> bool:
    """Whether the tests come to their end in time on the code as it is."""
    return _first_failing(_unplanted(), tests, timeout_s, dict(env)) != NEVER_ENDS


@cache
def _passes(node: str, timeout_s: float, env: tuple[tuple[str, str], ...]) -> bool:
    """Whether a test, or the collection of a file, succeeds on the code as it is."""
    flags = () if "::" in node else ("--collect-only",)
    return _first_failing(_unplanted(), (*flags, node), timeout_s, dict(env)) is None


@cache
def _unplanted() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hiradix-unplanted-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return copied(folder)


def _first_failing(copy: Path, tests: Sequence[str], timeout_s: float, env: dict[str, str]) -> str | None:
    """The id of the first test that fails, or how the fork ended."""
    receiving, sending = Pipe(False)
    child = get_context("fork").Process(target=_judge, args=(copy, tests, timeout_s, env, sending))
    child.start()
    sending.close()
    try:
        if not receiving.poll(BUSY * timeout_s):
            return NEVER_ENDS
        status, node, output = receiving.recv()
    except EOFError:
        child.join()
        return NEVER_ENDS if child.exitcode == -signal.SIGXCPU else f"exit {child.exitcode}"
    finally:
        child.kill()
        child.join()
    assert status == 0 or node, f"no test ran to see it:\n{output[-4000:]}"
    return str(node) if node else None


def _judge(
    copy: Path, tests: Sequence[str], timeout_s: float, env: dict[str, str], answer: Connection
) -> None:
    """In the fork: run the tests of the copy on the code of the copy."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("hiradix", "tests")]:
        del sys.modules[name]
    os.chdir(copy)
    os.environ.update(env, HIRADIX_JUDGING="1")
    limit_s = int(timeout_s)  # ends a loop without end by SIGXCPU; at the hard limit it would be SIGKILL
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 10))
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    first = _FirstFailure()
    quiet = ("-x", "-q", "-n0", "--no-header", "--tb=short", f"--timeout={TEST_S}", "-p", "no:cacheprovider")
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
        status = pytest.main([*quiet, *tests], plugins=[first])
    answer.send((int(status), first.node, output.getvalue()))
    os._exit(0)  # threads that a fault left hanging are not waited for


def survey(head: Sequence[str], plantings: Sequence[Planting], may_be_stale: bool = False) -> int:
    """Plant each and print what sees it, as a table under `head`. The exit status: 1 if one survives, or is
    stale where none may be."""
    survived = stale = 0
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for planting in plantings:
        with tempfile.TemporaryDirectory(prefix="hiradix-planted-") as folder:
            copy = copied(Path(folder))
            try:
                planted(planting.fault, copy)
            except Stale as error:
                stale += 1
                seen: str | None = f"**stale**: {error}"
            else:
                seen = planting.killer(copy)
        survived += seen is None
        print(f"| {' | '.join(planting.shown)} | {seen or '**survived**'} |", flush=True)
    killed = len(plantings) - survived - stale
    print(f"\n{len(plantings)} planted: {killed} killed, {survived} survived, {stale} stale")
    return int(bool(survived or (stale and not may_be_stale)))

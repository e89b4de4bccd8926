"""Generated faults: every operator at every place of the code that a suite answers for.

    python -m tests.mutants tree                     all of one suite, as a table (hours for a large one)
    python -m tests.mutants tree --sample 20         so many of it, spread evenly, the same each time
    python -m tests.mutants cache --function Prefetcher.start
    python -m tests.mutants --list                   how many there are of each suite and operator
    python -m tests.mutants --lane                   named bugs and drawn mutants, the same each time

An operator changes one node of one function: a comparison is turned, a condition made true or false, a
statement dropped, two arguments exchanged, a constant moved by one, `and` made `or`, `+` made `-`, a return
value lost. A mutant that survives is a hole in the tests, or changes nothing that can be told.
What stands for a bug that systems of this kind have had is planted by name: see `tests/planting.py`.
"""

from __future__ import annotations

import argparse
import ast
import resource
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.planting import ROOT, Function, Planting, copied, failing_test, local_names, numbered, survey, warm

TIMEOUT_S = 90
LANE = ("cache", "transfer", "policy", "memory")  # a mutant that survives costs its suite: those of seconds
TABLES = ("tests.tree.mutation", "tests.cache.planted", "tests.simulation.kill_table")
ONE_FUNCTION_IN, ONE_BUG_IN = 130, 60
LEAST_KILLED = 0.5  # of the few mutants that the lane draws; of the named bugs all are to be

EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("as_pages", "condition false", "_1 if isinstance(_1, np.ndarray) else np.asarray(_1, np.int32)"): (
        "pages are int32 arrays, which asarray gives back as they are"
    ),
}
"""Drawn mutants that change nothing a caller could tell, by function, operator and piece, and why not."""

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
}  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """Code and the tests that answer for it. folders, tests: as paths below hiradix/ and the repository.

    timeout_s: of processor time; more than the tests take, else nothing that survives can be told from a loop.
    """

    folders: tuple[str, ...]
    tests: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    timeout_s: int = TIMEOUT_S


SUITES = {
    "tree": Suite(
        ("tree",),
        (
            *(f"tests/tree/test_{n}.py" for n in ("key", "regressions", "dead_leaves", "merge", "orders")),
            *(f"tests/tree/test_{n}.py" for n in ("log", "misuse", "ids", "check", "fuzz")),
            "tests/cache/test_components.py",
        ),
        (("HIRADIX_TREE_RUNS", "100"), ("HIRADIX_COMPONENT_RUNS", "64")),
        timeout_s=240,
    ),
    "cache": Suite(
        ("cache",),
        ("tests/cache", "tests/transfer/test_boundaries.py"),
        (("HIRADIX_CACHE_SEEDS", "3"), ("HIRADIX_COMPONENT_RUNS", "64")),
    ),
    "transfer": Suite(
        ("transfer",),
        ("tests/transfer", "tests/cache/test_hierarchical_cache.py", "tests/ranks/test_process_group.py"),
        (("HIRADIX_CACHE_SEEDS", "3"),),
    ),
    "prefix_cache": Suite(("prefix_cache",), ("tests/prefix_cache",)),
    "policy": Suite(
        ("policy",), ("tests/policy", "tests/tree/test_orders.py", "tests/cache/test_no_regret.py")
    ),
    "memory": Suite(("memory",), ("tests/memory",)),
    "storage": Suite(
        ("storage",),
        ("tests/storage", "tests/disk/test_disk.py", "tests/disk/test_states.py"),
        timeout_s=400,
    ),
    "vllm": Suite(("adapters/vllm",), ("tests/vllm_roles",)),
}


@dataclass(frozen=True)
class Mutant:
    """One change. number: of the node among the function's nodes, in walk order. part: which of its parts."""

    file: str
    function: str
    operator: str
    number: int
    part: int
    shown: str


Operator = Callable[[ast.AST], Iterator[tuple[int, Callable[[ast.AST], ast.AST | None]]]]


def _turned(node: ast.AST) -> Iterator[tuple[int, Callable[[ast.AST], ast.AST | None]]]:
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            if type(op) in TURNED:

                def turn(node: ast.AST, at: int = at) -> ast.AST:
                    assert isinstance(node, ast.Compare)
                    node.ops[at] = TURNED[type(node.ops[at])]()
                    return node

                yield at, turn


def _condition(value: bool) -> Operator:
    def operator(node: ast.AST) -> Iterator[tuple[int, Callable[[ast.AST], ast.AST | None]]]:
        if isinstance(node, ast.If | ast.IfExp) or (isinstance(node, ast.While) and not value):

            def fixed(node: ast.AST) -> ast.AST:
                assert isinstance(node, ast.If | ast.IfExp | ast.While)
                node.test = ast.Constant(value)
                return node

            yield 0, fixed

    return operator


def _dropped(node: ast.AST) -> Iterator[tuple[int, Callable[[ast.AST], ast.AST | None]]]:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Break | ast.Continue | ast.Raise):
        if not is_docstring and "logger" not in ast.unparse(node):
            yield 0, lambda node: ast.Pass()


def _exchanged(node: ast.AST) -> Iterator[tuple[int, Callable[[ast.AST], ast.AST | None]]]:
    if isinstance(node, ast.Call) and "logger" not in ast.unparse(node.func):
        for at in range(len(node.args) - 1):
            if ast.dump(node.args[at]) != ast.dump(node.args[at + 1]):

                def exchange(node: ast.AST, at: int = at) -> ast.AST:
                    assert isinstance(node, ast.Call)
                    node.args[at], node.args[at + 1] = node.args[at + 1], node.args[at]
                    return node

                yield at, exchange


def _moved(node: ast.AST) -> Iterator[tuple[int, Callable[[ast.AST], ast.AST | None]]]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield 0, lambda node: ast.Constant(node.value + 1)  # type: ignore[attr-defined]


def _and_or(node: ast.AST) -> Iterator[tuple[int, Callable[[ast.AST], ast.AST | None]]]:
    if isinstance(node, ast.BoolOp):

        def other(node: ast.AST) -> ast.AST:
            assert isinstance(node, ast.BoolOp)
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return node

        yield 0, other


def _signs(node: ast.AST) -> Iterator[tuple[int, Callable[[ast.AST], ast.AST | None]]]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SIGNS:

        def other(node: ast.AST) -> ast.AST:
            assert isinstance(node, ast.BinOp | ast.AugAssign)
            node.op = SIGNS[type(node.op)]()
            return node

        yield 0, other


def _lost(node: ast.AST) -> Iterator[tuple[int, Callable[[ast.AST], ast.AST | None]]]:
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield 0, lambda node: ast.Return(ast.Constant(None))


OPERATORS: dict[str, Operator] = {
    "comparison turned": _turned,
    "condition true": _condition(True),
    "condition false": _condition(False),
    "statement dropped": _dropped,
    "arguments exchanged": _exchanged,
    "constant moved by one": _moved,
    "and for or": _and_or,
    "sign turned": _signs,
    "return value lost": _lost,
}


def functions(module: ast.Module) -> Iterator[tuple[str, Function]]:
    """The outermost functions of a module by qualified name."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield prefix + child.name, child
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")

    yield from walk(module, "")


def mutants_of(suite: Suite, root: Path = ROOT) -> Iterator[Mutant]:
    """Every mutant of the suite's code, in order of files, functions and nodes."""
    for folder in suite.folders:
        for path in sorted((root / "hiradix" / folder).rglob("*.py")):
            file = str(path.relative_to(root / "hiradix"))
            for function, node in functions(ast.parse(path.read_text(encoding="utf-8"))):
                yield from _of_function(file, function, node)


def _of_function(file: str, function: str, scope: Function) -> Iterator[Mutant]:
    local = local_names(scope)
    for number, node in enumerate(ast.walk(scope)):
        for name, operator in OPERATORS.items():
            for part, _ in operator(node):
                yield Mutant(file, function, name, number, part, _first_line(node, local))


def _first_line(node: ast.AST, local: frozenset[str]) -> str:
    piece = numbered([node] if isinstance(node, ast.stmt) else node, local.__contains__)[0]  # type: ignore[arg-type]
    text = "\n".join(map(ast.unparse, piece)) if isinstance(piece, list) else ast.unparse(piece)
    return text.partition("\n")[0][:80]


def plant(mutant: Mutant, copy: Path) -> None:
    """Change the copy's code as the mutant says."""
    path = copy / "hiradix" / mutant.file
    module = ast.parse(path.read_text(encoding="utf-8"))
    scope = dict(functions(module))[mutant.function]
    wanted = list(ast.walk(scope))[mutant.number]
    change = dict(OPERATORS[mutant.operator](wanted))[mutant.part]

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST | None:
            return change(node) if node is wanted else self.generic_visit(node)

    Change().visit(scope)
    path.write_text(ast.unparse(ast.fix_missing_locations(module)), encoding="utf-8")


def spread(mutants: list[Mutant], count: int) -> list[Mutant]:
    """So many of them, evenly over all and the same each time."""
    if count >= len(mutants):
        return mutants
    return [mutants[(2 * n + 1) * len(mutants) // (2 * count)] for n in range(count)]


def drawn(suite: Suite, root: Path = ROOT) -> Iterator[Mutant]:
    """One mutant of each function that its name draws: a change of other functions changes none of them."""
    for folder in suite.folders:
        for path in sorted((root / "hiradix" / folder).rglob("*.py")):
            file = str(path.relative_to(root / "hiradix"))
            for function, node in functions(ast.parse(path.read_text(encoding="utf-8"))):
                if not function.endswith("__repr__") and _draw(function) % ONE_FUNCTION_IN == 0:
                    found = _of_function(file, function, node)
                    yield from sorted(
                        found, key=lambda m: (_draw(m.function + m.operator + m.shown), m.number)
                    )[:1]


def _draw(text: str) -> int:
    return zlib.crc32(text.encode())


def named() -> Iterator[Planting]:
    """The bugs of the tables that their names draw."""
    for table in TABLES:
        for planting in import_module(table).plantings():
            if _draw(planting.fault.name) % ONE_BUG_IN == 0:
                yield planting


def killer_of(mutant: Mutant, suite: Suite) -> str | None:
    """What sees the mutant, None if no test of the suite does."""
    with tempfile.TemporaryDirectory(prefix="hiradix-mutant-") as folder:
        copy = copied(Path(folder))
        plant(mutant, copy)
        return failing_test(copy, suite.tests, suite.timeout_s, **dict(suite.env))


def judge(suites: dict[str, list[Mutant]]) -> tuple[int, list[Mutant]]:
    """Run them and print a table; how many were killed, and those that survived."""
    num_killed, survived = 0, []
    print("| function | operator | piece | seen by |\n|---|---|---|---|", flush=True)
    for name, mutants in suites.items():
        for mutant in mutants:
            killer = killer_of(mutant, SUITES[name])
            if killer is None:
                survived.append(mutant)
            num_killed += killer is not None
            shown = mutant.shown.replace("|", "\\|")
            print(
                f"| {mutant.function} | {mutant.operator} | `{shown}` | {killer or '**survived**'} |",
                flush=True,
            )
    print(f"\n{num_killed + len(survived)} mutants: {num_killed} killed, {len(survived)} survived")
    return num_killed, survived


def lane() -> int:
    """Named bugs and drawn mutants. The exit status: 1 if a named one survives, or too many of the drawn."""
    bugs = [Planting((bug.fault.name,), bug.fault, bug.killer) for bug in named()]
    status = survey(("bug", "seen by"), bugs, may_be_stale=True)
    print()
    num_killed, survived = judge({name: list(drawn(SUITES[name])) for name in LANE})
    unknown = [m for m in survived if (m.function, m.operator, m.shown) not in EQUIVALENT]
    for mutant in unknown:
        print(
            f"survived, and may be a hole in the tests: {mutant.file}: {mutant.function}: {mutant.operator}"
        )
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"{sum(use.ru_utime + use.ru_stime for use in spent):.0f} s of processor time")
    is_enough = num_killed >= LEAST_KILLED * (num_killed + len(unknown))
    return status or int(not is_enough)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    names = f"of {', '.join(SUITES)}; all where none is named"
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=names)
    parser.add_argument("--sample", type=int, metavar="N", help="so many of each suite, spread evenly")
    parser.add_argument("--function", help="those of this function alone, as Class.method")
    parser.add_argument(
        "--lane", action="store_true", help="a few named bugs and drawn mutants of several suites"
    )
    parser.add_argument("--list", action="store_true", help="count them and run none")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.suites if name not in SUITES]:
        parser.error(f"no suite {unknown[0]}: {', '.join(SUITES)}")
    if options.lane:
        warm()
        return lane()
    found: dict[str, list[Mutant]] = {}
    for name in options.suites or SUITES:
        mutants = [m for m in mutants_of(SUITES[name]) if options.function in (None, m.function)]
        found[name] = mutants if options.sample is None else spread(mutants, options.sample)
    if options.list:
        for name, mutants in found.items():
            count = Counter(mutant.operator for mutant in mutants)
            print(f"{name}: {len(mutants)}: " + ", ".join(f"{op} {n}" for op, n in sorted(count.items())))
        return 0
    warm()
    judge(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Faults planted in a copy of the code, one at a time, to show that something sees each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fault:
    """Replace `old`, which must occur once in hiradix/<file>, by `new`."""

    name: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Planting:
    """A row of a survey. shown: its first columns; killer: what sees the fault in a copy, None if nothing."""

    shown: tuple[str, ...]
    fault: Fault
    killer: Callable[[Path], str | None]


def is_current(fault: Fault) -> bool:
    """Whether its text is there, once."""
    return (ROOT / "hiradix" / fault.file).read_text(encoding="utf-8").count(fault.old) == 1


def refuse_stale(faults: Iterable[Fault]) -> None:
    """Stop the program if one of them would change nothing, or more than it says."""
    if stale := [fault.name for fault in faults if not is_current(fault)]:
        raise SystemExit(f"bring these up to date, their text does not occur once: {'; '.join(stale)}")


def planted(fault: Fault, copy: Path) -> None:
    file = copy / "hiradix" / fault.file
    file.write_text(file.read_text(encoding="utf-8").replace(fault.old, fault.new), encoding="utf-8")


def copied(to: Path) -> Path:
    for name in ("hiradix", "tests", "docs"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)
    return to


def run_in(copy: Path, *command: str, timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the copy to its end; `env` comes on top of this process's."""
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=copy, env=env, capture_output=True, text=True, timeout=timeout_s
    )


def failing_test(copy: Path, tests: Sequence[str], timeout_s: float, **env: str) -> str | None:
    """The first of these tests that fails on the copy, as `tests/...::name`; None if none does."""
    command = ("pytest", "-x", "-q", "-n0", "--no-header", "-p", "no:cacheprovider", *tests)
    try:
        done = run_in(copy, *command, timeout_s=timeout_s, **env)
    except subprocess.TimeoutExpired:
        return "never ends"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    found = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[|\s|$)", done.stdout, re.MULTILINE)
    assert found is not None, f"no test ran to see it:\n{done.stdout}{done.stderr}"
    return found.group(1)


def survey(head: Sequence[str], plantings: Sequence[Planting]) -> int:
    """Plant each and print what sees it, as a table under `head`. The exit status: 1 if one survives."""
    survivors = 0
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for planting in plantings:
        with tempfile.TemporaryDirectory(prefix="hiradix-planted-") as folder:
            copy = copied(Path(folder))
            planted(planting.fault, copy)
            seen = planting.killer(copy)
        survivors += seen is None
        print(f"| {' | '.join(planting.shown)} | {seen or '**survived**'} |", flush=True)
    print(f"\n{len(plantings) - survivors} of {len(plantings)} faults seen")
    return 1 if survivors else 0

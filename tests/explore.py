"""Plays the tests that draw at random with fresh seeds, suite by suite, until the time is over.

    make explore MINUTES=60                               all suites in turn, for an hour
    make explore SEED=1234                                the same turns as a run that printed that seed
    python -m tests.explore --minutes 5 --only file       one suite; --only may be given several times
    python -m tests.explore --list                        the suites

`make test` and the lanes draw the same examples every time; this is what looks for others. A suite is the
tests of a folder or file that hypothesis draws for, or that take their seeds from `tests.seeds`; a turn plays
them all once with one seed. Each failure is printed with what plays it again: the command, the seed, and of
hypothesis the shrunk example, its steps and blob. What is found becomes an `@example`, or a test beside the
repair.

Exit status: 0 when nothing was found, 1 when something was, 2 when a suite could not be played.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.seeds import SEED_VARIABLE

ROOT = Path(__file__).parent.parent
TURN_TIMEOUT_S = 900.0
"""A turn that takes longer hangs, and that is a finding. pytest ends a single test after 180 s or what it is
marked with."""
SEED_BITS = 24
MARKS = "hypothesis or seeded"
NONE_COLLECTED, FAILED = 5, 1


@dataclass(frozen=True)
class Suite:
    """What one turn plays. env: how much of it, so that a turn takes seconds."""

    paths: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    skip: Sequence[str] = ()
    """Paths below those that have a suite of their own, or need what this machine may lack."""


SUITES: Mapping[str, Suite] = {
    "tree": Suite(["tests/tree"], {"HIRADIX_TREE_RUNS": "300"}),
    "file": Suite(["tests/storage/test_file_states.py", "tests/storage/test_file.py"]),
    "disk": Suite(["tests/disk/test_states.py"]),
    "cache": Suite(["tests/cache"], {"HIRADIX_CACHE_SEEDS": "4", "HIRADIX_COMPONENT_RUNS": "240"}),
    "stack": Suite(["tests/storage/test_stack_states.py"]),
    "transfer": Suite(["tests/transfer"]),
    "room": Suite(["tests/storage/test_lru.py", "tests/disk/test_chains.py"]),
    "simulation": Suite(["tests/simulation"], {"HIRADIX_SIM_OPS": "60000"}),
    "s3": Suite(["tests/storage_servers/test_s3_states.py"]),
    "ghd": Suite(["tests/policy"]),
    "guard": Suite(["tests/storage/test_guard.py", "tests/storage/test_quota.py"]),
    "ranks": Suite(["tests/ranks"], {"HIRADIX_RANKS_SEEDS": "60"}),
    "storage": Suite(
        ["tests/storage", "tests/disk"],
        {"HIRADIX_FAULTS": "4000"},
        skip=[
            "tests/storage/test_file_states.py", "tests/storage/test_file.py", "tests/storage/test_guard.py",
            "tests/storage/test_quota.py", "tests/storage/test_lru.py", "tests/storage/test_stack_states.py",
            "tests/disk/test_states.py", "tests/disk/test_chains.py",
        ],
    ),
    "intents": Suite(["tests/intents"]),
    "explain": Suite(["tests/explain/test_departed.py"]),
    "memory": Suite(["tests/memory"]),
    "connector": Suite(["tests/vllm_roles", "tests/executors"]),
    "facade": Suite(["tests/prefix_cache", "tests/events", "tests/replay"], {"HIRADIX_EVENT_RUNS": "32"}),
    "engine": Suite(["tests/engine", "tests/server"]),
    "certify": Suite(["tests/certify/test_fake.py"]),
    "kernels": Suite(["tests/kernels"], {"TRITON_INTERPRET": "1"}),
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One suite with one seed."""

    name: str
    suite: Suite
    seed: int

    @property
    def env(self) -> dict[str, str]:
        """What differs from the caller's environment. Sets of texts have an order by seed, too."""
        return {SEED_VARIABLE: str(self.seed), "PYTHONHASHSEED": str(self.seed), **self.suite.env}

    def arguments(self, targets: Sequence[str]) -> list[str]:
        skipped = [f"--ignore={path}" for path in self.suite.skip] if targets == self.suite.paths else []
        marks = ["-m", MARKS] if targets == self.suite.paths else []
        return ["-m", "pytest", "-q", "-p", "no:cacheprovider", *marks, *skipped, *targets]

    def command(self, targets: Sequence[str]) -> str:
        """What to paste to play it, or one test of it, again."""
        values = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*values, shlex.quote(sys.executable), *map(shlex.quote, self.arguments(targets))])


@dataclass(frozen=True)
class Outcome:
    """code: pytest's exit status, None where the time was over first."""

    code: int | None
    text: str
    seconds: float

    @property
    def failed_tests(self) -> list[str]:
        """Node ids, from pytest's own summary."""
        found = re.findall(r"^(?:FAILED|ERROR) (\S+(?:\[[^\]]*\])?)", self.text, re.MULTILINE)
        return list(dict.fromkeys(found))


def play(turn: Turn, timeout_s: float) -> Outcome:
    """Play one turn in a process group of its own, which is gone when this returns."""
    start_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *turn.arguments(turn.suite.paths)],
        cwd=ROOT, env={**os.environ, **turn.env}, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=timeout_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        code = None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return Outcome(code, text, time.monotonic() - start_s)


def seed_of(master: int, name: str, number: int) -> int:
    """A turn's seed: it depends on nothing but these, so that `--only` plays what the whole run did."""
    return random.Random(f"{master} {name} {number}").getrandbits(SEED_BITS)


class Exploration:
    """All suites in turn, and what they found."""

    def __init__(self, suites: Mapping[str, Suite], master: int, minutes: float, rounds: int | None = None):
        self._suites = suites
        self._master = master
        self._end_s = time.monotonic() + 60 * minutes
        self._rounds = rounds
        self._known: set[str] = set()  # tests whose failure was printed in full
        self.num_turns = self.num_found = self.num_broken = 0

    def run(self) -> int:
        number, going = 0, dict(self._suites)
        while going and (self._rounds is None or number < self._rounds):
            for name, suite in list(going.items()):
                left_s = self._end_s - time.monotonic()
                if left_s <= 0:
                    return self._summary()
                if not self._turn(Turn(name, suite, seed_of(self._master, name, number)), left_s):
                    del going[name]
            number += 1
        return self._summary()

    def _turn(self, turn: Turn, left_s: float) -> bool:
        """Play it and tell; False: this suite cannot be played here."""
        out = play(turn, min(TURN_TIMEOUT_S, left_s))
        self.num_turns += 1
        said = out.text.strip().splitlines()[-1:] or [""]
        print(f"{turn.name}, seed {turn.seed}: {said[0].strip('= ')}", flush=True)
        if out.code is None and left_s < TURN_TIMEOUT_S:
            print(f"{turn.name}: ended with the time; what of it was played found nothing", flush=True)
        elif out.code is None:
            self._found(turn, turn.suite.paths, f"{out.text}\nhangs: not done after {TURN_TIMEOUT_S:.0f} s")
        elif out.code == FAILED:
            self._failed(turn, out)
        elif out.code == NONE_COLLECTED:
            print(f"{turn.name}: has no such tests here", flush=True)
            return False
        elif out.code != 0:
            self.num_broken += 1
            print(f"{out.text}\n{turn.name}: could not be played (pytest ended with {out.code})", flush=True)
            return False
        return True

    def _failed(self, turn: Turn, out: Outcome) -> None:
        tests = out.failed_tests or list(turn.suite.paths)
        new = [test for test in tests if test.partition("[")[0] not in self._known]
        for test in tests:
            if test not in new:
                self.num_found += 1
                print(f"FOUND again: {test}\n    {turn.command([test])}", flush=True)
        if new:
            self._known.update(test.partition("[")[0] for test in new)
            self._found(turn, new, out.text)

    def _found(self, turn: Turn, tests: Sequence[str], text: str) -> None:
        self.num_found += len(tests)
        bar = "=" * 78
        print(f"{bar}\nFOUND in {turn.name}, seed {turn.seed}\n{bar}\n{text.rstrip()}\n{bar}")
        for test in tests:
            print(f"play it again:\n    {turn.command([test])}")
        print(bar, flush=True)

    def _summary(self) -> int:
        print(f"{self.num_turns} turns, seed {self._master}: {self.num_found} failures", flush=True)
        return 1 if self.num_found else 2 if self.num_broken else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.explore", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--seed", type=int, help="of the whole run; a fresh one is drawn and printed")
    parser.add_argument("--only", action="append", choices=list(SUITES), metavar="SUITE", help="which suites")
    parser.add_argument("--rounds", type=int, help="at most so many turns of each suite")
    parser.add_argument("--list", action="store_true", help="say which suites there are")
    given = parser.parse_args(arguments)
    if given.list:
        for name, suite in SUITES.items():
            print(f"{name:12}{' '.join(suite.paths)}")
        return 0
    if not given.minutes > 0:
        parser.error("--minutes must be more than 0")
    master = secrets.randbits(32) if given.seed is None else given.seed
    names = given.only or list(SUITES)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the turn under way, too
    only = "".join(f" --only {name}" for name in given.only or [])
    print(f"seed {master}; its turns again: python -m tests.explore --seed {master}{only}", flush=True)
    return Exploration({name: SUITES[name] for name in names}, master, given.minutes, given.rounds).run()


if __name__ == "__main__":
    raise SystemExit(main())

"""`make explore` finds what is planted and prints what plays it again; `make test` draws the same always."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import explore
from tests.explore import ROOT, SUITES, Exploration, Suite, main, seed_of
from tests.seeds import SEED_VARIABLE

PLANTED = "tests/project/planted"
A_FAILURE, A_HANG, NOTHING = (Suite([f"{PLANTED}/{name}.py"]) for name in ("a_failure", "a_hang", "nothing"))


def explored(
    capsys: pytest.CaptureFixture[str], suite: Suite, rounds: int = 1, seed: int = 7
) -> tuple[int, str]:
    code = Exploration({"planted": suite}, seed, minutes=5, rounds=rounds).run()
    return code, capsys.readouterr().out


def shrunk(text: str) -> list[str]:
    """The smallest example."""
    return re.findall(r"numbers=\[[^\]]*\]", text)


def test_a_planted_failure_is_found_printed_and_played_again(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = explored(capsys, A_FAILURE)
    assert code == 1 and "2 failures" in text
    assert "test_no_sum_is_large(\n" in text and shrunk(text) and "@reproduce_failure(" in text
    assert f"seed {seed_of(7, 'planted', 0)} draws" in text, "the first seed of the turn"
    commands = [line.strip() for line in text.splitlines() if line.startswith(f"    {SEED_VARIABLE}=")]
    assert len(commands) == 2
    for command, name in zip(commands, ("test_no_sum_is_large", "test_seeds_of_every_run_are_good")):
        again = subprocess.run(command, shell=True, cwd=ROOT, text=True, capture_output=True, timeout=170)
        assert again.returncode == 1 and name in again.stdout and "1 failed" in again.stdout
        assert set(shrunk(again.stdout)) <= set(shrunk(text))


def test_a_seed_plays_the_same_turns_and_another_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, other = (explored(capsys, A_FAILURE, seed=seed)[1] for seed in (7, 7, 8))
    blobs = [re.findall(r"seed \d+ draws [\d.]+", text) for text in (first, second, other)]
    assert blobs[0] == blobs[1] != blobs[2] and shrunk(first) == shrunk(second)


def test_what_is_known_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = explored(capsys, A_FAILURE, rounds=2)
    assert code == 1 and text.count("FOUND again: ") == 2 and text.count("FOUND in planted") == 1
    assert text.count(f"{SEED_VARIABLE}={seed_of(7, 'planted', 1)} ") == 2


def test_nothing_found_is_success(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = explored(capsys, NOTHING, rounds=2)
    assert code == 0 and "2 turns, seed 7: 0 failures" in text and "FOUND" not in text


def test_what_cannot_be_played_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = explored(capsys, Suite([f"{PLANTED}/is_not_there.py"]), rounds=3)
    assert code == 2 and text.count("could not be played") == 1


def test_a_turn_that_hangs_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explore, "TURN_TIMEOUT_S", 1.0)
    code, text = explored(capsys, A_HANG)
    assert code == 1 and "hangs: not done after 1 s" in text


def test_the_time_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert Exploration({"a": A_HANG, "b": A_HANG}, 7, minutes=1 / 60).run() == 0
    assert "a: ended with the time" in capsys.readouterr().out


def test_the_command_says_which_suites_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(SUITES)
    for wrong in (["--minutes", "0"], ["--only", "nobody"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2


def is_played(path: Path) -> bool:
    name = path.relative_to(ROOT).as_posix()

    def has(paths: Sequence[str]) -> bool:
        return any(name == one or name.startswith(one + "/") for one in paths)

    return any(has(suite.paths) and not has(suite.skip) for suite in SUITES.values())


def test_every_random_test_has_a_suite() -> None:
    uses = re.compile(r"^from (hypothesis\b|tests\.seeds import .*\bseeded\b)", re.MULTILINE)
    random = [path for path in (ROOT / "tests").rglob("test_*.py") if uses.search(path.read_text())]
    assert len(random) > 50 and [path for path in random if not is_played(path)] == []
    assert all((ROOT / path).exists() for suite in SUITES.values() for path in [*suite.paths, *suite.skip])


def test_every_test_with_seeds_bears_the_mark() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = re.findall(r"^from tests\.seeds import (.*)$", path.read_text(), re.MULTILINE)
        draws = names and names[0] != "assert_seen"  # which draws nothing
        if draws and path != Path(__file__):
            assert "seeded" in names[0], f"{path}: `make explore` does not find it"


def test_random_generators_have_a_seed() -> None:
    """None of a test's own draws from the clock or the machine; the driver of `make explore` does."""
    fresh = re.compile(r"random\.Random\(\)|default_rng\(\)|SystemRandom|secrets\.|urandom\(|uuid4\(")
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name not in ("explore.py", "test_explore.py"):
            found = fresh.search(path.read_text())
            assert found is None, f"{path}: {found and found.group()}"


def drawn(tmp_path: Path, *arguments: str, **env: str) -> str:
    """A digest of all that a run drew, as `make test` runs it unless env says otherwise."""
    into = tmp_path / "drawn"
    clean = {name: value for name, value in os.environ.items() if name not in (SEED_VARIABLE, "CI")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *NOTHING.paths]
    done = subprocess.run(
        command, cwd=ROOT, env=clean | {"DRAWN_INTO": str(into)} | env, capture_output=True, text=True,
        timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return into.read_text()


def test_every_run_draws_the_same_whatever_else_is_loaded(tmp_path: Path) -> None:
    alone = drawn(tmp_path, PYTHONHASHSEED="1")
    loaded = ["-p", "hiradix.config", "-p", "hiradix.apps.replay.generate", "-p", "hiradix.tree"]
    assert drawn(tmp_path, *loaded, PYTHONHASHSEED="2") == alone
    assert drawn(tmp_path, "--hypothesis-seed=5", CI="1") == alone
    fresh = drawn(tmp_path, **{SEED_VARIABLE: "5"})
    assert fresh != alone and fresh == drawn(tmp_path, **{SEED_VARIABLE: "5"})

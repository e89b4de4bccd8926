"""What cannot be served is refused at start, in words that name the flag."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hiradix.apps.demo.process import START_TIMEOUT_S, ServerProcess
from tests.e2e.load import three_tiers

pytestmark = pytest.mark.timeout(300)  # an interpreter that imports everything, on a machine that is busy


def start_and_fail(arguments: list[str], tmp_path: Path) -> str:
    """Standard error of a server that must not start."""
    command = ServerProcess(arguments, tmp_path / "unused.log").command
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode not in (0, -9), done
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--model-path", "no/such/model", "--model-path"),
        ("--hicache-storage-backend", "nosuch", "nosuch"),
        ("--hicache-storage-backend-extra-config", '{"a":', "--hicache-storage-backend-extra-config"),
        ("--hicache-storage-backend-extra-config", "@no/such/file.json", "no/such/file.json"),
        ("--hicache-write-policy", "sometimes", "--hicache-write-policy"),
        ("--page-size", "0", "--page-size"),
    ],
)
def test_a_bad_value_is_named(tiny_model: Path, tmp_path: Path, flag: str, value: str, words: str) -> None:
    assert words in start_and_fail([*three_tiers(tiny_model, tmp_path / "storage"), flag, value], tmp_path)


def test_a_storage_path_that_is_no_directory_is_named(tiny_model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert str(blocked) in start_and_fail(three_tiers(tiny_model, blocked / "pages"), tmp_path)

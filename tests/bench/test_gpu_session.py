"""What a GPU has to show: every command finds its file and its flags, and says so where there is no GPU."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
import torch

from tests.project.repo import ROOT

MAX_PIECE_S = 600


def python(*command: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=150, env=environment
    )


def listed() -> list[str]:
    done = python("benchmarks/gpu_session.py", "--list")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_every_command_is_there_and_every_piece_short_enough() -> None:
    lines = listed()
    limits = [int(line.split(", ")[1].split(" ")[0]) for line in lines if line.startswith("#")]
    assert len(limits) == 3 and max(limits) <= MAX_PIECE_S
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("python ")]
    files = {part for command in commands for part in command if part.endswith(".py")}
    assert len(commands) == 10 and len(files) == 8
    assert all((ROOT / name).is_file() for name in files)
    outs = [command[command.index("--out") + 1] for command in commands if "--out" in command]
    assert len(set(outs)) == len(outs) == 5 and all(out.startswith("benchmarks/results/") for out in outs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_benchmark_says_so() -> None:
    commands = [shlex.split(line)[1:] for line in listed() if line.startswith("python benchmarks/")]
    each = {command[0]: command for command in commands}  # a process for each flag would take long
    for command in [["benchmarks/gpu_session.py"], *each.values()]:
        done = python(*command)
        assert done.returncode == 2 and "sees no CUDA device here" in done.stderr, done.stderr[-2000:]

"""A big tree, in a process of its own to see its peak memory. `make test-scale`: a million nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_NODES, NUM_OPERATIONS = 40_000, 20_000


@pytest.mark.long(8)
def test_a_big_tree_keeps_every_invariant(record_property) -> None:
    command = [sys.executable, "-m", "tests.tree.scale", str(NUM_NODES), str(NUM_OPERATIONS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr
    assert "every invariant holds" in done.stdout
    record_property("told", "a big tree: " + done.stdout.rstrip().replace("\n", "\na big tree: "))

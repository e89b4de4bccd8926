"""No process of the ladder outlives a life that goes wrong; without any engine. SGLang's: tests/sglang."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.puppet import Puppet


class SilentPuppet(Puppet):
    """Takes what it is told, and never answers."""

    def _spawn(
        self, setup: str, environment: dict[str, str], stdin: int, stdout: int
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=stdout)

    def answer(self, timeout_s: float = 0.0) -> Any:
        return super().answer(0.1)


def test_a_puppet_that_answers_nothing_is_killed(tmp_path: Path) -> None:
    puppet = SilentPuppet({}, tmp_path / "log")
    with pytest.raises(AssertionError, match="no answer"):
        puppet.stop()
    assert puppet.process.poll() == -signal.SIGKILL

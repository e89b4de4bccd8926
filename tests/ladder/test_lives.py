"""No process of the ladder outlives a life that goes wrong; without any engine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tests.ladder.sglang import LadderServer, ServerLife, Sglang
from tests.puppet import Puppet

RUN = Sglang.runs["full"]


class SilentPuppet(Puppet):
    """Takes what it is told, and never answers."""

    def _spawn(
        self, setup: str, environment: dict[str, str], stdin: int, stdout: int
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=stdout)

    def answer(self, timeout_s: float = 0.0) -> Any:
        return super().answer(0.1)


class FaultyServer:
    """A server that starts, and whose calls of one name fail."""

    def __init__(self, fault: str) -> None:
        self.fault, self.is_stopped = fault, False

    def launch(self) -> FaultyServer:
        return self

    def wait(self) -> None: ...

    def stop(self) -> None:
        self.is_stopped = True

    def attach(self, *_: Any, **__: Any) -> None:
        assert self.fault != "attach"

    def detach(self) -> None:
        assert self.fault != "detach"

    def assert_healthy(self) -> None:
        assert self.fault != "health"


@pytest.mark.parametrize("fault", ["attach", "detach", "health"])
def test_a_server_ends_whatever_fails(fault: str, tmp_path: Path) -> None:
    server = FaultyServer(fault)
    with pytest.raises(AssertionError):
        ServerLife(cast(LadderServer, server), RUN, tmp_path).stop()
    assert server.is_stopped


def test_a_puppet_that_answers_nothing_is_killed(tmp_path: Path) -> None:
    puppet = SilentPuppet({}, tmp_path / "log")
    with pytest.raises(AssertionError, match="no answer"):
        puppet.stop()
    assert puppet.process.poll() == -signal.SIGKILL
